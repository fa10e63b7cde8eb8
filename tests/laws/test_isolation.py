"""Law 8: nothing global changes, and a policy that fails takes only its own cells with it."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvbench.contract.cell import Cell, Schedule
from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.pins import Pins
from kvbench.contract.policy import Policy
from kvbench.engine.measure import Failure
from kvbench.errors import UnsupportedModel
from tests.laws.lab import (
    BUDGETS,
    CHUNK,
    SCHEDULES,
    SOME,
    N,
    Trial,
    cells_of,
    loaded,
    prompt_of,
    same_positions,
    schedule_of,
    trial,
    try_out,
)  # fmt: skip
from tests.laws.runs import by_key, config, lines, python, recorded
from tests.laws.toy import FAULTS, Faulty
from tests.tiny import tiny_model

OTHERS = """
import json, sys, torch, transformers
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.llama import modeling_llama

kind = dict(vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2)
def build(attention):
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**kind), attn_implementation=attention)
    return made.eval()
early = {name: build(name) for name in ("eager", "sdpa")}
ids = torch.arange(40).view(2, 20)
def outputs(models):
    with torch.no_grad():
        return {name: model(ids).logits for name, model in models.items()} | {
            name + " text": model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
            for name, model in models.items()}
def state():
    names = {name: id(f) for name, f in AttentionInterface().items() if name != "kvbench"}
    masks = {name: id(f) for name, f in AttentionMaskInterface().items() if name != "kvbench"}
    return names, masks, [
        id(torch.nn.functional.scaled_dot_product_attention), id(modeling_llama.LlamaAttention.forward),
        id(modeling_llama.LlamaModel.forward), id(modeling_llama.eager_attention_forward),
        id(modeling_llama.apply_rotary_pos_emb), str(torch.get_default_dtype()), torch.is_grad_enabled(),
        torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(),
        transformers.logging.get_verbosity(), torch.random.initial_seed(), torch.get_rng_state().sum().item(),
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for o in early.values() for m in o.modules()],
    ]
def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)
before, clean = outputs(early), state()

import kvbench, kvbench.study.runner, kvbench.engine.evaluate, kvbench.engine.attention
found = {"import": same(before, outputs(early)) and clean == state()}

from tests.laws import toy
toy.add()
torch.manual_seed(0)
clean = state()
for schedule in ({}, {"schedule": "chunked", "chunk": 16}):
    result = kvbench.run(kvbench.RunConfig(
        policies=("laws_faulty", "laws_faulty:after=20", "knorm"), tasks="laws_toy", budgets=(8,),
        device="cpu", model=sys.argv[1], out=f"{sys.argv[2]}/{len(schedule)}", **schedule), progress=False)
    name = schedule.get("schedule", "prefill")
    found[name] = same(before, outputs(early)) and clean == state()
    found[name + " failed"] = result.failed
found["loaded later"] = same(before, outputs({name: build(name) for name in early}))
print(json.dumps(found))
"""


def test_other_models_are_untouched(folder: str, tmp_path: Path) -> None:
    """B18: bit for bit, by an import, by runs, and by policies that raise in the middle of a prefill."""
    done = python(f"import sys; sys.argv[1:] = {[folder, str(tmp_path)]!r}\n{OTHERS}")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    failed = {name: found.pop(name) for name in list(found) if name.endswith("failed")}
    assert found == dict.fromkeys(("import", "prefill", "chunked", "loaded later"), True)
    assert failed["prefill failed"] > 4  # four samples of laws_faulty and those longer than 20 tokens
    assert failed["chunked failed"] > 4


def test_our_model_without_the_engine() -> None:
    """B12: a model under our attention refuses to run alone, or with a mask that we would ignore."""
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(UnsupportedModel, match="without kvbench's engine"):
        tiny_model("llama")(ids)
    with pytest.raises(UnsupportedModel, match="mask"):
        tiny_model("llama")(ids, attention_mask=torch.ones(1, 1, 3, 3), kv_pass=object())


def faulty_cells(schedule: str, fault: str, after: int = 0) -> list[Cell]:
    return [Cell(Faulty(fault, after), budget, Pins(), schedule_of(schedule)) for budget in BUDGETS]


@functools.cache
def alone(schedule: str) -> Trial:
    return try_out(loaded("llama"), prompt_of(), cells_of(SOME, BUDGETS, schedule))


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_failing_policy_is_named_and_alone(schedule: str, fault: str) -> None:
    bad, clean = faulty_cells(schedule, fault), alone(schedule)
    done = try_out(loaded("llama"), prompt_of(), [*bad, *clean.cells])
    for cell in bad:
        failure = done.done.cells[cell]
        assert isinstance(failure, Failure)
        assert "laws_faulty" in failure.reason
        assert "layer 2" in failure.reason
        assert FAULTS[fault] in failure.reason
    for cell in clean.cells:
        assert done[cell].outcome == clean[cell].outcome
        assert done[cell].eviction_cost == clean[cell].eviction_cost
        assert same_positions(done.kept(cell), clean.kept(cell))


@pytest.mark.usefixtures("toys")
def test_failing_after_some_chunks() -> None:
    """Rows that leave in the middle of the context leave the others as they are."""
    bad = faulty_cells("chunked", "raise", CHUNK)
    clean = alone("chunked")
    done = try_out(loaded("llama"), prompt_of(), [*bad, *clean.cells])
    assert all(isinstance(done.done.cells[cell], Failure) for cell in bad)
    for cell in clean.cells:
        assert done[cell].outcome.nll == pytest.approx(clean[cell].outcome.nll, abs=1e-5)
        assert done[cell].outcome.answer.label == clean[cell].outcome.answer.label
        assert same_positions(done.kept(cell), clean.kept(cell))


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize("after", [0, CHUNK, 2 * CHUNK, N])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nothing_but_failing_policies(schedule: str, after: int) -> None:
    """The sample ends with reasons and the full cache's answer, not with an exception."""
    bad = faulty_cells(schedule, "raise", after)
    done = try_out(loaded("llama"), prompt_of(), bad)
    for cell in bad:
        assert isinstance(done.done.cells[cell], Failure) == (after < N)
    assert done.done.full.outcome == trial("llama", "prefill").done.full.outcome


@dataclass(frozen=True)
class FailsWithManySlots(Policy):
    """K-Norm that cannot take more than 40 slots: budget 33 fails in the second chunk, 8 never does."""

    name = "many"
    needs = frozenset({Need.KEYS})

    def score(self, seen: Observation) -> Tensor:
        if seen.slots > 40:
            raise ValueError("too many")
        return -seen.keys.float().norm(dim=-1)


def test_a_failure_is_one_of_a_budget() -> None:
    """Law 6 holds for failures: a budget that works alone works beside one that does not."""
    chunks = Schedule("chunked", CHUNK)
    small, large = (Cell(FailsWithManySlots(), budget, Pins(), chunks) for budget in BUDGETS)
    together = try_out(loaded("llama"), prompt_of(), [large, small])
    alone = try_out(loaded("llama"), prompt_of(), [small])
    assert isinstance(together.done.cells[large], Failure)
    assert same_positions(together.kept(small), alone.kept(small))
    assert together[small].outcome.nll == pytest.approx(alone[small].outcome.nll, abs=1e-5)


@dataclass(frozen=True)
class FutureAndQueries(Policy):
    """Asks for two things that are never known together after a prefill."""

    name = "both"
    needs = frozenset({Need.FUTURE, Need.WINDOW_QUERIES})

    def score(self, seen: Observation) -> Tensor:
        return seen.future_attention + seen.by_group(seen.window_attention(4).sum(2)).mean(2)


def test_queries_that_are_gone_are_an_error() -> None:
    """Not silently zero."""
    cell = Cell(FutureAndQueries(), 8)
    failure = try_out(loaded("llama"), prompt_of(), [cell]).done.cells[cell]
    assert isinstance(failure, Failure)
    assert "both" in failure.reason
    assert "queries" in failure.reason


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize("schedule", [{}, {"schedule": "chunked", "chunk": 16}])
def test_rows_of_a_failing_policy(folder: str, tmp_path: Path, schedule: dict[str, object]) -> None:
    """On disk: failed rows with a reason; every other row as in a run without that policy."""
    names = ("knorm", "snapkv")
    recorded(config(folder, tmp_path / "a", policies=names, **schedule))
    result, _ = recorded(config(folder, tmp_path / "b", policies=("laws_faulty", *names), **schedule))
    without, together = by_key(lines(tmp_path / "a")), by_key(lines(tmp_path / "b"))
    failed = [row for row in together.values() if row["status"] == "failed"]
    assert len(failed) == result.failed == 2 * 2 * 4  # budgets, tasks, samples
    assert all(row["policy"] == "laws_faulty" and "laws_faulty" in row["reason"] for row in failed)
    assert {key: row for key, row in together.items() if row["status"] == "ok"} == without
    assert any("laws_faulty" in note for note in result.notes)
