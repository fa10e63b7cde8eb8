"""CAOTE: tokens without which the attention's output would change most."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.pins import Pins
from kvbench.contract.policy import Policy, param
from kvbench.contract.registry import register
from kvbench.errors import BadInput

CLOSE = 1e-6  # a token with all the attention: the rest has none to take over


@register("caote", source="arXiv:2504.14051")
@dataclass(frozen=True)
class CAOTE(Policy):
    """Ranks tokens by the change of the attention's output when they alone are evicted.

    a = mean attention of the last `window` queries, o = sum_i a_i v_i per query head; s_i = a_i / (1 -
    a_i) x ||o - v_i||_2, mean over the group. Exact for one query and one token.

    Shapes: score (batch, kv_head, slot) float32, in units of values.
    Source: arXiv:2504.14051 from notes, no official code.
    Differs: inspired by the paper. The window, that its tokens are pinned as in SnapKV, and the mean over
    the group are ours; `window=1` is the error of the last query. The paper weights scores of any method,
    normalised to sum 1, as attention; here a is attention.
    """

    needs = frozenset({Need.KEYS, Need.VALUES, Need.WINDOW_QUERIES})
    exactness = "notes"
    ranking = "the window by recency, then by descending change of the output"
    repeated = "kept and new tokens are ranked by the last queries of the newest chunk"
    color = "#A5AA99"

    window: int = param(32, "ours; as SnapKV")

    def __post_init__(self) -> None:
        if self.window < 1:
            raise BadInput(f"caote: window={self.window}; use 1 or more")

    @property
    def pins(self) -> Pins:
        return Pins(last=self.window)

    def score(self, seen: Observation) -> torch.Tensor:
        attention = seen.by_group(seen.window_attention(self.window).mean(2))  # (batch, kv_head, group, slot)
        values = seen.values.float()
        change = torch.cdist(attention @ values, values, compute_mode="donot_use_mm_for_euclid_dist")
        return (attention / (1 - attention).clamp_min(CLOSE) * change).mean(2)
