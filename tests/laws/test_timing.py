"""Times of rows: scoring is no part of the prefill, and shared work is paid by everyone who uses it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.contract import observation
from kvbench.contract.cell import Cell, Schedule
from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.pins import Pins
from kvbench.contract.policy import Policy
from kvbench.engine import ranking, stopwatch
from kvbench.engine.stopwatch import Lap
from tests.laws.lab import CHUNK, N, cells_of, loaded, prompt_of, try_out
from tests.tiny import LAYERS

HOUR = 3600.0


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock that can be put forward: the hours by which it is late."""
    hours, clock = [0.0], time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + HOUR * hours[0])
    return iter([hours])


def slow(late: list[float], work: Callable[..., Any]) -> Callable[..., Any]:
    """Work that takes an hour by that clock."""

    def slowly(*args: Any) -> Any:
        late[0] += 1
        return work(*args)

    return slowly


def test_shared_work_is_charged_to_everyone(late: Iterator[list[float]], monkeypatch: Any) -> None:
    """Two policies look at one window: it is computed once per layer, and each is told its cost."""
    hours = next(late)
    monkeypatch.setattr(observation, "attention_rows", slow(hours, observation.attention_rows))
    specs = ("snapkv:window=8,kernel=3", "snapkv:window=8,kernel=3,pooling=avg", "knorm", "tova")
    for order in (specs, specs[::-1]):
        hours[0] = 0
        done = try_out(loaded("llama"), prompt_of(), cells_of(order, (8, 33)))
        assert hours[0] == 2 * LAYERS  # the windows of 8 and of 1
        for cell in done.cells:
            wanted = 0 if cell.name == "knorm" else LAYERS
            assert done[cell].times["score_s"] / HOUR == pytest.approx(wanted, abs=0.1), cell.spec
            assert done[cell].times["prefill_s"] / HOUR == pytest.approx(0, abs=0.1)


def test_sorting_is_part_of_scoring(late: Iterator[list[float]], monkeypatch: Any) -> None:
    hours = next(late)
    monkeypatch.setattr(ranking, "rank", slow(hours, ranking.rank))
    done = try_out(loaded("llama"), prompt_of(), cells_of(("knorm", "tova"), (8,)))
    for cell in done.cells:
        assert done[cell].times["score_s"] / HOUR == pytest.approx(LAYERS, abs=0.1)
        assert done[cell].times["prefill_s"] / HOUR == pytest.approx(0, abs=0.1)


@dataclass(frozen=True)
class Slow(Policy):
    """Takes an hour a call."""

    name = "slow"
    needs = frozenset({Need.RANDOM})

    def score(self, seen: Observation) -> Tensor:
        LATE[0] += 1
        return seen.uniform()


LATE = [0.0]


def test_a_cell_pays_for_its_own_rows(late: Iterator[list[float]], monkeypatch: Any) -> None:
    """Chunks add up, other budgets do not count, and rows that are scored in one batch share its time."""
    hours = next(late)
    monkeypatch.setitem(globals(), "LATE", hours)
    chunks = -(-N // CHUNK)
    schedule = Schedule("chunked", CHUNK)
    cells = [Cell(Slow(), budget, Pins(), schedule) for budget in (8, 33)]
    done = try_out(loaded("llama"), prompt_of(), cells)
    for cell in cells:
        assert done[cell].times["score_s"] / HOUR == pytest.approx(LAYERS * chunks, abs=0.1)
    several = [Cell(Slow(), 20, pins, schedule) for pins in (Pins(), Pins(4, 0))]
    done = try_out(loaded("llama"), prompt_of(), several)
    for cell in several:
        assert done[cell].times["score_s"] / HOUR == pytest.approx(LAYERS * (1 + (chunks - 1) / 2), abs=0.1)


class FakeEvent:
    """A CUDA event whose device is at a certain second."""

    queue = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at: float | None = None

    def record(self, stream: str) -> None:
        assert stream == "stream of cuda:1"
        self.at = FakeEvent.queue

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.at is not None
        assert other.at is not None
        return 1000 * (other.at - self.at)


def test_a_lap_on_cuda_is_the_devices_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By events in the layer's own queue; nobody waits when a lap begins or ends."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: pytest.fail("the host waited"))
    lap = Lap(torch.device("cuda", 1))
    FakeEvent.queue += 2.5
    lap.end()
    FakeEvent.queue += 10
    assert lap.seconds == 2.5
    assert isinstance(stopwatch._mark(torch.device("cpu")), float)
