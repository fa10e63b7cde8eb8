"""One sample, all cells: a shared prefill, the full cache's answer, then every kept set's answer.

In: a LoadedModel, a sample with its prompt, cells. Out: a Measurement or a Failure for each cell.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..contract.cell import Cell, Ranker
from ..contract.need import Need
from ..contract.policy import Policy
from ..contract.task import Sample
from ..model.context_text import context_text
from ..model.lm import LoadedModel
from ..model.prompt import Prompt
from .answer import DRAFT, AnswerRequest, AnswerSet, answer_rows
from .bind import BoundPolicies, bind_policies
from .cache import Cache
from .compress import ChunkReader, ChunkSource, ReadContext, compress
from .future import FutureAttention
from .measure import Failure, Measurement, SampleResult, count_rows, measure_costs
from .observe import Moment
from .passes import rank_stored, read_and_rank
from .ranking import Rankings
from .score import InputsWritten

ROWS_LIMIT = 3 * 2**30  # bytes of K/V of all kept sets evaluated in one batch


@dataclass(frozen=True, eq=False)
class ReadSample:
    """What the cells of a sample share.

    ids: (token,). draw: key of the sample's random draws. room: slots behind the context, for all that may be
    read there. full: the full cache. rankings, costs: of the whole context, which is its row 0. utility: u,
    (full_layer, kv_head, context). answers: of the full cache. prefill_s: seconds.
    """

    request: AnswerRequest
    bound: BoundPolicies
    ids: Tensor
    draw: int
    room: int
    full: Cache
    rankings: Rankings
    costs: Mapping[Ranker, float]
    future: Mapping[int, Tensor]
    utility: Tensor
    answers: AnswerSet
    prefill_s: float


@torch.inference_mode()
def evaluate(
    lm: LoadedModel, sample: Sample, prompt: Prompt, cells: Sequence[Cell], key: int, draft: bool = True
) -> SampleResult:
    """Evaluate every cell on one sample.

    cells: of any schedules; one without a policy gets the full cache's measurement. key: of the sample's
    random draws. draft: verify the full cache's answer in one pass before writing what differs. A policy that
    breaks its contract fails its own cells only; if it writes into what others see, the sample is read anew
    without it. All its forwards are rotated as one over the whole sample (see `model.rotation`).
    """
    refused: dict[Policy, str] = {}
    request = AnswerRequest(lm, prompt, sample, draft)
    while True:
        try:
            with lm.rotation.whole(request.tokens):
                return _evaluate(request, cells, key, refused)
        except InputsWritten as error:
            refused[error.policy] = str(error)


def _evaluate(
    request: AnswerRequest, cells: Sequence[Cell], key: int, refused: Mapping[Policy, str]
) -> SampleResult:
    """refused: policies whose cells fail, and why."""
    lm, prompt = request.lm, request.prompt
    bound = bind_policies(lm, (cell.policy for cell in cells if cell.policy is not None), refused)
    full, context = evaluate_full(request, bound, cells, key)
    results: dict[Cell, Measurement | Failure] = {}
    evicted: list[Cell] = []
    for cell in dict.fromkeys(cells):
        if cell.policy is None or context is None:  # without a context nothing can be evicted
            results[cell] = full
        elif cell.policy in bound.failures:
            results[cell] = Failure(bound.failures[cell.policy])
        else:
            evicted.append(cell)
    if context is not None:
        for batch in _batch_cells(lm, evicted, len(prompt.context), context.room):
            results |= evaluate_batch(context, batch)
    return SampleResult(full, {cell: results[cell] for cell in cells})


def evaluate_full(
    request: AnswerRequest, bound: BoundPolicies, cells: Sequence[Cell], key: int
) -> tuple[Measurement, ReadSample | None]:
    """The full cache: it reads, answers, and ranks for the prefill schedule while its queries exist.

    The policies that look at the future rank when it has answered. No context when the prompt has none.
    """
    lm, prompt = request.lm, request.prompt
    n, room = len(prompt.context), _count_room(prompt, request.sample)
    ids = torch.tensor(prompt.context, dtype=torch.int64, device=lm.device)
    now, late = (_find_rankers(bound, cells, future) for future in (False, True))
    extra = max((bound.probe_length(ranker.policy) for ranker in now), default=0)
    cache = Cache.empty(lm.geometry.layers, n + max(room, extra))
    rankings, prefill_s = Rankings(), 0.0
    if n:
        moment = Moment(n, n, key, None, prompt.asked, context_text(lm.tokenizer, prompt))
        rankings, prefill_s = read_and_rank(bound, cache, ids, [now], moment)
    future = FutureAttention(lm, prompt)
    started = time.perf_counter()
    answers = answer_rows(request, cache, observer=future)
    times = {"prefill_s": prefill_s, "score_s": 0.0, "answer_s": time.perf_counter() - started}
    outcome = answers.outcomes[0]
    if not n:
        return Measurement(outcome, 0, 0, 0, 0.0, None, times), None
    utility = future.stack()
    (held,) = count_rows(lm, cache, utility)
    if late:
        moment = Moment(n, n, key, future.utility, prompt.asked)
        rankings = rankings.joined(rank_stored(bound, cache, [late], moment, future.scalings))
    costs = measure_costs(rankings, utility)
    full = Measurement(outcome, held.pairs, held.slots, held.nbytes, 0.0, None, times)
    return full, ReadSample(
        request, bound, ids, key, room, cache, rankings, costs, future.utility, utility, answers, prefill_s
    )


def _count_room(prompt: Prompt, sample: Sample) -> int:
    """Slots behind the context: question, and what is read at once or written one by one."""
    new = sample.max_new_tokens
    ahead = len(prompt.reference.ids) + sum(len(choice.ids) for choice in prompt.choices) + min(new, DRAFT)
    return len(prompt.question) + max(new, ahead)


def _find_rankers(bound: BoundPolicies, cells: Sequence[Cell], future: bool) -> list[Ranker]:
    """The distinct rankers of the prefill schedule that do, or do not, look at the future."""
    found = (
        cell.ranker
        for cell in cells
        if cell.policy is not None
        and cell.schedule.kind == "prefill"
        and cell.policy not in bound.failures
        and (Need.FUTURE in cell.policy.needs) == future
    )
    return list(dict.fromkeys(found))


def _batch_cells(lm: LoadedModel, cells: Sequence[Cell], n: int, room: int) -> Iterator[list[Cell]]:
    """Cells of one schedule, in groups whose caches fit ROWS_LIMIT together, neighbours in budget."""
    geometry = lm.geometry
    pair = 2 * geometry.layers * geometry.kv_heads * geometry.head_dim * lm.dtype.itemsize
    for schedule in dict.fromkeys(cell.schedule for cell in cells):
        batch: list[Cell] = []
        used = 0
        mine = (cell for cell in cells if cell.schedule == schedule)
        for cell in sorted(mine, key=lambda cell: cell.held(n)):
            size = pair * (cell.held(n) + room + min(schedule.chunk or 0, n))
            if batch and used + size > ROWS_LIMIT:
                yield batch
                batch, used = [], 0
            batch.append(cell)
            used += size
        yield batch


def evaluate_batch(context: ReadSample, cells: Sequence[Cell]) -> dict[Cell, Measurement | Failure]:
    """Evict to the budget of every cell of one schedule, answer from all kept sets at once, measure."""
    lm = context.bound.lm
    compressed = compress(context.bound, cells, _choose_source(context, cells[0]), context.room)
    done: dict[Cell, Measurement | Failure] = {
        cell: Failure(reason) for cell, reason in compressed.failures.items()
    }
    if not compressed.row_of:
        return done
    started = time.perf_counter()
    held = count_rows(lm, compressed.cache, context.utility)
    outcomes = answer_rows(context.request, compressed.cache, context.answers).outcomes
    answer_s = (time.perf_counter() - started) / len(outcomes)
    for cell, row in compressed.row_of.items():
        done[cell] = Measurement(
            outcome=outcomes[row],
            kept=held[row].pairs,
            peak=max(held[row].slots, compressed.peak[cell]),
            kv_bytes=held[row].nbytes,
            missed_mass=held[row].missed,
            eviction_cost=context.costs.get(cell.ranker) if cell.schedule.kind == "prefill" else None,
            times={
                "prefill_s": context.prefill_s,
                "score_s": compressed.seconds[cell],
                "answer_s": answer_s,
            },
        )
    return done


def _choose_source(context: ReadSample, cell: Cell) -> ChunkSource:
    """How the context is read under a cell's schedule."""
    if cell.schedule.chunk is None:
        return ReadContext(context.full, len(context.ids), context.rankings)
    return ChunkReader(
        context.bound,
        context.ids,
        cell.schedule.chunk,
        context.draw,
        context.future,
        context.request.prompt.asked,
        context_text(context.request.lm.tokenizer, context.request.prompt),
    )
