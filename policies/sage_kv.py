"""SAGE-KV: what the last token of the prompt attends to, head by head."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.pins import Pins
from kvbench.contract.policy import Policy, param
from kvbench.contract.registry import register
from kvbench.errors import BadInput


@register("sage_kv", source="arXiv:2503.08879")
@dataclass(frozen=True)
class SageKV(Policy):
    """Ranks tokens by the last query's attention, averaged over the group; sinks and recent tokens stay.

    TOVA's signal without its average over the layer: each KV head has its own ranking.

    Shapes: score (batch, kv_head, slot) float32, mean attention probability in [0, 1].
    Source: inspired by the abstract of arXiv:2503.08879; there is no public code.
    Differs: from the abstract are one selection after the prefill, the last token as the query, selection per
    head, and that sinks and recent tokens stay. Ours: the mean over the group, and how many of both stay.
    """

    needs = frozenset({Need.WINDOW_QUERIES})
    exactness = "abstract"
    ranking = "sinks and recent tokens, then by descending attention of the last query"
    repeated = "kept and new tokens are ranked by the last query of the newest chunk"
    color = "#4393C3"

    sinks: int = param(4, "ours, as streaming_llm")
    recent: int = param(16, "ours")

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.recent < 0:
            raise BadInput(f"sage_kv: sinks={self.sinks}, recent={self.recent}; both must be 0 or more")

    @property
    def pins(self) -> Pins:
        return Pins(first=self.sinks, last=self.recent)

    def score(self, seen: Observation) -> torch.Tensor:
        return seen.by_group(seen.window_attention(1)).mean((2, 3))
