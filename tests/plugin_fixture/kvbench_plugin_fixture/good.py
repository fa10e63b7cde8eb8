"""A policy that keeps the contract."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvbench import Need, Policy, param, register
from kvbench.contract.observation import Observation


@register("fixture_good", source="tests/plugin_fixture")
@dataclass(frozen=True)
class Good(Policy):
    """Ranks tokens by the size of one channel of their key."""

    needs = frozenset({Need.KEYS})

    channel: int = param(0, "the fixture's author")

    def score(self, seen: Observation) -> Tensor:
        return seen.keys[..., self.channel].float().abs()
