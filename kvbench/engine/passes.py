"""Passes in which policies rank: a chunk of the context, extra tokens, or what is stored.

In: a cache, what is read into it, and who ranks which row. Out: `Rankings`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext

from torch import Tensor

from ..contract.need import Need
from ..model.memory import synchronise
from .attention import Layer, Observer
from .bind import BoundPolicies, Probe, check_room
from .cache import Cache
from .forward import read
from .hidden import recorded_hidden
from .observe import Moment
from .probe import read_probe
from .ranking import RankingPass, Rankings, RowRanker, Wanted
from .second_pass import rank_after_second_pass

AFTERWARDS = frozenset({Need.PROBE, Need.SECOND_PASS})


def read_and_rank(
    bound: BoundPolicies, cache: Cache, ids: Tensor, wanted: Wanted, moment: Moment,
    observer: Observer | None = None,
) -> tuple[Rankings, float]:  # fmt: skip
    """Read one chunk and rank every row, layer by layer, while its queries exist.

    ids: (new,), the last of the `moment.seen` tokens. Policies with extra tokens or a second pass rank
    afterwards, when those are read. observer: also looks at the layers of the chunk. Returns the rankings,
    and the seconds of the reading alone.
    """
    lm = bound.lm
    at_once = [[ranker for ranker in row if not ranker.policy.needs & AFTERWARDS] for row in wanted]
    ranking = RankingPass(bound, at_once, moment)
    needs_hidden = any(Need.HIDDEN_STATES in ranker.policy.needs for row in at_once for ranker in row)
    started = time.perf_counter()
    with recorded_hidden(lm, ranking.hidden) if needs_hidden else nullcontext():
        read(lm, cache, ids, moment.seen - moment.new, observer=_both(ranking, observer))
    synchronise(lm.description.devices)  # `finish` would wait all the same
    seconds = time.perf_counter() - started - ranking.spent()
    done = ranking.finish().joined(rank_probed(bound, cache, wanted, moment))
    return done.joined(rank_after_second_pass(bound, cache, wanted, moment)), seconds


def _both(first: Observer, second: Observer | None) -> Observer:
    def look(layer: Layer) -> None:
        first(layer)
        if second is not None:
            second(layer)

    return look


def rank_probed(bound: BoundPolicies, cache: Cache, wanted: Wanted, moment: Moment) -> Rankings:
    """Rank for the policies with extra tokens; equal tokens are read once, for all who want them.

    The time of a pass counts in full for each of its rankers: alone, each would need it. The cache is left
    as it was.
    """
    done = Rankings()
    for probe in bound.probes:
        done = done.joined(_rank_after(bound, cache, wanted, moment, probe))
    return done


def _rank_after(bound: BoundPolicies, cache: Cache, wanted: Wanted, moment: Moment, probe: Probe) -> Rankings:
    """Rank the rows that want policies of one probe, after its tokens."""
    lm = bound.lm
    count = len(probe.tokens)
    readers = [[ranker for ranker in row if ranker.policy in probe.policies] for row in wanted]
    failures: dict[RowRanker, str] = {}
    for row, rankers in enumerate(readers):
        for ranker in rankers:
            if why := check_room(ranker.policy, lm, moment.seen, count):
                failures[row, ranker] = why
    rows = [row for row, rankers in enumerate(readers) if rankers]
    if failures or not rows:
        return Rankings(failures=failures)
    part = cache if len(rows) == cache.rows else cache.take_rows(rows)
    ranking = RankingPass(bound, [readers[row] for row in rows], moment, count)
    started = time.perf_counter()
    read_probe(lm, part, probe.tokens, moment.seen, ranking)
    synchronise(lm.description.devices)
    seconds = time.perf_counter() - started - ranking.spent()
    return ranking.finish().moved(rows, seconds, count)


def rank_stored(
    bound: BoundPolicies, cache: Cache, wanted: Wanted, moment: Moment, scalings: Mapping[int, float]
) -> Rankings:
    """Rank from keys and values alone, after the prefill: for policies that look at the future.

    scalings: of every full-attention layer, the factor on its logits.
    """
    ranking = RankingPass(bound, wanted, moment)
    for bucket in cache.buckets:
        for index, scaling in scalings.items():
            ranking(Layer.stored(index, bucket, scaling))
    return ranking.finish()
