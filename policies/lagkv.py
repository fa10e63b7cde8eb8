"""LagKV: tokens that stand out against the partition that follows theirs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.pins import Pins
from kvbench.contract.policy import Policy, param
from kvbench.contract.registry import register
from kvbench.errors import BadInput

FLAT = 1e-12  # a reference channel with less spread says nothing about a token


@register("lagkv", source="arXiv:2504.04704")
@dataclass(frozen=True)
class LagKV(Policy):
    """Ranks tokens inside partitions of `lag` slots, after the sinks, by lag-relative spread.

    With lo, hi the range of each channel in the next partition, e = std over channels of
    (x - lo) / (hi - lo); softmax of e inside the partition, for keys plus for values; then the
    token's rank in its partition over `lag`. Sinks, the last full partition and the remainder get 1.

    Shapes: score (batch, kv_head, slot) float32 in [0, 1], no unit.
    Source: arXiv:2504.04704; AI-Lab-China-Merchants-Bank/LagKV `lag_kv.py`; kvpress `LagKVPress`.
    Differs: defaults are kvpress' (sinks 4; paper and official code: 16, `lagkv:sinks=16`; the
    official class has lag 1024). Budgets below sinks + lag + remainder are outside the paper; they
    keep the newest, as under sinks + 2*lag slots, where the paper evicts nothing. Channels without
    spread count 0, where the formula divides by 0. Ties go to the newer token, kvpress leaves them.
    """

    needs = frozenset({Need.KEYS, Need.VALUES})
    exactness = "official code"
    parity = "kvpress"
    ranking = "sinks, the tail by recency, then by rank in the partition, later partitions first"
    repeated = "kept and new tokens are partitioned again by slot (official: kept parts stay for good)"
    color = "#CC79A7"

    sinks: int = param(4, "kvpress n_sink; the paper uses 16")
    lag: int = param(128, "kvpress lag_size; the paper uses 128 and 1024")

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.lag < 1:
            raise BadInput(
                f"lagkv: sinks={self.sinks}, lag={self.lag}; use sinks of 0 or more, lag of 1 or more"
            )

    @property
    def pins(self) -> Pins:
        return Pins(first=self.sinks)

    def score(self, seen: Observation) -> torch.Tensor:
        score = torch.ones(seen.positions.shape, dtype=torch.float32, device=seen.keys.device)
        rest = seen.slots - self.sinks
        if rest < 2 * self.lag:
            score[..., self.sinks :] = torch.arange(max(rest, 0), device=score.device) / max(rest, 1)
            return score
        full = slice(self.sinks, self.sinks + rest // self.lag * self.lag)
        spread = self._spread(seen.keys[:, :, full]) + self._spread(seen.values[:, :, full])
        rank = spread.argsort(dim=-1, stable=True).argsort(-1)  # ties: the newer token ranks higher
        score[..., full.start : full.stop - self.lag] = rank.flatten(2) / self.lag
        return score

    def _spread(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, kv_head, partitions*lag, dim) -> (batch, kv_head, partitions - 1, lag)."""
        parts = x.float().unflatten(2, (-1, self.lag))
        low, high = parts[:, :, 1:].aminmax(dim=3, keepdim=True)
        width = high - low
        relative = (parts[:, :, :-1] - low) / width.clamp_min(FLAT)
        return relative.masked_fill(width <= FLAT, 0.0).std(-1).softmax(-1)
