"""TOVA: what the last token attends to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.policy import Policy
from kvbench.contract.registry import register


@register("tova", source="arXiv:2401.06104")
@dataclass(frozen=True)
class TOVA(Policy):
    """Ranks tokens by the last query's attention, averaged over all query heads of the layer.

    The average runs over the layer, not over groups: all KV heads share one ranking.

    Shapes: score (batch, kv_head, slot) float32, mean attention probability in [0, 1].
    Source: arXiv:2401.06104; schwartz-lab-NLP/TOVA `tova_cache.py`.
    Differs: nothing is pinned, so the last token competes as in the official code; kvpress always
    keeps it (here: `--pins 0,1`). The paper drops one token per generated token; here a chunk is
    read, then ranked by its last query, which for one chunk is the official prefill rule.
    """

    needs = frozenset({Need.KEYS, Need.WINDOW_QUERIES})
    exactness = "official code"
    parity = "kvpress"
    ranking = "by descending attention of the last query"
    repeated = "kept and new tokens are ranked by the last query of the newest chunk"
    color = "#0072B2"

    def score(self, seen: Observation) -> torch.Tensor:
        layer = seen.window_attention(1).squeeze(2).mean(1, keepdim=True)  # (batch, 1, slot)
        return layer.expand(-1, seen.kv_heads, -1).contiguous()
