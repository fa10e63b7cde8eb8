"""The contract every registered policy keeps; `pytest -k NAME` runs it for one, plugins included.

The laws are those of `kvbench check`, tried on fewer layers; that it finds what breaks them is proved in
test_check.py. Here is only what it cannot know: the ranking that pins and ties make of a score, a signal
that is declared and never read, and what a reader of the policy is told.
"""

from __future__ import annotations

import dataclasses

import pytest

from kvbench.audit.check import check_policy
from kvbench.audit.specimen import few_specimens
from kvbench.contract.need import Need
from kvbench.contract.pins import Pins
from kvbench.contract.policy import Policy
from kvbench.contract.registry import POLICIES, parameters
from kvbench.contract.wrapper import Wrapper
from kvbench.engine.order import keep, rank
from kvbench.errors import BadInput, PluginError
from tests.scene import KV_HEADS, ranked, scene

SLOTS = 300  # enough for the partitions of lagkv's defaults

NATIVE = {
    "random": Pins(),
    "streaming_llm": Pins(first=4),
    "knorm": Pins(),
    "keydiff": Pins(),
    "lagkv": Pins(first=4),
    "tova": Pins(),
    "snapkv": Pins(last=32),
    "oracle": Pins(),
}


@pytest.fixture(params=POLICIES.names())
def policy(request: pytest.FixtureRequest) -> Policy:
    found: Policy = POLICIES.parse(request.param)
    if found.trained_for is not None:
        pytest.skip("learned for one model, whose layers these are not")
    return found


@pytest.mark.parametrize("name", POLICIES.names())
def test_check_finds_nothing(name: str) -> None:
    assert [finding for finding in check_policy(name, few_specimens) if not finding.passed] == []


def test_declared_signals_are_read(policy: Policy) -> None:
    """A guarded signal that is declared but never read would make the policy look costlier than it is."""
    for need in policy.needs - {Need.KEYS, Need.VALUES}:
        with pytest.raises(PluginError, match="not declared"):
            policy.score(scene(SLOTS).limited_to(policy.needs - {need}))


def test_kept_sets_are_nested_and_hold_the_pins(policy: Policy) -> None:
    seen = scene(SLOTS, new=40)
    score = policy.score(seen.limited_to(policy.needs))
    order = rank(score, seen.positions, policy.pins, seen.seen)
    assert order[0].tolist() == ranked(score, seen, policy.pins)
    smaller: list[set[int]] = [set()] * KV_HEADS
    for budget in (1, 50, SLOTS + 5):
        kept = keep(order, budget)[0]
        assert kept.shape == (KV_HEADS, min(budget, SLOTS))
        for head in range(KV_HEADS):
            slots = kept[head].tolist()
            assert slots == sorted(set(slots))
            assert smaller[head] <= set(slots)
            smaller[head] = set(slots)
            positions = seen.positions[0, head]
            pinned = (positions < policy.pins.first) | (positions >= seen.seen - policy.pins.last)
            if budget >= policy.pins.total:
                assert set(pinned.nonzero().flatten().tolist()) <= set(slots)


def test_described(policy: Policy) -> None:
    cls = type(policy)
    assert all((policy.source, policy.ranking, policy.repeated))
    assert all(word in (cls.__doc__ or "") for word in ("Shapes", "Source"))
    assert cls.bracket in (None, "lower", "upper")
    assert all(parameter.source for parameter in parameters(cls)), "write param(default, source)"
    assert cls.exactness in ("official code", "paper", "abstract", "notes", "ours")
    if POLICIES.target(policy.name).startswith("kvbench.policies."):
        assert any("exactness" in vars(base) for base in cls.__mro__ if base not in (Policy, Wrapper))
        inspired = "inspired by" in (cls.__doc__ or "")
        assert cls.exactness != "abstract" or inspired or policy.name == "judgeq"  # its source says so
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.anything = 1  # type: ignore[attr-defined]


def test_colors_are_distinct() -> None:
    colors = [POLICIES.get(name).color for name in POLICIES.names()]
    given = [color for color in colors if color]
    assert len(given) == len(set(given))


@pytest.mark.parametrize("name", NATIVE)
def test_native_pins(name: str) -> None:
    assert POLICIES.parse(name).pins == NATIVE[name]


@pytest.mark.parametrize(
    ("spec", "pins"),
    [
        ("streaming_llm:sinks=0", Pins()),
        ("streaming_llm:sinks=16", Pins(first=16)),
        ("lagkv:sinks=16,lag=64", Pins(first=16)),
        ("snapkv:window=64,kernel=5,pooling=avg", Pins(last=64)),
    ],
)
def test_pins_follow_parameters(spec: str, pins: Pins) -> None:
    assert POLICIES.parse(spec).pins == pins


@pytest.mark.parametrize(
    "spec",
    [
        "streaming_llm:sinks=-1",
        "lagkv:lag=0",
        "lagkv:sinks=-1",
        "snapkv:window=0",
        "snapkv:kernel=4",
        "snapkv:kernel=0",
        "snapkv:pooling=median",
        "snapkv:group=sum",
    ],
)
def test_bad_parameters_name_the_policy(spec: str) -> None:
    with pytest.raises(BadInput, match=spec.split(":")[0]):
        POLICIES.parse(spec)
