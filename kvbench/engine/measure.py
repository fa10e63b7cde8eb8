"""What is measured of a cell, counted in the tensors of its cache.

In: caches that hold nothing but context, and the future attention. Out: pairs, slots, bytes and missed mass
of every row, and the results of a sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..contract.cell import Cell, Ranker
from ..contract.eviction import eviction_costs, missed_mass
from ..model.lm import LoadedModel
from .answer import Outcome
from .cache import Cache
from .ranking import Rankings


@dataclass(frozen=True)
class Measurement:
    """What was measured for one cell: everything here comes from tensors, nothing from the request.

    kept: KV pairs per KV head in the full-attention layers. peak: the most slots held at any moment.
    times: seconds; prefill_s is shared by all cells, answer_s is the batch's time over its rows.
    """

    outcome: Outcome
    kept: int
    peak: int
    kv_bytes: int
    missed_mass: float
    eviction_cost: float | None
    times: dict[str, float]


@dataclass(frozen=True)
class Failure:
    """A cell whose policy broke its contract on this sample."""

    reason: str


@dataclass(frozen=True)
class SampleResult:
    """All cells of one sample; `full` is the cell without eviction."""

    full: Measurement
    cells: Mapping[Cell, Measurement | Failure]


@dataclass(frozen=True)
class RowCount:
    """What a row holds, counted in its tensors.

    pairs: per KV head. slots, nbytes: of the row. missed: share of the future attention that it lost.
    """

    pairs: int
    slots: int
    nbytes: int
    missed: float


def count_rows(lm: LoadedModel, cache: Cache, utility: Tensor) -> list[RowCount]:
    """Every row of a cache that holds nothing but context; the host reads the counts of all rows at once.

    utility: u of the context's tokens, (full_layer, kv_head, context).
    """
    counted: list[Tensor] = []
    sizes: list[tuple[int, int]] = []
    for bucket in cache.buckets:
        held = [bucket.view(layer)[2].to(lm.device) for layer in lm.geometry.full_layers]
        positions = torch.stack(held, 1)  # (row, full_layer, kv_head, kept)
        distinct = (positions.diff(dim=-1) > 0).sum(-1) + min(1, positions.shape[-1])
        missed = missed_mass(positions, utility.expand(len(bucket.rows), -1, -1, -1)).flatten(1).mean(1)
        counted.append(torch.stack([distinct.amin((1, 2)), distinct.amax((1, 2)), missed.double()], 1))
        tensors = [tensor for layer in range(lm.geometry.layers) for tensor in bucket.view(layer)[:2]]
        sizes += [(positions.shape[-1], sum(tensor[0].nbytes for tensor in tensors))] * len(bucket.rows)
    rows = []
    for (least, most, missed), (slots, nbytes) in zip(torch.cat(counted).tolist(), sizes, strict=True):
        assert least == most, f"KV heads hold different numbers of pairs: {least:.0f} to {most:.0f}"
        rows.append(RowCount(int(least), slots, nbytes, missed))
    return rows


def measure_costs(rankings: Rankings, utility: Tensor) -> dict[Ranker, float]:
    """C(sigma)/C(sigma*) of each ranking of the whole context, the mean over layers and KV heads."""
    if not rankings.found:
        return {}
    costs = eviction_costs([ranking.order for ranking in rankings.found.values()], utility)
    found = torch.stack([cost.mean() for cost in costs]).tolist()
    return {ranker: cost for (_, ranker), cost in zip(rankings.found, found, strict=True)}
