"""Entropy-gated ChunkKV: a chunk whose score is one token's gives that token and little else."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvbench.contract.observation import Observation
from kvbench.contract.policy import param
from kvbench.contract.registry import register
from kvbench.contract.wrapper import Wrapper
from kvbench.errors import BadInput

from .chunk_kv import chunk_means, places

EPS = 1e-8  # kvpress'


@register("entropy_chunk_kv", source="NVIDIA/kvpress")
@dataclass(frozen=True)
class EntropyChunkKV(Wrapper):
    """Ranks whole chunks as ChunkKV, but of a good chunk with little entropy only the best tokens.

    p: a chunk's token scores (less their minimum where that is negative) as shares; H = -sum p log p / log
    length. A chunk is gated if its mean is at least the median and its H below the median. Chunks come by
    descending mean, gated ones with their `low` best tokens, others with all, best tokens first; then what is
    left, by descending score.

    Shapes: score (batch, kv_head, slot) float32: minus the place in this order, the same for all heads.
    Source: kvpress' EntropyGatedChunkKVPress.
    Differs: none in kept sets for bases without pins; kvpress states a rule per budget, its kept sets are
    prefixes of this order.
    """

    ranking = "chunks by descending mean score, gated ones in part, then the other tokens by score"
    repeated = "kept and new tokens are cut into chunks again"
    color = "#F7B6D2"
    exactness = "official code"
    parity = "kvpress"

    length: int = param(10, "kvpress")
    low: int = param(4, "kvpress: tokens of a gated chunk")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < 1 or self.low < 1:
            raise BadInput(f"entropy_chunk_kv: length={self.length}, low={self.low}; both 1 or more")

    def score(self, seen: Observation) -> torch.Tensor:
        tokens = self.base_score(seen).sum(1)  # (batch, slot)
        slots = torch.arange(seen.slots, device=tokens.device)
        chunk, means = slots // self.length, chunk_means(tokens, self.length)
        inside = self._inside(tokens)  # place of each token in its chunk
        walked = (inside < self.low) | ~self._gated(tokens, means)[:, chunk]
        first = places(means)[:, chunk] * self.length + inside
        last = means.shape[1] * self.length + places(tokens)
        order = torch.where(walked, first, last)
        return -order.float()[:, None].expand(-1, seen.kv_heads, -1).contiguous()

    def _inside(self, tokens: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(tokens, (0, -tokens.shape[1] % self.length), value=-math.inf)
        return places(padded.view(-1, self.length)).view_as(padded)[:, : tokens.shape[1]]

    def _gated(self, tokens: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
        """(batch, chunk) bool."""
        empty = -tokens.shape[1] % self.length
        padded = torch.nn.functional.pad(tokens, (0, empty), value=math.inf).unflatten(1, (-1, self.length))
        there = padded.isfinite()
        shifted = torch.where(there, padded - padded.amin(2, keepdim=True).clamp(max=0), 0)
        shares = shifted / (shifted.sum(2, keepdim=True) + EPS)
        sizes = there.sum(2).clamp(min=2)
        entropy = -(shares * (shares + EPS).log()).sum(2) / sizes.log()
        entropy = torch.where(there.sum(2) > 1, entropy.clamp(0, 1), 0)
        return (means >= means.median(1, True).values) & (entropy < entropy.median(1, True).values)
