"""Law 7: the model reads the ids of one tokenisation of the whole prompt, at consecutive positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.laws.lab import Forward
from tests.laws.runs import config, recorded
from tests.laws.toy import COUNT, Toy
from tests.tiny import SPECIAL

BUDGET = 10**6


def whole_text(tokenizer: Any, sample: Any, chat: bool) -> str:
    if not chat:
        return sample.context + sample.question
    turn = [{"role": "user", "content": sample.context + sample.question}]
    return tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)


def per_sample(forwards: list[Forward]) -> list[list[Forward]]:
    """A sample begins where positions begin again at 0 with one row, in a prefill."""
    groups: list[list[Forward]] = []
    for seen in forwards:
        if int(seen.positions[0, 0]) == 0:
            groups.append([])
        groups[-1].append(seen)
    return groups


def read_ids(forwards: list[Forward], upto: int) -> list[int]:
    """The ids of the context and of what was read after it, by position."""
    ids: dict[int, int] = {}
    for seen in forwards[:2]:  # the context, then question and reference
        assert seen.ids.shape[0] == 1
        run = seen.runs()[0]  # the reference stands before what else may follow
        for position, token in zip(seen.positions[0, run].tolist(), seen.ids[0, run].tolist(), strict=True):
            assert position not in ids
            ids[position] = token
    assert sorted(ids) == list(range(len(ids)))
    return [ids[position] for position in range(upto)]


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize("template", ["auto", "none"])
@pytest.mark.parametrize("question", ["withheld", "seen"])
def test_one_tokenisation(any_folder: str, tmp_path: Path, question: str, template: str) -> None:
    """Contexts and questions whose join is a merge ("wor" + "ld"), with and without template and BOS."""
    settings = config(
        any_folder, tmp_path, policies="knorm", budgets=BUDGET, tasks="laws_toy:kind=generate",
        question=question, template=template,
    )  # fmt: skip
    result, forwards = recorded(settings)
    tokenizer = transformers.AutoTokenizer.from_pretrained(any_folder)
    chat = tokenizer.chat_template is not None and template != "none"
    samples = [Toy("generate")._sample(index) for index in range(COUNT)]
    groups = per_sample(forwards)
    assert len(groups) == COUNT
    for sample, group in zip(samples, groups, strict=True):
        text = whole_text(tokenizer, sample, chat)
        ids = tokenizer(text, add_special_tokens=not chat)["input_ids"]
        assert read_ids(group, len(ids)) == ids
        rows = result.rows[result.rows["sample"] == sample.id]
        n, asked = rows["context_tokens"].iloc[0], rows["question_tokens"].iloc[0]
        assert n + asked == len(ids)
        assert group[0].ids.shape[1] == n
        assert (rows["kept"] == n).all()
        assert asked == 1 if question == "seen" else asked > 1
        if question == "withheld":  # the token that spans the border is the question's first
            before, after = tokenizer.decode(ids[:n]), tokenizer.decode(ids[n:])
            assert before.endswith("hello")
            assert after.startswith(" world, the answer")
        starts = [int(seen.positions[0, 0]) for seen in group]
        assert starts[1] == n
        assert set(starts[1:]) <= {n, *range(len(ids), len(ids) + 5)}
        assert ids.count(SPECIAL.index("<|bos|>")) == (tokenizer.bos_token is not None and not chat)


@pytest.mark.usefixtures("toys")
def test_one_tokenisation_of_prompt_and_choice(any_folder: str, tmp_path: Path) -> None:
    """B41: "Ans" + "wer" is read as the tokeniser reads "Answer"."""
    settings = config(any_folder, tmp_path, policies="knorm", budgets=BUDGET, tasks="laws_toy")
    _, forwards = recorded(settings)
    tokenizer = transformers.AutoTokenizer.from_pretrained(any_folder)
    chat = tokenizer.chat_template is not None
    groups = per_sample(forwards)
    assert len(groups) == COUNT
    merged = 0
    for index, group in enumerate(groups):
        sample = Toy()._sample(index)
        text = whole_text(tokenizer, sample, chat)
        ids = tokenizer(text + sample.reference, add_special_tokens=not chat)["input_ids"]
        assert read_ids(group, len(ids)) == ids
        assert max(int(seen.positions.max()) for seen in group) == len(ids) - 1
        merged += len(ids) == len(tokenizer(text, add_special_tokens=not chat)["input_ids"])
    assert merged == (0 if chat else COUNT)  # the choice's token begins inside the prompt
