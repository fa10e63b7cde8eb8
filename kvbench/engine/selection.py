"""From rankings to compacted caches: which slots each cell keeps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..contract.draws import scrambled
from ..model.open import LoadedModel
from .cache import Cache, Kept
from .order import keep
from .ranking import Ranker, Ranking, Target


def evict(
    lm: LoadedModel, cache: Cache, targets: list[Target], row_of: list[int], ranking: Ranking, room: int
) -> tuple[Cache, list[int]]:
    """Cut every target's row down to its budget.

    row_of: each target's row in `cache`. Returns the compacted cache and each target's new row;
    targets that keep the same slots of the same row share one.
    """
    kept: list[Kept] = []
    known: dict[Any, int] = {}
    index = []
    names = _names(lm, cache, targets, row_of, ranking)
    for target, row, name in zip(targets, row_of, names, strict=True):
        if name not in known:
            known[name] = len(kept)
            kept.append(Kept(row, _all_layers(lm, cache, row, _kept_slots(lm, cache, target, row, ranking))))
        index.append(known[name])
    compacted, place = cache.compact(kept, room)
    return compacted, [place[i] for i in index]


def _names(
    lm: LoadedModel, cache: Cache, targets: list[Target], row_of: list[int], ranking: Ranking
) -> list[tuple[int, ...]]:
    """A name for what each target keeps: equal names, equal slots of one row.

    Every (layer, KV head, slot) has 128 random bits, and a kept set has the sum of its members', in two
    numbers. The sums of all budgets of a ranking are its running sums, and the host reads all of them once.
    """
    sums: dict[tuple[int, Ranker], Tensor] = {}
    asked: list[Tensor] = []
    names: list[tuple[int, ...]] = [(row,) for row in row_of]
    cut = []
    for i, (target, row) in enumerate(zip(targets, row_of, strict=True)):
        if _fits(lm, cache, target, row):
            continue
        if (row, target.ranker) not in sums:
            sums[row, target.ranker] = _running_sums(ranking.order(row, target.ranker))
        asked.append(sums[row, target.ranker][:, target.budget - 1])
        cut.append(i)
    if asked:
        for i, name in zip(cut, torch.stack(asked).tolist(), strict=True):
            names[i] = (row_of[i], *name)
    return names


def _running_sums(order: Tensor) -> Tensor:
    """(layer, kv_head, slot) slots -> (2, slot) int64: sums of random bits, over the slots ranked so far."""
    numbers = torch.arange(order.numel(), device=order.device).view(order.shape)
    bits = torch.stack([scrambled(numbers + 1), scrambled(numbers + 1 + order.numel())])
    return bits.gather(-1, order.expand_as(bits)).sum((1, 2)).cumsum(-1)


def _fits(lm: LoadedModel, cache: Cache, target: Target, row: int) -> bool:
    """Whether all of a row's slots stay."""
    bucket, _ = cache.locate(row)
    return bucket.filled[lm.geometry.full_layers[0]] <= target.budget


def _kept_slots(
    lm: LoadedModel, cache: Cache, target: Target, row: int, ranking: Ranking
) -> Tensor | None:  # fmt: skip
    """Slots to keep in the full-attention layers (full_layer, kv_head, kept); None when all stay."""
    if _fits(lm, cache, target, row):
        return None
    return keep(ranking.order(row, target.ranker), target.budget)


def _all_layers(lm: LoadedModel, cache: Cache, row: int, slots: Tensor | None) -> list[Tensor]:
    """Kept slots of every layer: sliding-window layers, and rows within budget, keep everything."""
    bucket, _ = cache.locate(row)
    kept = []
    full = {layer: i for i, layer in enumerate(lm.geometry.full_layers)}
    for layer in range(lm.geometry.layers):
        if slots is not None and layer in full:
            kept.append(slots[full[layer]])
            continue
        everything = torch.arange(bucket.filled[layer], device=lm.device)
        kept.append(everything.expand(lm.geometry.kv_heads, -1))
    return kept
