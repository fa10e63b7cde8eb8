"""Equal kept sets share a row, and sets that only look alike do not."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvbench.contract.cell import Cell, Schedule
from kvbench.contract.observation import Observation
from kvbench.contract.pins import Pins
from kvbench.contract.policy import Policy
from kvbench.engine.cache import Cache
from kvbench.engine.forward import read
from kvbench.engine.measure import Failure
from kvbench.engine.ranking import Ranking, Rankings
from kvbench.engine.selection import evict
from tests.laws.lab import N, held, loaded, prompt_of, same_positions, try_out, words
from tests.tiny import KV_HEADS, LAYERS


@dataclass(frozen=True)
class Named(Policy):
    """Only a name: these tests bring rankings of their own."""

    name = "named"
    which: int = 0

    def score(self, seen: Observation) -> Tensor:
        raise NotImplementedError


def cut(cache: Cache, orders: list[Tensor], rows: list[int], budget: int) -> tuple[Cache, list[int]]:
    """Evict rankings (layer, kv_head, slot) of these rows to one budget."""
    cells = [Cell(Named(which), budget) for which in range(len(orders))]
    rankings = Rankings(
        {
            (row, cell.ranker): Ranking(order, torch.zeros(order.shape), 0.0)
            for cell, row, order in zip(cells, rows, orders, strict=True)
        }
    )
    return evict(loaded("llama"), cache, cells, rows, rankings, 0)


@torch.inference_mode()
def filled() -> Cache:
    cache = Cache.empty(LAYERS, N)
    read(loaded("llama"), cache, torch.tensor(words(N, 0)), 0)
    return cache


def drawn(seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(N, generator=draw) for _ in range(LAYERS * KV_HEADS)]).view(
        LAYERS, KV_HEADS, N
    )


@pytest.mark.parametrize("budget", [1, 20, N - 1])
@torch.inference_mode()
def test_what_looks_alike(budget: int) -> None:
    """Sets that differ in their order only are one; swapped KV heads, layers and single slots are not."""
    base = drawn(0)
    within = torch.cat([base[..., :budget].flip(-1), base[..., budget:]], -1)
    one_slot = base.clone()
    one_slot[2, 1, [budget - 1, budget]] = base[2, 1, [budget, budget - 1]]
    orders = [base, base.clone(), within, base.flip(1), base.flip(0), one_slot]
    compacted, rows = cut(filled(), orders, [0] * len(orders), budget)
    assert rows[0] == rows[1] == rows[2]
    assert len(set(rows)) == compacted.rows == 4
    for order, row in zip(orders, rows, strict=True):
        kept = list(order[..., :budget].sort(-1).values)
        assert same_positions(kept, held(compacted, row))


@torch.inference_mode()
def test_equal_slots_of_different_rows() -> None:
    """The same slots of two rows are other tokens."""
    compacted, rows = cut(filled(), [drawn(0), drawn(1)], [0, 0], 30)
    before = [held(compacted, row) for row in rows]
    order = torch.arange(30).expand(LAYERS, KV_HEADS, -1)
    again, after = cut(compacted, [order, order], rows, 10)
    assert after[0] != after[1]
    for old, row in zip(before, after, strict=True):
        assert same_positions([layer[:, :10] for layer in old], held(again, row))


@dataclass(frozen=True)
class FailsTwice(Policy):
    """NaN in two layers, an exception in a third."""

    name = "twice"

    def score(self, seen: Observation) -> Tensor:
        if seen.layer == 3:
            raise ValueError("too late")
        return torch.full(seen.positions.shape, float("nan" if seen.layer in (1, 2) else 0))


@pytest.mark.parametrize("chunk", [None, 24])
def test_the_first_fault_is_told(chunk: int | None) -> None:
    """Scores are looked at when all layers are done, and still the reason is the first layer's."""
    cell = Cell(FailsTwice(), 8, Pins(), Schedule("prefill" if chunk is None else "chunked", chunk))
    failure = try_out(loaded("llama"), prompt_of(), [cell]).done.cells[cell]
    assert isinstance(failure, Failure)
    assert "layer 1" in failure.reason
    assert "NaN" in failure.reason
