"""Expected Attention: what queries that are still to come would attend to, if they were Gaussian."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from kvbench.contract.calibrated import Calibrated
from kvbench.contract.calibration import Calibration, load_calibration
from kvbench.contract.model_description import ModelDescription
from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.pins import Pins
from kvbench.contract.policy import param
from kvbench.contract.quadratic import quadratic
from kvbench.contract.query_moments import QueryMoments
from kvbench.contract.registry import register
from kvbench.contract.weights import find_weights
from kvbench.errors import BadInput

WEIGHTS = Path(__file__).parent / "weights"
MOMENTS = "moments"  # (layer, query_head, 1 + dim, dim): the mean, then the covariance


@register("expected_attention", source="arXiv:2510.00636")
@dataclass(frozen=True)
class ExpectedAttention(Calibrated):
    """Ranks tokens by the attention that Gaussian queries at the next positions would pay, times value norm.

    mu, Sigma: mean and covariance of the queries before RoPE, sinks left out; R: the mean of the model's
    rotations over the next `future` positions. With l = R mu . k / sqrt(D) + k^T (R Sigma R^T) k / (2 D):
    score = (mean over the group of softmax(l) + eps) * ||v||, the softmax over all slots but the sinks.
    stats: mean and covariance of a file: `ruler` (shipped, for SmolLM2-135M-Instruct), or the path of
    one that `kvbench train --policy expected_attention` wrote.
    Shapes: score (batch, kv_head, slot) float32.
    Source: arXiv:2510.00636; NVIDIA/kvpress `expected_attention_press.py`, which is the official code, and
    `expected_attention_with_stats.py`.
    Differs: moments in float32; the model's own factor on logits instead of 1/sqrt(D); QK-norm and YaRN's
    factor on every architecture. In chunked runs the queries are those of the newest chunk, and the next
    positions follow all tokens read. Sinks are pins; with `--pins none` they still lead. Statistics come from
    kvbench's traces, kvpress' from 100 chapters of BookSum, 1000 characters each.
    """

    ranking = "the sinks, then by descending expected attention times value norm"
    repeated = "kept and new tokens are ranked for the positions after the newest chunk, by its queries"
    exactness = "official code"
    parity = "kvpress"
    color = "#8C564B"
    trainer = "kvbench.policies.expected_attention.command:TRAINER"

    future: int = param(512, "kvpress, the official code")
    sinks: int = param(4, "kvpress")
    covariance: bool = param(True, "kvpress")
    values: bool = param(True, "kvpress; it advises False under critical_kv")
    eps: float = param(0.0, "kvpress; its leaderboard runs use 0.01 with AdaKV")
    stats: str = param("", "kvpress: the moments of the prompt's own queries")

    _placed: ClassVar[Any] = ()  # stored moments of each evicted layer, once bound

    def __post_init__(self) -> None:
        if self.future < 1 or self.sinks < 0 or not 0 <= self.eps < float("inf"):
            raise BadInput(
                f"expected_attention: future={self.future}, sinks={self.sinks}, eps={self.eps}; "
                "use future 1 or more, sinks and eps 0 or more"
            )

    @property
    def needs(self) -> frozenset[Need]:  # type: ignore[override]
        moments = frozenset() if self.stats else frozenset({Need.QUERY_MOMENTS})
        return moments | {Need.KEYS, Need.VALUES, Need.ROTARY}

    @property
    def pins(self) -> Pins:
        return Pins(first=self.sinks)

    @property
    def calibration(self) -> Calibration | None:
        if not self.stats:
            return None
        return load_calibration(find_weights(self.name, WEIGHTS, self.stats), self.name, {MOMENTS})

    def bind(self, model: ModelDescription) -> ExpectedAttention:
        """With every layer's stored moments, (1, query_head, 1 + dim, dim), on the device of that layer."""
        if self.calibration is None:
            return self
        layers = zip(self.calibration.tensors[MOMENTS], model.devices, strict=True)
        return self.holding(_placed=tuple(one[None].to(device) for one, device in layers))

    def score(self, seen: Observation) -> torch.Tensor:
        ahead = seen.rotary(seen.seen, seen.seen + self.future).mean()
        moments = self._stored(seen) if self.stats else seen.query_moments(self.sinks)
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

    def _stored(self, seen: Observation) -> QueryMoments:
        placed = self._placed[seen.full_index]
        return QueryMoments(placed[:, :, 0], placed[:, :, 1:])
