"""Ranking while a pass is read: every policy scores and orders every full-attention layer.

In: layers, one after another, and which rows want which policies. Out: `Rankings`, immutable, when the pass
is over. Rows with equally many slots that want one policy are scored in one call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..contract.cell import Ranker
from ..contract.observation import Observation
from ..contract.policy import Policy
from ..errors import KvbenchError
from ..model.memory import synchronise
from .attention import Layer
from .bind import BoundPolicies, reason
from .observe import Moment, observe_rows
from .order import rank
from .score import InputsWritten, not_finite, score_and_flag
from .stopwatch import Lap, SharedCosts

SCORE_LIMIT = 2**28  # bytes of float32 attention that one call of `score` may need for a block of queries
QUERIES = 256  # in such a block, see `contract.attention_sums`

RowRanker = tuple[int, Ranker]  # a row of the cache and who ranks it
Wanted = Sequence[Sequence[Ranker]]  # per row, who ranks it
PlacedSums = dict[tuple[int, int], Tensor]  # (layer, first row of a bucket) -> (row, query_head, slot)


@dataclass(frozen=True, eq=False)
class Ranking:
    """One row, ranked in every full-attention layer, on the model's first device.

    order: (full_layer, kv_head, slot) int64, slots, the one to keep longest first. score: same shape,
    float32, by slot. seconds: what scoring and ordering took, shared work included. read_after: tokens that
    were read behind the context for it, at most at once.
    """

    order: Tensor
    score: Tensor
    seconds: float
    read_after: int = 0


@dataclass(frozen=True, eq=False)
class Rankings:
    """What came of a pass: for each row and ranker, a ranking or the reason why there is none."""

    found: Mapping[RowRanker, Ranking] = field(default_factory=dict)
    failures: Mapping[RowRanker, str] = field(default_factory=dict)

    def joined(self, other: Rankings) -> Rankings:
        """These and the rankings of another pass, which are of other rows or rankers."""
        return Rankings({**self.found, **other.found}, {**self.failures, **other.failures})

    def moved(self, rows: Sequence[int], seconds: float, read_after: int) -> Rankings:
        """The rankings of a part of a batch, after extra tokens: row i is rows[i] there, and each took so
        many seconds more."""
        found = {
            (rows[row], ranker): replace(one, seconds=one.seconds + seconds, read_after=read_after)
            for (row, ranker), one in self.found.items()
        }
        return Rankings(found, {(rows[row], ranker): why for (row, ranker), why in self.failures.items()})


class _Track:
    """What a row's ranking is made of, layer by layer. laps: with the share of each that it is charged."""

    def __init__(self) -> None:
        self.orders: list[Tensor] = []
        self.scores: list[Tensor] = []
        self.laps: list[tuple[Lap, float]] = []


class RankingPass:
    """Observer of one pass. probe: how many extra tokens it reads; they stand last and do not compete.

    hidden: layer -> what its attention module received, filled from outside while the layer is read. second:
    attention of the second pass that all these policies asked for.
    """

    def __init__(
        self, bound: BoundPolicies, wanted: Wanted, moment: Moment, probe: int = 0,
        second: PlacedSums | None = None,
    ) -> None:  # fmt: skip
        self.hidden: dict[int, Tensor] = {}
        self._bound = bound
        self._moment = moment
        self._rankers: list[dict[Policy, list[Ranker]]] = [{} for _ in wanted]
        for mine, row in zip(self._rankers, wanted, strict=True):
            for ranker in row:
                mine.setdefault(ranker.policy, []).append(ranker)
        self._probe = probe
        self._second = second or {}
        self._tracks: defaultdict[RowRanker, _Track] = defaultdict(_Track)
        self._failures: dict[RowRanker, str] = {}
        self._finite: list[tuple[int, Policy, Sequence[int], Tensor]] = []
        self._laps: list[Lap] = []

    def __call__(self, layer: Layer) -> None:
        if layer.index not in self._bound.lm.geometry.full_layers:
            return
        shown: dict[tuple[int, ...], tuple[Observation, SharedCosts]] = {}
        for policy, rows in self._calls(layer):
            if rows not in shown:
                shown[rows] = self._observe(layer, rows)
            if not self._score(policy, rows, *shown[rows]) and len(rows) > 1:
                for row in rows:  # a policy that fails on one row fails there only
                    self._score(policy, (row,), *self._observe(layer, (row,)))

    def finish(self) -> Rankings:
        """Read once what the devices know of all scores, and give the rankings of those that are finite."""
        synchronise(self._bound.lm.description.devices)
        if self._finite:
            device = self._bound.lm.device
            known = torch.cat([finite.to(device) for *_, finite in self._finite]).tolist()
            for layer, policy, rows, _ in reversed(self._finite):  # the first layer has the last word
                mine = known[len(known) - len(rows) :]
                del known[len(known) - len(rows) :]
                for row, fine in zip(rows, mine, strict=True):
                    if not fine:
                        self._fail(policy, row, not_finite(policy, layer))
        done = {place: track for place, track in self._tracks.items() if place not in self._failures}
        return Rankings({place: self._join(track) for place, track in done.items()}, dict(self._failures))

    def spent(self) -> float:
        """Seconds of all scoring and ordering of this pass, once the devices are done."""
        return sum(lap.seconds for lap in self._laps)

    def _join(self, track: _Track) -> Ranking:
        device = self._bound.lm.device
        order, score = (
            torch.stack([one.to(device) for one in part]) for part in (track.orders, track.scores)
        )
        return Ranking(order, score, sum(share * lap.seconds for lap, share in track.laps))

    def _calls(self, layer: Layer) -> Iterator[tuple[Policy, tuple[int, ...]]]:
        """Every policy with rows of the layer's bucket that want it, as many as may be scored at once."""
        rows_of: dict[Policy, list[int]] = {}
        for row in layer.bucket.rows:
            for policy, rankers in self._rankers[row].items():
                if (row, rankers[0]) not in self._failures:
                    rows_of.setdefault(policy, []).append(row)
        heads, new = layer.queries.shape[1:3]
        need = 4 * heads * min(QUERIES, max(1, new)) * layer.bucket.filled[layer.index]
        most = max(1, SCORE_LIMIT // need)
        for policy, rows in rows_of.items():
            for start in range(0, len(rows), most):
                yield policy, tuple(rows[start : start + most])

    def _observe(self, layer: Layer, rows: tuple[int, ...]) -> tuple[Observation, SharedCosts]:
        hidden = self.hidden.get(layer.index)
        second = self._second.get((layer.index, layer.bucket.rows.start))
        seen = observe_rows(self._bound, layer, rows, self._moment, hidden, self._probe, second)
        costs = SharedCosts(seen.keys.device)
        seen._sharing = costs.compute
        return seen, costs

    def _score(
        self, policy: Policy, rows: tuple[int, ...], seen: Observation, costs: SharedCosts
    ) -> bool:  # fmt: skip
        """Score and order these rows; False when the policy failed, which on a single row is for good."""
        lap = Lap(seen.keys.device)
        try:
            score, finite = score_and_flag(self._bound.policies[policy], seen)
        except InputsWritten:
            raise
        except KvbenchError as error:
            costs.take_borrowed()
            if len(rows) == 1:
                self._fail(policy, rows[0], reason(policy, error))
            return False
        finally:
            lap.end()
            self._laps.append(lap)
        self._finite.append((seen.layer, policy, rows, finite))
        charged = [(one, 1 / len(rows)) for one in (lap, *costs.take_borrowed())]
        indices: dict[Ranker, list[int]] = {}
        for index, row in enumerate(rows):
            for ranker in self._rankers[row][policy]:
                indices.setdefault(ranker, []).append(index)
        for ranker, mine in indices.items():
            self._order(ranker, rows, mine, score, seen, charged)
        return True

    def _order(
        self, ranker: Ranker, rows: Sequence[int], mine: list[int], score: Tensor, seen: Observation,
        charged: list[tuple[Lap, float]],
    ) -> None:  # fmt: skip
        """Order the slots of some of the rows, those at the indices `mine`."""
        lap = Lap(seen.keys.device)
        whole = len(mine) == len(rows)
        part, positions = (x if whole else torch.stack([x[i] for i in mine]) for x in (score, seen.positions))
        order = rank(part, positions, ranker.pins, seen.seen)
        lap.end()
        self._laps.append(lap)
        for index, one, values in zip(mine, order, part, strict=True):
            track = self._tracks[rows[index], ranker]
            track.orders.append(one)
            track.scores.append(values)
            track.laps += [*charged, (lap, 1 / len(mine))]

    def _fail(self, policy: Policy, row: int, why: str) -> None:
        """A policy has failed on a row, whatever its pins."""
        for ranker in self._rankers[row][policy]:
            self._failures[row, ranker] = why
