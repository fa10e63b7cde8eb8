"""Numbers about KV heads, from rankings of recorded tokens: how sharp, how wrong, how alike.

order: slots, the one to keep longest first; utility: future attention of each slot (see `learn.ranked`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.contract.pins import Pins
from kvbench.errors import BadInput
from kvbench.learn import rank


def ranks(order: Tensor) -> Tensor:
    """The rank of each slot, from 1: the inverse of a ranking. (..., slot) int64."""
    return order.argsort(-1) + 1


def oracle_order(utility: Tensor) -> Tensor:
    """The best ranking, ties as everywhere. utility: (layer, kv_head, slot)."""
    return rank(utility, torch.arange(utility.shape[-1]).expand(utility.shape), Pins(), utility.shape[-1])


def shares(utility: Tensor) -> Tensor:
    """Each slot's share of its head's future attention; 0 where there is none. (..., slot) float64."""
    total = utility.double().sum(-1, keepdim=True)
    return torch.where(total > 0, utility.double() / total, 0.0)


def effective_tokens(utility: Tensor) -> Tensor:
    """How many tokens share a head's future attention: exp of its entropy, 1 (one token has all) to the
    number of slots (all equal). (...) float64."""
    share = shares(utility)
    return torch.exp(-torch.special.xlogy(share, share).sum(-1))


def representative(utility: Tensor, count: int) -> list[tuple[int, int]]:
    """(layer, KV head) of `count` heads from the sharpest to the flattest, evenly spaced in that order."""
    order = effective_tokens(utility).flatten().argsort(stable=True)
    places = torch.linspace(0, len(order) - 1, min(count, len(order))).round().long()
    heads = utility.shape[1]
    return [(index // heads, index % heads) for index in order[places].tolist()]


def rank_error(order: Tensor, utility: Tensor) -> Tensor:
    """|rank - the oracle's rank| / number of slots, of each slot. (layer, kv_head, slot) float64, 0..1."""
    off = ranks(order) - ranks(oracle_order(utility))
    return off.abs().double() / order.shape[-1]


def rank_moments(order: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance over all heads of the rank of each slot: (slot,) float64 each."""
    places = ranks(order).flatten(0, -2).double()
    return places.mean(0), places.var(0, correction=0)


def spearman(order: Tensor) -> Tensor:
    """Rank correlation of every pair of heads: (head, head) float64, heads in the order of the layers."""
    places = ranks(order).flatten(0, -2).double()
    centred = places - places.mean(-1, keepdim=True)
    unit = centred / centred.norm(dim=-1, keepdim=True)
    return unit @ unit.T


def budget_costs(order: Tensor, utility: Tensor) -> Tensor:
    """-R^b of KVP for every budget: b * u_(sigma_b) / C(sigma*), which add up to the eviction cost.

    Returns (..., slot) float64, for b = 1 to the number of slots. Where all utility is 0 they add up to 1, as
    every ranking is as good.
    """
    u = utility.double()
    b = torch.arange(1, u.shape[-1] + 1, dtype=torch.float64)
    best = (u.sort(-1, descending=True).values * b).sum(-1, keepdim=True)
    return torch.where(best > 0, u.gather(-1, order) * b / best, b / b.sum())


def missed_masses(order: Tensor, utility: Tensor) -> Tensor:
    """Share of the future attention on tokens that budget b = 1 to the number of slots evicts: (..., slot)
    float64; 0 where all utility is 0."""
    return (1 - shares(utility).gather(-1, order).cumsum(-1)).clamp(0, 1) * (
        utility.sum(-1, keepdim=True) > 0
    )


def head_name(layer: int, head: int) -> str:
    return f"L{layer}.H{head}"


def find_head(text: str, shape: Sequence[int]) -> tuple[int, int]:
    """(layer, KV head) of "L10.H0". shape: how many layers, and KV heads per layer. Raises: BadInput."""
    layers, heads = shape
    match = re.fullmatch(r"L(\d+)\.H(\d+)", text)
    if not match or int(match[1]) >= layers or int(match[2]) >= heads:
        raise BadInput(f"--head '{text}': write L0.H0 to {head_name(layers - 1, heads - 1)}")
    return int(match[1]), int(match[2])
