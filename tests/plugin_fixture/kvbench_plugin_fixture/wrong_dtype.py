"""Returns scores in double precision."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvbench import Need, Policy, register
from kvbench.contract.observation import Observation


@register("fixture_dtype", source="tests/plugin_fixture")
@dataclass(frozen=True)
class WrongDtype(Policy):
    """Returns scores in double precision."""

    needs = frozenset({Need.KEYS})

    def score(self, seen: Observation) -> Tensor:
        return seen.keys.double().sum(-1)
