"""The trace store: what the model computed, which part of it is read, and how a folder goes on."""

from __future__ import annotations

import itertools
import json
import shutil
from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.policy import Policy
from kvbench.contract.registry import register
from kvbench.errors import BadInput, StoreError
from kvbench.learn import collect as collecting
from kvbench.learn import trace
from kvbench.learn.collect import TraceConfig, collect
from kvbench.learn.ranked import RecordedRanker
from kvbench.learn.trace import TraceSet
from kvbench.model.open import OpenModel
from kvbench.model.prompt import Prompt
from kvbench.study.samples import TaskSamples
from tests.kvp.make import model_folder
from tests.laws import toy
from tests.laws.lab import FOREVER, _slow_attention
from tests.tiny import KV_HEADS, LAYERS, tiny_model

Recorded = list[tuple[Tensor, Tensor, Tensor]]
CALLS = itertools.count()

pytestmark = pytest.mark.usefixtures("story")


def config(folder: str, out: Path, **changes: Any) -> TraceConfig:
    settings = {"tasks": ("story",), "samples": 3, "out": str(out), "model": folder, "store": "float32"}
    return TraceConfig(**{**settings, "device": "cpu", **changes})


def prompts(monkeypatch: pytest.MonkeyPatch) -> list[Prompt]:
    """The prompts of whatever is collected from now on."""
    seen: list[Prompt] = []
    build = collecting.prepare

    def spy(*args: Any) -> TaskSamples:
        found = build(*args)
        seen.extend(prompt for _, prompt in found.items if isinstance(prompt, Prompt))
        return found

    monkeypatch.setattr(collecting, "prepare", spy)
    return seen


def computed(ids: Sequence[int], arch: str = "llama", until: Tensor | None = None) -> Recorded:
    """Queries, keys and values of every layer, from a stock model whose attention is slow and looked at.

    until: (layer, kv_head, position), the first query that no longer sees a token.
    """
    layers: Recorded = []

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **more: Any) -> Any:
        layers.append((query[0], key[0], value[0]))
        return _slow_attention(module, query, key, value, *args, until=gone[None], **more)

    name = f"kvp_probe_{next(CALLS)}"  # kvpress, when imported, freezes what every known name stands for
    AttentionInterface.register(name, attention)
    gone = torch.full((LAYERS, KV_HEADS, len(ids)), FOREVER) if until is None else until
    with torch.inference_mode():
        tiny_model(arch, name)(torch.tensor([list(ids)]), use_cache=False)
    return layers


def assert_equal(found: Recorded, wanted: Recorded) -> None:
    for layer, (one, other) in enumerate(zip(found, wanted, strict=True)):
        for name, left, right in zip("qkv", one, other, strict=True):
            assert left.shape == right.shape
            assert torch.allclose(left.float(), right, atol=1e-4), (layer, name)


def layers_of(found: TraceSet, index: int) -> Recorded:
    return [found[index].layer(layer) for layer in range(found.layers)]


def test_traces_are_what_the_plain_model_computes(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = prompts(monkeypatch)
    found = collect(config(folder, tmp_path / "t"), progress=False)
    assert (len(found), found.layers, found.kv_heads, found.dim) == (3, LAYERS, KV_HEADS, 16)
    for index, prompt in enumerate(seen):
        info = found.infos[index]
        ids = [*prompt.context, *prompt.question, *prompt.reference.ids]
        assert (info.tokens, info.context) == (len(ids), len(prompt.context))
        assert info.scaling == 16**-0.5
        assert_equal(layers_of(found, index), computed(ids))
    tokenizer_text = len(seen[0].context)
    assert 0 < tokenizer_text < found.infos[0].tokens - 1


def test_sliding_layers_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = prompts(monkeypatch)
    (tmp_path / "model").mkdir()
    model = model_folder(tmp_path / "model", "sliding")
    found = collect(config(model, tmp_path / "t", samples=1), progress=False)
    assert found.layers == 2
    ids = [*seen[0].context, *seen[0].question, *seen[0].reference.ids]
    assert_equal(layers_of(found, 0), computed(ids, "sliding")[::2])  # layers 0 and 2 attend to everything


@pytest.mark.parametrize("store", ["float16", "bfloat16"])
def test_dtype_on_disk(folder: str, tmp_path: Path, store: str) -> None:
    found = collect(config(folder, tmp_path / store, samples=1, store=store), progress=False)
    exact = collect(config(folder, tmp_path / "exact", samples=1), progress=False)
    for left, right in zip(found[0].layer(1), exact[0].layer(1), strict=True):
        assert str(left.dtype) == f"torch.{store}"
        assert torch.equal(left, right.to(left.dtype))


def test_one_head_reads_its_own_slice(folder: str, tmp_path: Path) -> None:
    found = collect(config(folder, tmp_path / "t"), progress=False)
    q, k, v = found[2].layer(3)
    group = q.shape[0] // KV_HEADS
    for head in range(KV_HEADS):
        parts = found[2].layer(3, slice(head, head + 1))
        wanted = (q[head * group : (head + 1) * group], k[head : head + 1], v[head : head + 1])
        assert all(torch.equal(part, whole) for part, whole in zip(parts, wanted, strict=True))
    assert found[2].layer(3, slice(0, 2))[0].shape == q.shape


def test_under_eviction(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The context is the full cache's; question and answer come out as they do after the eviction."""
    seen, budget = prompts(monkeypatch), 12
    plain = collect(config(folder, tmp_path / "plain", samples=1), progress=False)
    found = collect(config(folder, tmp_path / "under", samples=1, under=f"knorm:{budget}"), progress=False)
    n = found.infos[0].context
    assert found.infos[0] == plain.infos[0]
    ids = [*seen[0].context, *seen[0].question, *seen[0].reference.ids]
    until = torch.full((LAYERS, KV_HEADS, len(ids)), FOREVER)
    recorded = layers_of(found, 0)
    for layer, (_, k, _) in enumerate(recorded):
        for head, norms in enumerate(k[:, :n].norm(dim=-1).tolist()):
            # K-Norm keeps the smallest keys; words come back, so norms tie, and the newer one stays.
            order = sorted(range(n), key=lambda i, norms=norms: (norms[i], -i))  # type: ignore[misc]
            until[layer, head, order[budget:]] = n
    assert_equal(recorded, computed(ids, until=until))
    for layer, (one, other) in enumerate(zip(recorded, layers_of(plain, 0), strict=True)):
        for left, right in zip(one, other, strict=True):
            assert torch.allclose(left[:, :n], right[:, :n], atol=1e-5)
            if layer:
                assert (left[:, n:] - right[:, n:]).abs().max() > 1e-2
    assert found.header["under"] == "knorm:12"


def test_a_budget_without_eviction_changes_nothing(folder: str, tmp_path: Path) -> None:
    plain = collect(config(folder, tmp_path / "plain", samples=1), progress=False)
    found = collect(config(folder, tmp_path / "under", samples=1, under="tova:999"), progress=False)
    assert_equal(layers_of(found, 0), layers_of(plain, 0))


def test_a_context_that_is_empty(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything withheld: there is nothing to evict, but it is no reason to crash."""
    build = collecting.prepare

    def without(*args: Any) -> TaskSamples:
        made = build(*args)
        items = [(sample, replace(prompt, context=())) for sample, prompt in made.items]  # type: ignore[type-var]
        return replace(made, items=items)

    monkeypatch.setattr(collecting, "prepare", without)
    found = collect(config(folder, tmp_path / "t", samples=1), progress=False)
    assert found.infos[0].context == 0
    assert found[0].layer(0)[1].shape[1] == found.infos[0].tokens


@pytest.mark.parametrize(
    ("length", "wanted"),
    [("40", {40}), ("40-47", set(range(40, 48))), ("40-42", {40, 41, 42}), ("40-180", {40, 60, 80, 100})],
)
def test_lengths(folder: str, tmp_path: Path, length: str, wanted: set[int]) -> None:
    samples = 8 if "-" in length else 3
    found = collect(config(folder, tmp_path / "t", samples=samples, length=length), progress=False)
    specs = {int(info.id.split("length=")[1].split("|")[0]) for info in found.infos}
    assert specs >= wanted
    assert len(specs) == min(len(wanted) if length != "40-180" else 8, 8)
    assert len({info.id for info in found.infos}) == len(found) == samples
    assert len({info.draft for info in found.infos}) == samples  # no text twice, at another length
    low, high = int(length.split("-")[0]), int(length.split("-")[-1])
    for info in found.infos:
        assert low <= info.tokens <= high + 30


@pytest.mark.parametrize("length", ["", "x", "9-", "-9", "90-40", "4 0"])
def test_other_lengths_are_refused(folder: str, tmp_path: Path, length: str) -> None:
    with pytest.raises(BadInput, match="350-700"):
        collect(config(folder, tmp_path / "t", length=length), progress=False)
    assert not (tmp_path / "t").exists()


def test_tasks_take_turns(folder: str, tmp_path: Path) -> None:
    tasks = ("story:length=40", "story:length=60")
    found = collect(config(folder, tmp_path / "t", tasks=tasks, samples=5), progress=False)
    names = [info.id.removeprefix("story:length=").rpartition("|")[0] for info in found.infos]
    assert names == ["40|0", "60|0", "40|1", "60|1", "40|2"]


def snapshot(found: TraceSet) -> dict[str, Any]:
    """Everything that is in a folder, by trace."""
    return {info.id: layers_of(found, index) for index, info in enumerate(found.infos)}


def assert_same_contents(found: TraceSet, wanted: dict[str, Any]) -> None:
    assert list(snapshot(found)) == list(wanted)
    for name, layers in snapshot(found).items():
        assert_equal(layers, wanted[name])


@pytest.mark.parametrize("damage", ["lost line", "torn line", "lost line, torn shard", "header only"])
def test_resume(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    """Shards of two: whatever a killed process left, the same command ends with the same traces."""
    monkeypatch.setattr(trace, "SHARD", 2)
    whole = snapshot(collect(config(folder, tmp_path / "whole", samples=5), progress=False))
    out, told = tmp_path / "t", []
    collect(config(folder, out, samples=5), progress=False)
    lines = (out / "index.jsonl").read_text().splitlines(keepends=True)
    assert [json.loads(line)["shard"] for line in lines] == [0, 0, 1, 1, 2]
    if damage == "header only":
        for path in out.iterdir():
            if path.name != "traces.json":
                path.unlink() if path.is_file() else shutil.rmtree(path)
    else:
        torn = lines[4][:20] if damage == "torn line" else ""
        (out / "index.jsonl").write_text("".join(lines[:4]) + torn)
    if "torn shard" in damage:
        trace._opened.cache_clear()
        shard = out / "shard-0002"
        (shard / "layer-00.safetensors").write_bytes(b"half")
        (shard / "layer-03.safetensors").unlink()
    if damage == "torn line":
        assert len(TraceSet(out)) == 4  # what is whole can be read before it is resumed
    found = collect(config(folder, out, samples=5), progress=False, announce=told.append)
    assert told[0].startswith("5 traces" if damage == "header only" else "1 traces")
    assert_same_contents(found, whole)


def test_a_finished_folder_loads_no_model(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect(config(folder, tmp_path / "t"), progress=False)
    monkeypatch.setattr(OpenModel, "load", lambda self: pytest.fail("weights were loaded"))
    assert len(collect(config(folder, tmp_path / "t"), progress=False)) == 3


def test_more_samples_are_added(folder: str, tmp_path: Path) -> None:
    collect(config(folder, tmp_path / "t", samples=2), progress=False)
    told: list[str] = []
    found = collect(config(folder, tmp_path / "t", samples=4), progress=False, announce=told.append)
    assert len(found) == 4
    assert told[0].startswith("2 traces")


@pytest.mark.parametrize("change", [{"seed": 1}, {"store": "float16"}, {"under": "tova:9"}, {"length": "60"}])
def test_other_traces_do_not_mix(folder: str, tmp_path: Path, change: dict[str, Any]) -> None:
    collect(config(folder, tmp_path / "t", samples=1), progress=False)
    name = {"store": "dtype"}.get(next(iter(change)), next(iter(change)))
    with pytest.raises(StoreError, match=f"{name}: .* there, .* asked"):
        collect(config(folder, tmp_path / "t", samples=1, **change), progress=False)


def test_a_full_disk_is_refused_before_the_model_loads(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    told: list[str] = []
    asked = config(folder, tmp_path / "t", store="float16")
    size = 0
    for item in collect(asked, progress=False, announce=told.append).infos:
        size += item.tokens * LAYERS * (8 + 2 * KV_HEADS) * 16 * 2
    stored = sum(file.stat().st_size for file in (tmp_path / "t").rglob("*.safetensors"))
    assert size <= stored < size * 1.2  # the estimate is what is written, headers aside
    assert f"{size / 2**30:.2f} GiB" in told[0]
    monkeypatch.setattr(OpenModel, "load", lambda self: pytest.fail("weights were loaded"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, size))
    with pytest.raises(StoreError, match="record fewer or shorter samples"):
        collect(replace(asked, out=str(tmp_path / "u")), progress=False)


def test_a_disk_that_fills_up_says_what_to_do(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors import SafetensorError

    def full(*args: Any, **options: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(trace, "save_file", full)
    with pytest.raises(StoreError, match=r"No space left.*free space, then resume"):
        collect(config(folder, tmp_path / "t"), progress=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": 0}, "--samples 0"),
        ({"store": "int8"}, "float16, bfloat16, float32"),
        ({"under": "tova"}, "POLICY:BUDGET"),
        ({"under": "tova:0"}, "POLICY:BUDGET"),
        ({"under": "tova:many"}, "POLICY:BUDGET"),
    ],
)
def test_bad_settings_are_refused(folder: str, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        collect(config(folder, tmp_path / "t", **change), progress=False)
    assert not (tmp_path / "t").exists()


def test_policies_that_need_the_future_cannot_evict_here(folder: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="oracle"):
        collect(config(folder, tmp_path / "t", under="oracle:9"), progress=False)


def test_folders_without_traces_say_how_to_make_some(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="kvbench trace --out"):
        TraceSet(tmp_path)
    (tmp_path / "traces.json").write_text("{")
    (tmp_path / "index.jsonl").write_text("")
    with pytest.raises(StoreError, match="broken"):
        TraceSet(tmp_path)
    (tmp_path / "traces.json").write_text('{"schema": 99}')
    with pytest.raises(StoreError, match="newer"):
        TraceSet(tmp_path)
    (tmp_path / "traces.json").write_text('{"schema": 1}')
    (tmp_path / "index.jsonl").write_text('{"id": "a"\n')
    with pytest.raises(StoreError, match="broken"):
        TraceSet(tmp_path)


@pytest.mark.parametrize("under", [None, "knorm:20"])
def test_hidden_states(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, under: str | None
) -> None:
    """What attention modules of a stock model receive; after an eviction, those of the context."""
    seen = prompts(monkeypatch)
    found = collect(config(folder, tmp_path / "t", hidden=True, under=under), progress=False)
    assert found.has_hidden
    for index, prompt in enumerate(seen):
        wanted = received([*prompt.context, *prompt.question, *prompt.reference.ids])
        stop = len(prompt.context) if under else None
        for layer in range(LAYERS):
            hidden = found[index].hidden(layer)
            assert hidden.shape == wanted[layer].shape
            assert torch.allclose(hidden[:stop], wanted[layer][:stop], atol=1e-4)


def received(ids: Sequence[int]) -> list[Tensor]:
    model, noted = tiny_model("llama", "sdpa"), []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: noted.append(kwargs["hidden_states"][0]), with_kwargs=True
        )
    with torch.inference_mode():
        model(torch.tensor([list(ids)]), use_cache=False)
    return noted


@dataclass(frozen=True)
class ByHidden(Policy):
    """Ranks by the norm of the hidden state."""

    needs = frozenset({Need.HIDDEN_STATES})

    def score(self, seen: Observation) -> Tensor:
        return seen.hidden_states.norm(dim=-1)[:, None].expand(-1, seen.kv_heads, -1).contiguous()


def test_policies_rank_by_recorded_hidden_states(folder: str, tmp_path: Path) -> None:
    plain = collect(config(folder, tmp_path / "plain"), progress=False)
    found = collect(config(folder, tmp_path / "t", hidden=True), progress=False)
    with toy.added():
        register("laws_hidden", source="tests")(ByHidden)
        with pytest.raises(BadInput, match=r"plain does not hold: make it again with kvbench trace --hidden"):
            RecordedRanker.open(plain, ["laws_hidden"])
        ranker = RecordedRanker.open(found, ["laws_hidden"])
        trace = found[0]
        splits = [20, trace.info.context]
        for n, ranked in zip(splits, ranker.rank(trace, splits), strict=True):
            for layer in range(LAYERS):
                score = trace.hidden(layer)[:n].norm(dim=-1)
                order = sorted(range(n), key=lambda i: (-score[i].item(), -i))
                for head in range(KV_HEADS):
                    assert ranked.orders["laws_hidden"][layer, head].tolist() == order


def test_traces_without_hidden_states_say_so(folder: str, tmp_path: Path) -> None:
    found = collect(config(folder, tmp_path / "t"), progress=False)
    assert not found.has_hidden
    with pytest.raises(StoreError, match="kvbench trace --hidden"):
        found[0].hidden(0)
    with pytest.raises(StoreError, match="hidden: None there, True asked"):
        collect(config(folder, tmp_path / "t", hidden=True), progress=False)
