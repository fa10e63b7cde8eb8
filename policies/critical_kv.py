"""CriticalKV: half of what is kept by another policy's score, the rest by score times what values write."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.policy import param
from kvbench.contract.registry import register
from kvbench.contract.two_stages import entry_sizes
from kvbench.contract.wrapper import Wrapper
from kvbench.errors import BadInput


@register("critical_kv", source="arXiv:2502.03805")
@dataclass(frozen=True)
class CriticalKV(Wrapper):
    """Ranks tokens by when they enter: of b kept, some are the base's best, the others by score * ||W_O v||.

    With s the base's score, m_i the mean over the group of ||W_O^h v_i||_1 and f = max(1, int(share *
    b)): the first f by s are kept, then the b - f best others by (s_i + eps) m_i. Kept sets of growing b
    are nested, and the score is minus the smallest b that keeps a token.
    Shapes: score (batch, kv_head, slot) float32, -1 to -slots.
    Source: arXiv:2502.03805; NVIDIA/kvpress `criticalkv_press.py`.
    Differs: one ranking for all sizes, of which kvpress computes one. Pinned tokens of the base take the
    top of both stages, as kvpress' own sentinels do. The product means something for scores from 0 on:
    scores that reach below are shifted to 0 (ours; kvpress multiplies them as they are). eps is in the
    unit of the base's score: our SnapKV sums over its window, kvpress' takes the mean.
    """

    own = frozenset({Need.OUTPUT_WEIGHTS})
    ranking = "by the smallest kept set that holds a token; the base's pins lead"
    repeated = "kept and new tokens are ranked again, by the base's new score"
    exactness = "official code"
    parity = "kvpress"
    color = "#BCBD22"

    share: float = param(0.5, "kvpress and the paper")
    eps: float = param(1e-4, "kvpress")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.share <= 1 or not 0 <= self.eps < float("inf"):
            raise BadInput(
                f"critical_kv: share={self.share}, eps={self.eps}; use share from 0 to 1, eps 0 or more"
            )

    def score(self, seen: Observation) -> torch.Tensor:
        score = self.base_score(seen)
        score = score - score.amin(-1, keepdim=True).clamp_max(0)
        pinned = (seen.positions < self.pins.first) | (seen.positions >= seen.seen - self.pins.last)
        score = torch.where(pinned, score.amax(-1, keepdim=True) + 1, score)
        written = seen.by_group(seen.output_sums).mean(2)
        return -entry_sizes(score, (score + self.eps) * written, self.share).float()
