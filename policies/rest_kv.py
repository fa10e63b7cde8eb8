"""ReST-KV: tokens whose removal changes the output of attention most."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.pins import Pins
from kvbench.contract.policy import Policy, param
from kvbench.contract.registry import register
from kvbench.errors import BadInput


@register("rest_kv", source="arXiv:2605.08840")
@dataclass(frozen=True)
class RestKV(Policy):
    """Ranks the window first, then tokens by how far the output moves when one of them goes.

    a: attention of the window's queries to the slots before it, averaged with weights that decay into the
    past (a <- alpha new + (1 - alpha) a, oldest first); o = sum_i a_i v_i; score = mean over the group of
    pooled (a_i / (1 - a_i)) ||W_O^h (o - v_i)||_2^tau, over slots before the window.
    Shapes: score (batch, kv_head, slot) float32.
    Source: arXiv:2605.08840; an-yongqi/rest-kv, by its definition and the values of its scripts.
    Differs: the mean over the group (the official code keeps a set per query head). Its pooling widens
    and shifts with how far the attended places drift, which no text defines well enough to follow: pooling
    has one width (`kernel`, ours), with the border repeated. In chunked runs neighbours are slots, and a
    chunk shorter than the window gives fewer queries. Window tokens are pins; with `--pins none` they
    still lead.
    """

    needs = frozenset({Need.VALUES, Need.WINDOW_QUERIES, Need.OUTPUT_WEIGHTS})
    ranking = "the window, then by descending change of the output"
    repeated = "kept and new tokens are ranked by the last queries of the newest chunk"
    exactness = "official code"
    color = "#2CA02C"

    window: int = param(32, "official scripts")
    alpha: float = param(0.3, "official scripts; the class has 0.5 and leaves averaging off")
    tau: float = param(1.0, "official scripts")
    kernel: int = param(7, "ours, as in SnapKV's LongBench configs")

    def __post_init__(self) -> None:
        if self.window < 1 or self.kernel % 2 == 0 or self.kernel < 1:
            raise BadInput(f"rest_kv: window={self.window}, kernel={self.kernel}; use 1 or more, kernel odd")
        if not 0 < self.alpha <= 1 or not 0 <= self.tau < float("inf"):
            raise BadInput(f"rest_kv: alpha={self.alpha}, tau={self.tau}; alpha is in (0, 1], tau from 0 on")

    @property
    def pins(self) -> Pins:
        return Pins(last=self.window)

    def score(self, seen: Observation) -> torch.Tensor:
        older = max(seen.slots - self.window, 0)
        if older == 0:
            return seen.positions.float()
        rows = seen.window_attention(self.window)[..., :older]
        ages = torch.arange(rows.shape[2] - 1, -1, -1, device=rows.device)
        decay = self.alpha * (1 - self.alpha) ** ages
        decay[0] /= self.alpha  # the oldest row begins the average
        attention = (decay[:, None] * rows).sum(2)
        moved = attention / (1 - attention).clamp_min(1e-6) * self._distance(seen, attention) ** self.tau
        padded = torch.nn.functional.pad(moved, [self.kernel // 2] * 2, mode="replicate")
        pooled = torch.nn.functional.avg_pool1d(padded, self.kernel, stride=1)
        score = seen.by_group(pooled).mean(2)
        lead = score.amax(-1, keepdim=True) + 1
        return torch.cat([score, lead.expand(-1, -1, seen.slots - older)], -1)

    def _distance(self, seen: Observation, attention: torch.Tensor) -> torch.Tensor:
        """||W_O^h (o - v)||_2: (batch, query_head, slot before the window)."""
        values, grouped = seen.values[:, :, : attention.shape[-1]].float(), seen.by_group(attention)
        grams = seen.output_gram.unflatten(0, (seen.kv_heads, -1))
        squares = []
        for head in range(grouped.shape[2]):
            away = grouped[:, :, head, None] @ values - values
            squares.append(((away @ grams[:, head]) * away).sum(-1))
        return torch.stack(squares, 2).flatten(1, 2).clamp_min(0).sqrt()
