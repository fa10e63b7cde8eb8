"""One curve point of a study: a policy, how much it keeps, and under which rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .pins import Pins

FULL = "full"  # the name of the cell without eviction


@dataclass(frozen=True)
class Cell:
    """One curve point: what is evicted, how much stays, and under which rules.

    policy: name, or "full" for no eviction. params: the policy's parameters, defaults included.
    budget: KV pairs per KV head and layer, None for full. pins: resolved numbers.
    """

    policy: str
    params: tuple[tuple[str, Any], ...]
    budget: int | None
    pins: Pins
    schedule: str
    chunk: int | None

    def as_dict(self) -> dict[str, Any]:
        """The cell's part of a row."""
        return {
            "policy": self.policy,
            "params": dict(self.params),
            "budget": self.budget,
            "pins": [self.pins.first, self.pins.last],
            "schedule": self.schedule,
            "chunk": self.chunk,
        }
