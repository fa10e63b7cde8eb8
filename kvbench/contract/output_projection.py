"""What a head's values become in the output: norms of W_O^h v without W_O^h v of all slots at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from .quadratic import quadratic

BLOCK = 1024  # slots of one head that are projected at once


@dataclass(frozen=True, eq=False)
class OutputProjection:
    """W_O of one layer. weight: (d_model, query_head * dim), the module's own; W_O^h: columns of head h."""

    weight: torch.Tensor
    query_heads: int

    @cached_property
    def gram(self) -> torch.Tensor:
        """W_O^h^T W_O^h of every head: (query_head, dim, dim) float32. Made once per model."""
        with torch.inference_mode(False), torch.no_grad():
            heads = self._heads()
            return heads.transpose(-1, -2) @ heads

    def norms(self, values: torch.Tensor) -> torch.Tensor:
        """||W_O^h v||_2, in the model's output: (batch, query_head, slot) float32.

        values: (batch, kv_head, slot, dim). sqrt(v^T G_h v): one product with dim x dim per head.
        """
        return quadratic(values, self.gram[None]).clamp_min(0).sqrt()

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """||W_O^h v||_1, which no Gram matrix gives: (batch, query_head, slot) float32. In blocks."""
        group = self.query_heads // values.shape[1]
        found = []
        for head, weight in enumerate(self._heads()):
            mine = values[:, head // group].float()
            blocks = [(block @ weight.T).abs().sum(-1) for block in mine.split(BLOCK, 1)]
            found.append(torch.cat(blocks, 1))
        return torch.stack(found, 1)

    def _heads(self) -> torch.Tensor:
        """(query_head, d_model, dim) float32"""
        return self.weight.float().unflatten(1, (self.query_heads, -1)).transpose(0, 1)
