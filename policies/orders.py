"""Orders of slots: places, shares, and samples."""

from __future__ import annotations

import torch


def places(score: torch.Tensor) -> torch.Tensor:
    """Each slot's place along the last dimension, from 0 for the lowest; of equals the newer is higher."""
    return score.argsort(dim=-1, stable=True).argsort(dim=-1)


def shares(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """x over its sum along a dimension; zeros where all of it is 0."""
    return x / x.sum(dim, keepdim=True).clamp_min(1e-30)


def gumbel(uniform: torch.Tensor) -> torch.Tensor:
    """Gumbel noise from uniform draws: log weights plus this, in descending order, are a sample without
    replacement in proportion to the weights."""
    return -(-uniform.clamp(1e-12, 1 - 1e-7).log()).log()
