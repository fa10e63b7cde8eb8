"""How long work takes, on the device that does it, without waiting for it.

In: stretches of work on one device. Out: seconds, to be read when the device is done: by the clock on a CPU,
by the device's own events on CUDA. Shared work is charged to everyone who uses it, at what it cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..contract.shared_work import SharedWork


class Lap:
    """A stretch of work on one device, from its creation to `end`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = self._end = _mark(device)

    def end(self) -> None:
        self._end = _mark(self._device)

    @property
    def seconds(self) -> float:
        """Raises RuntimeError on CUDA as long as the device is not done: synchronise first."""
        if isinstance(self._begin, float):
            return float(self._end - self._begin)
        return float(self._begin.elapsed_time(self._end)) / 1000


def _mark(device: torch.device) -> Any:
    """Now: of the clock, or of the device's queue, as an event that it will reach."""
    if device.type != "cuda":
        return float(time.perf_counter())
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


class SharedCosts:
    """The shared work of one observation: who computes it pays, and who uses it later pays as much."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._laps: dict[Any, Lap] = {}
        self._borrowed: dict[Any, Lap] = {}
        self._fresh: set[Any] = set()

    def compute(self, shared: SharedWork, name: Any, work: Callable[[], Tensor]) -> Tensor:
        """`compute_once` with a clock; see `Observation`."""
        if name not in shared:
            lap = Lap(self._device)
            with torch.inference_mode(False), torch.no_grad():  # torch counts who writes into the result
                shared[name] = work()
            lap.end()
            self._laps[name] = lap
            self._fresh.add(name)
        elif name not in self._fresh:
            self._borrowed[name] = self._laps[name]
        found: Tensor = shared[name]
        return found

    def take_borrowed(self) -> list[Lap]:
        """What was used since the last call, and had been computed before it."""
        laps = list(self._borrowed.values())
        self._borrowed, self._fresh = {}, set()
        return laps
