"""Law 5: one chunk is after-prefill, and what was evicted is really gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch

from kvbench.contract.cell import Cell
from kvbench.contract.need import Need
from kvbench.contract.registry import POLICIES
from kvbench.engine import compress as loop
from kvbench.engine.cache import Bucket, Cache
from tests.laws.lab import (
    BUDGETS,
    CHUNK,
    SCHEDULES,
    SPECS,
    N,
    Trial,
    cells_of,
    loaded,
    prompt_of,
    same_positions,
    trial,
    try_out,
)  # fmt: skip
from tests.tiny import DISTINCT

NOWHERE = -(10**9)  # a position that no token has


def twin(cell: Cell, cells: Any) -> Cell:
    """The cell of the same policy and budget in another run."""
    return next(other for other in cells if (other.spec, other.budget) == (cell.spec, cell.budget))


def assert_same(one: Trial, other: Trial) -> None:
    """Same kept sets and, bit for bit, same outcomes."""
    for cell in one.cells:
        match = twin(cell, other.cells)
        assert same_positions(one.kept(cell), other.kept(match)), cell
        assert one[cell].outcome == other[match].outcome, cell
        assert one[cell].missed_mass == other[match].missed_mass, cell


@pytest.mark.parametrize("chunk", [N, N + 1, 10 * N])
@pytest.mark.parametrize("arch", DISTINCT)
def test_one_chunk_is_after_prefill(arch: str, chunk: int) -> None:
    once = trial(arch, "prefill")
    chunked = try_out(loaded(arch), prompt_of(), cells_of(SPECS, BUDGETS, "chunked", chunk))
    assert_same(once, chunked)


@pytest.mark.parametrize("arch", DISTINCT)
def test_several_chunks_are_not(arch: str) -> None:
    """B06: a later chunk is read with what is left of the earlier ones, so most policies end elsewhere."""
    once, chunked = trial(arch, "prefill"), trial(arch, "chunked")
    moved = {
        cell.spec
        for cell in once.cells
        if not same_positions(once.kept(cell), chunked.kept(twin(cell, chunked.cells)))
    }
    assert {"snapkv:window=8,kernel=3", "vatp"} <= moved
    assert not {"random", "streaming_llm"} & moved


@contextmanager
def evicted_is_poison() -> Iterator[list[int]]:
    """Whatever an eviction leaves behind becomes NaN, and so does every slot not yet written."""
    evict, allocate = loop.evict, Bucket.allocate
    count = [0]

    def poisoned_evict(lm: Any, cache: Cache, *rest: Any) -> Any:
        result = evict(lm, cache, *rest)
        for bucket in cache.buckets:
            for layer in range(cache.layers):
                keys, values, positions = bucket.view(layer)
                keys.fill_(float("nan"))
                values.fill_(float("nan"))
                positions.fill_(NOWHERE)
        count[0] += 1
        return result

    def poisoned_allocate(self: Bucket, layer: int, *rest: Any) -> None:
        allocate(self, layer, *rest)
        for tensors, value in ((self.keys, float("nan")), (self.values, float("nan"))):
            tensor = tensors[layer]
            assert tensor is not None
            tensor.fill_(value)

    with (
        patch.object(loop, "evict", poisoned_evict),
        patch.object(Bucket, "allocate", poisoned_allocate),
    ):
        yield count


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("arch", DISTINCT)
def test_evicted_data_has_no_effect(arch: str, schedule: str) -> None:
    """B06: every pair left behind is overwritten with NaN; results are the same, bit for bit."""
    clean = trial(arch, schedule)
    with evicted_is_poison() as count:
        poisoned = try_out(loaded(arch), prompt_of(), cells_of(SPECS, BUDGETS, schedule))
    assert count == [len(clean.ends)]
    assert all(torch.isfinite(torch.tensor(poisoned[cell].outcome.nll)) for cell in poisoned.cells)
    assert_same(clean, poisoned)


@pytest.mark.parametrize("arch", ["llama", "sliding"])
def test_budgets_above_the_context_are_poisoned_too(arch: str) -> None:
    """A row that keeps everything is a copy, not a view of the cache it comes from."""
    for schedule in SCHEDULES:
        cells = cells_of(("knorm",), (N, 2 * N), schedule)
        clean = try_out(loaded(arch), prompt_of(), cells)
        with evicted_is_poison():
            assert_same(clean, try_out(loaded(arch), prompt_of(), cells))


@pytest.mark.parametrize("spec", SPECS)
def test_the_most_slots_held(spec: str) -> None:
    """Between evictions a row holds its budget and one chunk, and what a second pass reads."""
    done = trial("llama", "chunked")
    if Need.SECOND_PASS in POLICIES.parse(spec).needs:
        assert all(done[cell].peak > cell.held(N) + CHUNK for cell in done.cells if cell.spec == spec)
        return
    for cell in (cell for cell in done.cells if cell.spec == spec):
        assert cell.budget is not None
        before = [min(cell.budget, end - CHUNK) for end in (CHUNK, 2 * CHUNK)] + [cell.budget]
        held = [kept + new for kept, new in zip(before, (CHUNK, CHUNK, N - 2 * CHUNK), strict=True)]
        assert done[cell].peak == max(held)
    assert trial("llama", "prefill")[twin(cell, trial("llama", "prefill").cells)].peak == N
