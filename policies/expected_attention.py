"""Expected Attention: what queries that are still to come would attend to, if they were Gaussian."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.pins import Pins
from kvbench.contract.policy import Policy, param
from kvbench.contract.quadratic import quadratic
from kvbench.contract.registry import register
from kvbench.errors import BadInput


@register("expected_attention", source="arXiv:2510.00636")
@dataclass(frozen=True)
class ExpectedAttention(Policy):
    """Ranks tokens by the attention that Gaussian queries at the next positions would pay, times value norm.

    mu, Sigma: mean and covariance of the queries before RoPE, sinks left out; R: the mean of the model's
    rotations over the next `future` positions. With l = R mu . k / sqrt(D) + k^T (R Sigma R^T) k / (2 D):
    score = (mean over the group of softmax(l) + eps) * ||v||, the softmax over all slots but the sinks.
    Shapes: score (batch, kv_head, slot) float32.
    Source: arXiv:2510.00636; NVIDIA/kvpress `expected_attention_press.py`, which is the official code.
    Differs: moments in float32; the model's own factor on logits instead of 1/sqrt(D); QK-norm and YaRN's
    factor on every architecture. In chunked runs the queries are those of the newest chunk, and the next
    positions follow all tokens read. Sinks are pins; with `--pins none` they still lead.
    """

    needs = frozenset({Need.KEYS, Need.VALUES, Need.QUERY_MOMENTS, Need.ROTARY})
    ranking = "the sinks, then by descending expected attention times value norm"
    repeated = "kept and new tokens are ranked for the positions after the newest chunk, by its queries"
    color = "#8C564B"

    future: int = param(512, "kvpress, the official code")
    sinks: int = param(4, "kvpress")
    covariance: bool = param(True, "kvpress")
    values: bool = param(True, "kvpress; it advises False under critical_kv")
    eps: float = param(0.0, "kvpress; its leaderboard runs use 0.01 with AdaKV")

    def __post_init__(self) -> None:
        if self.future < 1 or self.sinks < 0 or not 0 <= self.eps < float("inf"):
            raise BadInput(
                f"expected_attention: future={self.future}, sinks={self.sinks}, eps={self.eps}; "
                "use future 1 or more, sinks and eps 0 or more"
            )

    @property
    def pins(self) -> Pins:
        return Pins(first=self.sinks)

    def score(self, seen: Observation) -> torch.Tensor:
        ahead = seen.rotary(seen.seen, seen.seen + self.future).mean()
        moments = seen.query_moments(self.sinks)
        mean = seen.by_group(ahead.rotate(moments.mean))  # (batch, kv_head, group, dim)
        logits = seen.scaling * mean @ seen.keys.float().transpose(-1, -2)
        if self.covariance:
            spread = quadratic(seen.keys, ahead.rotate_covariance(moments.covariance))
            logits = logits + seen.by_group(spread) * (seen.scaling**2 / 2)
        first = seen.positions < self.sinks
        logits = logits.masked_fill(first[:, :, None], float("-inf"))
        score = logits.softmax(-1).mean(2)
        if self.values:
            score = (score + self.eps) * seen.values.float().norm(dim=-1)
        score = score.masked_fill(first, 0.0)
        return torch.where(first, score.amax(-1, keepdim=True) + 1, score)
