"""Laws of the prompt: one tokenisation, borders by character, joins that never lose a token."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvbench.contract.task import PLACEHOLDER, Sample
from kvbench.errors import BadInput
from kvbench.model.prompt import build_prompt, count_tokens, end_of_turn, uses_chat
from tests.tiny import CHAT, tiny_tokenizer

STRIPPING = CHAT.replace("m.content", "m.content | trim")
ODD = [
    "",
    " ",
    "\n",
    "####",
    f"a {PLACEHOLDER} b",
    "the \n\n",
    "日本語 🙂 é",
    "a\0b",
    "<|end|>",
    "{{ m }}",
    "  in",
]


def sentencepiece_like(bos: bool, eos: bool) -> Any:
    """Characters, a space is a leading '▁', one is put in front: as Llama 2 and Gemma do."""
    characters = ["<s>", "</s>", "<unk>", "▁", *map(chr, range(33, 127)), "\n"]
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(characters)}, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    single = ["<s>"] * bos + ["$A"] + ["</s>"] * eos
    backend.post_processor = processors.TemplateProcessing(
        single=" ".join(single), special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>" if bos else None, eos_token="</s>", unk_token="<unk>"
    )


def sample(context: str, question: str = "is it?", **rest: Any) -> Sample:
    return Sample("s", context, question, **{"reference": "yes", **rest})


def names(tokenizer: Any, ids: tuple[int, ...]) -> list[str]:
    return tokenizer.convert_ids_to_tokens(list(ids))


@pytest.mark.parametrize("question", ["withheld", "seen"])
@pytest.mark.parametrize("template", [CHAT, STRIPPING], ids=["plain", "stripping"])
@settings(max_examples=60, deadline=None)
@given(
    context=st.sampled_from(ODD) | st.text(alphabet="the on\n 12é🙂", max_size=30),
    asked=st.sampled_from(ODD) | st.text(alphabet="the on\n 12é🙂", max_size=12),
    prefix=st.sampled_from(["", " The", "An"]),
)
def test_chat_prompt_is_one_tokenisation_of_one_template_call(
    template: str, question: Any, context: str, asked: str, prefix: str
) -> None:
    tokenizer = tiny_tokenizer(chat=True, bos=True, template=template)
    one = sample(context, asked, answer_prefix=prefix)
    prompt = build_prompt(one, tokenizer, question, chat=True)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": context + asked}], add_generation_prompt=True, tokenize=False
    )
    whole = tokenizer(text + prefix, add_special_tokens=False)["input_ids"]
    assert list(prompt.context + prompt.question) == whole
    assert prompt.question
    assert count_tokens(one, tokenizer, chat=True) == len(whole)
    if question == "seen":
        assert len(prompt.question) == 1


@pytest.mark.parametrize("context", ODD)
@pytest.mark.parametrize("template", [CHAT, STRIPPING], ids=["plain", "stripping"])
def test_withheld_context_holds_the_context_and_nothing_of_the_question(template: str, context: str) -> None:
    tokenizer = tiny_tokenizer(chat=True, template=template)
    prompt = build_prompt(sample(context, "?is it"), tokenizer, "withheld", chat=True)
    kept = context.lstrip() if template == STRIPPING else context
    assert tokenizer.decode(prompt.context) == "<|user|>" + kept
    assert tokenizer.decode(prompt.question) == "?is it<|end|><|model|>"


def test_a_token_that_spans_the_border_belongs_to_the_question() -> None:
    tokenizer = tiny_tokenizer()
    prompt = build_prompt(sample("the wor", "ld is"), tokenizer, "withheld", chat=False)
    assert names(tokenizer, prompt.context) == ["t", "he"]
    assert names(tokenizer, prompt.question) == ["Ġworld", "Ġis"]


def test_a_character_of_several_tokens_is_not_torn_by_the_border() -> None:
    tokenizer = tiny_tokenizer()
    prompt = build_prompt(sample("a🙂", "🙂b"), tokenizer, "withheld", chat=False)
    assert tokenizer.decode(prompt.context) == "a🙂"


def test_seen_reads_only_the_last_token_after_eviction() -> None:
    tokenizer = tiny_tokenizer(bos=True)
    prompt = build_prompt(sample("the", " the is"), tokenizer, "seen", chat=False)
    assert names(tokenizer, prompt.context) == ["<|bos|>", "t", "he", "Ġthe"]
    assert names(tokenizer, prompt.question) == ["Ġis"]


@pytest.mark.parametrize("context", ODD)
@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "sentencepiece with EOS"])
@pytest.mark.parametrize("bos", [True, False])
def test_without_template_the_tokenizer_adds_its_bos_once(context: str, kind: str, bos: bool) -> None:
    tokenizer = tiny_tokenizer(bos=bos) if kind == "byte-level" else sentencepiece_like(bos, "EOS" in kind)
    prompt = build_prompt(sample(context), tokenizer, "withheld", chat=False)
    ids = prompt.context + prompt.question
    bare = tokenizer(context + "is it?", add_special_tokens=False)["input_ids"]
    assert list(ids) == [tokenizer.bos_token_id] * bos + bare
    assert "None" not in tokenizer.decode(ids)


def test_a_template_with_its_own_bos_does_not_get_a_second_one() -> None:
    tokenizer = tiny_tokenizer(chat=True, bos=True, template="{{ bos_token }}" + CHAT)
    prompt = build_prompt(sample("the"), tokenizer, "withheld", chat=True)
    assert (prompt.context + prompt.question).count(tokenizer.bos_token_id) == 1


def test_no_context_gives_an_empty_context() -> None:
    prompt = build_prompt(sample("", "the is"), tiny_tokenizer(), "withheld", chat=False)
    assert prompt.context == ()
    assert prompt.question


def test_no_question_leaves_the_last_token_to_the_question() -> None:
    prompt = build_prompt(sample("the is", ""), tiny_tokenizer(), "withheld", chat=False)
    assert len(prompt.question) == 1


@pytest.mark.parametrize(
    ("prompt_text", "choices"),
    [
        ("Ans", ("wer", "x")),  # everything merges: nothing of the prompt is shared
        ("hello wor", ("ld", "king")),
        ("in: ", ("yes", " yes")),  # ends in a space that the tokeniser would rather give to the word
        ("is", (" yes", " no")),
        ("a", ("\n", "\n\n")),
    ],
)
@pytest.mark.parametrize("question", ["withheld", "seen"])
@pytest.mark.parametrize("split", [0, 1, 99])
def test_joins_keep_at_least_one_scored_token(
    prompt_text: str, choices: tuple[str, ...], question: Any, split: int
) -> None:
    tokenizer = tiny_tokenizer()
    one = sample(prompt_text[:split], prompt_text[split:], choices=choices, reference=choices[0])
    prompt = build_prompt(one, tokenizer, question, chat=False)
    assert prompt.question
    assert prompt.reference == prompt.choices[0]
    alone = len(tokenizer(prompt_text)["input_ids"])
    for text, choice in zip(choices, prompt.choices, strict=True):
        ids = prompt.context + prompt.question + choice.ids
        assert tokenizer.decode(ids) == prompt_text + text
        whole = tokenizer(prompt_text + text)["input_ids"]
        merged_whole = whole[0] == tokenizer(prompt_text)["input_ids"][0]
        if merged_whole:
            assert choice.scored == max(1, len(whole) - alone)
        assert 1 <= choice.scored <= len(choice.ids)


def test_a_merge_across_the_join_cuts_the_question_back() -> None:
    tokenizer = tiny_tokenizer()
    one = sample("the is", " wor", choices=("ld", "n"), reference="ld")
    prompt = build_prompt(one, tokenizer, "withheld", chat=False)
    assert names(tokenizer, prompt.context + prompt.question) == ["t", "he", "Ġis"]
    assert names(tokenizer, prompt.choices[0].ids) == ["Ġworld"]
    assert names(tokenizer, prompt.choices[1].ids) == ["Ġwor", "n"]
    assert [choice.scored for choice in prompt.choices] == [1, 1]


def test_a_prompt_to_generate_from_is_never_cut_for_its_reference() -> None:
    tokenizer = tiny_tokenizer()
    prompt = build_prompt(sample("the is", " wor", reference="ld"), tokenizer, "withheld", chat=False)
    assert names(tokenizer, prompt.question) == ["Ġwor"]
    assert names(tokenizer, prompt.reference.ids) == ["ld"]
    assert prompt.reference.scored == 1


@pytest.mark.parametrize(
    "template",
    [
        CHAT.replace("m.content", "m.content | upper"),
        CHAT + CHAT,
        "no text",
        "{{ raise_exception('no') }}",
    ],
    ids=["alters", "twice", "never", "raises"],
)
def test_templates_that_change_the_text_are_refused(template: str) -> None:
    with pytest.raises(BadInput, match="template"):
        build_prompt(sample("the"), tiny_tokenizer(chat=True, template=template), "seen", chat=True)


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (sample("a\ud800b"), "surrogate"),
        (sample("a", choices=("yes", "\udfff")), "surrogate"),
        (sample("", ""), "no tokens"),
        (sample("a", reference=""), "empty"),
        (sample("a", choices=("yes", "")), "empty"),
    ],
)
def test_texts_without_tokens_are_refused(one: Sample, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        build_prompt(one, tiny_tokenizer(), "withheld", chat=False)


def test_chat_is_used_where_there_is_a_template_unless_told_otherwise() -> None:
    with_template, without = tiny_tokenizer(chat=True), tiny_tokenizer()
    assert uses_chat(with_template, "auto")
    assert uses_chat(with_template, "chat")
    assert not uses_chat(with_template, "none")
    assert not uses_chat(without, "auto")
    with pytest.raises(BadInput, match="no chat template"):
        uses_chat(without, "chat")


def test_the_end_of_the_models_turn_is_read_from_the_template() -> None:
    assert end_of_turn(tiny_tokenizer(chat=True)) == 0
    other = CHAT.replace("<|end|>", "<|user|>")
    assert end_of_turn(tiny_tokenizer(chat=True, template=other)) == 2
    assert end_of_turn(tiny_tokenizer()) is None
