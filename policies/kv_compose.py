"""KVCompose: what the context attends to when it is read a second time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.policy import Policy, param
from kvbench.contract.registry import register
from kvbench.contract.second_pass import ContextText, Reading, SecondPass
from kvbench.errors import BadInput


@register("kv_compose", source="arXiv:2509.05165")
@dataclass(frozen=True)
class KVCompose(Policy):
    """Ranks tokens by the attention of the context, read again after itself, lifted by the layer's mean.

    a_h,i = max (or mean) over the tokens of the second reading; s_g,i = mean over the group, times ||v_i||_2
    with value_norm; then s_g,i + mean over the KV heads of s_i with across_heads.

    Shapes: score (batch, kv_head, slot) float32.
    Source: arXiv:2509.05165; NVIDIA/kvpress `kvcompose_press.py`.
    Differs: even budgets; the paper's composite slots divide a budget over layers, and inside a head they
    keep this order. kvpress takes other prompts than the context itself, too.
    """

    exactness = "official code"
    parity = "kvpress"
    ranking = "by descending attention of the second reading"
    repeated = "all text read so far is read again, against what is kept"
    color = "#762A83"

    over_tokens: str = param("max", "kvpress")
    value_norm: bool = param(False, "kvpress")
    across_heads: bool = param(True, "kvpress")

    def __post_init__(self) -> None:
        if self.over_tokens not in ("max", "mean"):
            raise BadInput(f"kv_compose: over_tokens={self.over_tokens}; use max or mean")

    @property
    def needs(self) -> frozenset[Need]:  # type: ignore[override]
        return frozenset({Need.SECOND_PASS, Need.VALUES} if self.value_norm else {Need.SECOND_PASS})

    def second_pass(self, text: ContextText) -> SecondPass:
        again = Reading(text.ids, 0, len(text.ids))
        return SecondPass((again,), "max" if self.over_tokens == "max" else "sum")

    def score(self, seen: Observation) -> torch.Tensor:
        score = seen.by_group(seen.second_attention).mean(2)
        if self.over_tokens == "mean":
            score = score / seen.seen
        if self.value_norm:
            score = score * seen.values.float().norm(dim=-1)
        return score + score.mean(1, keepdim=True) if self.across_heads else score
