"""Mean and covariance of queries, block by block: memory linear in the queries, exact in float32."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .rotary import RotaryTables

BLOCK = 1024  # queries that are un-rotated at once


class QueryMoments(NamedTuple):
    """Of un-rotated queries, in float32. mean: (batch, query_head, dim). covariance: (batch, query_head, dim,
    dim), divided by the number of queries."""

    mean: torch.Tensor
    covariance: torch.Tensor

    @property
    def second(self) -> torch.Tensor:
        """The second moment, the mean of q q^T: (batch, query_head, dim, dim)."""
        return self.covariance + self.mean[..., :, None] * self.mean[..., None, :]


def streamed_moments(queries: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
    """Mean and covariance of rotated queries (batch, query_head, t, dim) before their rotation.

    tables: of the t positions. Returns (batch, query_head, 1 + dim, dim) float32: the mean, then the
    covariance; zeros where there are no queries. Sums run over differences from the first block's mean, so
    that a large mean does not drown the covariance.
    """
    batch, heads, count, dim = queries.shape
    if count == 0:
        return torch.zeros(batch, heads, 1 + dim, dim, device=queries.device)
    pivot: torch.Tensor | None = None
    first = torch.zeros(batch, heads, 1, dim, device=queries.device)
    second = torch.zeros(batch, heads, dim, dim, device=queries.device)
    for start in range(0, count, BLOCK):
        stop = min(start + BLOCK, count)
        rows = torch.arange(start, stop, device=queries.device)
        block = tables.at(rows).unrotate(queries[:, :, start:stop])
        if pivot is None:
            pivot = block.mean(2, keepdim=True)
        block = block - pivot
        first += block.sum(2, keepdim=True)
        second += block.transpose(-1, -2) @ block
    assert pivot is not None
    shift = first / count
    return torch.cat([pivot + shift, second / count - shift.transpose(-1, -2) * shift], 2)
