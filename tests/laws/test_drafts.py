"""Laws 6 and 9 for what only saves time: drafts, shared beginnings, blocks and looks at what was written."""

from __future__ import annotations

import dataclasses
from unittest.mock import patch

import pytest
import torch

from kvbench.engine import answer as engine
from kvbench.engine import write
from kvbench.engine.tree import Tree
from kvbench.model.open import LoadedModel
from kvbench.model.prompt import Continuation, Prompt
from tests.laws.lab import (
    BUDGETS,
    SCHEDULES,
    SOME,
    SPECS,
    N,
    Trial,
    cells_of,
    loaded,
    plain,
    prompt_of,
    sample_of,
    try_out,
    words,
)  # fmt: skip
from tests.laws.test_order import assert_agree
from tests.tiny import DISTINCT

NEW = 9  # tokens of an answer


def endless(arch: str) -> LoadedModel:
    return dataclasses.replace(loaded(arch), eos_ids=frozenset())


def greedy(arch: str, prompt: Prompt, new: int = NEW) -> list[int]:
    """What the plain model writes."""
    ids = [*prompt.context, *prompt.question]
    with torch.inference_mode():
        for _ in range(new):
            ids.append(int(plain(arch)(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[-new:]


def expecting(prompt: Prompt, reference: list[int]) -> Prompt:
    return dataclasses.replace(prompt, reference=Continuation(tuple(reference), len(reference)))


def steps(done: Trial) -> int:
    """Forwards of one token per row."""
    return sum(seen.ids.shape[1] == 1 for seen in done.forwards)


def assert_same(one: Trial, other: Trial, future: float = 0) -> None:
    for cell in one.cells:
        assert_agree(one, other, cell, future)
        assert one[cell].outcome.answer.text == other[cell].outcome.answer.text
    assert one.done.full.outcome.answer.text == other.done.full.outcome.answer.text


# What the reference says: nothing of the full cache's answer, all of it, its beginning.
REFERENCES = {"other": 0, "answer": NEW, "beginning": 3}


@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("arch", "specs"), [("llama", SPECS), ("sliding", SOME)], ids=["llama", "sliding"])
def test_a_draft_changes_nothing(arch: str, specs: tuple[str, ...], schedule: str, reference: str) -> None:
    """Answers and metrics with a draft and without, whether rows follow it to the end, partly or never."""
    base, cells = prompt_of(question=4), cells_of(specs, (*BUDGETS, N), schedule)
    prompt = expecting(base, [*greedy(arch, base)[: REFERENCES[reference]], *words(2, 99)])
    sample = sample_of(prompt, new=NEW)
    plainly = try_out(endless(arch), prompt, cells, sample, draft=False)
    drafted = try_out(endless(arch), prompt, cells, sample)
    assert_same(plainly, drafted)
    assert steps(plainly) == 2 * (NEW - 1)
    assert steps(drafted) <= steps(plainly)


@pytest.mark.parametrize("arch", DISTINCT)
def test_what_agrees_is_not_written_again(arch: str) -> None:
    """With everything kept, all rows follow the draft to its end and no step is left to do."""
    base, cells = prompt_of(), cells_of(SOME, (N,))
    prompt = expecting(base, greedy(arch, base))
    done = try_out(endless(arch), prompt, cells, sample_of(prompt, new=NEW))
    assert steps(done) == 0
    late = expecting(base, [*greedy(arch, base)[:5], 5])
    done = try_out(endless(arch), late, cells, sample_of(late, new=NEW))
    assert steps(done) == NEW - 1 - 5  # by the full cache alone, from the token where it left the reference


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize("new", [1, 2])
def test_short_answers(new: int, draft: bool) -> None:
    """An answer of one token needs no step at all; the reference may be longer or shorter than the answer."""
    for size in (1, 4):
        base = prompt_of(reference=size)
        written = greedy("llama", base, new)
        for prompt in (base, expecting(base, [*written, *words(size, 7)][:size])):
            done = try_out(
                endless("llama"), prompt, cells_of(SOME, (N, 8)), sample_of(prompt, new=new), draft
            )
            text = done.lm.tokenizer.decode(written, skip_special_tokens=True)
            assert {done[cell].outcome.answer.text for cell in done.cells if cell.budget == N} == {text}
            assert new > 1 or steps(done) == 0


@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.parametrize("arch", ["llama", "sliding"])
def test_the_end_of_an_answer_inside_a_draft(arch: str, reference: str) -> None:
    """The full cache ends with an EOS: rows that follow it end there, others end elsewhere or never."""
    base, cells = prompt_of(seed=1), cells_of(SOME, (*BUDGETS, N))
    written = greedy(arch, base)
    prompt = expecting(base, [*written[: REFERENCES[reference]], *words(2, 99)])
    end = next(i for i in range(2, NEW) if written[i] not in written[:i])
    lm = dataclasses.replace(loaded(arch), eos_ids=frozenset({written[end]}))
    sample = sample_of(prompt, new=NEW)
    plainly, drafted = (try_out(lm, prompt, cells, sample, draft) for draft in (False, True))
    assert_same(plainly, drafted)
    text = lm.tokenizer.decode(written[:end], skip_special_tokens=True)
    assert drafted.done.full.outcome.answer.text == text
    texts = {cell: drafted[cell].outcome.answer.text for cell in cells}
    assert {texts[cell] for cell in cells if cell.budget == N} == {text}
    assert len(set(texts.values())) > 2
    assert steps(drafted) <= steps(plainly) - (reference == "answer")


@pytest.mark.parametrize("every", [2, 3, 100])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_looking_seldom(schedule: str, every: int) -> None:
    """How often the host looks at what was written changes no answer: what comes after an end is cut."""
    base, cells = prompt_of(), cells_of(SOME, (*BUDGETS, N), schedule)
    prompt = expecting(base, [*greedy("llama", base)[:2], 5])
    free = try_out(endless("llama"), prompt, cells, sample_of(prompt, new=NEW))
    letters = sorted({letter for cell in cells for letter in free[cell].outcome.answer.text[1:]})[:3]
    lm = dataclasses.replace(loaded("llama"), eos_ids=frozenset(greedy("llama", base)[5:6]))
    sample = sample_of(prompt, new=NEW, stop=tuple(letters))
    always = try_out(lm, prompt, cells, sample)
    with patch.object(write, "LOOK_EVERY", {"cpu": every}):
        seldom = try_out(lm, prompt, cells, sample)
    assert_same(always, seldom)
    assert len({always[cell].outcome.answer.text for cell in cells}) > 2


@pytest.mark.parametrize("choices", [False, True])
@pytest.mark.parametrize("arch", ["llama", "sliding"])
def test_one_token_at_a_time(arch: str, choices: bool) -> None:
    """Where the logits of all rows do not fit in memory, the tree is read in blocks."""
    prompt = prompt_of(choices=choices, reference=6)
    cells, sample = cells_of(("knorm", "snapkv", "oracle"), BUDGETS), sample_of(prompt, new=NEW)
    whole = try_out(endless(arch), prompt, cells, sample)
    with patch.object(engine, "LOGITS_LIMIT", 1):
        blocks = try_out(endless(arch), prompt, cells, sample)
    assert len(blocks.forwards) > len(whole.forwards)
    assert_same(whole, blocks, future=1e-6)
    assert whole.done.full.outcome.nll == pytest.approx(blocks.done.full.outcome.nll, abs=1e-5)


@pytest.mark.parametrize("draft", [False, True])
def test_long_drafts_are_cut(draft: bool) -> None:
    """Beyond DRAFT tokens rows write on their own; the room for them is not read."""
    prompt, cells = prompt_of(), cells_of(("knorm", "random"), (8, N))
    sample = sample_of(prompt, new=30)
    whole = try_out(endless("llama"), prompt, cells, sample, draft=False)
    with patch.object(engine, "DRAFT", 4):
        cut = try_out(endless("llama"), prompt, cells, sample, draft)
    assert_same(whole, cut)
    assert max(seen.ids.shape[1] for seen in cut.forwards[1:]) < 5 + 4 + 4 + 1


def test_shared_beginnings_are_read_once() -> None:
    tree = Tree.of([7, 8])
    assert tree.add([1, 2, 3]) == [1, 2, 3, 4]
    assert tree.add([1, 2, 9]) == [1, 2, 3, 5]
    assert tree.add([4]) == [1, 6]
    assert tree.add([1, 2]) == [1, 2, 3]
    assert tree.ids == [7, 8, 1, 2, 3, 9, 4]
    assert tree.depth == [0, 1, 2, 3, 4, 4, 2]
    seen = tree.visible(0, len(tree))
    assert seen is not None
    ancestors = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 5], [0, 1, 6]]
    assert [row.nonzero().flatten().tolist() for row in seen] == ancestors
    later = tree.visible(4, 6)
    assert later is not None
    assert later.tolist() == seen[4:6, :6].tolist()
    chain = Tree.of([7])
    chain.add([1, 2])
    assert chain.visible(0, 3) is None
