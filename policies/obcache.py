"""OBCache: tokens whose key and value the attention's output would miss, to second order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.pins import Pins
from kvbench.contract.policy import Policy, param
from kvbench.contract.registry import register
from kvbench.errors import BadInput


@register("obcache", source="arXiv:2510.07651")
@dataclass(frozen=True)
class OBCache(Policy):
    """Ranks tokens by the squared error that setting their key, their value or both to 0 makes in the output.

    For a query with attention A, logits Z and output o: of the value A_i^2 ||v_i||^2, of the key (A_i
    Z_i)^2 ||v_i - o||^2, of both || A_i v_i + A_i Z_i (v_i - o) ||^2. Summed over the last `window`
    queries and the group.

    Shapes: score (batch, kv_head, slot) float32, in squared units of values.
    Source: arXiv:2510.07651 from notes; a public copy of its code (MalachiAjayi/kv-cache-pruner).
    Differs: the sum over the group is the paper's, the code repeats keys and values. Its window is the
    number of recent tokens, a part of the budget there. It goes on adding scores at every generated
    token.
    """

    needs = frozenset({Need.KEYS, Need.VALUES, Need.WINDOW_QUERIES})
    exactness = "notes"
    ranking = "the window by recency, then by descending error"
    repeated = "kept and new tokens are ranked by the last queries of the newest chunk"
    color = "#764E9F"

    of: Literal["both", "value", "key"] = param("both", "its default: the joint score")
    window: int = param(32, "ours; its recent tokens")

    def __post_init__(self) -> None:
        if self.of not in ("both", "value", "key") or self.window < 1:
            raise BadInput(
                f"obcache: of={self.of}, window={self.window}; use of both, value or key, window 1 or more"
            )

    @property
    def pins(self) -> Pins:
        return Pins(last=self.window)

    def score(self, seen: Observation) -> torch.Tensor:
        attention = seen.by_group(seen.window_attention(self.window)).flatten(
            2, 3
        )  # (.., kv_head, rows, slot)
        values = seen.values.float()
        size = values.square().sum(-1)[:, :, None]  # ||v||^2
        if self.of == "value":
            return (attention.square() * size).sum(2)
        queries = seen.by_group(seen.window_queries(self.window)).flatten(2, 3).float()
        moved = attention * (queries @ seen.keys.float().transpose(-1, -2)).mul(seen.scaling)  # A Z
        output = attention @ values
        along = output @ values.transpose(-1, -2)  # <o, v>
        distance = (size + output.square().sum(-1, keepdim=True) - 2 * along).clamp_min(0.0)
        error = moved.square() * distance
        if self.of == "both":
            error = error + attention.square() * size + 2 * attention * moved * (size - along)
        return error.sum(2)
