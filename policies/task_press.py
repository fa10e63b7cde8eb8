"""TaskPress: what a guide text attends to, weighted by how far the keys reach."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.policy import Policy, param
from kvbench.contract.registry import register
from kvbench.contract.second_pass import ContextText, Reading, SecondPass
from kvbench.errors import BadInput


@register("task_press", source="arXiv:2608.03276")
@dataclass(frozen=True)
class TaskPress(Policy):
    """Ranks tokens by the attention of a guide text read after the context, times the scale of their key.

    s_i = (mean over the group of the pooled sum over the guide's tokens of A_i) x max_d |k_i,d|, the scale
    with which a row of int8 keys would be stored.

    Shapes: score (batch, kv_head, slot) float32.
    Source: inspired by the abstract of arXiv:2608.03276; there is no public code.
    Differs: from the abstract are the guide as a query and the scales as a signal of outliers. Ours: this
    guide, the sum over its tokens, pooling as SnapKV's, and the product.
    """

    needs = frozenset({Need.SECOND_PASS, Need.KEYS})
    exactness = "abstract"
    ranking = "by descending attention of the guide times the key's scale"
    repeated = "the guide is read again after each chunk, against what is kept"
    color = "#8C510A"

    guide: str = param("Find the facts in the text above that a question may ask for.", "ours")
    kernel: int = param(7, "ours, as snapkv")

    def __post_init__(self) -> None:
        if not self.guide.strip() or self.kernel < 1 or self.kernel % 2 == 0:
            raise BadInput(
                f"task_press: guide={self.guide!r}, kernel={self.kernel}; write a guide, and an odd kernel"
            )

    def second_pass(self, text: ContextText) -> SecondPass:
        ids = text.encode("\n\n" + self.guide) + text.suffix
        return SecondPass((Reading(ids, 0, len(text.ids)),), "sum")

    def score(self, seen: Observation) -> torch.Tensor:
        pooled = torch.nn.functional.max_pool1d(seen.second_attention, self.kernel, 1, self.kernel // 2)
        return seen.by_group(pooled).mean(2) * seen.keys.float().abs().amax(-1)
