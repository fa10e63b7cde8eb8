"""The policies that the laws are tried on show the engine all that any policy shows it."""

from __future__ import annotations

from itertools import chain, combinations
from typing import Any

import pytest

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.pins import Pins
from kvbench.contract.policy import Policy
from kvbench.contract.registry import POLICIES, Registry
from tests.laws.kinds import asks, pairs, representatives

READ = (Need.KEYS, Need.VALUES, Need.WINDOW_QUERIES, Need.RANDOM)


class Plugged(Policy):
    def score(self, seen: Observation) -> Any:
        raise NotImplementedError


@pytest.fixture
def crowd() -> Registry:
    """The built-in policies among a plugin's: every set of four needs, with and without pins."""
    everyone = Registry("policy", "kvbench.policies", Policy)
    sets = chain.from_iterable(combinations(READ, size) for size in range(len(READ) + 1))
    for index, needs in enumerate(sets):
        for pins in (Pins(), Pins(2), Pins(last=3), Pins(2, 3)):
            body = {"needs": frozenset(needs), "pins": pins, "source": "a test", "name": ""}
            cls = type(f"P{index}_{pins.first}_{pins.last}", (Plugged,), body)
            cls.name = cls.__name__  # type: ignore[attr-defined]
            everyone.add(cls.__name__, cls)
    return everyone


def fitting(policies: Registry) -> list[Policy]:
    found = [policies.parse(n) for n in policies.names() if policies.get(n).trainer is None]
    return [policy for policy in found if not asks(policy)]


@pytest.mark.parametrize("whole", [False, True])
def test_every_pair_of_features_is_tried(whole: bool, crowd: Registry) -> None:
    policies = crowd if whole else POLICIES
    chosen = representatives(policies)
    tried = set().union(*(pairs(policies.parse(name)) for name in chosen))
    assert tried == set().union(*map(pairs, fitting(policies)))
    assert len(chosen) < 20
    assert not any(policies.get(name).trainer for name in chosen)


def test_plugins_join_the_built_in_ones(crowd: Registry) -> None:
    """What the laws were tried on without a plugin, they are tried on with it, too."""
    assert set(representatives(POLICIES)) <= set(representatives(crowd))
    assert len(crowd.names()) > 70


def test_the_choice_does_not_depend_on_the_order_of_registration(crowd: Registry) -> None:
    places = dict(crowd._found())
    crowd._places = dict(reversed(places.items()))
    backwards = set(representatives(crowd))
    crowd._places = places
    assert backwards == set(representatives(crowd))
