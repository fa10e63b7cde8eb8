"""The context as text that policies with a second pass add to: its ids, and what the template puts around.

In: a tokeniser and a prompt. Out: a ContextText.
"""

from __future__ import annotations

from typing import Any

from ..contract.second_pass import ContextText
from .prompt import Prompt, template_around


def context_text(tokenizer: Any, prompt: Prompt) -> ContextText:
    """What has been read of a prompt, once its context has been.

    Without a chat template nothing comes before the text, and a line break after it.
    """

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    before, after = template_around(tokenizer) if prompt.chat else ("", "\n")
    head = encode(before) if before else ()
    shared = zip(head, prompt.context, strict=False)
    prefix = next(
        (place for place, (a, b) in enumerate(shared) if a != b), min(len(head), len(prompt.context))
    )
    return ContextText(prompt.context, prefix, encode(after), encode)
