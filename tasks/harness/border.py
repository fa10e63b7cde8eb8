"""Where the context ends inside a prompt that lm-eval writes.

A mark is put into the text that lm-eval is about to render, and found again in the rendered prompt:
so descriptions, few-shot examples and chat templates need no knowledge of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvbench.errors import BadInput

MARK = "\ue000kvbench\ue001"  # private-use characters: in no prompt
BEFORE = "what precedes the question"  # the description and the few-shot examples
WHOLE = "the whole prompt"


def marked(text: str, doc: Mapping[str, Any], border: str, write: Callable[[Mapping[str, Any]], Any]) -> str:
    """A document's text with MARK where the context ends; unchanged where all of it is context.

    text: as lm-eval writes it. border: BEFORE, WHOLE, or the column after whose text (and the white
    space behind it) the context ends. write: from a document to its text.
    Raises BadInput when the column is no text, not in the prompt, or changed on its way there.
    """
    if border == WHOLE:
        return text
    if border == BEFORE:
        return MARK + text
    value = doc.get(border)
    if not isinstance(value, str):
        raise BadInput(f"context={border} is no column with a text; columns: {', '.join(doc)}")
    inner = value.rstrip()
    found = str(write({**doc, border: inner + MARK + value[len(inner) :]}))
    if MARK not in found or found.replace(MARK, "") != text:
        how = "changes" if MARK in found else "does not show"
        raise BadInput(f"context={border}: the prompt {how} that column; name another one")
    head, _, tail = found.rpartition(MARK)
    rest = tail.lstrip() or tail  # lm-eval looks at the last character: no mark behind white space there
    return head.replace(MARK, "") + tail[: len(tail) - len(rest)] + MARK + rest


def in_turns(turns: list[dict[str, str]], render: Callable[[list[dict[str, str]]], str]) -> str:
    """A dialogue as the chat template writes it, with the mark at its place.

    A template may strip a turn's text, and the mark would hide white space from it.
    Raises BadInput when the template alters the text otherwise.
    """
    plain = render([{**turn, "content": turn["content"].replace(MARK, "")} for turn in turns])
    for prepared in (turns, [{**turn, "content": _stripped(turn["content"])} for turn in turns]):
        text = render(prepared)
        if text.replace(MARK, "") == plain:
            return text
    raise BadInput("the chat template alters the text of a turn; use --template none")


def split(prompt: str) -> tuple[str, str]:
    """(context, question) of a marked prompt."""
    context, mark, question = prompt.partition(MARK)
    if MARK in question:
        raise BadInput("the prompt shows the question more than once: the context has no single end")
    return (context, question) if mark else (prompt, "")


def _stripped(text: str) -> str:
    before, mark, after = text.partition(MARK)
    whole = before + after
    start = len(whole) - len(whole.lstrip())
    kept = whole.strip()
    place = min(max(len(before) - start, 0), len(kept))
    return kept[:place] + mark + kept[place:]
