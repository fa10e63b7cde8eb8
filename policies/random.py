"""Random: the lower bracket of every figure."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.policy import Policy
from kvbench.contract.registry import register


@register("random", source="baseline of arXiv:2602.10238")
@dataclass(frozen=True)
class Random(Policy):
    """Ranks tokens by a number drawn once per token, KV head and layer.

    Shapes: score (batch, kv_head, slot) float32, uniform in [0, 1), no unit.
    Source: no method of its own; a baseline in arXiv:2602.10238, which does not say whether its
    draws are shared by heads or repeated after each chunk.
    Differs: kvpress draws in the key dtype (bf16 draws tie) and, with a seed, gives every layer the
    same draw. Here a draw depends on (seed, sample, layer, KV head, position) only, so a token keeps
    its number in every chunk, and the kept set is a uniform sample at any time. Drawing again after
    each chunk would be another baseline: one that forgets old tokens.
    """

    needs = frozenset({Need.RANDOM})
    exactness = "paper"
    ranking = "by descending draw, a uniform permutation"
    repeated = "the draw of a token never changes, so the kept set stays a uniform sample"
    bracket = "lower"
    color = "#999999"

    def score(self, seen: Observation) -> torch.Tensor:
        return seen.uniform()
