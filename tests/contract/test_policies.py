"""The contract every registered policy keeps; `pytest -k NAME` runs it for one, plugins included."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from kvbench.audit.check import check_policy
from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.pins import Pins
from kvbench.contract.policy import Policy
from kvbench.contract.registry import POLICIES, parameters
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
        pytest.skip(
            "learned for one model: its contract is tried at that geometry, see test_learned_policies"
        )
    return found


@pytest.mark.parametrize("name", POLICIES.names())
def test_learned_policies(name: str) -> None:
    """Policies that fit one model keep the contract of `kvbench check` at that model's geometry."""
    if POLICIES.parse(name).trained_for is None:
        pytest.skip("fits every model: the tests above try it")
    assert [finding for finding in check_policy(name) if not finding.passed] == []


def scored(policy: Policy, seen: Observation) -> Tensor:
    return policy.score(seen.limited_to(policy.needs))


def row(seen: Observation, index: int) -> Observation:
    """Row `index` of a batch as an observation of its own."""
    cut = {name: getattr(seen, name)[index : index + 1] for name in ("keys", "values", "positions")}
    cut |= {name: getattr(seen, name)[index : index + 1] for name in ("_queries", "_hidden")}
    return dataclasses.replace(seen, **cut, _shared={})


@pytest.mark.parametrize("new", [SLOTS, 40, 1])
def test_shape_dtype_finite(policy: Policy, new: int) -> None:
    score = scored(policy, scene(SLOTS, new=new, batch=2))
    assert score.shape == (2, KV_HEADS, SLOTS)
    assert score.dtype == torch.float32
    assert score.isfinite().all()


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_tiny_contexts(policy: Policy, slots: int) -> None:
    seen = scene(slots)
    score = scored(policy, seen)
    assert score.shape == (1, KV_HEADS, slots)
    assert score.isfinite().all()
    order = rank(score, seen.positions, policy.pins, seen.seen)
    assert order.sort(-1).values.tolist() == [[list(range(slots))] * KV_HEADS]


def test_bf16_cache_gives_fp32_scores(policy: Policy) -> None:
    score = scored(policy, scene(SLOTS, dtype=torch.bfloat16))
    assert score.dtype == torch.float32
    assert score.isfinite().all()


def test_equal_and_empty_keys_stay_finite(policy: Policy) -> None:
    seen = scene(SLOTS)
    for fill in (0.0, 1.0):
        flat = torch.full_like(seen.keys, fill)
        assert scored(policy, dataclasses.replace(seen, keys=flat, values=flat, _shared={})).isfinite().all()


def test_pure(policy: Policy) -> None:
    """Scoring changes nothing it was given, and remembers nothing of other layers or samples."""
    seen = scene(SLOTS, new=40)
    tensors = (seen.keys, seen.values, seen.positions, seen._queries, seen._hidden)
    before = [tensor.clone() for tensor in tensors if tensor is not None]
    first = scored(policy, seen).clone()
    scored(policy, scene(SLOTS, seed=9))
    assert torch.equal(scored(policy, seen), first)
    after = [tensor for tensor in tensors if tensor is not None]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_deterministic(policy: Policy) -> None:
    again = POLICIES.parse(policy.name)
    assert again == policy
    assert torch.equal(scored(policy, scene(SLOTS, new=40)), scored(again, scene(SLOTS, new=40)))


def test_rows_of_a_batch_do_not_meet(policy: Policy) -> None:
    both = scene(SLOTS, new=40, batch=2)
    together = scored(policy, both)
    for index in range(2):
        alone = scored(policy, row(both, index))
        torch.testing.assert_close(together[index : index + 1], alone, rtol=1e-5, atol=1e-6)


def test_declared_needs_suffice(policy: Policy) -> None:
    """What was not declared may as well be garbage."""
    seen = scene(SLOTS, new=40)
    garbage: dict[str, Any] = {"_shared": {}}
    if Need.KEYS not in policy.needs:
        garbage["keys"] = torch.full_like(seen.keys, float("nan"))
    if Need.VALUES not in policy.needs:
        garbage["values"] = torch.full_like(seen.values, float("nan"))
    if not any(need.is_attention for need in policy.needs):
        garbage["_queries"] = torch.full_like(seen._queries, float("nan"))
    if Need.HIDDEN_STATES not in policy.needs:
        garbage["_hidden"] = None
    if Need.FUTURE not in policy.needs:
        garbage["_future"] = None
    assert torch.equal(scored(policy, dataclasses.replace(seen, **garbage)), scored(policy, seen))


def test_declared_signals_are_read(policy: Policy) -> None:
    """A guarded signal that is declared but never read would make the policy look costlier than it is."""
    for need in policy.needs - {Need.KEYS, Need.VALUES}:
        with pytest.raises(PluginError, match="not declared"):
            policy.score(scene(SLOTS).limited_to(policy.needs - {need}))


@pytest.mark.parametrize("new", [SLOTS, 40])
def test_kept_sets_are_nested_and_hold_the_pins(policy: Policy, new: int) -> None:
    seen = scene(SLOTS, new=new)
    score = scored(policy, seen)
    order = rank(score, seen.positions, policy.pins, seen.seen)
    assert order[0].tolist() == ranked(score, seen, policy.pins)
    smaller: list[set[int]] = [set()] * KV_HEADS
    for budget in (1, 2, 20, 50, 150, SLOTS, SLOTS + 5):
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
