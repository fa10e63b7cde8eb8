"""The loop: read a chunk, let every policy rank, evict down to the budgets, read the next chunk.

Compress-after-prefill is the case of one chunk. Rows of the cache are the different kept sets; cells
(policy, budget, pins) that keep the same pairs share a row.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..model.open import LoadedModel
from .cache import Cache
from .passes import read_and_rank
from .probe import probe_tokens
from .ranking import Ranker, Ranking, Target
from .selection import evict


@dataclass
class Compressed:
    """Caches after the context was read and evicted.

    cache: rows of kept sets. row_of: target -> row. failed: target -> what its policy did wrong.
    seconds: ranker -> scoring time. peak: target -> most slots held at any moment, chunk included.
    """

    cache: Cache
    row_of: dict[Target, int]
    failed: dict[Target, str]
    seconds: dict[Ranker, float]
    peak: dict[Target, int]


def compress_in_chunks(
    lm: LoadedModel, ids: Tensor, chunk: int, targets: list[Target], ranking_key: int,
    future: dict[int, Tensor] | None, room: int,
) -> Compressed:  # fmt: skip
    """The chunked schedule: after each chunk, rank kept + new tokens and evict down to the budget.

    A chunk attends to what was kept and to itself; only then is anything evicted.
    """
    cache = Cache.empty(lm.geometry.layers, min(chunk, ids.shape[0]) + room)
    done = Compressed(cache, dict.fromkeys(targets, 0), {}, {}, dict.fromkeys(targets, 0))
    extra = {target: probe_tokens(target.ranker.policy) for target in targets}
    for start in range(0, ids.shape[0], chunk):
        piece = ids[start : start + chunk]
        alive = list(done.row_of)
        wanted: list[list[Ranker]] = [[] for _ in range(done.cache.rows)]
        for target in alive:
            if target.ranker not in wanted[done.row_of[target]]:
                wanted[done.row_of[target]].append(target.ranker)
        ranking = Ranking(lm, wanted, ranking_key, start + piece.shape[0], future, seconds=done.seconds)
        read_and_rank(lm, done.cache, piece, start, ranking)
        for target in alive:
            if reason := ranking.failed.get((done.row_of[target], target.ranker)):
                done.failed[target] = reason
        alive = [target for target in alive if target not in done.failed]
        if not alive:  # every policy failed, so nobody waits for the rest of the context
            done.row_of = {}
            break
        for target in alive:
            held = done.cache.locate(done.row_of[target])[0].filled[lm.geometry.full_layers[0]]
            done.peak[target] = max(done.peak[target], held + extra[target])
        last = start + chunk >= ids.shape[0]
        rows = [done.row_of[target] for target in alive]
        done.cache, rows = evict(
            lm, done.cache, alive, rows, ranking, room if last else chunk + max(extra.values())
        )
        done.row_of = dict(zip(alive, rows, strict=True))
    return done
