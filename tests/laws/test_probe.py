"""Extra tokens of a policy: what they see, and that nothing of them is left."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from kvbench.audit.check import check_policy
from kvbench.audit.speed.flops import prefill_flops
from kvbench.audit.speed.stages import run_stages
from kvbench.contract.cell import Cell, Ranker
from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.pins import Pins
from kvbench.contract.policy import Policy, param
from kvbench.contract.registry import POLICIES, register
from kvbench.engine import passes as reading
from kvbench.engine.bind import bind_policies
from kvbench.engine.cache import Cache
from kvbench.engine.evaluate import evaluate
from kvbench.engine.forward import read
from kvbench.engine.measure import Failure
from kvbench.engine.observe import Moment
from kvbench.engine.passes import read_and_rank
from kvbench.engine.probe import read_probe
from kvbench.engine.ranking import Rankings
from kvbench.errors import PluginError
from tests.laws.lab import (
    BUDGETS,
    CHUNK,
    KEY,
    N,
    cells_of,
    held,
    loaded,
    measured,
    plain,
    prompt_of,
    same_positions,
    sample_of,
    schedule_of,
    try_out,
    words,
)
from tests.laws.test_chunks import assert_same
from tests.tiny import ARCHS, HEAD_DIM, KV_HEADS, LAYERS, QUERY_HEADS

WIDTH = QUERY_HEADS * HEAD_DIM
COUNT = 3


def drawn(seed: int, width: int = WIDTH) -> Tensor:
    return torch.randn(COUNT, width, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Peek(Policy):
    """Ranks by the mean attention of random extra tokens."""

    needs = frozenset({Need.PROBE})
    seed: int = param(0, "none")
    width: int = param(WIDTH, "none")
    power: float = param(1.0, "none")  # another policy with the same extra tokens

    @property
    def probe(self) -> Tensor:
        return drawn(self.seed, self.width)

    def score(self, seen: Observation) -> Tensor:
        return seen.by_group(seen.probe_attention.mean(2)).mean(2) ** self.power


@pytest.fixture(autouse=True)
def peek() -> Iterator[None]:
    with (
        patch.object(POLICIES, "_places", dict(POLICIES._found())),
        patch.object(POLICIES, "_classes", dict(POLICIES._classes)),
    ):
        register("peek", source="tests")(Peek)
        yield


@contextmanager
def embedded_forwards(model: Any) -> Iterator[list[tuple[int, int]]]:
    """(rows, first position) of every forward of embeddings."""
    found: list[tuple[int, int]] = []

    def hook(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs.get("inputs_embeds") is not None and kwargs.get("input_ids") is None:
            found.append((len(kwargs["inputs_embeds"]), int(kwargs["position_ids"][0, 0])))

    handle = model.model.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield found
    finally:
        handle.remove()


@torch.inference_mode()
def prefilled(arch: str, rankers: list[Ranker], capacity: int = N + 8) -> tuple[Cache, Rankings]:
    lm = loaded(arch)
    cache = Cache.empty(LAYERS, capacity)
    bound = bind_policies(lm, [one.policy for one in rankers])
    rankings, _ = read_and_rank(bound, cache, torch.tensor(words(N, 0)), [rankers], Moment(N, N, KEY))
    return cache, rankings


def ranker(**changes: Any) -> Ranker:
    return Ranker(Peek(**changes), Pins())


@pytest.mark.parametrize("arch", ARCHS)
def test_their_attention_is_the_plain_models(arch: str) -> None:
    """One sequence of context and extra tokens in a plain model, its attention cut to the context."""
    shown: dict[int, Observation] = {}

    def spy(policy: Policy, seen: Observation) -> tuple[Tensor, Tensor]:
        shown[seen.layer] = seen
        return seen.positions.float(), torch.tensor([True])

    with patch("kvbench.engine.ranking.score_and_flag", spy):
        prefilled(arch, [ranker()])
    assert list(shown) == list(loaded(arch).geometry.full_layers)
    model = plain(arch)
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            context = model.get_input_embeddings()(torch.tensor([words(N, 0)]))
            whole = torch.cat([context, drawn(0)[None]], 1)
            wanted = model(inputs_embeds=whole, output_attentions=True, use_cache=False).attentions
    finally:
        model.set_attn_implementation("sdpa")
    for layer, seen in shown.items():
        assert seen.keys.shape == (1, KV_HEADS, N, HEAD_DIM)
        assert seen.positions[0].tolist() == [list(range(N))] * KV_HEADS
        assert (seen.new, seen.seen) == (N, N)
        assert torch.allclose(seen.probe_attention, wanted[layer][:, :, N:, :N], atol=1e-5)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("capacity", [N, N + 8])
def test_the_cache_is_bit_for_bit_as_without_them(arch: str, capacity: int) -> None:
    cache, rankings = prefilled(arch, [ranker()], capacity)
    never, _ = prefilled(arch, [])
    assert rankings.found[0, ranker()].order.shape[-1] == N
    ids = torch.tensor(words(3, 9))
    with torch.inference_mode():
        for step in range(2):  # before and after more tokens are read
            for layer in range(LAYERS):
                for one, other in zip(
                    cache.buckets[0].view(layer), never.buckets[0].view(layer), strict=True
                ):
                    assert torch.equal(one, other)
            logits = [read(loaded(arch), which, ids, N + 3 * step) for which in (cache, never)]
            assert torch.equal(*logits)
    assert held(cache, 0)[0][0].tolist() == list(range(N + 6))


@pytest.mark.parametrize("schedule", ["prefill", "chunked"])
def test_other_policies_do_not_notice(schedule: str) -> None:
    others = cells_of(("knorm", "tova", "random"), BUDGETS, schedule)
    alone = try_out(loaded("llama"), prompt_of(), others)
    together = try_out(loaded("llama"), prompt_of(), others + cells_of(("peek",), BUDGETS, schedule))
    for cell in others:
        assert same_positions(alone.kept(cell), together.kept(cell))
        assert alone[cell].outcome.answer == together[cell].outcome.answer
        assert alone[cell].outcome.nll == pytest.approx(together[cell].outcome.nll, abs=1e-5)
    ids, positions = together.forwards[-1].ids, together.forwards[-1].positions
    assert ids.shape == positions.shape
    assert positions[:, -1].tolist() == alone.forwards[-1].positions[:1, -1].tolist() * len(positions)


def test_equal_tokens_are_read_once() -> None:
    specs = ("peek", "peek:power=2.0", "peek:seed=1", "knorm")
    lm = loaded("llama")
    clock, late = time.perf_counter, [0.0]

    def slowly(*args: Any) -> None:
        read_probe(*args)
        late[0] += 1000

    with (
        embedded_forwards(lm.model) as found,
        patch.object(reading, "read_probe", slowly),
        patch("time.perf_counter", lambda: clock() + late[0]),
    ):
        done = try_out(lm, prompt_of(), cells_of(specs, BUDGETS))
    assert found == [(1, N), (1, N)]
    for cell in done.cells:  # a pass takes 1000 s by this clock, and each of its policies is told all of it
        passes = 0 if cell.spec == "knorm" else 1
        assert done[cell].times["score_s"] == pytest.approx(1000 * passes, abs=500)
        assert 0 < done[cell].times["prefill_s"] < 500
    one, squared, other = ([c for c in done.cells if c.spec == spec] for spec in specs[:3])
    for a, b, c in zip(one, squared, other, strict=True):  # squares keep the order, other tokens do not
        assert same_positions(done.kept(a), done.kept(b))
        assert not same_positions(done.kept(a), done.kept(c))


def test_chunks_read_them_again_after_kept_and_new_tokens() -> None:
    lm = loaded("llama")
    cells = cells_of(("peek", "knorm"), BUDGETS, "chunked")
    with embedded_forwards(lm.model) as found:
        done = try_out(lm, prompt_of(), cells)
    assert [start for _, start in found] == [CHUNK, 2 * CHUNK, N]
    assert [rows for rows, _ in found] == [1, 2, 2]  # the rows of peek only: both budgets after chunk 1
    for cell in cells:
        extra = COUNT if cell.name == "peek" else 0
        assert done[cell].peak == {8: 8 + CHUNK, 33: 33 + N - 2 * CHUNK}[cell.budget or 0] + extra
        assert done[cell].kept == cell.budget


def test_one_chunk_is_after_prefill() -> None:
    cells = cells_of(("peek",), BUDGETS)
    once = try_out(loaded("llama"), prompt_of(), cells)
    assert_same(once, try_out(loaded("llama"), prompt_of(), cells_of(("peek",), BUDGETS, "chunked", N)))
    assert all(once[cell].peak == N + COUNT for cell in cells)


@pytest.mark.parametrize("schedule", ["prefill", "chunked"])
@pytest.mark.parametrize(
    ("changes", "words"), [({"width": 5}, "(3, 5)"), ({"power": float("nan")}, "NaN")], ids=["width", "nan"]
)
def test_a_failing_one_is_named_and_alone(schedule: str, changes: dict[str, Any], words: str) -> None:
    bad = Cell(Peek(**changes), 8, Pins(), schedule_of(schedule))
    cells = [*cells_of(("peek", "knorm"), (8,), schedule), bad]
    done = dict(evaluate(loaded("llama"), sample_of(prompt_of()), prompt_of(), cells, KEY).cells)
    failure = done.pop(bad)
    assert isinstance(failure, Failure)
    assert "'peek'" in failure.reason
    assert words in failure.reason
    assert {measured(one).kept for one in done.values()} == {8}


def test_too_long_for_the_model() -> None:
    lm = loaded("llama")
    short = dataclasses.replace(lm, geometry=dataclasses.replace(lm.geometry, max_length=N + COUNT - 1))
    done = evaluate(short, sample_of(prompt_of()), prompt_of(), cells_of(("peek",), (8,)), KEY)
    failure = next(iter(done.cells.values()))
    assert isinstance(failure, Failure)
    assert f"{N} tokens and its {COUNT} extra ones" in failure.reason


def test_queries_of_the_chunk_are_gone() -> None:
    """So `kvbench check` refuses a policy that declares both."""

    @dataclass(frozen=True)
    class Both(Peek):
        needs = frozenset({Need.PROBE, Need.WINDOW_QUERIES})

        def score(self, seen: Observation) -> Tensor:
            return seen.window_attention(1)

    register("both", source="tests")(Both)
    _, rankings = prefilled("llama", [Ranker(Both(), Pins())])
    assert "queries of the chunk are gone" in next(iter(rankings.failures.values()))
    refused = [finding for finding in check_policy("both") if not finding.passed]
    assert "beside extra tokens" in refused[0].detail


def test_check() -> None:
    assert [finding for finding in check_policy("peek") if not finding.passed] == []

    @dataclass(frozen=True)
    class Silent(Policy):
        def score(self, seen: Observation) -> Tensor:
            return seen.probe_attention.mean((1, 2))[:, None].expand(-1, seen.kv_heads, -1).contiguous()

    register("silent", source="tests")(Silent)
    details = {finding.law: finding.detail for finding in check_policy("silent") if not finding.passed}
    assert (
        details["reads only the signals in `needs`"].count("PROBE was read but not declared in `needs`") == 1
    )


def test_speed_counts_the_reading_of_extra_tokens() -> None:
    lm, budget = loaded("llama"), 8
    bad, norms = Cell(Peek(width=5), budget), Cell(POLICIES.parse("knorm"), budget)
    cells = [Cell(Peek(), budget), Cell(Peek(power=2.0), budget), norms, bad]
    passed = run_stages(lm, torch.tensor(words(N, 0)), cells, 2)
    extra = prefill_flops(lm, N + COUNT) - prefill_flops(lm, N)
    for one in cells[:3]:
        stages = passed.policies[one]
        assert (stages.failed, stages.kept, len(stages.score)) == ("", budget, LAYERS)
        assert sum(stages.score) == pytest.approx(stages.scoring.seconds)
        assert (stages.score_flops > extra) == (one is not norms)
    assert "(3, 5)" in passed.policies[bad].failed


def test_no_extra_tokens_in_the_late_pass() -> None:
    seen = Observation(
        0, 1, *(torch.zeros(1, 1, 2, 2),) * 2, torch.arange(2).view(1, 1, 2), 2, 2, 1.0, 0,
        _queries=torch.zeros(1, 1, 2, 2),
    )  # fmt: skip
    with pytest.raises(PluginError, match="no extra tokens"):
        _ = seen.probe_attention
