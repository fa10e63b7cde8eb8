"""Observed attention: how much attention each token received from the tokens that could see it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.policy import Policy, param
from kvbench.contract.registry import register


@register("observed_attention", source="arXiv:2306.14048")
@dataclass(frozen=True)
class ObservedAttention(Policy):
    """Ranks tokens by the attention that they received while the context was read.

    s_i = sum_t a_ti / (number of queries that see i), a_ti the attention of query t, mean over the group.
    With mean=false s_i is the sum, H2O's accumulator after the prefill, which favours early tokens: more
    queries see them. The mean makes the newest tokens noisy: few queries see them.

    Shapes: score (batch, kv_head, slot) float32, attention per query (or summed).
    Source: kvpress' ObservedAttentionPress; the sum is that of H2O, arXiv:2306.14048.
    Differs: neither is H2O, which keeps a recent window and evicts at every step. kvpress needs the attention
    matrix, here sums are streamed. In chunked runs only the newest chunk's queries count.
    """

    needs = frozenset({Need.ATTENTION_SUMS})
    ranking = "by descending attention received per query"
    repeated = "kept and new tokens are ranked by the queries of the newest chunk"
    color = "#8C6D31"
    exactness = "official code"
    parity = "kvpress"

    mean: bool = param(True, "kvpress; false: H2O's sum")

    def score(self, seen: Observation) -> torch.Tensor:
        received = seen.by_group(seen.attention_sums).mean(2)
        if not self.mean:
            return received
        readers = torch.arange(seen.slots, 0, -1, device=received.device).clamp(max=seen.new)
        return received / readers
