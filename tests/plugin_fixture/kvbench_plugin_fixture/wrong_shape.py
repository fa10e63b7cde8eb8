"""Forgets that a score belongs to a KV head."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvbench import Need, Policy, register
from kvbench.contract.observation import Observation


@register("fixture_shape", source="tests/plugin_fixture")
@dataclass(frozen=True)
class WrongShape(Policy):
    """Forgets that a score belongs to a KV head."""

    needs = frozenset({Need.KEYS})

    def score(self, seen: Observation) -> Tensor:
        return seen.keys.float().sum((1, 3))
