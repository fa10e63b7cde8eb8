"""Positions, small and odd prompts, and rows that end early, are rewound or grow."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from kvbench.engine.answer import AnswerRequest, answer_rows
from kvbench.engine.cache import Cache, KeptSet
from kvbench.engine.forward import read
from kvbench.model.prompt import Continuation, Prompt
from tests.laws.lab import (
    CHUNK,
    SCHEDULES,
    SOME,
    SPECS,
    N,
    Trial,
    cells_of,
    held,
    loaded,
    plain,
    prompt_of,
    sample_of,
    trial,
    try_out,
    words,
)  # fmt: skip
from tests.tiny import DISTINCT, KV_HEADS, LAYERS

FORWARDS, MIXED = (0, 1, 2, 3), (3, 0, 1, 2)  # orders of choices


def spans(done: Trial) -> list[tuple[int, int]]:
    """First and last position of every forward; rows of a forward always share them."""
    for seen in done.forwards:
        assert (seen.positions == seen.positions[:1]).all()
        assert (seen.positions.diff(dim=-1) == 1).all()
    return [(int(seen.positions[0, 0]), int(seen.positions[0, -1])) for seen in done.forwards]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_positions_count_the_whole_context(schedule: str, spec: str) -> None:
    """B01: 200 tokens, budget 20: the question is read at 200..206, the answers and all drafts at 207..."""
    prompt = prompt_of(200, question=7, reference=5)
    lm = dataclasses.replace(loaded("llama"), eos_ids=frozenset())
    cells = cells_of((spec,), (20,), schedule, 64)
    done = try_out(lm, prompt, cells, sample_of(prompt, new=5), draft=False)
    decoding = [(position, position) for position in range(207, 211)]  # the fifth token is never read
    chunks = [] if schedule == "prefill" else [(0, 63), (64, 127), (128, 191), (192, 199)]
    full = [(0, 199), (200, 211), *decoding]  # the last reference token is read for its attention
    assert spans(done) == [*full, *chunks, (200, 210), *decoding]
    drafted = try_out(lm, prompt, cells, sample_of(prompt, new=5))
    for seen in drafted.forwards:
        for run in seen.runs():
            assert (seen.positions[:, run].diff(dim=-1) == 1).all()
            assert int(seen.positions[0, run[0]]) in (0, 64, 128, 192, 200, *range(207, 211))


@pytest.mark.parametrize("arch", ["llama", "sliding"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("choices", [False, True])
@pytest.mark.parametrize("n", [0, 1, 2])
def test_tiny_contexts(arch: str, schedule: str, choices: bool, n: int) -> None:
    """B23: all policies, budgets on both sides; where everything is kept, it is the full cache."""
    prompt = prompt_of(n, seed=n, choices=choices)
    done = try_out(loaded(arch), prompt, cells_of(SOME, (1, 2, 500), schedule))
    for cell in done.cells:
        assert done[cell].kept == min(cell.budget or 0, n)
        if (cell.budget or 0) >= n:
            assert done[cell].outcome.nll == pytest.approx(done.done.full.outcome.nll, abs=1e-5)
            assert done[cell].outcome.answer.label == done.done.full.outcome.answer.label
    whole = torch.tensor([[*prompt.context, *prompt.question, *prompt.reference.ids]])
    logprobs = plain(arch)(whole).logits[0, -1 - len(prompt.reference.ids) : -1].log_softmax(-1)
    nll = -logprobs.gather(1, torch.tensor(prompt.reference.ids)[:, None]).mean()
    assert done.done.full.outcome.nll == pytest.approx(float(nll), abs=1e-4)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_question_longer_than_the_context(schedule: str) -> None:
    prompt = prompt_of(10, question=60)
    done = try_out(loaded("llama"), prompt, cells_of(SOME, (4, 10), schedule, 4))
    assert {done[cell].kept for cell in done.cells if cell.budget == 4} == {4}
    for cell in (cell for cell in done.cells if cell.budget == 10):
        assert done[cell].outcome.nll == pytest.approx(done.done.full.outcome.nll, abs=1e-5)


@pytest.mark.parametrize("arch", DISTINCT)
def test_choices_without_a_common_token(arch: str) -> None:
    """Each choice is scored from the cache after the question, whatever was scored before it."""
    parts = [
        Continuation(words(size, 50 + size), scored) for size, scored in ((1, 1), (4, 2), (2, 2), (3, 3))
    ]
    assert len({part.ids[0] for part in parts}) == 4
    base = prompt_of()
    done = {}
    for order in (FORWARDS, MIXED):
        prompt = Prompt(base.context, base.question, tuple(parts[i] for i in order), parts[1])
        trial_ = try_out(loaded(arch), prompt, cells_of(("knorm", "snapkv"), (12,)))
        for cell in trial_.cells:
            found = trial_[cell].outcome.answer.loglikelihoods
            done[order, cell] = [found[order.index(i)] for i in range(4)]
    for cell in trial_.cells:
        assert done[FORWARDS, cell] == pytest.approx(done[MIXED, cell], abs=1e-5)
    start = [*base.context, *base.question]
    for index, part in enumerate(parts):
        logits = plain(arch)(torch.tensor([[*start, *part.ids]])).logits[0, len(start) - 1 : -1]
        each = logits.log_softmax(-1).gather(1, torch.tensor(part.ids)[:, None])[-part.scored :]
        full = trial_.done.full.outcome.answer.loglikelihoods[MIXED.index(index)]
        assert full == pytest.approx(float(each.sum()), abs=1e-4)


def written(done: Trial) -> Tensor:
    """Generated ids of a batch that no row has left: (row, token)."""
    start = len(done.prompt.context) + len(done.prompt.question)
    steps = [seen.ids for seen in done.forwards if int(seen.positions[0, 0]) >= start]
    rows = max(step.shape[0] for step in steps)
    return torch.cat([step for step in steps if step.shape[0] == rows], 1)


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("arch", DISTINCT)
def test_rows_that_end_do_not_change_the_others(arch: str, schedule: str, draft: bool) -> None:
    """Every row stops at its own EOS and says what it says when nobody stops."""
    prompt, cells = prompt_of(), cells_of(SOME, (8, 33), schedule)
    endless = dataclasses.replace(loaded(arch), eos_ids=frozenset())
    free = try_out(endless, prompt, cells, sample_of(prompt, new=15), draft=False)
    ids = written(free)  # all but the fifteenth token
    eos = {int(ids[row, 1 + row % 10]) for row in range(0, ids.shape[0], 2)}  # half the rows end somewhere
    lm = dataclasses.replace(loaded(arch), eos_ids=frozenset(eos))
    done = try_out(lm, prompt, cells, sample_of(prompt, new=14), draft)
    lengths = set()
    for cell in cells:
        row = ids[free.row(cell)].tolist()
        ends = [step for step, token in enumerate(row) if token in eos]
        expected = row[: ends[0]] if ends else row
        assert done[cell].outcome.answer.text == lm.tokenizer.decode(expected, skip_special_tokens=True)
        lengths.add(len(expected))
    assert len(lengths) > 2
    batches = [seen.ids.shape[0] for seen in done.forwards if seen.ids.shape[1] == 1]
    assert len(set(batches)) > 2  # the full cache's own row, all rows, and fewer rows


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stop_strings(schedule: str) -> None:
    """The answer ends before the first stop string, and rows that met one leave."""
    prompt, cells = prompt_of(), cells_of(SOME, (8, 33), schedule)
    lm = dataclasses.replace(loaded("llama"), eos_ids=frozenset())
    free = try_out(lm, prompt, cells, sample_of(prompt, new=20))
    texts = {cell: free[cell].outcome.answer.text for cell in cells}
    letters = {letter for text in texts.values() for letter in text[1:] if letter.isascii()}
    stops = tuple(sorted(letters, key=lambda s: -sum(s in text for text in texts.values()))[:2])
    done = try_out(lm, prompt, cells, sample_of(prompt, new=20, stop=stops))
    for cell, text in texts.items():
        cut = min([text.index(stop) for stop in stops if stop in text], default=len(text))
        assert done[cell].outcome.answer.text == text[:cut]
    assert len({len(done[cell].outcome.answer.text) for cell in cells}) > 2


@pytest.mark.parametrize("first_is_eos", [True, False])
def test_an_answer_of_nothing(first_is_eos: bool) -> None:
    prompt = prompt_of()
    lm = dataclasses.replace(loaded("llama"), eos_ids=frozenset(range(320) if first_is_eos else ()))
    new = 5 if first_is_eos else 0
    done = try_out(lm, prompt, cells_of(("knorm",), (8,)), sample_of(prompt, new=new))
    assert done.done.full.outcome.answer.text == ""
    assert all(done[cell].outcome.answer.text == "" for cell in done.cells)


def compacted(arch: str) -> tuple[Cache, Tensor]:
    """Rows keeping 0 slots, one, two different tens, and all of a random context."""
    lm, ids = loaded(arch), torch.tensor(words(N, 0))
    cache = Cache.empty(LAYERS, 1)
    read(lm, cache, ids, 0)
    full = set(lm.geometry.full_layers)
    everything = torch.arange(N).expand(KV_HEADS, -1)
    kept = []
    for size, seed in ((0, 0), (1, 1), (10, 2), (10, 3), (N, 4)):
        draw = torch.Generator().manual_seed(seed)
        slots = [torch.randperm(N, generator=draw)[:size].sort().values for _ in range(KV_HEADS)]
        kept.append(KeptSet(0, [torch.stack(slots) if i in full else everything for i in range(LAYERS)]))
    return cache.compact(kept, 3)[0], ids


Content = list[tuple[Tensor, ...]]  # per layer: keys, values and positions (kv_head, slot, ...)


def content(cache: Cache, row: int) -> Content:
    bucket, offset = cache.locate(row)
    return [tuple(part[offset].clone() for part in bucket.view(layer)) for layer in range(cache.layers)]


def chosen(source: Content, size: int, seed: int) -> list[Tensor]:
    """Random slots, ascending: per layer (kv_head, size)."""
    draw = torch.Generator().manual_seed(seed)
    counts = [positions.shape for _, _, positions in source]
    return [
        torch.stack([torch.randperm(slots, generator=draw)[:size].sort().values for _ in range(heads)])
        for heads, slots in counts
    ]


@torch.inference_mode()
def test_every_row_finds_its_place() -> None:
    """Kept sets of mixed sizes, then again from rows of several buckets: each row holds its own pairs."""
    cache = Cache.empty(LAYERS, N)
    read(loaded("llama"), cache, torch.tensor(words(N, 0)), 0)
    rows = [0]  # where each item of the last round is
    for sizes, sources in (((30, 12, 30, 50, 12), (0,) * 5), ((9, 5, 12, 9, 5, 9), (4, 0, 1, 3, 2, 1))):
        kept, expected = [], []
        for seed, (size, item) in enumerate(zip(sizes, sources, strict=True)):
            source = content(cache, rows[item])
            slots = chosen(source, size, seed)
            kept.append(KeptSet(rows[item], slots))
            expected.append(
                [
                    tuple(torch.stack([part[h, s] for h, s in enumerate(some)]) for part in parts)
                    for parts, some in zip(source, slots, strict=True)
                ]
            )
        cache, rows = cache.compact(kept, 2)
        assert sorted(rows) == list(range(len(sizes)))
        for row, wanted in zip(rows, expected, strict=True):
            for parts, found in zip(wanted, content(cache, row), strict=True):
                assert all(torch.equal(a, b) for a, b in zip(parts, found, strict=True))


@pytest.mark.parametrize("arch", ["llama", "sliding"])
@torch.inference_mode()
def test_questions_do_not_contaminate_each_other(arch: str) -> None:
    """B15, B16: A then B, B then A, B alone; whether 0, 1, some or all slots were kept."""
    cache, _ = compacted(arch)
    lm, before = loaded(arch), cache.mark()
    state = [held(cache, row) for row in range(cache.rows)]
    a = prompt_of(question=6, reference=3, seed=0, choices=True)
    b = Prompt(a.context, words(9, 77), (), Continuation(words(20, 78), 20))
    asked = {name: AnswerRequest(lm, prompt, sample_of(prompt)) for name, prompt in (("a", a), ("b", b))}
    first = {name: answer_rows(asked[name], cache) for name in "ab"}
    again = {name: answer_rows(asked[name], cache) for name in "ba"}
    fresh, _ = compacted(arch)
    alone = answer_rows(asked["b"], fresh)
    assert cache.mark() == before
    assert first["b"].outcomes == again["b"].outcomes == alone.outcomes
    assert first["b"].logprobs is not None
    assert alone.logprobs is not None
    assert torch.equal(first["b"].logprobs, alone.logprobs)
    assert first["a"].outcomes == again["a"].outcomes
    for row, positions in enumerate(state):
        assert all(torch.equal(x, y) for x, y in zip(positions, held(cache, row), strict=True))
    assert len({outcome.nll for outcome in alone.outcomes}) == cache.rows


@pytest.mark.parametrize("arch", ["llama", "sliding"])
@torch.inference_mode()
def test_taking_rows(arch: str) -> None:
    """Rows that leave do not change those that stay, and the source stays as it is."""
    lm = loaded(arch)
    cache, _ = compacted(arch)
    mark = cache.mark()
    wanted = read(lm, cache, torch.tensor(words(3, 9)), N)
    cache.rewind(mark)
    for rows in ([0], [4], [1, 3], [0, 2, 4], [0, 1, 2, 3, 4]):
        fewer = cache.take_rows(rows)
        assert fewer.rows == len(rows)
        for place, row in enumerate(rows):
            assert all(torch.equal(x, y) for x, y in zip(held(cache, row), held(fewer, place), strict=True))
        got = read(lm, fewer, torch.tensor(words(3, 9)), N)
        torch.testing.assert_close(got, wanted[rows], atol=1e-5, rtol=0)
    assert cache.mark() == mark


@pytest.mark.parametrize("arch", DISTINCT)
@torch.inference_mode()
def test_growing_beyond_the_room(arch: str) -> None:
    """A cache that was promised one token takes as many as come."""
    lm, ids = loaded(arch), torch.tensor(words(N, 0))
    wanted = plain(arch)(ids[None]).logits
    cache = Cache.empty(LAYERS, 1)
    parts = [read(lm, cache, piece, CHUNK * i, piece.shape[0]) for i, piece in enumerate(ids.split(CHUNK))]
    torch.testing.assert_close(torch.cat(parts, 1), wanted, atol=1e-4, rtol=0)
    cache, _ = compacted(arch)  # room for 3
    roomy, _ = compacted(arch)
    for bucket in roomy.buckets:
        for layer in range(LAYERS):
            bucket._grow(layer, 500)
    new = torch.tensor(words(40, 5))
    assert torch.equal(read(lm, cache, new, N, 40), read(lm, roomy, new, N, 40))


@torch.inference_mode()
def test_rewinding() -> None:
    """Forgetting all or some of what was read is as if it had never been read."""
    lm = loaded("llama")
    cache, _ = compacted("llama")
    mark = cache.mark()
    question, other = torch.tensor(words(6, 5)), torch.tensor(words(4, 6))
    wanted = read(lm, cache, torch.cat((question[:2], other)), N, 4)
    cache.rewind(mark)
    read(lm, cache, question, N)
    cache.rewind(mark, 2)
    assert cache.mark() == [[length + 2 for length in bucket] for bucket in mark]
    torch.testing.assert_close(read(lm, cache, other, N + 2, 4), wanted, atol=1e-5, rtol=0)
    cache.rewind(mark)
    assert cache.mark() == mark


def test_the_full_cell_is_always_there() -> None:
    done = trial("llama", "prefill")
    assert done.done.full.outcome.kl is None
    assert done.done.full.kept == N
