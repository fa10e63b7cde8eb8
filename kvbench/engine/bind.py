"""The policies of an evaluation, bound to the model before anything is read.

In: a LoadedModel and policies. Out: each policy with its weights in place, the extra tokens that some of them
read, checked and grouped, and the policies that failed already. What happens here happens once, not in a
layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..contract.layer_parts import FROM_PARTS, LayerParts
from ..contract.model_description import ModelDescription
from ..contract.need import Need
from ..contract.policy import Policy
from ..errors import KvbenchError, PluginError, UnsupportedModel, place_of
from ..model.lm import LoadedModel


@dataclass(frozen=True, eq=False)
class Probe:
    """Extra tokens: their embeddings (n, d_model) on the model's device, and the policies that read them."""

    tokens: Tensor
    policies: frozenset[Policy]


@dataclass(frozen=True, eq=False)
class BoundPolicies:
    """Policies ready for a model. policies: each as given -> bound. failures: policy -> what it did wrong.

    parts: of every full-attention layer, where a policy looks at them.
    """

    lm: LoadedModel
    policies: Mapping[Policy, Policy]
    probes: tuple[Probe, ...]
    failures: Mapping[Policy, str]
    parts: Mapping[int, LayerParts] = field(default_factory=dict)

    def probe_length(self, policy: Policy) -> int:
        """How many extra tokens a policy reads."""
        return next((len(probe.tokens) for probe in self.probes if policy in probe.policies), 0)


def bind_policies(
    lm: LoadedModel, policies: Iterable[Policy], refused: Mapping[Policy, str] | None = None
) -> BoundPolicies:
    """Bind every policy, and collect the extra tokens: equal ones are one probe.

    refused: policies that have failed before, and why.
    """
    bound: dict[Policy, Policy] = {}
    failures = dict(refused or {})
    probes: list[tuple[Tensor, list[Policy]]] = []
    for policy in dict.fromkeys(policies):
        if policy in failures:
            continue
        try:
            bound[policy] = bind_policy(lm, policy)
            check_parts(lm, policy)
            tokens = validated_probe(bound[policy], lm) if Need.PROBE in policy.needs else None
        except KvbenchError as error:
            failures[policy] = reason(policy, error)
            continue
        if tokens is None:
            continue
        same = next((known for known in probes if torch.equal(known[0], tokens)), None)
        if same is None:
            probes.append(same := (tokens, []))
        same[1].append(policy)
    found = tuple(Probe(tokens, frozenset(readers)) for tokens, readers in probes)
    parts = lm.parts if any(policy.needs & FROM_PARTS for policy in bound) else {}
    return BoundPolicies(lm, bound, found, failures, parts)


def bind_policy(model: LoadedModel | ModelDescription, policy: Policy) -> Policy:
    """A policy bound to a model, or to what is known of one.

    Raises PluginError that names the policy; other KvbenchErrors of the policy pass through.
    """
    try:
        bound = model.bind(policy) if isinstance(model, LoadedModel) else policy.bind(model)
    except KvbenchError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"policy '{policy.name}', bind: {type(error).__name__}: {error}{place_of(error)}"
        ) from error
    if bound != policy:
        raise PluginError(f"policy '{policy.name}': bind must return a policy that equals the one it is of")
    return bound


def check_parts(lm: LoadedModel, policy: Policy) -> None:
    """Refuse a policy that looks at parts of the model which cannot be read. Raises UnsupportedModel."""
    if not policy.needs & FROM_PARTS:
        return
    for layer, parts in lm.parts.items():
        if why := parts.missing(policy.needs):
            raise UnsupportedModel(f"{lm.name}, layer {layer}: {why}, and this policy needs that")


def validated_probe(policy: Policy, lm: LoadedModel) -> Tensor:
    """A bound policy's extra tokens, checked, in the model's dtype and on its device: (n, d_model).

    Raises PluginError that names the policy.
    """
    try:
        tokens = policy.probe
    except KvbenchError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"policy '{policy.name}', probe: {type(error).__name__}: {error}{place_of(error)}"
        ) from error
    width = lm.description.width
    if not isinstance(tokens, Tensor) or not tokens.is_floating_point() or tokens.dim() != 2:
        raise PluginError(f"policy '{policy.name}': probe must be floating point embeddings (n, d_model)")
    if tokens.shape[0] < 1 or tokens.shape[1] != width or not tokens.isfinite().all():
        raise PluginError(
            f"policy '{policy.name}': probe has shape {tuple(tokens.shape)}; it must be finite and "
            f"(n, {width}) with n from 1 on, as {lm.name} reads embeddings"
        )
    return tokens.to(lm.device, lm.dtype)


def check_room(policy: Policy, lm: LoadedModel, start: int, count: int) -> str:
    """Why so many extra tokens cannot be read from a position on; "" where they can."""
    if not lm.rotation.fits(start + count):
        return (
            f"policy '{policy.name}': {start} tokens and its {count} extra ones are more than "
            f"{lm.rotation.border}, from which on {lm.name} rotates by other factors than this sample; use "
            "other lengths"
        )
    if start + count <= lm.geometry.max_length:
        return ""
    return (
        f"policy '{policy.name}': {start} tokens and its {count} extra ones are more than the "
        f"{lm.geometry.max_length} that {lm.name} reads; use shorter samples"
    )


def reason(policy: Policy, error: KvbenchError) -> str:
    """Why the rows of a policy failed: it names the policy, whatever was raised."""
    return str(error) if isinstance(error, PluginError) else f"policy '{policy.name}': {error}"
