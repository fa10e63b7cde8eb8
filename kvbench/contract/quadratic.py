"""Quadratic forms of keys or values with one matrix per query head, without repeating them to query heads."""

from __future__ import annotations

import torch


def quadratic(x: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """x^T M_h x of every slot and query head: (batch, query_head, slot) float32.

    x: (batch, kv_head, slot, dim). matrices: (batch or 1, query_head, dim, dim). No tensor in between is
    larger than x in float32.
    """
    batch, kv_heads, slots, _ = x.shape
    x = x.float()
    grouped = matrices.float().unflatten(1, (kv_heads, -1))  # (batch, kv_head, group, dim, dim)
    parts = [((x @ grouped[:, :, head]) * x).sum(-1) for head in range(grouped.shape[2])]
    return torch.stack(parts, 2).view(batch, -1, slots)


def weighted_gram(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """sum_i w_i x_i x_i^T of every query head: (batch, query_head, dim, dim) float32.

    x: (batch, kv_head, slot, dim). weights: (batch, query_head, slot).
    """
    x = x.float()
    grouped = weights.unflatten(1, (x.shape[1], -1))
    parts = [(x * grouped[:, :, head, :, None]).transpose(-1, -2) @ x for head in range(grouped.shape[2])]
    return torch.stack(parts, 2).flatten(1, 2)
