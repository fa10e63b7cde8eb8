"""The only door through which the engine asks a policy for scores.

In: a policy and what it may see of one layer. Out: its score, checked, or an error that names the policy.
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import Tensor

from ..contract.need import Need
from ..contract.observation import Observation
from ..contract.policy import Policy
from ..errors import KvbenchError, PluginError, place_of


class InputsWritten(PluginError):
    """A policy wrote into tensors that the cache and other policies use: what follows would be wrong.

    policy: the one that did. Whoever shares these tensors begins anew without it.
    """

    def __init__(self, policy: Policy, message: str) -> None:
        super().__init__(message)
        self.policy = policy


def validated_score(policy: Policy, seen: Observation) -> Tensor:
    """The policy's score of one layer, checked: (batch, kv_head, slot) float32, finite, on the keys' device.

    Raises: PluginError that names the policy when it fails or returns something else; other
    KvbenchErrors of the policy (a model it does not support) pass through.
    """
    return score_seeing(policy, seen, policy.needs)


def score_seeing(policy: Policy, seen: Observation, needs: Set[Need]) -> Tensor:
    """`validated_score` for a policy that may look at `needs`, whatever it declares."""
    score, finite = score_and_flag(policy, seen, needs)
    if not finite.all().item():
        raise PluginError(not_finite(policy, seen.layer))
    return score


def score_and_flag(
    policy: Policy, seen: Observation, needs: Set[Need] | None = None
) -> tuple[Tensor, Tensor]:
    """`validated_score` without waiting for the device, and whether each row is finite: (batch,) bool there.

    The caller reads that when convenient, and then must refuse with `not_finite`.
    """
    name, before = _name(policy), seen.versions()
    try:
        score = policy.score(seen.limited_to(frozenset(policy.needs if needs is None else needs)))
    except PluginError as error:
        raise PluginError(f"policy '{name}', layer {seen.layer}: {error}{place_of(error)}") from error
    except KvbenchError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"policy '{name}' failed in layer {seen.layer}: {type(error).__name__}: {error}{place_of(error)}"
        ) from error
    finally:
        if written := seen.written(before):
            raise InputsWritten(
                policy,
                f"policy '{name}', layer {seen.layer}: it writes into {', '.join(written)}, which the cache "
                "and other policies use, too: work on a copy (x.clone(); x.float() of float32 is none)",
            )
    fault = _fault(score, seen)
    if fault:
        raise PluginError(f"policy '{name}', layer {seen.layer}: {fault}")
    # One pass: NaN and inf survive the sum, and finite float32 values cannot overflow float64.
    return score, score.sum((1, 2), dtype=torch.float64).isfinite()


def not_finite(policy: Policy, layer: int) -> str:
    """What to say of a score that is not finite."""
    return (
        f"policy '{_name(policy)}', layer {layer}: score holds NaN or inf; every slot needs a finite number"
    )


def _name(policy: Policy) -> str:
    return policy.name or type(policy).__name__


def _fault(score: object, seen: Observation) -> str:
    """What is wrong with the form of a score, in words; "" when nothing is."""
    if not isinstance(score, Tensor):
        return f"score returned {type(score).__name__}; it must return a torch.Tensor"
    if type(score) not in (Tensor, type(seen.keys)) or score.layout != torch.strided:
        kind = f"{type(score).__name__} of layout {score.layout}"
        return f"score is a {kind}; it must be a plain dense torch.Tensor"
    wanted = tuple(seen.keys.shape[:3])
    if tuple(score.shape) != wanted:
        return f"score has shape {tuple(score.shape)}; it must be (batch, kv_head, slot) = {wanted}"
    if score.dtype != torch.float32:
        return f"score has dtype {score.dtype}; it must be torch.float32: end with .float()"
    if score.device != seen.keys.device:
        return f"score is on {score.device}; it must stay on {seen.keys.device}, with the layer's keys"
    return ""
