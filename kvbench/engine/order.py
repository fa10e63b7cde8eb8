"""From scores to a ranking, and from a ranking to the kept slots of every budget.

In: scores, positions, pins. Out: slots in the order in which they are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract.pins import Pins


def rank(score: Tensor, positions: Tensor, pins: Pins, seen: int) -> Tensor:
    """Order the slots of each KV head, the one to keep longest first.

    score: (batch, kv_head, slot) float32; positions: same shape, int64, ascending along slots;
    seen: tokens read so far, so that the last pinned position is seen - 1.
    Returns slots (batch, kv_head, slot) int64.

    The order is total: pinned slots first (sinks by ascending position, then the window by
    descending position), then descending score; ties go to the newer position.
    """
    slots = score.shape[-1]
    newest_first = torch.sort(score.flip(-1), dim=-1, descending=True, stable=True).indices
    order = slots - 1 - newest_first
    if pins.total == 0 or slots == 0:
        return order
    is_sink = positions < pins.first
    is_window = (positions >= seen - pins.last) & ~is_sink
    place = torch.full_like(positions, seen + pins.first)  # everything not pinned comes last, as it is
    place = torch.where(is_window, pins.first + seen - 1 - positions, place)
    place = torch.where(is_sink, positions, place)
    by_tier = torch.sort(place.gather(-1, order), dim=-1, stable=True).indices
    return order.gather(-1, by_tier)


def keep(order: Tensor, budget: int) -> Tensor:
    """The first `budget` slots of a ranking, in ascending slot order: (..., min(budget, slot))."""
    return order[..., :budget].sort(-1).values
