"""A second pass: what a policy wants the model to read after the context, and which attention it is told of.

The engine reads each text after the context, reduces its attention to the context at once, never as a matrix,
and forgets it. Equal texts are read once for all policies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ContextText:
    """What has been read so far, as a policy with a second pass sees it.

    ids: (token,) evicted ones included. prefix: how many of the first tokens are the chat template's. suffix:
    ids with which the template ends the user's turn and opens the model's. encode: a text's ids, without
    special tokens.
    """

    ids: tuple[int, ...]
    prefix: int
    suffix: tuple[int, ...]
    encode: Callable[[str], tuple[int, ...]]


@dataclass(frozen=True)
class Reading:
    """One text, read after the context and forgotten.

    ids: its tokens, one or more. start, stop: positions of the context whose attention is wanted. sinks: so
    are the first `sinks` positions. The softmax of each token runs over these and, causally, over the text.
    """

    ids: tuple[int, ...]
    start: int
    stop: int
    sinks: int = 0


@dataclass(frozen=True)
class SecondPass:
    """All that a policy wants read, and how the attention of what is read becomes one number per slot.

    reduce: over the tokens read, of all readings. by_input_norm: each token's attention is first divided by
    the norm of what the attention module received for it.
    """

    readings: tuple[Reading, ...]
    reduce: Literal["max", "sum"] = "max"
    by_input_norm: bool = False
