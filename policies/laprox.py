"""LaProx: how much of the layer's output a token carries for the last queries."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.policy import Policy, param
from kvbench.contract.registry import register
from kvbench.errors import BadInput


@register("laprox", source="arXiv:2605.07234")
@dataclass(frozen=True)
class LaProx(Policy):
    """Ranks tokens by the norm of the window's attention to them times the norm of their output.

    p_h,i = ||A[window, i]||_2 ||W_O^h v_i||_2, pooled; s_g,i = mean over the group, over the layer's sum, so
    that scores of all layers and heads may stand in one order.

    Shapes: score (batch, kv_head, slot) float32; those of a layer sum to 1.
    Source: arXiv:2605.07234, by the notes of a third party; there is no public code.
    Differs: even budgets; the paper cuts one order of the whole model. It averages attention over the group,
    which leaves open whose W_O is meant; here each query head has its own, and the scores are averaged. The
    window is pooled with the rest and not pinned.
    """

    needs = frozenset({Need.WINDOW_QUERIES, Need.OUTPUT_WEIGHTS})
    exactness = "notes"
    ranking = "by descending share of the layer's output"
    repeated = "kept and new tokens are ranked by the last queries of the newest chunk"
    color = "#D6604D"

    window: int = param(32, "notes on the paper")
    kernel: int = param(7, "notes on the paper")

    def __post_init__(self) -> None:
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise BadInput(
                f"laprox: window={self.window}, kernel={self.kernel}; use window 1 or more, kernel odd"
            )

    def score(self, seen: Observation) -> torch.Tensor:
        carried = seen.window_attention(self.window).norm(dim=2) * seen.output_norms
        pooled = torch.nn.functional.avg_pool1d(carried, self.kernel, 1, self.kernel // 2)
        score = seen.by_group(pooled).mean(2)
        return score / score.sum((1, 2), keepdim=True).clamp_min(1e-30)
