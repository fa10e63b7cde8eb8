"""One sample, all cells: a shared prefill, the full cache's answer, then every kept set's answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..contract.cell import Cell
from ..contract.eviction import eviction_costs, missed_mass
from ..contract.need import Need
from ..contract.task import Sample
from ..model.open import LoadedModel
from ..model.prompt import Prompt
from .answer import DRAFT, Answered, Asked, FutureAttention, Outcome, answer_rows
from .cache import Cache
from .compress import Compressed, compress_in_chunks
from .passes import rank_stored, read_and_rank
from .probe import probe_tokens
from .ranking import Ranker, Ranking, Target
from .selection import evict

ROWS_LIMIT = 3 * 2**30  # bytes of K/V of all kept sets evaluated in one batch


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


@dataclass
class Evaluated:
    """All cells of one sample; `full` is the cell without eviction."""

    full: Measurement
    cells: dict[Cell, Measurement | Failure] = field(default_factory=dict)


@dataclass
class _Context:
    """What the cells of a sample share. room: slots behind the context, for all that may be read there.

    answered: by the full cache, as soon as it has.
    """

    asked: Asked
    ids: Tensor
    room: int
    full: Cache
    ranking: Ranking
    future: FutureAttention
    prefill_s: float
    answered: Answered | None = None

    @property
    def lm(self) -> LoadedModel:
        return self.asked.lm

    @property
    def utility(self) -> Tensor:
        """u of every full-attention layer: (full_layer, kv_head, context)."""
        layers = [self.future.utility[layer] for layer in self.lm.geometry.full_layers]
        return torch.cat([layer.to(self.lm.device) for layer in layers])


@torch.inference_mode()
def evaluate(
    lm: LoadedModel, sample: Sample, prompt: Prompt, cells: dict[Cell, Ranker], key: int, draft: bool = True
) -> Evaluated:
    """Evaluate every cell on one sample.

    cells: each cell with its ranker; all of one schedule and chunk. key: of the sample's random draws.
    draft: verify the full cache's answer in one pass before writing what differs.
    A policy that breaks its contract fails its own cells only.
    """
    context = _read_context(Asked(lm, prompt, sample, draft), cells, key)
    started = time.perf_counter()
    context.answered = answer_rows(context.asked, context.full, observer=context.future)
    seconds = {"prefill_s": context.prefill_s, "score_s": 0.0, "answer_s": time.perf_counter() - started}
    outcome = context.answered.outcomes[0]
    if not prompt.context:  # nothing is cached before the question, so nothing can be evicted
        full = Measurement(outcome, 0, 0, 0, 0.0, None, seconds)
        return Evaluated(full, dict.fromkeys(cells, full))
    (held,) = _held(lm, context.full, context.utility)
    full = Measurement(outcome, held.pairs, held.slots, held.nbytes, 0.0, None, seconds)
    done = Evaluated(full)
    _rank_late(context, cells)
    costs = _eviction_costs(context)
    for batch in _batches(lm, cells, len(prompt.context), context.room):
        done.cells |= _evaluate_batch(context, batch, costs, key)
    return done


def _read_context(asked: Asked, cells: dict[Cell, Ranker], key: int) -> _Context:
    """Prefill the full cache; in the prefill schedule, rank while the queries exist."""
    lm, prompt = asked.lm, asked.prompt
    n = len(prompt.context)
    room = _room(prompt, asked.sample)
    ids = torch.tensor(prompt.context, dtype=torch.int64, device=lm.device)
    ranking = Ranking(lm, [_rankers(cells, future=False)], key, seen=n)
    extra = max((probe_tokens(ranker.policy) for ranker in ranking.wanted[0]), default=0)
    full = Cache.empty(lm.geometry.layers, n + max(room, extra))
    prefill_s = read_and_rank(lm, full, ids, 0, ranking) if n else 0.0
    future = FutureAttention.over(prompt, lm.geometry.full_layers)
    return _Context(asked, ids, room, full, ranking, future, prefill_s)


def _room(prompt: Prompt, sample: Sample) -> int:
    """Slots behind the context: question, and what is read at once or written one by one."""
    new = sample.max_new_tokens
    ahead = len(prompt.reference.ids) + sum(len(choice.ids) for choice in prompt.choices) + min(new, DRAFT)
    return len(prompt.question) + max(new, ahead)


def _rankers(cells: dict[Cell, Ranker], future: bool) -> list[Ranker]:
    """The distinct rankers of the prefill schedule that do, or do not, look at the future."""
    found = (
        ranker
        for cell, ranker in cells.items()
        if cell.schedule == "prefill" and (Need.FUTURE in ranker.policy.needs) == future
    )
    return list(dict.fromkeys(found))


def _rank_late(context: _Context, cells: dict[Cell, Ranker]) -> None:
    """Rank for the policies that look at the future, which is known only now."""
    late = _rankers(cells, future=True)
    context.ranking.future = context.future.utility
    context.ranking.wanted = [late]
    if late:
        rank_stored(context.full, context.ranking, context.future.modules)


def _eviction_costs(context: _Context) -> dict[Ranker, float]:
    """C(sigma)/C(sigma*) of each ranking, the mean over layers and KV heads."""
    ranking = context.ranking
    rankers = [(row, ranker) for row, ranker in ranking.orders if (row, ranker) not in ranking.failed]
    if not rankers:
        return {}
    costs = eviction_costs([ranking.order(row, ranker) for row, ranker in rankers], context.utility)
    found = torch.stack([cost.mean() for cost in costs]).tolist()
    return {ranker: cost for (_, ranker), cost in zip(rankers, found, strict=True)}


def _batches(
    lm: LoadedModel, cells: dict[Cell, Ranker], n: int, room: int
) -> Iterator[dict[Cell, Ranker]]:  # fmt: skip
    """Cells in groups whose caches fit ROWS_LIMIT together, neighbours in budget."""
    geometry = lm.geometry
    pair = 2 * geometry.layers * geometry.kv_heads * geometry.head_dim * lm.dtype.itemsize
    batch: dict[Cell, Ranker] = {}
    used = 0
    for cell in sorted(cells, key=lambda cell: min(cell.budget or n, n)):
        slots = min(cell.budget or n, n) + room + min(cell.chunk or 0, n)
        if batch and used + slots * pair > ROWS_LIMIT:
            yield batch
            batch, used = {}, 0
        batch[cell] = cells[cell]
        used += slots * pair
    if batch:
        yield batch


def _evaluate_batch(
    context: _Context, cells: dict[Cell, Ranker], costs: dict[Ranker, float], key: int
) -> dict[Cell, Measurement | Failure]:
    """Evict to every cell's budget, answer from all kept sets at once, measure."""
    lm = context.lm
    target_of = {cell: Target(ranker, cell.budget or 0) for cell, ranker in cells.items()}
    compressed = _compress(context, cells, list(dict.fromkeys(target_of.values())), key)
    started = time.perf_counter()
    outcomes: list[Outcome] = []
    held: list[_Held] = []
    if compressed.row_of:
        held = _held(lm, compressed.cache, context.utility)
        outcomes = answer_rows(context.asked, compressed.cache, context.answered).outcomes
    answer_s = (time.perf_counter() - started) / max(1, len(outcomes))
    done: dict[Cell, Measurement | Failure] = {}
    for cell, target in target_of.items():
        if target in compressed.failed:
            done[cell] = Failure(compressed.failed[target])
            continue
        row = compressed.row_of[target]
        score_s = compressed.seconds.get(target.ranker, 0.0)
        done[cell] = Measurement(
            outcome=outcomes[row],
            kept=held[row].pairs,
            peak=max(held[row].slots, compressed.peak[target]),
            kv_bytes=held[row].nbytes,
            missed_mass=held[row].missed,
            eviction_cost=costs.get(target.ranker),
            times={"prefill_s": context.prefill_s, "score_s": score_s, "answer_s": answer_s},
        )
    return done


def _compress(
    context: _Context, cells: dict[Cell, Ranker], targets: list[Target], key: int
) -> Compressed:  # fmt: skip
    """The kept sets of the targets, by the schedule that their cells share."""
    lm, n = context.lm, len(context.asked.prompt.context)
    cell = next(iter(cells))
    if cell.schedule == "chunked":
        assert cell.chunk is not None
        future = context.future.utility
        return compress_in_chunks(lm, context.ids, cell.chunk, targets, key, future, context.room)
    ranking = context.ranking
    reasons = ((target, ranking.failed.get((0, target.ranker))) for target in targets)
    failed = {target: reason for target, reason in reasons if reason}
    alive = [target for target in targets if target not in failed]
    cache, rows = evict(lm, context.full, alive, [0] * len(alive), ranking, context.room)
    row_of = dict(zip(alive, rows, strict=True))
    peak = {target: n + probe_tokens(target.ranker.policy) for target in alive}
    return Compressed(cache, row_of, failed, ranking.seconds, peak)


@dataclass(frozen=True)
class _Held:
    """What a row holds, counted in its tensors.

    pairs: per KV head. slots, nbytes: of the row. missed: share of the future attention that it lost.
    """

    pairs: int
    slots: int
    nbytes: int
    missed: float


def _held(lm: LoadedModel, cache: Cache, utility: Tensor) -> list[_Held]:
    """Every row of a cache that holds nothing but context; the host reads the counts of all rows at once."""
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
        rows.append(_Held(int(least), slots, nbytes, missed))
    return rows
