"""ChunkKV: whole chunks of neighbours stay or go together."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.contract.observation import Observation
from kvbench.contract.policy import param
from kvbench.contract.registry import register
from kvbench.contract.wrapper import Wrapper
from kvbench.errors import BadInput


@register("chunk_kv", source="arXiv:2502.00299")
@dataclass(frozen=True)
class ChunkKV(Wrapper):
    """Ranks chunks of neighbouring tokens by the base's scores, the same chunks for all heads of a layer.

    A token's score is the sum over KV heads of the base's, a chunk's the mean over its tokens. Better chunks
    come first, inside a chunk older tokens.

    Shapes: score (batch, kv_head, slot) float32: minus the place in this order.
    Source: arXiv:2502.00299; kvpress' ChunkKVPress.
    Differs: kvpress keeps whole chunks only, so its total is a multiple of `length`; here the last chunk is
    cut where the budget ends. The paper's length is 10, and it reuses one layer's choice for the next, which
    is left out. Pins of the base are kept as such; in kvpress they make the mean of their chunk explode.
    """

    ranking = "chunks by descending mean score, inside a chunk by ascending position"
    repeated = "kept and new tokens are cut into chunks again"
    color = "#5254A3"
    exactness = "official code"
    parity = "kvpress"

    length: int = param(20, "kvpress; the paper 10")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length < 1:
            raise BadInput(f"chunk_kv:length={self.length}: use 1 or more")

    def score(self, seen: Observation) -> torch.Tensor:
        tokens = self.base_score(seen).sum(1)  # (batch, slot)
        slots = torch.arange(seen.slots, device=tokens.device)
        chunk = slots // self.length
        place = places(chunk_means(tokens, self.length))
        order = place[:, chunk] * self.length + slots % self.length
        return -order.float()[:, None].expand(-1, seen.kv_heads, -1).contiguous()


def chunk_means(tokens: torch.Tensor, length: int) -> torch.Tensor:
    """(batch, slot) -> (batch, chunk): means over chunks of `length`, the last one may be shorter."""
    padded = torch.nn.functional.pad(tokens, (0, -tokens.shape[1] % length)).unflatten(1, (-1, length))
    sizes = torch.full((padded.shape[1],), length, device=tokens.device)
    sizes[-1] -= -tokens.shape[1] % length
    return padded.sum(2) / sizes


def places(scores: torch.Tensor) -> torch.Tensor:
    """(batch, n) -> the place of each in descending order, int64; of equals the later one is first."""
    last = scores.shape[1] - 1
    order = last - scores.flip(1).argsort(dim=1, descending=True, stable=True)
    return torch.empty_like(order).scatter_(
        1, order, torch.arange(last + 1, device=order.device).expand_as(order)
    )
