"""K-Norm: tokens with a small key matter."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.policy import Policy
from kvbench.contract.registry import register


@register("knorm", source="arXiv:2406.11430")
@dataclass(frozen=True)
class KNorm(Policy):
    """Ranks tokens by the norm of their key, the smallest first.

    Rotation keeps norms, so keys before and after RoPE give the same ranking.

    Shapes: score (batch, kv_head, slot) float32, minus the L2 norm over the head dimension.
    Source: arXiv:2406.11430; alessiodevoto/l2compress.
    Differs: every layer is compressed. The official code can skip layers (its README example skips
    0 and 1, its default none) and starts only at 2048 tokens; it stores kept tokens by norm, here
    they stay in order. The norm is taken in fp32 whatever the dtype of the keys: in bf16 most norms
    of a head tie (kvpress did so until its issue #276).
    """

    needs = frozenset({Need.KEYS})
    exactness = "official code"
    parity = "kvpress"
    ranking = "by ascending key norm"
    repeated = "the same tokens as in one go: the norm of a key never changes"
    color = "#56B4E9"

    def score(self, seen: Observation) -> torch.Tensor:
        return -torch.linalg.vector_norm(seen.keys, dim=-1, dtype=torch.float32)
