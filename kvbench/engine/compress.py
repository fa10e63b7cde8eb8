"""The loop: read a chunk, let every policy rank, evict down to the budgets, read the next chunk.

In: cells of one schedule and the context, as a source of chunks. Out: a cache whose rows are the kept sets,
and each cell's row, or why it has none. After-prefill is the case of one chunk, which the full cache has read
and ranked already; cells that keep the same pairs share a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..contract.cell import Cell, Ranker
from ..contract.second_pass import ContextText
from .bind import BoundPolicies
from .cache import Cache
from .observe import Moment
from .passes import read_and_rank
from .ranking import Rankings, Wanted
from .selection import count_slots, evict


@dataclass(frozen=True, eq=False)
class Compression:
    """Kept sets of the context.

    cache: its rows. row_of: cell -> row. failures: cell -> what its policy did wrong. seconds: cell ->
    scoring time. peak: cell -> most slots held at any moment, chunk included.
    """

    cache: Cache
    row_of: Mapping[Cell, int]
    failures: Mapping[Cell, str]
    seconds: Mapping[Cell, float]
    peak: Mapping[Cell, int]


class ChunkSource(Protocol):
    """The context, chunk by chunk."""

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each chunk."""

    def start(self, room: int) -> Cache:
        """The cache of one row that the first chunk is read into. room: slots behind the last chunk."""

    def rank(self, cache: Cache, index: int, wanted: Wanted) -> Rankings:
        """Read a chunk into every row of the cache, and rank the rows."""


class ReadContext:
    """A context that the full cache has read: one chunk, and rankings that serve all cells. `cache` has one
    row.
    """

    def __init__(self, cache: Cache, tokens: int, rankings: Rankings) -> None:
        self.lengths = [tokens]
        self._cache = cache
        self._rankings = rankings

    def start(self, room: int) -> Cache:
        return self._cache

    def rank(self, cache: Cache, index: int, wanted: Wanted) -> Rankings:
        return self._rankings


class ChunkReader:
    """A context that is read in chunks, each against what was kept of those before and itself.

    ids: (token,), the last `asked` of the question. future, text: see `Moment`.
    """

    def __init__(
        self, bound: BoundPolicies, ids: Tensor, chunk: int, draw: int,
        future: Mapping[int, Tensor] | None, asked: int = 0, text: ContextText | None = None,
    ) -> None:  # fmt: skip
        self.lengths = [min(chunk, len(ids) - start) for start in range(0, len(ids), chunk)]
        self._bound = bound
        self._chunks = ids.split(chunk)
        self._draw = draw
        self._future = future
        self._border = len(ids) - asked
        self._text = text

    def start(self, room: int) -> Cache:
        return Cache.empty(self._bound.lm.geometry.layers, self.lengths[0] + room)

    def rank(self, cache: Cache, index: int, wanted: Wanted) -> Rankings:
        seen = sum(self.lengths[: index + 1])
        asked = max(0, seen - self._border)
        moment = Moment(seen, self.lengths[index], self._draw, self._future, asked, self._text)
        rankings, _ = read_and_rank(self._bound, cache, self._chunks[index], wanted, moment)
        return rankings


def compress(bound: BoundPolicies, cells: Sequence[Cell], source: ChunkSource, room: int) -> Compression:
    """Read, rank and evict until the context has been read.

    cells: of one schedule, each with a policy in `bound`. room: slots behind the context. Policies that fail
    leave, and nobody waits for the rest of the context when all have.
    """
    lm, cache = bound.lm, source.start(room)
    row_of = dict.fromkeys(cells, 0)
    failures: dict[Cell, str] = {}
    seconds = dict.fromkeys(cells, 0.0)
    peak = dict.fromkeys(cells, 0)
    extra = {cell: bound.probe_length(cell.ranker.policy) for cell in cells}
    for index in range(len(source.lengths)):
        rankings = source.rank(cache, index, _want(row_of, cache.rows))
        for cell, row in list(row_of.items()):
            if reason := rankings.failures.get((row, cell.ranker)):
                failures[cell] = reason
                del row_of[cell]
                continue
            found = rankings.found[row, cell.ranker]
            seconds[cell] += found.seconds
            peak[cell] = max(peak[cell], count_slots(lm, cache, row) + found.read_after)
        if not row_of:
            break
        rest = source.lengths[index + 1 : index + 2]
        behind = rest[0] + max(extra.values()) if rest else room
        cache, rows = evict(lm, cache, list(row_of), list(row_of.values()), rankings, behind)
        row_of = dict(zip(row_of, rows, strict=True))
    return Compression(cache, row_of, failures, seconds, peak)


def _want(row_of: Mapping[Cell, int], rows: int) -> Wanted:
    """Per row, who ranks it."""
    wanted: list[dict[Ranker, None]] = [{} for _ in range(rows)]
    for cell, row in row_of.items():
        wanted[row][cell.ranker] = None
    return [list(rankers) for rankers in wanted]
