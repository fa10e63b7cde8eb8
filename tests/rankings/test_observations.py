"""What policies see of rotations, queries, output projection and question, against the model's own parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from torch import Tensor

from kvbench.contract.cell import Cell, Schedule
from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.policy import Policy
from kvbench.engine.evaluate import evaluate
from kvbench.engine.measure import Failure
from kvbench.engine.score import validated_score
from kvbench.errors import PluginError
from kvbench.model import parts as parts_module
from kvbench.model.geometry import read_geometry
from kvbench.model.hook import install
from kvbench.model.open import LoadedModel
from tests.laws.lab import KEY, N, loaded, measured, prompt_of, sample_of
from tests.scene import scene
from tests.tiny import HEAD_DIM, KV_HEADS, QUERY_HEADS, tiny_config, tiny_tokenizer

YARN = {
    "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 2048,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "qwen3 yarn": ("qwen3", {"rope_parameters": YARN}),
    "phi3 partial": ("phi3", {"rope_parameters": PARTIAL}),
    "phi3 longrope": ("phi3", {"rope_parameters": LONG}),
    "sliding": ("sliding", {}),
}  # fmt: skip


def model_of(name: str, dtype: torch.dtype = torch.float32) -> LoadedModel:
    arch, changes = MODELS[name]
    config = tiny_config(arch)
    for key, value in changes.items():
        setattr(config, key, value)
    install()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="kvbench", dtype=dtype
        )
    return LoadedModel(
        model.eval().requires_grad_(False), tiny_tokenizer(), name, None, "0", torch.device("cpu"), dtype,
        read_geometry(config), frozenset({0}),
    )  # fmt: skip


@dataclass(frozen=True)
class Look(Policy):
    """Notes what a function sees of each layer, chunk by chunk."""

    name = "look"
    needs = frozenset(Need) - {Need.FUTURE, Need.PROBE, Need.SECOND_PASS}

    def score(self, seen: Observation) -> Tensor:
        NOTES.append(LOOKS[0](seen))
        return seen.positions.float()


NOTES: list[Any] = []
LOOKS: list[Callable[[Observation], Any]] = []


def look(lm: LoadedModel, chunk: int | None = None, asked: int = 0, **reads: Any) -> list[dict[str, Any]]:
    """What is read of every layer and chunk in one sample."""
    NOTES.clear()
    LOOKS[:] = [lambda seen: {"layer": seen.layer} | {name: read(seen) for name, read in reads.items()}]
    schedule = Schedule("chunked", chunk) if chunk else Schedule("prefill", None)
    prompt = dataclasses.replace(prompt_of(), asked=asked)
    cell = Cell(Look(), 16, schedule=schedule)
    done = evaluate(lm, sample_of(prompt), prompt, [cell], KEY)
    measured(done.cells[cell])
    return list(NOTES)


def before_rotation(lm: LoadedModel) -> dict[int, list[Tensor]]:
    """Queries and keys of the context, as projections and norms give them: layer -> (1, head, N, dim)."""
    found: dict[int, list[Tensor]] = {}

    def hook(layer: int, attention: Any) -> Callable[..., None]:
        def note(module: Any, args: Any, kwargs: Any) -> None:
            hidden = kwargs["hidden_states"]
            if hidden.shape[1] != N or layer in found:
                return
            if hasattr(module, "qkv_proj"):
                width = [QUERY_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
                q, k, _ = module.qkv_proj(hidden).split(width, -1)
            else:
                q, k = module.q_proj(hidden), module.k_proj(hidden)
            q, k = (x.unflatten(-1, (-1, HEAD_DIM)) for x in (q, k))
            if hasattr(module, "q_norm"):
                q, k = module.q_norm(q), module.k_norm(k)
            found[layer] = [q.transpose(1, 2), k.transpose(1, 2)]

        return attention.register_forward_pre_hook(note, with_kwargs=True)

    handles = [hook(i, layer.self_attn) for i, layer in enumerate(lm.model.model.layers)]
    try:
        look(lm)
    finally:
        for handle in handles:
            handle.remove()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_before_rotation(name: str) -> None:
    """Keys and moments of queries are those of the projections, before RoPE and after QK-norm."""
    lm = model_of(name)
    notes = look(lm, keys=lambda seen: seen.unrotated_keys, moments=lambda seen: seen.query_moments(4))
    wanted = before_rotation(lm)
    assert [note["layer"] for note in notes] == list(lm.geometry.full_layers)
    for note in notes:
        q, k = wanted[note["layer"]]
        assert torch.allclose(note["keys"], k, atol=1e-5)
        q = q[:, :, 4:]
        mean = q.mean(2, keepdim=True)
        covariance = (q - mean).transpose(-1, -2) @ (q - mean) / (N - 4)
        assert torch.allclose(note["moments"].mean, mean[:, :, 0], atol=1e-5)
        assert torch.allclose(note["moments"].covariance, covariance, atol=1e-5)
        assert torch.allclose(note["moments"].second, q.transpose(-1, -2) @ q / (N - 4), atol=1e-5)


def test_the_factor_of_yarn_is_there() -> None:
    """Or the test above would prove nothing about it."""
    (note, *_) = look(model_of("yarn"), tables=lambda seen: seen.rotary(0, 1))
    assert note["tables"].cos[0, 0] == pytest.approx(0.1 * torch.tensor(4.0).log().item() + 1)


@pytest.mark.parametrize("name", ["llama", "yarn", "phi3 partial"])
def test_rotating_what_was_unrotated(name: str) -> None:
    lm = model_of(name)
    for note in look(
        lm,
        again=lambda seen: seen.rotary(0, N).rotate(seen.unrotated_keys),
        keys=lambda seen: seen.keys.clone(),
    ):
        assert torch.allclose(note["again"], note["keys"], atol=1e-5)


def _unrotated(seen: Observation) -> Tensor:
    return seen.rotary(seen.seen - seen.new, seen.seen).unrotate(seen.window_queries(seen.new))


def test_chunks() -> None:
    """Kept slots are un-rotated by their own positions; moments are of the chunk, sinks only in the first."""
    lm = loaded("qwen3")
    first = {note["layer"]: note["keys"] for note in look(lm, 40, keys=lambda seen: seen.unrotated_keys)[:4]}
    notes = look(
        lm, 40, keys=lambda seen: seen.unrotated_keys, positions=lambda seen: seen.positions.clone(),
        moments=lambda seen: seen.query_moments(4),
        queries=lambda seen: _unrotated(seen),
    )  # fmt: skip
    assert len(notes) == 8
    for note in notes[4:]:
        old = note["positions"] < 40
        assert int(old.sum()) == KV_HEADS * 16
        rows = note["positions"][old].view(1, KV_HEADS, -1, 1).expand(-1, -1, -1, HEAD_DIM)
        wanted = first[note["layer"]].gather(2, rows)
        assert torch.allclose(note["keys"][:, :, :16], wanted, atol=1e-5)
        assert torch.allclose(note["moments"].mean, note["queries"].mean(2), atol=1e-5)
    for note in notes[:4]:
        assert torch.allclose(note["moments"].mean, note["queries"][:, :, 4:].mean(2), atol=1e-5)


def test_moments_do_not_drown_in_a_large_mean() -> None:
    """float32 sums of squares would have no correct digit here; blocks of 1024 do not matter."""
    from kvbench.contract.query_moments import streamed_moments
    from kvbench.contract.rotary import Rotary

    queries = torch.randn(2, 3, 3000, 8, generator=torch.Generator().manual_seed(0))
    tables = Rotary(8, None).read(0, 3000, queries.device)
    found = streamed_moments(queries + 1e4, tables)[:, :, 1:]
    exact = (queries + 1e4).double()
    exact = exact - exact.mean(2, keepdim=True)
    assert torch.allclose(found.double(), exact.transpose(-1, -2) @ exact / 3000, atol=1e-3)


@pytest.mark.parametrize("arch", ["llama", "qwen3", "phi3", "sliding"])
def test_norms_of_what_values_become(arch: str) -> None:
    """Against W_O^h v of every head, slot and output dimension."""
    lm = loaded(arch)
    notes = look(
        lm, l2=lambda seen: seen.output_norms, l1=lambda seen: seen.output_sums,
        gram=lambda seen: seen.output_gram, values=lambda seen: seen.values.clone(),
    )  # fmt: skip
    for note in notes:
        weight = lm.model.model.layers[note["layer"]].self_attn.o_proj.weight
        for head in range(QUERY_HEADS):
            mine = weight[:, head * HEAD_DIM : (head + 1) * HEAD_DIM]
            became = note["values"][0, head // (QUERY_HEADS // KV_HEADS)] @ mine.T
            assert torch.allclose(note["l2"][0, head], became.norm(dim=-1), rtol=1e-4)
            assert torch.allclose(note["l1"][0, head], became.abs().sum(-1), rtol=1e-4)
            assert torch.allclose(note["gram"][head], mine.T @ mine, atol=1e-5)


@pytest.mark.parametrize("asked", [0, 7, 40])
def test_length_of_the_question(asked: int) -> None:
    """What has been read of it, chunk by chunk."""
    notes = look(loaded("llama"), 24, asked, question=lambda seen: seen.question_tokens)
    assert [note["question"] for note in notes[::4]] == [max(0, end - (N - asked)) for end in (24, 48, N)]
    whole = look(loaded("llama"), None, asked, question=lambda seen: seen.question_tokens)
    assert {note["question"] for note in whole} == {asked}


READS: dict[str, Callable[[Observation], Tensor]] = {
    "unrotated_keys": lambda seen: seen.unrotated_keys,
    "moments": lambda seen: seen.query_moments(1).mean,
    "norms": lambda seen: seen.output_norms,
    "sums": lambda seen: seen.output_sums,
    "gram": lambda seen: seen.output_gram,
}


@pytest.mark.parametrize("name", READS)
def test_writing_into_shared_work_is_found(name: str) -> None:
    class Writer(Look):
        def score(self, seen: Observation) -> Tensor:
            READS[name](seen).mul_(2)
            return seen.positions.float()

    with pytest.raises(PluginError, match="writes into shared"):
        validated_score(Writer(), scene(12))


@pytest.mark.parametrize("name", READS)
def test_computed_once(name: str) -> None:
    """Two policies, one computation."""
    seen = scene(12)
    one = READS[name](seen.limited_to(frozenset(Need)))
    assert one.data_ptr() == READS[name](seen.limited_to(frozenset(Need))).data_ptr()


@dataclass(frozen=True)
class Reader(Policy):
    name = "reader"
    needs = frozenset({Need.UNROTATED_KEYS, Need.OUTPUT_WEIGHTS})

    def score(self, seen: Observation) -> Tensor:
        return seen.unrotated_keys.sum(-1)


@pytest.mark.parametrize(
    ("part", "why"), [("_find_rotaries", "rotary embedding"), ("_find_outputs", "linear layer")]
)
def test_a_model_whose_parts_cannot_be_read(part: str, why: str) -> None:
    """A failed row by name; who does not look at them is not touched."""
    lm = dataclasses.replace(loaded("llama"))
    cells = [Cell(Reader(), 8), Cell(Look(), 8)]
    LOOKS[:] = [lambda seen: None]
    with (
        patch.object(parts_module, part, lambda *args: {}),
        patch.object(Look, "needs", frozenset({Need.KEYS})),
    ):
        done = evaluate(lm, sample_of(prompt_of()), prompt_of(), cells, KEY)
    failure = done.cells[cells[0]]
    assert isinstance(failure, Failure)
    assert "'reader'" in failure.reason
    assert why in failure.reason
    measured(done.cells[cells[1]])


def test_the_wrong_rotation_is_not_taken() -> None:
    """A rotation of neighbours is no rotation of halves: what does not undo it is refused."""
    lm = dataclasses.replace(loaded("llama"))

    def swapped(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        return tuple(x * cos[:, None] + x.flip(-1) * sin[:, None] for x in (q, k))  # type: ignore[return-value]

    with patch("transformers.models.llama.modeling_llama.apply_rotary_pos_emb", swapped):
        assert all(parts.rotary is None for parts in lm.parts.values())


def test_bfloat16() -> None:
    """A model in bfloat16 rounds its rotation, and is still read."""
    lm = model_of("qwen3", torch.bfloat16)
    assert all(parts.rotary and parts.rotary.tables and parts.output for parts in lm.parts.values())


def test_longrope_beyond_its_border_is_refused() -> None:
    """There the model has other factors than the ones that have rotated what is cached."""
    lm = model_of("phi3 longrope")
    notes = look(lm, tables=lambda seen: _refusal(seen, 4000, 4200))
    assert all("other factors" in note["tables"] for note in notes)
    assert look(lm, tables=lambda seen: _refusal(seen, 100, 4096))[0]["tables"] == ""


def _refusal(seen: Observation, start: int, stop: int) -> str:
    from kvbench.errors import UnsupportedModel

    try:
        seen.rotary(start, stop)
    except UnsupportedModel as error:
        return str(error)
    return ""
