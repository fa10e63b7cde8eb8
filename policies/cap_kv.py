"""CapKV: values that future queries would read and that no other value replaces."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.pins import Pins
from kvbench.contract.policy import Policy, param
from kvbench.contract.quadratic import quadratic, weighted_gram
from kvbench.contract.registry import register
from kvbench.errors import BadInput


@register("cap_kv", source="arXiv:2604.25975")
@dataclass(frozen=True)
class CapKV(Policy):
    """Ranks tokens by the leverage of their values, weighted by how near keys are to the queries to come.

    mu: the mean query before RoPE, sinks left out, turned by the mean of the next `future` rotations. w_i
    = exp(tau (cos(k_i, mu) - max_j cos(k_j, mu))); M = I + sum_i (w_i + eps) v_i v_i^T over all slots but
    the sinks; score = mean over the group of w_i v_i^T M^-1 v_i.
    Shapes: score (batch, kv_head, slot) float32.
    Source: arXiv:2604.25975 by way of NVIDIA/kvpress `cap_press.py`, which was read; the paper was not.
    Differs: kvpress takes the cosine, the shift by the maximum and the mean rotation in place of the
    paper's dot product, and so do we; the shift changes the ranking, since M holds I. M is inverted in
    float64. In chunked runs the queries are the newest chunk's. Sinks are pins; with `--pins none` they
    still lead.
    """

    needs = frozenset({Need.KEYS, Need.VALUES, Need.QUERY_MOMENTS, Need.ROTARY})
    ranking = "the sinks, then by descending weighted leverage of values"
    repeated = "kept and new tokens are ranked for the positions after the newest chunk, by its queries"
    exactness = "official code"
    parity = "kvpress"
    color = "#17BECF"

    tau: float = param(5.0, "kvpress")
    future: int = param(512, "kvpress")
    sinks: int = param(4, "kvpress")
    eps: float = param(1e-6, "kvpress")

    def __post_init__(self) -> None:
        if self.future < 1 or self.sinks < 0 or not (0 <= self.tau < 80 and 0 <= self.eps < float("inf")):
            raise BadInput(
                f"cap_kv: tau={self.tau}, future={self.future}, sinks={self.sinks}, eps={self.eps}; "
                "use tau from 0 to 80, future 1 or more, sinks and eps 0 or more"
            )

    @property
    def pins(self) -> Pins:
        return Pins(first=self.sinks)

    def score(self, seen: Observation) -> torch.Tensor:
        ahead = seen.rotary(seen.seen, seen.seen + self.future).mean()
        anchor = ahead.rotate(seen.query_moments(self.sinks).mean)
        normalize = torch.nn.functional.normalize
        near = seen.by_group(normalize(anchor, dim=-1)) @ normalize(seen.keys.float(), dim=-1).transpose(
            -1, -2
        )
        first = seen.positions < self.sinks
        near = near.clamp(-1, 1).masked_fill(first[:, :, None], -1e4)
        weights = (self.tau * (near - near.amax(-1, keepdim=True))).exp().flatten(1, 2)
        rest = ~first.repeat_interleave(weights.shape[1] // seen.kv_heads, 1)
        capacity = weighted_gram(seen.values, (weights + self.eps) * rest).double()
        capacity = capacity + torch.eye(capacity.shape[-1], dtype=capacity.dtype, device=capacity.device)
        leverage = quadratic(seen.values, torch.linalg.inv_ex(capacity).inverse)
        score = seen.by_group(weights * leverage).mean(2).masked_fill(first, 0.0)
        return torch.where(first, score.amax(-1, keepdim=True) + 1, score)
