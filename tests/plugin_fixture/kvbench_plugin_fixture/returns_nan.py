"""Divides zero by zero in the first slot."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvbench import Need, Policy, register
from kvbench.contract.observation import Observation


@register("fixture_nan", source="tests/plugin_fixture")
@dataclass(frozen=True)
class ReturnsNaN(Policy):
    """Divides zero by zero in the first slot."""

    needs = frozenset({Need.KEYS})

    def score(self, seen: Observation) -> Tensor:
        first = seen.keys[..., 0].float() * 0
        first[..., 1:] += 1
        return first / first
