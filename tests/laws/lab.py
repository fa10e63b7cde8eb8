"""What the laws share: small prompts, every policy as a cell, what was kept and what the model saw.

The reference in here shares no code with the engine: a plain model with its own slow attention, which
reads the whole sequence at once and hides each evicted pair from the queries that come after it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AttentionInterface

from kvbench.contract.cell import PREFILL, Cell, Ranker, Schedule
from kvbench.contract.pins import Pins
from kvbench.contract.registry import POLICIES
from kvbench.contract.second_pass import ContextText
from kvbench.contract.task import Sample
from kvbench.engine import compress as loop
from kvbench.engine.cache import Cache
from kvbench.engine.evaluate import evaluate
from kvbench.engine.measure import Failure, Measurement, SampleResult
from kvbench.model.context_text import context_text
from kvbench.model.open import LoadedModel
from kvbench.model.prompt import Continuation, Prompt
from tests.laws.kinds import representatives
from tests.tiny import KV_HEADS, LAYERS, tiny_loaded, tiny_model

# One registered policy of each kind, and two whose defaults are larger than these prompts.
SPECS = (*representatives(), "snapkv:window=8,kernel=3", "lagkv:sinks=2,lag=8")
# For laws of kept sets and answers, whoever ranked: a sort, one with a window, a draw, and one ranked late.
SOME = ("streaming_llm", "snapkv:window=8,kernel=3", "random", "oracle")
SCHEDULES = ("prefill", "chunked")
N, CHUNK, BUDGETS = 70, 24, (8, 33)  # chunks of 24, 24, 22; budgets on both sides of a chunk
FOREVER = 1 << 40
KEY = 5

Positions = list[Tensor]  # per layer (kv_head, kept): original positions


@functools.cache
def loaded(arch: str) -> LoadedModel:
    return tiny_loaded(arch)


@functools.cache
def plain(arch: str) -> Any:
    """The same weights as `loaded`, under stock sdpa."""
    return tiny_model(arch, "sdpa")


def words(count: int, seed: int) -> tuple[int, ...]:
    """Random ids without the special ones."""
    draw = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(4, 250, (count,), generator=draw).tolist())


def text_of(lm: LoadedModel, ids: tuple[int, ...]) -> ContextText:
    """Ids as policies with a second pass see them, without a template."""
    return context_text(lm.tokenizer, Prompt(ids, (), (), Continuation((5,), 1)))


def prompt_of(
    n: int = N, question: int = 5, reference: int = 4, seed: int = 0, choices: bool = False
) -> Prompt:
    """Random ids; the second of three choices is the reference, the first shares its first token."""
    ref = Continuation(words(reference, seed + 2), reference)
    others = (Continuation((ref.ids[0], *words(2, seed + 3)), 2), Continuation(words(1, seed + 4), 1))
    given = (others[0], ref, others[1]) if choices else ()
    return Prompt(words(n, seed), words(question, seed + 1), given, ref)


def sample_of(prompt: Prompt, name: str = "s", new: int = 4, stop: tuple[str, ...] = ()) -> Sample:
    """A sample for a prompt that is already ids; its texts are never read."""
    if prompt.choices:
        return Sample(name, "", "", "x", choices=tuple("abc"[: len(prompt.choices)]))
    return Sample(name, "", "", "x", max_new_tokens=new, stop=stop)


def ranker_of(spec: str, pins: Pins | None = None) -> Ranker:
    policy = POLICIES.parse(spec)
    return Ranker(policy, policy.pins if pins is None else pins)


def schedule_of(kind: str, chunk: int = CHUNK) -> Schedule:
    return Schedule("chunked", chunk) if kind == "chunked" else PREFILL


def cell_of(ranker: Ranker, budget: int, schedule: str = "prefill", chunk: int = CHUNK) -> Cell:
    return Cell(ranker.policy, budget, ranker.pins, schedule_of(schedule, chunk))


def cells_of(
    specs: Sequence[str], budgets: Sequence[int], schedule: str = "prefill", chunk: int = CHUNK
) -> list[Cell]:
    """Every policy under its own pins at every budget. A cell's spec is as it is written here."""
    rankers = [ranker_of(spec) for spec in specs]
    return [cell_of(ranker, budget, schedule, chunk) for ranker in rankers for budget in budgets]


def measured(result: Measurement | Failure) -> Measurement:
    assert isinstance(result, Measurement), result
    return result


@dataclass
class Forward:
    """One forward. ids, positions: (row, new). hidden: (row, new, d_model), after the last norm. visible:
    (new, new), which of the new tokens each new token is said to see."""

    ids: Tensor
    positions: Tensor
    hidden: Tensor
    visible: Tensor

    def runs(self) -> list[list[int]]:
        """The new tokens as runs that continue one another, by index: one, unless answers branch off."""
        new = len(self.visible)
        ends = [i for i in range(new) if not self.visible[i + 1 :, i].any()]
        return [self.visible[end].nonzero().flatten().tolist() for end in ends]


@contextmanager
def watched(model: Any) -> Iterator[list[Forward]]:
    """What the model receives and gives, forward by forward; extra tokens of policies have no ids."""
    seen: list[Forward] = []

    def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if kwargs.get("input_ids") is None:
            return
        rows = kwargs["input_ids"].shape[0]
        positions = kwargs["position_ids"].expand(rows, -1)
        new, told = positions.shape[1], kwargs["kv_pass"].visible
        visible = torch.ones(new, new, dtype=torch.bool).tril() if told is None else told[:, -new:].clone()
        hidden = output.last_hidden_state.clone()
        seen.append(Forward(kwargs["input_ids"].clone(), positions.clone(), hidden, visible))

    handle = model.model.register_forward_hook(hook, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def held(cache: Cache, row: int) -> Positions:
    """The positions that a row of a cache holds."""
    bucket, offset = cache.locate(row)
    return [bucket.view(layer)[2][offset].clone() for layer in range(cache.layers)]


@contextmanager
def evictions() -> Iterator[tuple[list[dict[Cell, Positions]], list[dict[Cell, int]]]]:
    """What every cell holds after each eviction, and in which row."""
    rounds: list[dict[Cell, Positions]] = []
    places: list[dict[Cell, int]] = []
    original = loop.evict

    def spy(lm: Any, cache: Any, cells: Any, before: Any, rankings: Any, room: Any) -> Any:
        compacted, rows = original(lm, cache, cells, before, rankings, room)
        places.append(dict(zip(cells, rows, strict=True)))
        rounds.append({cell: held(compacted, row) for cell, row in places[-1].items()})
        return compacted, rows

    with patch.object(loop, "evict", spy):
        yield rounds, places


@dataclass
class Trial:
    """One evaluation with all that was recorded. ends: tokens read before each eviction."""

    lm: LoadedModel
    prompt: Prompt
    sample: Sample
    cells: list[Cell]
    done: SampleResult
    rounds: list[dict[Cell, Positions]]
    places: list[dict[Cell, int]]
    forwards: list[Forward]
    ends: list[int]

    def history(self, cell: Cell) -> list[Positions]:
        """What the cell held after each eviction."""
        return [held_now[cell] for held_now in self.rounds if cell in held_now]

    def runs(self) -> list[tuple[Forward, list[int]]]:
        """Every forward with each of its runs."""
        return [(seen, run) for seen in self.forwards for run in seen.runs()]

    def kept(self, cell: Cell) -> Positions:
        return self.history(cell)[-1]

    def row(self, cell: Cell) -> int:
        """The cell's row when it answered."""
        return self.places[-1][cell]

    def __getitem__(self, cell: Cell) -> Measurement:
        return measured(self.done.cells[cell])


def try_out(
    lm: LoadedModel, prompt: Prompt, cells: Sequence[Cell], sample: Sample | None = None,
    draft: bool = True,
) -> Trial:  # fmt: skip
    sample = sample_of(prompt) if sample is None else sample
    with evictions() as (rounds, places), watched(lm.model) as forwards:
        done = evaluate(lm, sample, prompt, cells, KEY, draft)
    n, chunk = len(prompt.context), cells[0].schedule.chunk
    ends = [n] if chunk is None else [min(stop, n) for stop in range(chunk, n + chunk, chunk)]
    return Trial(lm, prompt, sample, list(cells), done, rounds, places, forwards, ends)


@functools.cache
def trial(arch: str, schedule: str, choices: bool = False) -> Trial:
    """All policies at both budgets on one model: computed once, looked at by many laws."""
    cells = cells_of(SPECS, BUDGETS, schedule)
    return try_out(loaded(arch), prompt_of(choices=choices), cells)


def same_positions(one: Positions, other: Positions) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# The reference: evicted is masked.


def _slow_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float,
    sliding_window: int | None = None,
    until: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention head by head over the whole sequence.

    until: (row, layer, kv_head, position), the first query position that no longer sees the key.
    """
    assert attention_mask is None
    assert until is not None
    heads, length = query.shape[1:3]
    at = torch.arange(length)
    out = []
    for head in range(heads):
        group = head // (heads // key.shape[1])
        hidden = (at[None, :] > at[:, None]) | (at[:, None] >= until[:, module.layer_idx, group, None, :])
        if sliding_window is not None:
            hidden = hidden | (at[None, :] <= at[:, None] - sliding_window)
        logits = torch.einsum("rqd,rkd->rqk", query[:, head], key[:, group]) * scaling
        weights = logits.masked_fill(hidden, float("-inf")).softmax(-1)
        out.append(torch.einsum("rqk,rkd->rqd", weights, value[:, group]))
    return torch.stack(out, 2), None


@functools.cache
def masking(arch: str) -> Any:
    """The same weights as `loaded`, under the reference attention."""
    AttentionInterface.register("laws_reference", _slow_attention)
    return tiny_model(arch, "laws_reference")


def visible_until(history: Sequence[Positions], ends: Sequence[int], length: int) -> Tensor:
    """(layer, kv_head, position): the query position from which on a token is gone."""
    until = [[[FOREVER] * length for _ in range(KV_HEADS)] for _ in range(LAYERS)]
    for kept, end in zip(history, ends, strict=True):
        for layer, heads in enumerate(kept):
            for head, positions in enumerate(heads.tolist()):
                for gone in set(range(end)) - set(positions):
                    until[layer][head][gone] = min(until[layer][head][gone], end)
    return torch.tensor(until)


@torch.inference_mode()
def masked_hidden(arch: str, ids: Tensor, until: Tensor) -> Tensor:
    """The reference's last hidden states (row, token, d_model) for ids (row, token)."""
    missing = ids.shape[1] - until.shape[-1]
    until = torch.nn.functional.pad(until, (0, missing), value=FOREVER)
    return masking(arch).model(input_ids=ids, use_cache=False, until=until).last_hidden_state


def log_probs(arch: str, hidden: Tensor) -> Tensor:
    with torch.inference_mode():
        return plain(arch).lm_head(hidden).log_softmax(-1)
