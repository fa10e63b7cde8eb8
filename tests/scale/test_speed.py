"""`kvbench speed`: every stage is measured through the engine, stored once, and shown."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kvbench.audit.speed import measure as speed
from kvbench.audit.speed import stages
from kvbench.audit.speed.flops import counted_flops, prefill_flops
from kvbench.audit.speed.measure import SpeedConfig
from kvbench.audit.speed.stages import run_stages
from kvbench.cli import main as cli
from kvbench.contract.cell import Cell
from kvbench.engine.cache import Cache
from kvbench.engine.forward import read
from kvbench.errors import BadInput, StoreError
from kvbench.model.open import LoadedModel
from kvbench.show.speed import tables
from tests.laws import toy
from tests.laws.lab import SPECS, cells_of, prompt_of, try_out
from tests.laws.test_probe import Peek
from tests.tiny import HEAD_DIM, KV_HEADS, LAYERS, QUERY_HEADS, SLIDING_WINDOW, tiny_loaded

TIMES = {"prefill_s", "score_s", "rank_s", "compact_s", "decode_rate", "peak_bytes"}


def config(folder: str, out: Path, **changes: Any) -> SpeedConfig:
    given: dict[str, Any] = {"policies": ("snapkv", "knorm"), "lengths": (40, 64), "budget": 16}
    given |= {"new_tokens": 3, "repeat": 2, "model": folder, "device": "cpu", "out": str(out)}
    return SpeedConfig(**(given | changes))


@pytest.fixture(scope="module")
def measured(folder: str, tmp_path_factory: pytest.TempPathFactory) -> speed.SpeedResult:
    return speed.speed(config(folder, tmp_path_factory.mktemp("speed")), progress=False)


def test_every_stage_has_a_number(measured: speed.SpeedResult) -> None:
    rows = measured.rows
    assert len(rows) == 2 * 2 * 3  # lengths, repeats, two policies and full
    policies = rows[rows["spec"] != "full"]
    for name in TIMES:
        assert (policies[f"time:{name}"] > 0).all(), name
    assert set(policies["kept"]) == {16}
    assert set(rows[rows["spec"] == "full"]["kept"]) == {40, 64}
    for line in policies.to_dict("records"):
        layers = json.loads(line["score_layers_s"])
        assert len(layers) == LAYERS
        assert sum(layers) == pytest.approx(line["time:score_s"])
    pair = 2 * LAYERS * KV_HEADS * HEAD_DIM * 4
    assert (rows["metric:kv_bytes"] == rows["kept"] * pair).all()


def test_it_keeps_what_a_run_keeps() -> None:
    """The clock changes nothing: kept sets and the next tokens are those of the engine's loop."""
    prompt = prompt_of()
    lm = tiny_loaded("llama")
    specs = [spec for spec in SPECS if not spec.startswith("oracle")]
    cells = cells_of(specs, (33,))
    peek = Cell(Peek(), 33)  # reads extra tokens
    cells.append(peek)
    expected = try_out(lm, prompt, cells)
    kept = {}
    original = stages.evict

    def spy(lm: Any, cache: Cache, cut: Any, *rest: Any) -> Any:
        compacted, rows = original(lm, cache, cut, *rest)
        kept[cut[0]] = [compacted.buckets[0].view(layer)[2][0].clone() for layer in range(LAYERS)]
        return compacted, rows

    timed = [cell for cell in cells if cell.name != "random"]  # its draws have their own key
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "evict", spy)
        passed = run_stages(lm, torch.tensor(prompt.context), timed, 2)
    assert not any(found.failed for found in passed.policies.values())
    assert len(kept) == len(timed) > 5
    assert passed.policies[peek].score_flops > 0
    assert sum(passed.policies[peek].score) == pytest.approx(passed.policies[peek].scoring.seconds)
    for cell in timed:
        assert all(torch.equal(a, b) for a, b in zip(kept[cell], expected.kept(cell), strict=True))


def test_no_policy_shares_the_work_of_another() -> None:
    """tova looks at a part of what snapkv computes: alone or after it, it computes its own."""
    lm = tiny_loaded("llama")
    ids = torch.tensor(prompt_of().context)
    alone = run_stages(lm, ids, cells_of(["tova"], [16]), 1)
    after = run_stages(lm, ids, cells_of(["snapkv:window=1,kernel=3", "tova"], [16]), 1)
    assert [s.score_flops for s in alone.policies.values()] == [list(after.policies.values())[1].score_flops]
    assert next(iter(alone.policies.values())).score_flops == 2 * LAYERS * QUERY_HEADS * HEAD_DIM * len(ids)


@pytest.mark.parametrize(("arch", "window"), [("llama", None), ("qwen3", None), ("sliding", SLIDING_WINDOW)])
def test_prefill_flops_are_those_of_a_prefill(arch: str, window: int | None) -> None:
    """Against torch's own count of the same forward under attention that is written as two products."""
    lm = tiny_loaded(arch)
    n = 48
    lm.model.set_attn_implementation("eager")
    ids = torch.arange(4, 4 + n)[None]
    counted = counted_flops(lambda: lm.model(input_ids=ids, use_cache=False, logits_to_keep=1))
    lm.model.set_attn_implementation("kvbench")
    square = 4 * QUERY_HEADS * HEAD_DIM * LAYERS * n * n  # eager multiplies the upper triangle, too
    full = sum(q + 1 for q in range(n))
    inside = sum(min(q + 1, window or n) for q in range(n))
    half = LAYERS // 2
    seen = 4 * QUERY_HEADS * HEAD_DIM * (half * full + (LAYERS - half) * inside)
    with torch.inference_mode():
        assert prefill_flops(lm, n) == pytest.approx(counted - square + seen, rel=1e-4)


def test_a_second_call_measures_nothing_and_says_so(
    folder: str, measured: speed.SpeedResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "run_stages", None)
    again = speed.speed(config(folder, measured.path), progress=False)
    assert again.rows.equals(measured.rows)
    assert any("measured before" in note for note in again.notes)
    assert not any("measured before" in note for note in measured.notes)


def test_more_policies_are_added(folder: str, tmp_path: Path) -> None:
    first = speed.speed(config(folder, tmp_path, policies=("knorm",), lengths=(40,)), progress=False)
    both = speed.speed(config(folder, tmp_path, lengths=(40,)), progress=False)
    old = both.rows[both.rows["key"].isin(first.rows["key"])].reset_index(drop=True)
    assert old["time:prefill_s"].equals(first.rows["time:prefill_s"])
    assert set(both.rows["spec"]) == {"full", "knorm", "snapkv"}


def test_other_hardware_does_not_mix(
    folder: str, measured: speed.SpeedResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "machine", lambda: {"cpu": "another"})
    with pytest.raises(StoreError, match="hardware"):
        speed.speed(config(folder, measured.path), progress=False)


def test_who_reads_the_future_has_no_price(folder: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="oracle"):
        speed.speed(config(folder, tmp_path, policies=("oracle",)), progress=False)
    lm_free = config(folder, tmp_path, policies=("all",))
    policies, notes = speed._policies(lm_free)
    assert "oracle" not in {policy.name for policy in policies}
    assert any("oracle" in note for note in notes)


def test_a_failing_policy_is_a_row(folder: str, tmp_path: Path) -> None:
    with toy.added():
        settings = config(folder, tmp_path, policies=("laws_faulty", "knorm"), lengths=(40,), repeat=1)
        rows = speed.speed(settings, progress=False).rows
    assert dict(zip(rows["spec"], rows["status"], strict=True)) == {
        "full": "ok", "laws_faulty": "failed", "knorm": "ok",
    }  # fmt: skip
    assert "laws_faulty: failed: " in tables(rows)


@pytest.mark.parametrize("bad", [{"lengths": ()}, {"lengths": (1,)}, {"budget": 0}, {"repeat": 0}])
def test_bad_numbers(bad: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        SpeedConfig(**({"policies": ("knorm",)} | bad))


def test_the_command(folder: str, tmp_path: Path) -> None:
    """A table with every length and policy, a note on what is too long, a figure."""
    short = tmp_path / "short"
    shutil.copytree(folder, short)
    settings = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": 64}))
    out = tmp_path / "out"
    command = [
        "speed",
        "--policy",
        "knorm,snapkv",
        "--lengths",
        "24,80",
        "--repeat",
        "1",
        "--new-tokens",
        "1",
    ]
    command += ["--model", str(short), "--device", "cpu", "--out", str(out)]
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 0, result.output
    told = result.output
    assert "80 tokens are beyond the 64" in told
    assert all(f" {length} " in told for length in (24, 80))
    assert "snapkv" in told
    assert (out / "figures" / "speed.png").stat().st_size > 10_000
    assert {line["status"] for line in map(json.loads, (out / "rows.jsonl").open())} == {"ok"}
    assert CliRunner().invoke(cli.app, ["speed", "--policy", "knorm", "--lengths", "1k"]).exit_code == 2
    assert CliRunner().invoke(cli.app, ["table", str(out)]).exit_code == 0
    assert CliRunner().invoke(cli.app, ["plot", str(out)]).exit_code == 0


def test_extra_tokens_beyond_the_models_length(tiny_llama: LoadedModel) -> None:
    """Refused in a run, measured here: only the time is looked at."""
    short = replace(tiny_llama, geometry=replace(tiny_llama.geometry, max_length=10))
    cell = Cell(Peek(), 8)
    passed = run_stages(short, torch.arange(4, 24), [cell], 1)
    assert passed.policies[cell].failed == ""
    assert passed.policies[cell].kept == 8


def test_decoding_leaves_the_cache(tiny_llama: LoadedModel) -> None:
    cache = Cache.empty(LAYERS, 10)
    ids = torch.arange(4, 10)
    with torch.inference_mode():
        read(tiny_llama, cache, ids, 0)
        found = stages.Stages()
        stages._decode(tiny_llama, stages.Clock([]), cache, found, 6, 3)
    assert cache.buckets[0].filled == [6] * LAYERS
    assert found.decode.seconds > 0
