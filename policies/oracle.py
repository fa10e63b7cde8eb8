"""Oracle: the upper bracket, a ranking that has read the future."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.policy import Policy
from kvbench.contract.registry import register


@register("oracle", source="arXiv:2602.10238")
@dataclass(frozen=True)
class Oracle(Policy):
    """Ranks tokens by the attention that the reference continuation will pay to them.

    The best possible ranking for eviction cost and missed mass at every budget at once; not for
    the error of the attention output, and not for a task's score.

    Shapes: score (batch, kv_head, slot) float32, attention summed over future tokens.
    Source: arXiv:2602.10238: sigma* sorts the utility u, with the max over a group's query heads.
    Differs: nothing is pinned, so it bounds policies run with `--pins none`. The future is the
    sample's reference, read on the full cache, all of it. Stepwise oracles of other projects, which
    rank by the current query alone, are a different bound.
    """

    needs = frozenset({Need.FUTURE})
    exactness = "paper"
    ranking = "by descending future attention"
    repeated = "future attention on the full cache never changes: the best tokens of those not evicted yet"
    bracket = "upper"
    color = "#444444"

    def score(self, seen: Observation) -> torch.Tensor:
        return seen.future_attention
