"""Chat templates that open a thought or take arguments, and ends of turn that no list names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

import kvbench
from kvbench.contract.identity import config_of
from kvbench.contract.spec import parse_template_args
from kvbench.errors import BadInput
from kvbench.model.open import load_model
from kvbench.model.prompt import end_of_turn, open_thought, with_template_args
from tests.laws import toy
from tests.laws.runs import config, lines
from tests.tiny import CHAT, tiny_model, tiny_tokenizer

# As Qwen3's: a closed thought where thinking is switched off, an open one else.
THINKS = CHAT.replace(
    "{% if add_generation_prompt %}{{ '<|model|>' }}",
    "{% if add_generation_prompt %}{{ '<|model|>' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think></think>' }}"
    "{% else %}{{ '<think>' }}{% endif %}",
)
OFF = "enable_thinking=false"


def saved(folder: Path, tokenizer: Any) -> str:
    tiny_model("llama", "sdpa").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("thinking"), tiny_tokenizer(chat=True, template=THINKS))


def test_a_special_token_that_no_list_names_ends_the_answer(tmp_path: Path) -> None:
    """<|end|> closes the turn and is special in the tokenizer's own table only."""
    backend = tiny_tokenizer()._tokenizer
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|bos|>", chat_template=CHAT
    )
    assert tokenizer.convert_tokens_to_ids("<|end|>") not in tokenizer.all_special_ids
    assert end_of_turn(tokenizer) == 0
    model = tiny_model("llama", "sdpa")
    for settings in (model.config, model.generation_config):
        settings.eos_token_id = 1
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert load_model(str(tmp_path), "cpu").eos_ids == {0, 1}


def test_an_ordinary_token_behind_the_turn_does_not_end_it() -> None:
    assert end_of_turn(tiny_tokenizer(chat=True, template=CHAT.replace("<|end|>", " the"))) is None


@pytest.mark.parametrize(
    ("tail", "tag"),
    [
        ("<think>", "<think>"),
        ("<think></think>", None),
        ("", None),
        ("<think></think><thought>", "<thought>"),
    ],
)
def test_an_open_thought_is_found(tail: str, tag: str | None) -> None:
    template = CHAT.replace(
        "{% if add_generation_prompt %}{{ '<|model|>'", "{% if add_generation_prompt %}{{ '" + tail + "'"
    )
    assert open_thought(tiny_tokenizer(chat=True, template=template)) == tag


def test_an_open_thought_is_noted_and_can_be_closed(thinking: str, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"policies": ("knorm",), "budgets": (8,), "limit": 2}
    with toy.added():
        plain = kvbench.run(config(thinking, tmp_path, **asked), progress=False)
        closed = kvbench.run(config(thinking, tmp_path, **asked, template_args=OFF), progress=False)
    assert any("opens a thought (<think>)" in note for note in plain.notes)
    assert plain.rows["note"].str.contains("opens a thought").all()
    assert not any("thought" in note for note in closed.notes)
    assert set(closed.rows["template_args"]) == {'{"enable_thinking": false}'}
    assert set(plain.rows["template_args"]) == {"{}"}
    assert not set(plain.rows["key"]) & set(closed.rows["key"])
    assert (closed.rows["context_tokens"].to_numpy() == plain.rows["context_tokens"].to_numpy()).all()
    assert closed.rows["question_tokens"].gt(plain.rows["question_tokens"].to_numpy()).all()
    assert sum("template_args" in line for line in lines(tmp_path)) == len(closed.rows)


def test_without_arguments_keys_and_folders_are_those_of_before() -> None:
    told = {"policy": "knorm", "task": "needle", "seed": 0}
    assert config_of({**told, "template_args": {}, "weights_for": ""}) == config_of(told)
    assert config_of({**told, "template_args": {"a": 1}}) != config_of(told)


def test_what_the_template_does_not_know_is_refused(thinking: str, tmp_path: Path) -> None:
    with (
        toy.added(),
        pytest.raises(BadInput, match="enable_thinkng: the chat template of this model does not"),
    ):
        kvbench.run(config(thinking, tmp_path, template_args=("enable_thinkng=false",)), progress=False)
    with pytest.raises(BadInput, match="no chat template"):
        with_template_args(tiny_tokenizer(), {"a": 1})
    with toy.added(), pytest.raises(BadInput, match="leave out --template none"):
        kvbench.run(config(thinking, tmp_path, template_args=OFF, template="none"), progress=False)


@pytest.mark.parametrize(
    ("text", "value"),
    [("a=false", False), ("a=True", True), ("a=None", None), ("a=3", 3), ("a=0.5", 0.5), ("a=high", "high"),
     ("a=x=y", "x=y"), ("a=[1]", "[1]")],
)  # fmt: skip
def test_values_are_read(text: str, value: Any) -> None:
    assert parse_template_args([text]) == {"a": value}


@pytest.mark.parametrize("texts", [["a"], ["=b"], ["a="], ["a b=c"], ["a=1", "a=2"]])
def test_what_is_no_pair_is_refused(texts: list[str]) -> None:
    with pytest.raises(BadInput, match="write KEY=VALUE"):
        parse_template_args(texts)
