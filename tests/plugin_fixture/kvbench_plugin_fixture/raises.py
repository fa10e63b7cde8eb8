"""Fails inside score."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvbench import Need, Policy, register
from kvbench.contract.observation import Observation


@register("fixture_raises", source="tests/plugin_fixture")
@dataclass(frozen=True)
class Raises(Policy):
    """Fails inside score."""

    needs = frozenset({Need.KEYS})

    def score(self, seen: Observation) -> Tensor:
        raise RuntimeError("the fixture fails on purpose")
