"""Non-causal attention: what the queries of a tile attend to in their own tile, before and after them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbench.contract.need import Need
from kvbench.contract.observation import Observation
from kvbench.contract.policy import Policy, param
from kvbench.contract.registry import register
from kvbench.errors import BadInput


@register("non_causal_attention", source="arXiv:2507.08143")
@dataclass(frozen=True)
class NonCausalAttention(Policy):
    """Ranks tokens by the attention of their tile, causal or not, times the norm of their value.

    In tiles of `tile` slots P = softmax(Q K^T) over the tile's keys, without mask and without
    1/sqrt(dim); s_i = ||v_i||_2 x sum over the tile's queries of P[t, i], meant over the group; s
    averaged over `kernel` slots.

    Shapes: score (batch, kv_head, slot) float32, attention probability times the norm of values.
    Source: arXiv:2507.08143; kvpress `NonCausalAttnPress`.
    Differs: kvpress pads the last tile and lets the padding take part (it masks logits with -1e-9, which
    is no mask): here a short tile is short. kvpress subtracts the mean of the layer's scores and divides
    by their deviation, which changes no order. kvpress scores a whole prompt only. In chunked runs the
    queries of kept tokens are gone: their tiles are read by the last `tile` queries of the chunk, scaled
    to the same mean (ours).
    """

    needs = frozenset({Need.KEYS, Need.VALUES, Need.WINDOW_QUERIES})
    exactness = "official code"
    parity = "kvpress"
    ranking = "by descending smoothed attention"
    repeated = "kept tokens are attended by the last tile of the newest chunk, new ones by their own tile"
    color = "#80BA5A"

    tile: int = param(256, "kvpress chunk_size")
    kernel: int = param(3, "kvpress")

    def __post_init__(self) -> None:
        if self.tile < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise BadInput(
                f"non_causal_attention: tile={self.tile}, kernel={self.kernel}; use tile >= 1, an odd kernel"
            )

    def score(self, seen: Observation) -> torch.Tensor:
        queries = seen.window_queries(seen.new)
        old = seen.slots - seen.new
        kept = seen.keys[:, :, :old].split(self.tile, 2) if old else ()
        received = [self._received(queries[:, :, -self.tile :], keys) for keys in kept]
        tiles = zip(queries.split(self.tile, 2), seen.keys[:, :, old:].split(self.tile, 2), strict=True)
        received += [self._received(*tile) for tile in tiles]
        score = torch.cat(received, -1) * torch.linalg.vector_norm(seen.values.float(), dim=-1)
        return torch.nn.functional.avg_pool1d(score, self.kernel, stride=1, padding=self.kernel // 2)

    @staticmethod
    def _received(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """(batch, query_head, t, dim), (batch, kv_head, m, dim) -> (batch, kv_head, m), whose mean is 1."""
        folded = queries.reshape(keys.shape[0], keys.shape[1], -1, keys.shape[3]).float()
        attention = torch.matmul(folded, keys.float().transpose(-1, -2)).softmax(-1)
        return attention.mean(2) * keys.shape[2]
