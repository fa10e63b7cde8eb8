"""Rows that want one policy and hold equally many slots are scored in one call, and nobody can tell."""

from __future__ import annotations

from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from kvbench.contract.cell import Cell, Schedule
from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.pins import Pins
from kvbench.contract.policy import Policy
from kvbench.engine import ranking
from kvbench.engine.measure import Failure
from tests.laws.lab import CHUNK, SPECS, N, cell_of, loaded, prompt_of, ranker_of, same_positions, try_out
from tests.tiny import KV_HEADS, LAYERS

PINS = (Pins(), Pins(4, 0), Pins(0, 6))  # one policy under each: other kept sets, equally many slots

APART = ("random", "knorm", "keydiff", "tova", "oracle")  # these pins give them three kept sets


def cells(spec: str) -> list[Cell]:
    return [cell_of(ranker_of(spec, pins), 20, "chunked") for pins in PINS]


@pytest.mark.parametrize("arch", ["llama", "sliding"])
@pytest.mark.parametrize("spec", SPECS)
def test_together_as_alone(spec: str, arch: str) -> None:
    """Rows of three pins, scored in one batch after the first chunk, keep what each of them keeps alone."""
    sizes = []
    scored = ranking.score_and_flag

    def spy(policy: Policy, seen: Observation) -> tuple[Tensor, Tensor]:
        score, finite = scored(policy, seen)
        sizes.append(len(score))
        assert finite.shape == (len(score),)
        return score, finite

    with patch.object(ranking, "score_and_flag", spy):
        together = try_out(loaded(arch), prompt_of(), cells(spec))
    layers = len(loaded(arch).geometry.full_layers)
    rows = [1, *(len(set(places.values())) for places in together.places[:-1])]  # before each eviction
    assert sizes == [count for count in rows for _ in range(layers)]
    if spec in APART:
        assert rows == [1, 3, 3]
    for cell in together.cells:
        alone = try_out(loaded(arch), prompt_of(), [cell])
        for one, other in zip(alone.history(cell), together.history(cell), strict=True):
            assert same_positions(one, other)
        assert together[cell].outcome.nll == pytest.approx(alone[cell].outcome.nll, abs=1e-5)


def test_rows_that_are_no_neighbours_and_few_at_once() -> None:
    """Whatever shares the bucket, and however many rows a call may take: the same kept sets."""
    pairs = zip(cells("knorm"), cells("tova"), strict=True)
    mixed = [cell for pair in pairs for cell in pair]
    together = try_out(loaded("llama"), prompt_of(), mixed)
    rows = [together.row(cell) for cell in mixed[::2]]
    assert max(rows) - min(rows) >= len(rows)  # those of the other policy lie between them
    with patch.object(ranking, "SCORE_LIMIT", 1):
        single = try_out(loaded("llama"), prompt_of(), mixed)
    for cell in mixed:
        alone = try_out(loaded("llama"), prompt_of(), [cell])
        assert same_positions(together.kept(cell), alone.kept(cell))
        assert same_positions(together.kept(cell), single.kept(cell))


@dataclass(frozen=True)
class FearsTheStart(Policy):
    """K-Norm that breaks where the first token of the context is still there after the first chunk."""

    name = "fearful"
    needs = frozenset({Need.KEYS})
    how: str = "raise"

    def score(self, seen: Observation) -> Tensor:
        score = -seen.keys.float().norm(dim=-1)
        there = (seen.positions == 0).any(-1).any(-1) & (seen.seen > CHUNK)
        if self.how == "raise" and bool(there.any()):
            raise ValueError("the first token")
        return score.masked_fill(there[:, None, None], torch.nan)


@pytest.mark.parametrize("how", ["raise", "nan"])
def test_a_row_that_fails_fails_alone(how: str) -> None:
    """In a batch with rows that do not: the row with sinks fails, the one with the last tokens goes on."""
    policy, chunks = FearsTheStart(how), Schedule("chunked", CHUNK)
    bad, good = Cell(policy, 20, Pins(4, 0), chunks), Cell(policy, 20, Pins(0, 20), chunks)
    together = try_out(loaded("llama"), prompt_of(), [bad, good])
    failure = together.done.cells[bad]
    assert isinstance(failure, Failure)
    assert ("ValueError: the first token" if how == "raise" else "NaN") in failure.reason
    assert "layer 0" in failure.reason
    assert [layer.tolist() for layer in together.kept(good)] == [[list(range(N - 20, N))] * KV_HEADS] * LAYERS
    alone = try_out(loaded("llama"), prompt_of(), [good])
    assert together[good].outcome.nll == pytest.approx(alone[good].outcome.nll, abs=1e-5)
