"""From rankings to compacted caches: which slots each cell keeps.

In: a cache, cells with the rows that they stand on, and the rows' rankings. Out: a new cache, cut to the
budgets, and every cell's row of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..contract.cell import Cell
from ..contract.draws import scrambled
from ..model.lm import LoadedModel
from .cache import Cache, KeptSet
from .order import keep
from .ranking import Rankings, RowRanker


def evict(
    lm: LoadedModel, cache: Cache, cells: Sequence[Cell], rows: Sequence[int], rankings: Rankings, room: int
) -> tuple[Cache, list[int]]:
    """Cut every cell's row down to its budget.

    rows: each cell's row in `cache`. Returns the compacted cache and each cell's new row; cells that keep the
    same slots of the same row share one. room: slots to preallocate behind the kept ones.
    """
    kept: list[KeptSet] = []
    known: dict[Any, int] = {}
    index = []
    names = _name_kept_sets(lm, cache, cells, rows, rankings)
    for cell, row, name in zip(cells, rows, names, strict=True):
        if name not in known:
            known[name] = len(kept)
            slots = None if _fits(lm, cache, cell, row) else _select(cell, row, rankings)
            kept.append(KeptSet(row, _fill_layers(lm, cache, row, slots)))
        index.append(known[name])
    compacted, place = cache.compact(kept, room)
    return compacted, [place[i] for i in index]


def count_slots(lm: LoadedModel, cache: Cache, row: int) -> int:
    """Slots that a row holds in each full-attention layer."""
    bucket, _ = cache.locate(row)
    return bucket.filled[lm.geometry.full_layers[0]]


def _name_kept_sets(
    lm: LoadedModel, cache: Cache, cells: Sequence[Cell], rows: Sequence[int], rankings: Rankings
) -> list[tuple[int, ...]]:
    """A hash of each cell's kept set: equal hashes, equal slots of one row.

    Every (layer, KV head, slot) has 128 random bits, and a kept set has the sum of its members', in two
    numbers. The sums of all budgets of a ranking are its running sums, and the host reads all of them once.
    """
    sums: dict[RowRanker, Tensor] = {}
    wanted: list[Tensor] = []
    names: list[tuple[int, ...]] = [(row,) for row in rows]
    cut = []
    for i, (cell, row) in enumerate(zip(cells, rows, strict=True)):
        if _fits(lm, cache, cell, row):
            continue
        place = (row, cell.ranker)
        if place not in sums:
            sums[place] = _sum_bits(rankings.found[place].order)
        wanted.append(sums[place][:, cell.held(count_slots(lm, cache, row)) - 1])
        cut.append(i)
    if wanted:
        for i, name in zip(cut, torch.stack(wanted).tolist(), strict=True):
            names[i] = (rows[i], *name)
    return names


def _sum_bits(order: Tensor) -> Tensor:
    """(layer, kv_head, slot) slots -> (2, slot) int64: sums of random bits, over the slots ranked so far."""
    numbers = torch.arange(order.numel(), device=order.device).view(order.shape)
    bits = torch.stack([scrambled(numbers + 1), scrambled(numbers + 1 + order.numel())])
    return bits.gather(-1, order.expand_as(bits)).sum((1, 2)).cumsum(-1)


def _fits(lm: LoadedModel, cache: Cache, cell: Cell, row: int) -> bool:
    """Whether all of a row's slots stay."""
    held = count_slots(lm, cache, row)
    return cell.held(held) == held


def _select(cell: Cell, row: int, rankings: Rankings) -> Tensor:
    """Slots to keep in the full-attention layers: (full_layer, kv_head, kept), ascending."""
    order = rankings.found[row, cell.ranker].order
    return keep(order, cell.held(order.shape[-1]))


def _fill_layers(lm: LoadedModel, cache: Cache, row: int, slots: Tensor | None) -> list[Tensor]:
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
