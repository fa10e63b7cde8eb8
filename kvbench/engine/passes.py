"""Passes in which policies rank: a chunk of the context, extra tokens, or what is stored."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..contract.need import Need
from ..errors import KvbenchError
from ..model.open import LoadedModel
from .attention import Layer, Observer
from .cache import Cache
from .forward import read
from .hidden import recorded_hidden
from .probe import read_embedded, validated_probe
from .ranking import Ranking
from .score import reason

if TYPE_CHECKING:
    from ..model.open import LoadedModel
    from .ranking import Ranker, Ranking


@dataclass
class _Asked:
    """Rankers that read the same extra tokens, by row. tokens: their embeddings (n, d_model)."""

    tokens: Tensor
    rows: dict[int, list[Ranker]] = field(default_factory=dict)


def rank_probed(lm: LoadedModel, cache: Cache, new: int, ranking: Ranking) -> None:
    """Rank every row for its policies with extra tokens; equal tokens are read once, for all who want them.

    new: tokens of the chunk that was read last. The time of a pass counts in full for each of its
    rankers: alone, each would need it. The cache is left as it was.
    """
    for asked in _asked(lm, ranking):
        started, scoring = time.perf_counter(), sum(ranking.seconds.values())
        rows = sorted(asked.rows)
        part = cache if len(rows) == cache.rows else cache.take_rows(rows)
        wanted = [asked.rows[row] for row in rows]
        own = replace(
            ranking,
            wanted=wanted,
            orders={},
            failed={},
            hidden={},
            flags=[],
            probed=len(asked.tokens),
            new=new,
        )
        mark = part.mark()
        read_embedded(lm, part, asked.tokens, ranking.seen, own)
        part.rewind(mark)
        ranking.orders |= {(rows[row], ranker): order for (row, ranker), order in own.orders.items()}
        ranking.failed |= {(rows[row], ranker): reason for (row, ranker), reason in own.failed.items()}
        ranking.flags += [(rows[row], ranker, layer, flag) for row, ranker, layer, flag in own.flags]
        seconds = time.perf_counter() - started - (sum(ranking.seconds.values()) - scoring)
        for ranker in dict.fromkeys(ranker for row in wanted for ranker in row):
            ranking.seconds[ranker] = ranking.seconds.get(ranker, 0.0) + seconds


def _asked(lm: LoadedModel, ranking: Ranking) -> list[_Asked]:
    """The passes that the rows' policies need; a policy whose tokens cannot be read has failed."""
    found: list[_Asked] = []
    for row, rankers in enumerate(ranking.wanted):
        for ranker in rankers:
            if Need.PROBE not in ranker.policy.needs:
                continue
            try:
                tokens = validated_probe(ranker.policy, lm, ranking.seen)
            except KvbenchError as error:
                ranking.failed[row, ranker] = reason(ranker.policy, error)
                continue
            same = next((one for one in found if torch.equal(one.tokens, tokens)), None)
            if same is None:
                found.append(same := _Asked(tokens))
            same.rows.setdefault(row, []).append(ranker)
    return found


def read_and_rank(
    lm: LoadedModel, cache: Cache, ids: Tensor, start: int, ranking: Ranking, observer: Observer | None = None
) -> float:
    """Read one chunk and rank every row, layer by layer, while its queries exist.

    Policies with extra tokens are ranked afterwards, when those are read. observer: also looks at the
    layers of the chunk. Returns the seconds of the reading alone.
    """
    needs_hidden = any(
        Need.HIDDEN_STATES in ranker.policy.needs for row in ranking.wanted for ranker in row
    )  # fmt: skip
    recording = recorded_hidden(lm.model, ranking.hidden) if needs_hidden else nullcontext()
    with recording:
        started, scoring = time.perf_counter(), sum(ranking.seconds.values())
        read(lm, cache, ids, start, observer=_both(ranking.without_probes(), observer))
        seconds = time.perf_counter() - started - (sum(ranking.seconds.values()) - scoring)
    rank_probed(lm, cache, ids.shape[0], ranking)
    ranking.settle()
    return seconds


def _both(first: Observer, second: Observer | None) -> Observer:
    def look(layer: Layer) -> None:
        first(layer)
        if second is not None:
            second(layer)

    return look


def rank_stored(cache: Cache, ranking: Ranking, modules: dict[int, tuple[Any, float]]) -> None:
    """Rank from keys and values alone, after the prefill: for policies that look at the future."""
    for bucket in cache.buckets:
        for index, (module, scaling) in modules.items():
            keys = bucket.view(index)[0]
            no_queries = keys.new_empty(keys.shape[0], keys.shape[1], 0, keys.shape[3])
            ranking(Layer(index, bucket, no_queries, scaling, module))
    ranking.settle()
