"""Law 3: exactly the budget is kept, counted in tensors, in every layer and KV head, after every chunk."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvbench.contract.cell import Cell
from kvbench.contract.observation import Observation
from kvbench.contract.pins import Pins
from kvbench.contract.policy import Policy
from kvbench.engine.bind import bind_policies
from kvbench.engine.compress import ChunkReader, compress
from tests.laws.lab import (
    SCHEDULES,
    SPECS,
    N,
    Positions,
    cell_of,
    cells_of,
    evictions,
    loaded,
    prompt_of,
    ranker_of,
    schedule_of,
    text_of,
    trial,
    try_out,
    words,
)  # fmt: skip
from tests.tiny import DISTINCT, HEAD_DIM, KV_HEADS, LAYERS

FLOAT = 4  # bytes


def in_chunks(n: int, chunk: int, cells: list[Cell]) -> list[dict[Cell, Positions]]:
    """What the cells hold after each chunk of a random context."""
    lm = loaded("llama")
    draw = torch.Generator().manual_seed(n)
    future = {layer: torch.rand(1, KV_HEADS, n, generator=draw) for layer in range(LAYERS)}
    with torch.inference_mode(), evictions() as (rounds, _):
        bound = bind_policies(lm, (cell.ranker.policy for cell in cells))
        ids = words(n, n)
        reader = ChunkReader(bound, torch.tensor(ids), chunk, 0, future, text=text_of(lm, ids))
        compress(bound, cells, reader, 0)
    return rounds


def assert_kept(positions: Tensor, budget: int, seen: int) -> None:
    """(kv_head, kept): as many as asked for, each once, in order, none from the future."""
    assert positions.shape == (KV_HEADS, min(budget, seen))
    assert (positions.diff(dim=-1) > 0).all()
    assert positions.min() >= 0
    assert positions.max() < seen


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("arch", DISTINCT)
def test_kept_is_the_budget(arch: str, schedule: str, spec: str) -> None:
    done = trial(arch, schedule)
    full = done.lm.geometry.full_layers
    for cell in (cell for cell in done.cells if cell.spec == spec):
        assert cell.budget is not None
        for kept, seen in zip(done.history(cell), done.ends, strict=True):
            for layer, positions in enumerate(kept):
                assert_kept(positions, cell.budget if layer in full else seen, seen)
        assert done[cell].kept == cell.budget


@pytest.mark.parametrize("arch", DISTINCT)
def test_bytes_are_the_formula(arch: str) -> None:
    """B35: keys and values of the KV heads, not of the query heads."""
    done = trial(arch, "prefill")
    full = len(done.lm.geometry.full_layers)
    for cell in done.cells:
        pairs = full * (cell.budget or 0) + (LAYERS - full) * N
        assert done[cell].kv_bytes == 2 * KV_HEADS * pairs * HEAD_DIM * FLOAT
    assert done.done.full.kv_bytes == 2 * LAYERS * KV_HEADS * N * HEAD_DIM * FLOAT


@dataclass(frozen=True)
class Listed(Policy):
    """A worth for every token of every layer and KV head, in advance; few values, so many ties."""

    name = "listed"
    seed: int = 0

    def worth(self) -> Tensor:
        """(layer, kv_head, position)"""
        draw = torch.Generator().manual_seed(self.seed)
        return torch.randint(12, (LAYERS, KV_HEADS, 1000), generator=draw).float()

    def score(self, seen: Observation) -> Tensor:
        return self.worth()[seen.layer].gather(1, seen.positions[0])[None]


def best(worth: list[float], alive: list[int], budget: int, pins: Pins, seen: int) -> list[int]:
    """What stays of the tokens still there, by sorting tuples."""

    def place(position: int) -> tuple[float, ...]:
        if position < pins.first:
            return (0, position)
        return (1, -position) if position >= seen - pins.last else (2, -worth[position], -position)

    return sorted(sorted(alive, key=place)[:budget])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("arch", DISTINCT)
def test_what_stays_is_the_head_of_the_ranking(arch: str, schedule: str) -> None:
    """Each cell keeps what its own policy ranks first, in each layer and KV head on its own."""
    given = ((0, 33, Pins()), (1, 8, Pins(2, 4)), (2, 33, Pins(4, 16)), (3, 8, Pins()))
    cells = [Cell(Listed(seed), budget, pins, schedule_of(schedule)) for seed, budget, pins in given]
    done = try_out(loaded(arch), prompt_of(), cells)
    for cell in cells:
        assert isinstance(cell.policy, Listed)
        for layer in done.lm.geometry.full_layers:
            for head in range(KV_HEADS):
                worth = cell.policy.worth()[layer, head].tolist()
                alive: list[int] = []
                start = 0
                for end, kept in zip(done.ends, done.history(cell), strict=True):
                    alive = best(worth, [*alive, *range(start, end)], cell.budget or 0, cell.pins, end)
                    start = end
                    assert kept[layer][head].tolist() == alive


@pytest.mark.parametrize("spec", SPECS)
def test_ten_chunks(spec: str) -> None:
    """B07: one budget for all chunks together, and the sinks are those of the whole context."""
    cell = cell_of(ranker_of(spec), 16, "chunked", 32)
    rounds = in_chunks(320, 32, [cell])
    assert len(rounds) == 10
    for index, kept in enumerate(rounds, start=1):
        seen = 32 * index
        for positions in kept[cell]:
            assert_kept(positions, 16, seen)
            if spec == "streaming_llm":
                assert positions.tolist() == [[0, 1, 2, 3, *range(seen - 12, seen)]] * KV_HEADS


def test_a_short_last_chunk() -> None:
    """B10: 1001 tokens in chunks of 64, all policies at three budgets in one loop."""
    cells = cells_of(SPECS, (20, 100, 500), "chunked", 64)
    rounds = in_chunks(1001, 64, cells)
    assert len(rounds) == 16
    for index, kept in enumerate(rounds, start=1):
        assert set(kept) == set(cells)
        for cell, layers in kept.items():
            for positions in layers:
                assert_kept(positions, cell.budget or 0, min(64 * index, 1001))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_around_the_context(schedule: str, spec: str) -> None:
    """B22, B24: one token too many is one token evicted; no policy has a floor of its own."""
    done = try_out(loaded("llama"), prompt_of(seed=4), cells_of((spec,), (N - 1, N, N + 1, 1), schedule))
    assert {cell.budget: done[cell].kept for cell in done.cells} == {1: 1, N - 1: N - 1, N: N, N + 1: N}


def test_no_state_between_samples() -> None:
    """B17: the fifth sample is treated as the first."""
    cells = cells_of(SPECS, (20,))
    prompts = [prompt_of(seed=10 * index) for index in range(5)]
    several = [try_out(loaded("llama"), prompt, cells) for prompt in prompts]
    alone = try_out(loaded("llama"), prompts[4], cells)
    for cell in cells:
        assert [done[cell].kept for done in several] == [20] * 5
        assert all(torch.equal(a, b) for a, b in zip(several[4].kept(cell), alone.kept(cell), strict=True))
        assert several[4][cell].outcome == alone[cell].outcome


@pytest.mark.parametrize("pins", [Pins(4, 16), Pins(0, 8), Pins(3, 0)])
def test_pinned_tokens_stay(pins: Pins) -> None:
    """At every moment, for every policy; below the pins all policies keep the same tokens."""
    rankers = [ranker_of(spec, pins) for spec in SPECS]
    large = [cell_of(one, budget, "chunked", 24) for one in rankers for budget in (pins.total, 24)]
    small = [cell_of(one, 3, "chunked", 24) for one in rankers]
    rounds = in_chunks(100, 24, list(dict.fromkeys(large + small)))
    for index, kept in enumerate(rounds, start=1):
        seen = min(24 * index, 100)
        pinned = {*range(pins.first), *range(seen - pins.last, seen)}
        for cell in large:
            for head in torch.cat(kept[cell]).tolist():
                assert pinned <= set(head)
        for cell in small:
            head = [*range(min(3, pins.first)), *range(seen - max(0, 3 - pins.first), seen)]
            assert all(positions.tolist() == [head] * KV_HEADS for positions in kept[cell])
