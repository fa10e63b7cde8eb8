"""From a sample to token ids: one rendering, one tokenisation, then a split by character offset.

Nothing is tokenised in pieces, so at full budget the model reads exactly the ids that the plain
model would read (law 7). Joins are the only place where a tokeniser can merge across the border
that we want, and both joins have a written rule: context/question in `build_prompt`,
prompt/continuation in `_continuations`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from ..contract.identity import fingerprint
from ..contract.task import PLACEHOLDER, Sample, plain_turns
from ..errors import BadInput
from .prompting import apply_template

THOUGHT = re.compile(r"<(/?)(think|thinking|thought|reasoning)>")


@dataclass(frozen=True)
class Continuation:
    """Ids that follow context + question; the last `scored` of them count."""

    ids: tuple[int, ...]
    scored: int


@dataclass(frozen=True)
class Prompt:
    """A sample as ids: context (in the cache when eviction happens), question, what may follow.

    asked: tokens at the end of the context that are of the question, when it is seen. chat: whether it was
    rendered with the chat template.
    """

    context: tuple[int, ...]
    question: tuple[int, ...]
    choices: tuple[Continuation, ...]
    reference: Continuation
    asked: int = 0
    chat: bool = False

    @property
    def ids(self) -> tuple[int, ...]:
        """What is read before the answer."""
        return self.context + self.question

    @property
    def sha256(self) -> str:
        """16 digits that change with anything that is read or scored."""
        scored = [(part.ids, part.scored) for part in (*self.choices, self.reference)]
        return fingerprint([self.context, self.question, scored])

    def room(self, new_tokens: int) -> int:
        """Slots that question and answer may take after the context; new_tokens: generated at most."""
        return len(self.question) + max(
            new_tokens, len(self.reference.ids), *(len(choice.ids) for choice in self.choices)
        )


@dataclass(frozen=True)
class _PromptText:
    """The whole prompt as text. border: index of the first character after `sample.context`.

    special: whether the tokeniser adds its own special tokens (a chat template brings them itself).
    """

    text: str
    border: int
    special: bool


def uses_chat(tokenizer: Any, template: Literal["auto", "chat", "none"]) -> bool:
    """Whether samples are rendered with the chat template.

    Raises BadInput for "chat" when the tokeniser has no template.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if template == "chat" and not has_template:
        raise BadInput("--template chat: this tokenizer has no chat template; use --template none or auto")
    return has_template and template != "none"


def count_tokens(sample: Sample, tokenizer: Any, chat: bool) -> int:
    """Tokens of the whole prompt: template, context, question and answer prefix."""
    rendered = _render(sample, tokenizer, chat)
    return len(_tokenise(rendered.text, tokenizer, rendered.special)[0])


def build_prompt(sample: Sample, tokenizer: Any, question: Literal["withheld", "seen"], chat: bool) -> Prompt:
    """Tokenise a sample once and split it.

    withheld: the context ends where `sample.context` ends; a token that spans this border belongs
    to the question. It has 0 tokens when nothing comes before the question.
    seen: the context is the whole prompt but its last token. That one is always read after eviction,
    so that even an answer of one token comes from the compacted cache.
    The question has 1 token or more in both cases.

    Raises BadInput for text that cannot be tokenised, an empty prompt, choice or reference, and a
    template that changes the user's text.
    """
    rendered = _render(sample, tokenizer, chat)
    ids, ends = _tokenise(rendered.text, tokenizer, rendered.special)
    if not ids:
        raise BadInput(f"sample '{sample.id}': its prompt has no tokens; give it a context or a question")
    length, choices, reference = _continuations(sample, tokenizer, rendered, ids)
    inside = (index for index, end in enumerate(ends) if end > rendered.border)
    border = min(next(inside, len(ids)), length - 1)
    context = border if question == "withheld" else length - 1
    return Prompt(ids[:context], ids[context:length], choices, reference, context - border, chat)


def render_turns(turns: list[dict[str, str]], tokenizer: Any, chat: bool, answer: bool = False) -> str:
    """A dialogue as text, for a sample that is `rendered`.

    answer: leave the model's turn open at the end, its own last turn or a new one.
    Raises BadInput for turns that the chat template refuses.
    """
    if not chat:
        return plain_turns(turns)
    begun = answer and turns[-1]["role"] == "assistant"
    try:
        return apply_template(
            tokenizer, turns, add_generation_prompt=answer and not begun, continue_final_message=begun
        )
    except Exception as error:  # jinja raises what the template raises
        raise BadInput(f"the chat template refuses a dialogue ({error}); use --template none") from error


def token_ends(text: str, tokenizer: Any) -> list[int]:
    """For each token of a text, the index of the first character after it; no special tokens added."""
    return _tokenise(text, tokenizer, special=False)[1]


def end_of_turn(tokenizer: Any) -> int | None:
    """The special token with which the chat template closes the model's turn, if there is one."""
    if not uses_chat(tokenizer, "auto"):
        return None
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": PLACEHOLDER}]
    try:
        text = apply_template(tokenizer, turns)
    except Exception:  # a template without model turns; jinja's errors share no base with ours
        return None
    tail = text.rpartition(PLACEHOLDER)[2]
    ids = tokenizer(tail.lstrip(), add_special_tokens=False)["input_ids"] if tail else []
    return ids[0] if ids and _is_special(ids[0], tokenizer) else None


def _is_special(token: int, tokenizer: Any) -> bool:
    """Whether a token is special: by name, or only in the tokenizer's table of added tokens."""
    added = tokenizer.added_tokens_decoder.get(token)
    return token in tokenizer.all_special_ids or (added is not None and added.special)


def open_thought(tokenizer: Any) -> str | None:
    """The tag of a thought that the chat template opens for every answer and does not close, if any."""
    turn = [{"role": "user", "content": PLACEHOLDER}]
    try:
        text = apply_template(tokenizer, turn, add_generation_prompt=True)
    except Exception:  # jinja raises what the template raises; the first sample tells
        return None
    tags = THOUGHT.findall(text.rpartition(PLACEHOLDER)[2])
    return f"<{tags[-1][1]}>" if tags and not tags[-1][0] else None


def with_template_args(tokenizer: Any, given: Mapping[str, Any]) -> Any:
    """The tokenizer with values for names that its chat template knows. Raises BadInput for others."""
    template = tokenizer.chat_template
    if not template:
        raise BadInput("--template-arg: this tokenizer has no chat template; leave it out")
    unknown = [name for name in given if not re.search(rf"\b{re.escape(name)}\b", str(template))]
    if unknown:
        raise BadInput(f"--template-arg {unknown[0]}: the chat template of this model does not use that name")
    filled = copy.copy(tokenizer)
    filled.apply_chat_template = partial(tokenizer.apply_chat_template, **given)
    return filled


def _render(sample: Sample, tokenizer: Any, chat: bool) -> _PromptText:
    """The whole prompt as one string."""
    for text in (sample.context, sample.question, sample.answer_prefix, sample.reference, *sample.choices):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise BadInput(
                f"sample '{sample.id}': character {error.start} of {text[:40]!a} is half of a surrogate "
                "pair, which no tokenizer can read; repair the text"
            ) from None
    content = sample.context + sample.question
    if not chat or sample.rendered:
        return _PromptText(content + sample.answer_prefix, len(sample.context), special=not chat)
    head, shown, tail = _in_template(content, tokenizer, sample.id)
    # A template may strip the user's text; only leading white space moves the border.
    dropped = 0 if shown == content or not shown else content.index(shown)
    inside = min(max(len(sample.context) - dropped, 0), len(shown))
    return _PromptText(head + shown + tail + sample.answer_prefix, len(head) + inside, special=False)


def template_around(tokenizer: Any) -> tuple[str, str]:
    """What the chat template puts before the user's text, and between it and the answer."""
    before, _, after = _apply(tokenizer, PLACEHOLDER, "any").partition(PLACEHOLDER)
    return before, after


def _in_template(content: str, tokenizer: Any, name: str) -> tuple[str, str, str]:
    """(before, the user's text as the template shows it, after), of one user turn."""
    around, text = (_apply(tokenizer, part, name) for part in (PLACEHOLDER, content))
    head, found, tail = around.partition(PLACEHOLDER)
    if not found or PLACEHOLDER in tail:
        raise BadInput("the chat template does not show the user's text exactly once; use --template none")
    shown = text[len(head) : len(text) - len(tail)]
    known = (content, content.strip(), content.lstrip(), content.rstrip())
    if head + shown + tail != text or shown not in known:
        raise BadInput(
            f"sample '{name}': the chat template alters the user's text; only stripping the white space "
            "around it is understood. Use --template none"
        )
    return head, shown, tail


def _apply(tokenizer: Any, content: str, name: str) -> str:
    turn = [{"role": "user", "content": content}]
    try:
        return apply_template(tokenizer, turn, add_generation_prompt=True)
    except Exception as error:  # jinja raises what the template raises
        raise BadInput(
            f"sample '{name}': the chat template refuses a single user turn ({error}); use --template none"
        ) from error


def _tokenise(text: str, tokenizer: Any, special: bool) -> tuple[tuple[int, ...], list[int]]:
    """Ids and, for each, the index of the first character after it.

    Special tokens that the tokeniser adds at the end (an EOS) are dropped: the answer follows here.
    """
    encoded = tokenizer(
        text,
        add_special_tokens=special,
        return_offsets_mapping=True,
        return_special_tokens_mask=True,
        truncation=False,
        verbose=False,
    )
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    added = [
        mask and start == end
        for mask, (start, end) in zip(encoded["special_tokens_mask"], offsets, strict=True)
    ]
    length = len(ids)
    while length and added[length - 1] and not all(added[:length]):
        length -= 1
    return tuple(ids[:length]), [end for _, end in offsets[:length]]


def _continuations(
    sample: Sample, tokenizer: Any, rendered: _PromptText, ids: tuple[int, ...]
) -> tuple[int, tuple[Continuation, ...], Continuation]:
    """(prompt tokens to read, choices, reference).

    Each choice is tokenised together with the prompt. When a token merges across the join, the
    prompt is cut back to what it shares with all choices, and each choice starts there; as in
    lm-eval only the tokens beyond the prompt's own number count, at least one. A prompt to generate
    from is never cut: there, and where a choice shares nothing with the prompt, the continuation
    is tokenised alone.
    """
    texts = (*sample.choices, sample.reference)
    for text in texts:
        if not text:
            raise BadInput(f"sample '{sample.id}': an empty choice or reference has no tokens to score")
    wholes = [_tokenise(rendered.text + text, tokenizer, rendered.special)[0] for text in texts]
    length = len(ids)
    if sample.choices:
        shared = min(_shared(ids, whole) for whole in wholes)
        length = shared or length
    parts = [
        whole if _shared(ids, whole) >= length and len(whole) > length else _apart(ids, text, tokenizer)
        for whole, text in zip(wholes, texts, strict=True)
    ]
    found = tuple(Continuation(whole[length:], max(1, len(whole) - len(ids))) for whole in parts)
    if not all(part.ids for part in found):
        raise BadInput(f"sample '{sample.id}': a choice or the reference has no tokens to score")
    return length, found[:-1], found[-1]


def _apart(ids: tuple[int, ...], text: str, tokenizer: Any) -> tuple[int, ...]:
    return ids + tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def _shared(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix, one token short of `right` so that something is left to score."""
    pairs = zip(left, right[:-1], strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right) - 1))
