"""SnapKV: what the last tokens attend to, smoothed over neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.pins import Pins
from kvbench.contract.policy import Policy, param
from kvbench.contract.registry import register
from kvbench.errors import BadInput


@register("snapkv", source="arXiv:2404.14469")
@dataclass(frozen=True)
class SnapKV(Policy):
    """Ranks the window first, then tokens by pooled attention summed over the window's queries.

    Shapes: score (batch, kv_head, slot) float32, attention summed over `window` queries.
    Source: arXiv:2404.14469; FasterDecoding/SnapKV `snapkv_utils.py` and its LongBench configs.
    Differs: selection per KV head, each query head pooled, then reduced over the group (kvpress;
    the official code repeats K and V and selects per query head; AdaKV reduces before pooling).
    kvpress defaults: `snapkv:window=64,kernel=5,pooling=avg`. As official: the softmax runs over all
    slots, pooling over the slots before the window (avg pads with 0, max with nothing). In chunked
    runs neighbours are slots, with gaps where tokens went, and a chunk shorter than the window
    gives fewer queries. Window tokens are pins: their score, the same sum pooled among themselves,
    only matters with `--pins none`. A context of at most `window` slots is all window.
    """

    needs = frozenset({Need.KEYS, Need.WINDOW_QUERIES})
    exactness = "official code"
    parity = "kvpress"
    ranking = "the window by recency, then by descending pooled attention"
    repeated = "kept and new tokens are ranked by the last queries of the newest chunk"
    color = "#D55E00"

    window: int = param(32, "official LongBench configs; kvpress 64")
    kernel: int = param(7, "official LongBench configs; kvpress 5")
    pooling: str = param("max", "official LongBench configs; kvpress avg")
    group: str = param("mean", "kvpress and AdaKV; the official code has no reduction")

    def __post_init__(self) -> None:
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise BadInput(
                f"snapkv: window={self.window}, kernel={self.kernel}; use window 1 or more, kernel odd"
            )
        if self.pooling not in ("max", "avg") or self.group not in ("mean", "max"):
            raise BadInput(
                f"snapkv: pooling={self.pooling}, group={self.group}; "
                "use pooling max or avg, group mean or max"
            )

    @property
    def pins(self) -> Pins:
        return Pins(last=self.window)

    def score(self, seen: Observation) -> torch.Tensor:
        received = seen.window_attention(self.window).sum(2)  # (batch, query_head, slot)
        older = max(seen.slots - self.window, 0)
        parts = [self._pool(part) for part in (received[..., :older], received[..., older:]) if part.numel()]
        pooled = seen.by_group(torch.cat(parts, -1))
        return pooled.mean(2) if self.group == "mean" else pooled.amax(2)

    def _pool(self, x: torch.Tensor) -> torch.Tensor:
        pool = torch.nn.functional.max_pool1d if self.pooling == "max" else torch.nn.functional.avg_pool1d
        return pool(x, self.kernel, stride=1, padding=self.kernel // 2)
