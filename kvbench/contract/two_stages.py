"""One ranking for kept sets that are chosen in two stages: who enters at which size.

A share of every kept set is the best by one score, and the rest the best others by a second score. Such sets
nest as they grow, so that the size at which a slot enters says all of them.
"""

from __future__ import annotations

import torch


def entry_sizes(first: torch.Tensor, second: torch.Tensor, share: float) -> torch.Tensor:
    """The smallest b whose kept set holds a slot: max(1, int(share * b)) by `first`, others by `second`.

    first, second: (batch, kv_head, slot), higher is kept longer. share 0: all by `second`. Returns the same
    shape, int64: 1 to slots, each once.
    """
    slots = first.shape[-1]
    by_first, place, other = _order(first), _places(first), _places(second)
    sizes = torch.arange(1, slots + 1, device=first.device)
    leading = (sizes * share).long().clamp_min(1 if share else 0)
    last = _smallest(other.gather(-1, by_first), leading, sizes - leading - 1)
    entry = torch.searchsorted(leading, place, right=True)
    return torch.minimum(entry, torch.searchsorted(last, other)) + 1


def _order(score: torch.Tensor) -> torch.Tensor:
    """Slots, the best first; of equal ones the newer, as the engine ranks."""
    return score.shape[-1] - 1 - score.flip(-1).argsort(dim=-1, descending=True, stable=True)


def _places(score: torch.Tensor) -> torch.Tensor:
    return _order(score).argsort(-1)


def _smallest(numbers: torch.Tensor, start: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
    """The number at `rank` of numbers[start:], sorted, for every pair of those; -1 for rank -1.

    A wavelet matrix: bit by bit, zeros go before ones, and start and end follow. The host waits for nothing.
    """
    slots = numbers.shape[-1]
    none, low, rank = rank < 0, start.expand_as(numbers), rank.expand_as(numbers)
    high, found = torch.full_like(low, slots), torch.zeros_like(low)
    for bit in reversed(range(slots.bit_length())):
        ones = numbers >> bit & 1
        zeros = torch.nn.functional.pad((1 - ones).cumsum(-1), (1, 0))
        left, right = zeros.gather(-1, low), zeros.gather(-1, high)
        up = rank >= right - left
        found, rank = found + (up.long() << bit), torch.where(up, rank - (right - left), rank)
        low, high = (torch.where(up, zeros[..., -1:] + x - y, y) for x, y in ((low, left), (high, right)))
        numbers = numbers.gather(-1, ones.argsort(dim=-1, stable=True))
    return found.masked_fill(none, -1)
