"""The contract of a policy as laws that anyone can run: `kvbench check NAME`.

Every law is tried on random layers from small to large, and a broken law comes with the smallest
layer that breaks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from ..contract.layer_parts import FROM_PARTS
from ..contract.model_description import ModelDescription
from ..contract.need import Need
from ..contract.observation import Observation
from ..contract.pins import Pins
from ..contract.policy import Policy, TrainedFor
from ..contract.registry import POLICIES, parameters
from ..contract.shared_work import SharedWork
from ..engine.bind import bind_policy
from ..engine.score import score_seeing, validated_score
from ..errors import KvbenchError, PluginError
from .finding import Finding
from .specimen import Specimen, specimens

Layers = Callable[[TrainedFor | None], Iterable[Specimen]]
Trial = Callable[[Policy, Specimen, Tensor], str]  # what breaks, in words; "" when nothing does

FEEDS: dict[str, frozenset[Need]] = {  # part of a layer -> the needs that let a policy look at it
    "keys": frozenset({Need.KEYS, Need.WINDOW_QUERIES, Need.ATTENTION_SUMS, Need.PROBE, Need.UNROTATED_KEYS}),
    "values": frozenset({Need.VALUES, Need.OUTPUT_WEIGHTS}),
    "queries": frozenset({Need.WINDOW_QUERIES, Need.ATTENTION_SUMS, Need.QUERY_MOMENTS}),
    "hidden": frozenset({Need.HIDDEN_STATES}),
    "future": frozenset({Need.FUTURE}),
    "probe": frozenset({Need.PROBE}),
    "second": frozenset({Need.SECOND_PASS}),
    "draw": frozenset({Need.RANDOM}),
    "parts": FROM_PARTS,
    "question": frozenset({Need.QUESTION}),
}
PART_NAMES = {
    "hidden": "hidden states",
    "future": "future attention",
    "probe": "extra tokens",
    "second": "a second pass",
    "draw": "the random key",
    "parts": "the model's rotation or weights",
    "question": "the length of the question",
}
OF_QUERIES = frozenset({Need.WINDOW_QUERIES, Need.ATTENTION_SUMS, Need.QUERY_MOMENTS})
AFTERWARDS = {Need.PROBE: "extra tokens", Need.SECOND_PASS: "a second pass"}
GONE = OF_QUERIES | {Need.HIDDEN_STATES, Need.FUTURE}  # when those are read


@dataclass
class Scores:
    """Scores of all layers, and the first layer of each kind of refusal.

    bound: the policy, bound to the layer's model. unsteady: why scores cannot be compared.
    """

    scores: dict[Specimen, Tensor] = field(default_factory=dict)
    bound: dict[Specimen, Policy] = field(default_factory=dict)
    invalid: str = ""
    undeclared: str = ""
    unsteady: str = ""
    declined: list[str] = field(default_factory=list)


def check_policy(spec: str, layers: Layers = specimens) -> list[Finding]:
    """Try the contract on a policy given by name or spec. Runs on the CPU.

    layers: what it is tried on, smallest first, given the geometry that a learned policy fits.

    Raises: UnknownName and BadInput for the spec, PluginError when the policy cannot be imported.
    """
    policy: Policy = POLICIES.parse(spec)
    written = [
        _finding("declares name, source, needs and pins", _declaration(policy)),
        _finding("is a frozen dataclass with documented parameters", _dataclass(type(policy))),
        _finding("knows no budget", _budget(type(policy))),
    ]
    if not written[0].passed:  # without its declarations nothing else can be tried
        return written
    with torch.inference_mode():  # torch counts no writes there: what is written is found by its values
        scored = _score_all(policy, layers(policy.trained_for))
        steady = _tried("is deterministic, whatever was scored before", scored, _changed)
        if scored.scores and not steady.passed:  # what compares scores would blame whatever it changed
            scored.unsteady = "not tried: the same layer gets another score each time"
        return [
            *written,
            _valid(scored),
            _tried("reads only the signals in `needs`", scored, _undeclared, scored.undeclared),
            _tried("is pure: leaves its inputs, shared work and torch's random state", scored, _impure),
            steady,
            _tried("scores each row of a batch by itself", scored, _mixed),
        ]


def _finding(law: str, fault: str) -> Finding:
    return Finding(law, not fault, fault)


def _score_all(policy: Policy, layers: Iterable[Specimen]) -> Scores:
    found = Scores()
    bound: dict[ModelDescription, Policy] = {}
    for specimen in layers:
        if specimen.new < specimen.slots and not policy.chunked:
            continue
        try:
            if specimen.model not in bound:
                bound[specimen.model] = bind_policy(specimen.model, policy)
            found.bound[specimen] = bound[specimen.model]
            found.scores[specimen] = validated_score(found.bound[specimen], specimen.observe())
        except PluginError as error:
            if _scores_when_all_is_shown(found.bound.get(specimen), specimen):
                found.undeclared = found.undeclared or f"{specimen}: {error}"
            else:
                found.invalid = found.invalid or f"{specimen}: {error}"
        except KvbenchError as error:
            found.declined.append(f"{specimen}: {error}")
    return found


def _scores_when_all_is_shown(bound: Policy | None, specimen: Specimen) -> bool:
    if bound is None:
        return False
    try:
        score_seeing(bound, specimen.observe(), frozenset(Need))
    except KvbenchError:
        return False
    return True


def _valid(scored: Scores) -> Finding:
    law = "score is finite float32 (batch, kv_head, slot) on the keys' device"
    if scored.invalid:
        return Finding(law, False, scored.invalid)
    if scored.declined and not scored.scores:
        return Finding(law, False, f"declines every layer, the first being {scored.declined[0]}")
    count = len(scored.declined)
    return Finding(law, True, f"declined {count} layers, as {scored.declined[0]}" if count else "")


def _tried(law: str, scored: Scores, trial: Trial, known: str = "") -> Finding:
    """Try a law on every layer, the largest first, and report the smallest that breaks it."""
    fault = known or (scored.unsteady if trial in (_undeclared, _mixed) else "")
    if not scored.scores:
        fault = fault or "not tried: no layer got a valid score"
    for specimen, score in [] if fault else reversed(scored.scores.items()):
        try:
            broken = trial(scored.bound[specimen], specimen, score)
        except KvbenchError as error:
            broken = f"scored once, and then: {error}"
        fault = f"{specimen}: {broken}" if broken else fault
    return _finding(law, fault)


def _declaration(policy: Policy) -> str:
    if not policy.name or not policy.source:
        return "name or source is empty: decorate the class with @register(name, source=...)"
    needs: object = policy.needs
    if not isinstance(needs, Set) or not all(isinstance(need, Need) for need in needs):
        return f"needs is {policy.needs!r}; it must be a set of kvbench.Need"
    for late, what in AFTERWARDS.items():
        if late in needs and needs & (GONE | AFTERWARDS.keys() - {late}):
            gone = ", ".join(sorted(need.value for need in needs & (GONE | AFTERWARDS.keys() - {late})))
            return f"needs {gone} beside {what}; when that is read, it is gone"
    if Need.SECOND_PASS in needs and type(policy).second_pass is Policy.second_pass:
        return "needs a second pass and does not say what is read: define second_pass(text)"
    if (Need.PROBE in needs) != isinstance(policy.probe, Tensor):
        return "needs names extra tokens if and only if `probe` is a tensor (n, d_model) of their embeddings"
    if not isinstance(policy.pins, Pins):
        return f"pins is {policy.pins!r}; it must be kvbench.Pins"
    return ""


def _dataclass(cls: type) -> str:
    settings = vars(cls).get("__dataclass_params__")
    if settings is None or not settings.frozen:
        return f"{cls.__name__} is not decorated with @dataclass(frozen=True)"
    bare = [parameter.name for parameter in parameters(cls) if not parameter.source]
    return f"no source for the default of {', '.join(bare)}: use param(default, source)" if bare else ""


def _budget(cls: type) -> str:
    """A score that looked at a budget would not nest; nothing in the class may be named so."""
    names = {parameter.name for parameter in parameters(cls)}
    for member in vars(cls).values():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        names |= _names(getattr(function, "__code__", None))
    found = sorted(name for name in names if "budget" in name.lower())
    return f"{cls.__name__} uses {', '.join(found)}: the engine applies budgets to a ranking" if found else ""


def _names(code: CodeType | None) -> set[str]:
    if code is None:
        return set()
    inner = [_names(item) for item in code.co_consts if isinstance(item, CodeType)]
    return set(code.co_names + code.co_varnames + code.co_freevars).union(*inner)


def _undeclared(policy: Policy, specimen: Specimen, score: Tensor) -> str:
    for part, needs in FEEDS.items():
        if not needs & frozenset(policy.needs):
            other = validated_score(policy, specimen.observe(other=part))
            if not torch.equal(other, score):
                return f"the score depends on {PART_NAMES.get(part, part)}, which `needs` does not name"
    return ""


class _WorkMemory(SharedWork):
    """Shared work of a layer, with a copy of everything as it was when it was stored."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[Any, Any] = {}

    def __setitem__(self, name: Any, value: Any) -> None:
        super().__setitem__(name, value)
        self.copies[name] = value.clone() if isinstance(value, Tensor) else value


def _impure(policy: Policy, specimen: Specimen, score: Tensor) -> str:
    seen = specimen.observe()
    shared = seen._shared = _WorkMemory()
    before = {name: value.clone() for name, value in _inputs(seen).items()}
    state = torch.get_rng_state()
    validated_score(policy, seen)
    faults = []
    if not torch.equal(state, torch.get_rng_state()):
        faults.append("it draws from torch's global random state: use seen.uniform()")
    changed = [name for name, value in _inputs(seen).items() if not torch.equal(value, before[name])]
    changed += [
        f"shared {name}"
        for name, copy in shared.copies.items()
        if isinstance(copy, Tensor) and not torch.equal(copy, shared[name])
    ]
    if changed:
        faults.append(f"it writes into {', '.join(changed)}: work on a copy")
    return "; ".join(faults)


def _inputs(seen: Observation) -> dict[str, Tensor]:
    parts = {"keys": seen.keys, "values": seen.values, "positions": seen.positions, "queries": seen._queries}
    if seen._hidden is not None:
        parts["hidden states"] = seen._hidden
    if seen._future is not None:
        parts["future attention"] = seen._future()
    if seen._probe is not None:
        parts |= {"extra queries": seen._probe.queries, "extra keys": seen._probe.keys}
    return parts


def _changed(policy: Policy, specimen: Specimen, score: Tensor) -> str:
    seen = specimen.observe()
    twin = bind_policy(specimen.model, replace(policy))  # another instance of the same parameters
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        again = [validated_score(each, seen) for each in (policy, policy, twin)]
    same = all(torch.equal(one, score) for one in again)
    return "" if same else "another score for the same layer"


def _mixed(policy: Policy, specimen: Specimen, score: Tensor) -> str:
    """Two rows, and three in another order: each as when it is alone."""
    order = (1, 2, 0)
    three = validated_score(policy, specimen.observe(rows=order))
    for row in order:
        alone = validated_score(policy, specimen.observe(rows=(row,)))
        batched = [three[order.index(row)], *score[row : row + 1]]
        if not all(torch.allclose(alone[0], one, rtol=1e-4, atol=1e-5) for one in batched):
            return f"row {row} scores otherwise when it is alone"
    return ""
