"""Needle: exact lengths, one needle, samples that depend on seed and index alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.contract.task import Answer, Setting
from kvbench.errors import BadInput
from kvbench.model.prompt import build_prompt, count_tokens
from kvbench.tasks.needle import Needle
from kvbench.tasks.ruler.text import NOISE
from tests.tasks.test_prompt import sentencepiece_like
from tests.tiny import tiny_tokenizer

TOKENIZERS = {
    "byte-level": tiny_tokenizer(bos=True),
    "chat": tiny_tokenizer(chat=True),
    "sentencepiece": sentencepiece_like(bos=True, eos=False),
}


def setting(tokenizer: Any, limit: int | None = 3, seed: int = 0) -> Setting:
    chat = bool(tokenizer.chat_template)
    return Setting(seed, limit, None, chat, lambda sample: count_tokens(sample, tokenizer, chat))


def words(limit: int | None = 3, seed: int = 0, chat: bool = False) -> Setting:
    """A stand-in tokeniser: a token per word."""
    text = lambda s: len((s.context + s.question + s.answer_prefix).split())  # noqa: E731
    return Setting(seed, limit, None, chat, text)


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(sorted(TOKENIZERS)),
    length=st.integers(600, 3000),
    room=st.integers(1, 100),
    seed=st.integers(0, 5),
)
def test_the_prompt_and_its_answer_fill_the_length(name: str, length: int, room: int, seed: int) -> None:
    tokenizer = TOKENIZERS[name]
    task = Needle(length=length, max_new_tokens=room)
    for sample in task.samples(setting(tokenizer, 2, seed)).samples:
        prompt = build_prompt(sample, tokenizer, "withheld", bool(tokenizer.chat_template))
        used = len(prompt.context) + len(prompt.question) + room
        assert 0.95 * length <= used <= length
        assert sample.max_new_tokens == room


@pytest.mark.parametrize("length", [150, 256, 512, 1024, 4096])
def test_the_length_is_kept_when_a_token_is_a_word(length: int) -> None:
    task = Needle(length=length)
    for sample in task.samples(words(20)).samples:
        assert 0.95 * length <= words().count(sample) + 16 <= length


def test_the_needle_stands_once_on_a_line_of_its_own_between_whole_lines() -> None:
    for sample in Needle(length=600).samples(words(20)).samples:
        (value,) = sample.gold
        assert sample.context.count(value) == 1
        assert len(value) == 7
        key = sample.question.split(" for ")[1].split()[0]
        lines = sample.context.rstrip("\n").split("\n")
        needle = f"One of the special magic numbers for {key} is: {value}."
        assert lines.count(needle) == 1
        lines.remove(needle)
        assert lines[0].startswith("A special magic number is hidden")
        assert set(lines[1:-1]) == {" ".join(NOISE)}
        assert " ".join(NOISE).startswith(lines[-1])
        assert value not in sample.question + sample.answer_prefix
        assert sample.reference == f" {value}."


def test_depths_differ_and_reach_both_halves() -> None:
    found = Needle(length=600).samples(words(40)).samples
    depths = [s.context.index("One of the special") / len(s.context) for s in found]
    assert min(depths) < 0.25 < 0.75 < max(depths)
    assert len({s.gold for s in found}) == 40


def test_samples_depend_on_seed_and_index_only() -> None:
    task = Needle(length=500)
    many = task.samples(words(9)).samples
    assert task.samples(words(9)).samples == many
    assert task.samples(words(4)).samples == many[:4]
    assert {s.gold for s in task.samples(words(9, seed=1)).samples}.isdisjoint(s.gold for s in many)
    assert len({s.id for s in many}) == 9


def test_without_a_limit_there_are_a_hundred() -> None:
    assert len(Needle(length=200).samples(words(None)).samples) == 100


def test_the_hash_names_the_recipe_not_the_limit() -> None:
    base = Needle(length=500).samples(words(2)).sha256
    assert base == Needle(length=500).samples(words(5)).sha256
    assert base != Needle(length=501).samples(words(2)).sha256
    assert base != Needle(length=500).samples(words(2, seed=1)).sha256


def test_a_chat_answer_does_not_begin_with_a_space() -> None:
    plain = Needle(length=500).samples(words(1)).samples[0]
    chat = Needle(length=500).samples(words(1, chat=True)).samples[0]
    assert plain.answer_prefix == " " + chat.answer_prefix
    assert chat.answer_prefix.startswith("The special magic number for ")


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_a_length_without_room_names_the_smallest_that_works(name: str) -> None:
    with pytest.raises(BadInput, match="too short") as caught:
        Needle(length=30).samples(setting(TOKENIZERS[name]))
    least = int(str(caught.value).split("need ")[1].split()[0])
    assert len(Needle(length=least).samples(setting(TOKENIZERS[name])).samples) == 3
    with pytest.raises(BadInput, match="too short"):
        Needle(length=least - 1).samples(setting(TOKENIZERS[name]))


@pytest.mark.parametrize("values", [{"length": 0}, {"length": -5}, {"max_new_tokens": 0}])
def test_parameters_are_checked(values: dict[str, int]) -> None:
    with pytest.raises(BadInput, match="1 or more"):
        Needle(**values)


@pytest.mark.parametrize("text", ["1234567", " it is 1234567.", "12345 67", "", "\x001234567\n", "7654321"])
def test_the_score_is_rulers(text: str) -> None:
    official = pytest.importorskip("lm_eval.tasks.ruler.common_utils")
    sample = Needle(length=200).samples(words(1)).samples[0]
    gold = sample.gold[0]
    said = text.replace("1234567", gold)
    expected = official.string_match_all(official.postprocess_pred([said]), [[gold]])
    assert Needle().score(sample, Answer(text=said)) == {"string_match": expected}
    assert expected == float("1234567" in text)
