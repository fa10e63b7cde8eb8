"""Which policies the laws are tried on: few, and together they show the engine all that any policy shows it.

The engine never asks who a policy is. It looks at what the policy reads (`needs`) and at what it pins, so a
hundred policies are a few lines of the engine with other numbers. The laws take policies until every two of
these features that some registered policy has together occur together in one that was taken. The contract,
which is about the numbers, takes all of them (tests/contract).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

from kvbench.contract.need import Need
from kvbench.contract.policy import Policy
from kvbench.contract.registry import POLICIES, Registry

BUILT_IN = "kvbench.policies."

Pair = tuple[str, str]


def features(policy: Policy) -> set[str]:
    """What the engine can tell of a policy: what it reads and what it pins, or that it does not."""
    pins = policy.pins
    pinned = {"first tokens"} if pins.first else set()
    pinned |= {"last tokens"} if pins.last else set()
    read = {need.value for need in policy.needs}
    return (read or {"nothing read"}) | (pinned or {"nothing pinned"})


def asks(policy: Policy) -> bool:
    return Need.QUESTION in policy.needs


def pairs(policy: Policy) -> set[Pair]:
    return set(combinations(sorted(features(policy)), 2))


def representatives(policies: Registry = POLICIES) -> list[str]:
    """Names of policies that cover every pair of features: built-in ones as far as they reach, then plugins.

    Learned ones are left out (weights fit one model, and none of the tests'), those that rank by a question
    (these prompts withhold it, see test_question.py), and broken ones (the contract tests report those).
    """
    broken = policies.failures()
    whole = [name for name in policies.names() if name not in broken]
    fixed = [name for name in whole if policies.get(name).trainer is None]
    shown = {name: pairs(policies.parse(name)) for name in fixed if not asks(policies.parse(name))}
    built_in = [name for name in shown if policies.target(name).startswith(BUILT_IN)]
    chosen = cover({name: shown[name] for name in built_in}, set())
    chosen += cover(shown, set().union(*(shown[name] for name in chosen)))
    return [name for name in policies.names() if name in chosen]


def cover(shown: dict[str, set[Pair]], covered: Iterable[Pair]) -> list[str]:
    """Names that add every pair that is not covered yet: the most at a time, and of equals the first name."""
    missing, chosen = set().union(*shown.values()) - set(covered), []
    while missing:
        best = min(shown, key=lambda name: (-len(shown[name] & missing), name))
        chosen.append(best)
        missing -= shown[best]
    return chosen
