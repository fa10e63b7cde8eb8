"""Eviction error: how much of the attention that the future paid was evicted.

u_i is the utility of a cached token (see contract.attention_sums): the attention that the
question and the reference answer pay to it on the full cache, maxed over the query heads of its group.
"""

from __future__ import annotations

import torch


def eviction_cost(order: torch.Tensor, utility: torch.Tensor) -> torch.Tensor:
    """C(sigma)/C(sigma*) of KVP, with C = sum_b b * u_(sigma_b) (arXiv:2602.10238, eq. 3.7).

    order: (..., slot) a ranking; utility: (..., slot) float32, not negative. Returns (...) float32,
    1 for the best ranking; 1 where all utility is 0, because then every ranking is as good.
    """
    return eviction_costs([order], utility)[0]


def eviction_costs(orders: list[torch.Tensor], utility: torch.Tensor) -> list[torch.Tensor]:
    """`eviction_cost` of several rankings of the same tokens."""
    utility = utility.double()
    rank = torch.arange(1, utility.shape[-1] + 1, device=utility.device, dtype=torch.float64)
    best = (utility.sort(-1, descending=True).values * rank).sum(-1)
    costs = [(utility.gather(-1, order) * rank).sum(-1) for order in orders]
    return [torch.where(best > 0, cost / best, 1.0).float() for cost in costs]


def missed_mass(kept: torch.Tensor, utility: torch.Tensor) -> torch.Tensor:
    """Share of the future attention on context tokens that goes to evicted ones, 0..1.

    kept: (..., kept) original positions that stayed; utility: (..., context). Returns (...) float32.
    """
    utility = utility.double()
    total = utility.sum(-1)
    hit = utility.gather(-1, kept).sum(-1)
    return torch.where(total > 0, 1 - hit / total, 0.0).clamp(0, 1).float()
