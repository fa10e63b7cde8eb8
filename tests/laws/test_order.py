"""Law 6: neither the order of cells, policies and samples nor their number changes a result."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest

import kvbench.engine.evaluate as engine
from kvbench.contract.cell import Cell
from tests.laws.lab import (
    BUDGETS,
    SCHEDULES,
    SOME,
    SPECS,
    N,
    Trial,
    cells_of,
    loaded,
    prompt_of,
    same_positions,
    sample_of,
    trial,
    try_out,
)  # fmt: skip
from tests.tiny import DISTINCT

CLOSE = 1e-5


def assert_agree(one: Trial, other: Trial, cell: Cell, future: float = 0) -> None:
    """Same kept sets and answers; continuous numbers within 1e-5. future: what the future attention may
    differ by, when it is summed in another order."""
    assert same_positions(one.kept(cell), other.kept(cell)), cell
    a, b = one[cell], other[cell]
    assert a.outcome.answer.label == b.outcome.answer.label, cell
    assert a.outcome.answer.greedy == b.outcome.answer.greedy, cell
    assert a.outcome.answer.loglikelihoods == pytest.approx(b.outcome.answer.loglikelihoods, abs=CLOSE)
    assert a.outcome.nll == pytest.approx(b.outcome.nll, abs=CLOSE)
    assert a.outcome.kl == pytest.approx(b.outcome.kl, abs=CLOSE)
    assert (a.kept, a.kv_bytes, a.peak) == (b.kept, b.kv_bytes, b.peak)
    assert a.missed_mass == pytest.approx(b.missed_mass, abs=future, rel=0)
    assert (a.eviction_cost is None) == (b.eviction_cost is None)
    assert (a.eviction_cost or 0) == pytest.approx(b.eviction_cost or 0, abs=future, rel=0)


@pytest.mark.parametrize("choices", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("arch", DISTINCT)
def test_order_of_cells(arch: str, schedule: str, choices: bool) -> None:
    done = trial(arch, schedule, choices)
    cells = list(done.cells)
    random.Random(0).shuffle(cells)
    other = try_out(done.lm, done.prompt, cells)
    for cell in done.cells:
        assert_agree(done, other, cell)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("arch", "choices"), [("llama", False), ("sliding", True)])
def test_one_cell_or_all(arch: str, choices: bool, schedule: str, spec: str) -> None:
    done = trial(arch, schedule, choices)
    for cell in (cell for cell in done.cells if cell.spec == spec):
        alone = try_out(done.lm, done.prompt, [cell])
        assert_agree(done, alone, cell)


@pytest.mark.parametrize("arch", ["llama", "sliding"])
def test_schedules_in_one_call(arch: str) -> None:
    """Cells of three schedules, mixed: each as in a call of its own."""
    apart = [trial(arch, schedule) for schedule in SCHEDULES]
    apart.append(try_out(loaded(arch), prompt_of(), cells_of(SPECS, BUDGETS, "chunked", 50)))
    cells = [cell for done in apart for cell in done.cells]
    random.Random(1).shuffle(cells)
    together = try_out(loaded(arch), prompt_of(), cells)
    assert set(together.done.cells) == set(cells)
    for done in apart:
        for cell in done.cells:
            assert same_positions(done.kept(cell), together.kept(cell)), cell
            one, other = done[cell], together[cell]
            assert one.outcome.answer.label == other.outcome.answer.label
            assert one.outcome.nll == pytest.approx(other.outcome.nll, abs=CLOSE)
            assert (one.kept, one.peak, one.eviction_cost) == (other.kept, other.peak, other.eviction_cost)


def test_the_full_cache_is_a_cell() -> None:
    """A cell without a policy gets the full cache's numbers, beside others and alone."""
    full, cells = Cell(None, None), cells_of(("knorm",), BUDGETS)
    for company in ([full], [*cells, full]):
        done = try_out(loaded("llama"), prompt_of(), company)
        assert done[full] is done.done.full
        assert done[full].kept == N
    with pytest.raises(ValueError, match="both or neither"):
        Cell(cells[0].policy, None)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("arch", DISTINCT)
def test_batches(arch: str, schedule: str) -> None:
    """When the rows do not fit in memory together, they answer in several batches."""
    done = trial(arch, schedule)
    with patch.object(engine, "ROWS_LIMIT", 1):
        split = try_out(done.lm, done.prompt, done.cells)
    assert len(split.rounds) == len(done.cells) * len(done.ends)
    for cell in done.cells:
        assert_agree(done, split, cell)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("arch", DISTINCT)
def test_order_of_samples(arch: str, schedule: str) -> None:
    """Samples of different kinds and lengths, forwards and backwards: not one bit differs."""
    cells = cells_of(SOME, BUDGETS[:1], schedule)
    prompts = [prompt_of(n, seed=n, choices=n % 2 == 0) for n in (61, 40, 9)]

    def evaluated(indices: list[int]) -> dict[int, Trial]:
        return {i: try_out(loaded(arch), prompts[i], cells, sample_of(prompts[i])) for i in indices}

    forwards, backwards = evaluated([0, 1, 2]), evaluated([2, 1, 0])
    for index in range(3):
        for cell in cells:
            assert forwards[index][cell].outcome == backwards[index][cell].outcome
            assert same_positions(forwards[index].kept(cell), backwards[index].kept(cell))
