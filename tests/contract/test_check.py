"""`check_policy` finds each way to break the contract, and `validated_score` stops it in a run."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch

from kvbench.audit import check
from kvbench.audit.check import Finding, Layers, check_policy
from kvbench.audit.specimen import KINDS, PARTS, Specimen, few_specimens
from kvbench.contract import registry
from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.policy import Policy, param
from kvbench.contract.registry import POLICIES, Registry, register
from kvbench.engine.score import validated_score
from kvbench.errors import PluginError, UnsupportedModel

SMALL = [
    Specimen(1, 1, 1, torch.float32),
    Specimen(5, 1, 3, torch.bfloat16, "gaps"),
    Specimen(5, 3, 3, torch.float32),
]


def _norms(seen: Observation) -> torch.Tensor:
    return seen.keys.float().norm(dim=-1)


def _made(score: Callable[..., Any], needs: set[Need]) -> type[Policy]:
    body = {"score": lambda self, seen: score(seen), "needs": frozenset(needs), "__module__": __name__}
    return dataclass(frozen=True)(type("Made", (Policy,), body))


@pytest.fixture
def try_(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Finding]]:
    """Check a policy made of a score function on a few small layers: the broken laws by name."""
    policies = Registry("policy", "kvbench.policies", Policy)
    for module in (registry, check):
        monkeypatch.setattr(module, "POLICIES", policies)

    def run(
        score: Callable[..., Any], *needs: Need, layers: Layers = lambda trained: SMALL
    ) -> dict[str, Finding]:
        register("made", source="a test")(_made(score, set(needs)))
        return {finding.law: finding for finding in check_policy("made", layers) if not finding.passed}

    return run


def _writes(seen: Observation) -> torch.Tensor:
    seen.keys.mul_(2)
    return _norms(seen)


def _writes_shared(seen: Observation) -> torch.Tensor:
    return seen.by_group(seen.window_attention(4).clamp_(max=0.1).sum(2)).sum(2)


def _writes_and_draws(seen: Observation) -> torch.Tensor:
    torch.rand(1)
    return _writes(seen)


def _remembers() -> Callable[[Observation], torch.Tensor]:
    calls: list[int] = []

    def score(seen: Observation) -> torch.Tensor:
        calls.append(1)
        return _norms(seen) + len(calls)

    return score


def _peeks(seen: Observation) -> torch.Tensor:
    return seen._queries.float().mean() + _norms(seen)


def _mixes(seen: Observation) -> torch.Tensor:
    return _norms(seen) - _norms(seen).mean()


def _only_small(seen: Observation) -> torch.Tensor:
    return _norms(seen) if seen.slots < 5 else _norms(seen)[..., :-1]


def test_a_sound_policy_breaks_no_law(try_: Callable[..., dict[str, Finding]]) -> None:
    assert try_(_norms, Need.KEYS) == {}


BROKEN: list[tuple[Any, list[Need], str, str]] = [
    (_writes, [Need.KEYS], "is pure", "writes into keys"),
    (_writes_and_draws, [Need.KEYS], "is pure", "random state: use seen.uniform(); it writes into keys"),
    (_writes_shared, [Need.KEYS, Need.WINDOW_QUERIES], "is pure", "shared ('window', 4)"),
    (lambda seen: torch.rand_like(_norms(seen)), [Need.KEYS], "is pure", "random state"),
    (lambda seen: torch.rand_like(_norms(seen)), [Need.KEYS], "is deterministic", "another score"),
    (lambda seen: torch.rand_like(_norms(seen)), [Need.KEYS], "reads only", "not tried"),
    (lambda seen: torch.rand_like(_norms(seen)), [Need.KEYS], "scores each row", "not tried"),
    (_remembers(), [Need.KEYS], "is deterministic", "another score"),
    (_peeks, [Need.KEYS], "reads only", "queries"),
    (_norms, [Need.VALUES], "reads only", "keys"),
    (lambda seen: seen.uniform(), [Need.KEYS], "reads only", "not declared"),
    (_mixes, [Need.KEYS], "scores each row", "alone"),
    (_only_small, [Need.KEYS], "score is finite", "5 slots, 1 KV head, 3 query heads each, bfloat16"),
    (lambda seen: _norms(seen) / 0, [Need.KEYS], "score is finite", "1 slot"),
    (lambda seen: _norms(seen).tolist(), [Need.KEYS], "score is finite", "list"),
]


@pytest.mark.parametrize(("score", "needs", "law", "detail"), BROKEN)
def test_a_broken_law_is_found_with_its_smallest_layer(
    try_: Callable[..., dict[str, Finding]], score: Any, needs: list[Need], law: str, detail: str
) -> None:
    broken = try_(score, *needs)
    found = [finding for name, finding in broken.items() if name.startswith(law)]
    assert len(found) == 1
    assert detail in found[0].detail


@pytest.mark.parametrize(("score", "needs", "law", "detail"), BROKEN)
def test_the_few_layers_that_every_policy_is_tried_on_find_it_too(
    try_: Callable[..., dict[str, Finding]], score: Any, needs: list[Need], law: str, detail: str
) -> None:
    assert any(name.startswith(law) for name in try_(score, *needs, layers=few_specimens))


def test_the_few_layers_are_of_every_kind() -> None:
    few = list(few_specimens())
    assert {layer.kind for layer in few} == set(KINDS)
    assert {layer.dtype for layer in few} == {torch.float32, torch.bfloat16}
    assert max(layer.slots for layer in few) == 300
    assert len(few) < 15


def test_a_norm_of_zero_is_tried(try_: Callable[..., dict[str, Finding]]) -> None:
    (found,) = try_(lambda seen: 1 / _norms(seen), Need.KEYS, layers=few_specimens).values()
    assert "all keys and values 0" in found.detail


def test_weights_drawn_when_a_policy_is_made_are_found(try_: Callable[..., dict[str, Finding]]) -> None:
    """Two processes would make two of it, and their rows would differ."""

    @dataclass(frozen=True)
    class Drawn(Policy):
        needs = frozenset({Need.KEYS})

        def __post_init__(self) -> None:
            object.__setattr__(self, "size", float(torch.rand(())))

        def score(self, seen: Observation) -> torch.Tensor:
            return self.size * _norms(seen)  # type: ignore[attr-defined, no-any-return]

    register("drawn", source="a test")(Drawn)
    broken = [finding for finding in check_policy("drawn", lambda trained: SMALL) if not finding.passed]
    assert any(finding.law.startswith("is deterministic") for finding in broken)


@dataclass(frozen=True)
class _Budgeted(Policy):
    max_budget: int = param(3, "a test")

    def score(self, seen: Observation) -> torch.Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class _Looks(Policy):
    def score(self, seen: Any) -> torch.Tensor:
        return seen.budget


class _Bare(Policy):
    def score(self, seen: Observation) -> torch.Tensor:
        raise NotImplementedError


def test_budgets_in_parameters_or_code_are_found() -> None:
    assert "max_budget" in check._budget(_Budgeted)
    assert "budget" in check._budget(_Looks)
    assert check._budget(_Bare) == ""


def test_a_class_without_its_decorators_is_found() -> None:
    assert "@dataclass(frozen=True)" in check._dataclass(_Bare)
    assert "@register" in check._declaration(_Looks())


def test_a_policy_may_decline_a_model_but_not_all(try_: Callable[..., dict[str, Finding]]) -> None:
    def declines(seen: Observation) -> torch.Tensor:
        raise UnsupportedModel("only for layers of another size")

    def declines_one(seen: Observation) -> torch.Tensor:
        return declines(seen) if seen.kv_heads == 3 else _norms(seen)

    assert try_(declines_one, Need.KEYS) == {}
    assert any("declines every layer" in finding.detail for finding in try_(declines, Need.KEYS).values())


@pytest.mark.parametrize("part", PARTS)
def test_one_part_of_a_specimen_changes_alone(part: str) -> None:
    """Without this, an undeclared look at a part could not be told from a declared one."""
    specimen = Specimen(5, 3, 3, torch.float32, "gaps")
    before, after = (_parts(specimen.observe(other=other)) for other in ("", part))
    assert [name for name in before if not torch.equal(before[name], after[name])] == [part]


def _parts(seen: Observation) -> dict[str, torch.Tensor]:
    assert seen._hidden is not None
    assert seen._future is not None
    assert seen._probe is not None
    assert seen._second is not None
    assert seen._parts is not None
    assert seen._parts.rotary is not None
    assert seen._parts.output is not None
    tables = seen._parts.rotary.read(0, 4, seen.keys.device)
    return {
        "parts": torch.cat([tables.cos.flatten(), seen._parts.output.weight.flatten()]),
        "question": torch.tensor(seen._question),
        "second": seen._second,
        "keys": seen.keys,
        "values": seen.values,
        "queries": seen._queries,
        "hidden": seen._hidden,
        "future": seen._future(),
        "probe": torch.cat([seen._probe.queries, seen._probe.keys], 1),
        "draw": torch.tensor(seen._draw),
        "positions": seen.positions,
    }


@pytest.mark.parametrize("specimen", SMALL, ids=str)
def test_a_specimen_is_a_possible_layer(specimen: Specimen) -> None:
    seen = specimen.observe()
    assert seen.keys.shape[:3] == seen.positions.shape
    assert bool((seen.positions.diff(dim=-1) > 0).all())
    assert int(seen.positions.max()) == seen.seen - 1


@pytest.mark.parametrize(
    ("score", "words"),
    [
        (lambda seen: 1 / 0, "ZeroDivisionError"),
        (lambda seen: None, "NoneType"),
        (lambda seen: _norms(seen)[0], "shape"),
        (lambda seen: _norms(seen).bfloat16(), "dtype torch.bfloat16"),
        (lambda seen: _norms(seen).to("meta"), "is on meta"),
        (lambda seen: _norms(seen).index_fill(2, torch.tensor([1]), float("nan")), "NaN or inf"),
        (lambda seen: _norms(seen).index_fill(2, torch.tensor([1]), float("-inf")), "NaN or inf"),
        (lambda seen: seen.attention_sums, "not declared"),
    ],
)
def test_a_bad_score_stops_with_the_policys_name(score: Any, words: str) -> None:
    policy = _made(score, {Need.KEYS})()
    with pytest.raises(PluginError, match="policy 'Made'") as caught:
        validated_score(policy, SMALL[2].observe())
    assert words in str(caught.value)
    assert (caught.value.__cause__ is not None) == (words in ("ZeroDivisionError", "not declared"))


def test_large_finite_scores_and_refusals_pass() -> None:
    seen = SMALL[2].observe()
    large = _made(lambda seen: torch.full_like(_norms(seen), 3e38), {Need.KEYS})()
    assert validated_score(large, seen).max() == 3e38

    def refuse(seen: Observation) -> torch.Tensor:
        raise UnsupportedModel("needs another model")

    with pytest.raises(UnsupportedModel, match="another model"):
        validated_score(_made(refuse, set())(), seen)


def test_the_policy_in_contributing_passes() -> None:
    """As it is written there; no other test sees it registered."""
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    code = next(part for part in re.findall(r"```python\n(.*?)```", text, re.S) if "@register(" in part)
    assert len(code.splitlines()) < 30
    POLICIES.names()
    module = ModuleType("value_norm")
    with (
        patch.object(POLICIES, "_places", dict(POLICIES._found())),
        patch.object(POLICIES, "_classes", dict(POLICIES._classes)),
        patch.dict(sys.modules, {"value_norm": module}),
    ):
        exec(compile(code, "CONTRIBUTING.md", "exec"), vars(module))
        findings = check_policy("value_norm")
    assert len(findings) == 8
    assert [finding for finding in findings if not finding.passed] == []


def test_what_was_never_scored_is_not_called_unsteady(try_: Callable[..., dict[str, Finding]]) -> None:
    broken = try_(lambda seen: 1 / 0, Need.KEYS)
    assert "score is finite float32 (batch, kv_head, slot) on the keys' device" in broken
    untried = [one.detail for law, one in broken.items() if not law.startswith("score is finite")]
    assert set(untried) == {"not tried: no layer got a valid score"}
