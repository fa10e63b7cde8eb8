"""How much haystack fills a length: few tokenisations, even of 131072 tokens.

Tokens grow nearly in proportion to the text, so the search interpolates between what it measured and
halves the bracket where that does not help. It never trusts the estimate: the text that is returned
was counted.
"""

from __future__ import annotations

from collections.abc import Callable

from kvbench.errors import BadInput

PROBE = 48  # units of haystack in the first estimate
GOOD = 0.985  # share of the room that ends the search
GUESSES = 5  # interpolations before the search halves instead
ENDLESS = 64  # units per token that no tokenizer reaches


class TooShort(Exception):
    """Not even the smallest text fits. least: tokens that it takes."""

    def __init__(self, least: int) -> None:
        super().__init__(least)
        self.least = least


def fill(tokens: Callable[[int], int], room: int, most: int | None = None) -> int:
    """The number of haystack units whose text takes at most `room` tokens, and nearly all of them.

    tokens: counts the text with so many units; nearly increasing. most: units that there are.
    Depends on nothing but its arguments, so that a sample does not depend on the ones before it.
    Raises TooShort when 0 units take more than `room` tokens, BadInput when units take no tokens.
    """
    low, at_low = 0, tokens(0)
    if at_low > room:
        raise TooShort(at_low)
    high = ENDLESS * (room + PROBE) if most is None else most + 1  # does not fit, or is not there
    size, tries = PROBE, 0
    while at_low < GOOD * room and high - low > 1:
        size = (low + high) // 2 if tries > GUESSES else min(max(size, low + 1), high - 1)
        used = tokens(size)
        slope = (used - at_low) / (size - low)
        if used <= room:
            low, at_low = size, used
        else:
            high, tries = size, tries + 1
        wanted = (1 + GOOD) / 2 * room - at_low
        size = low + max(1, int(wanted / slope)) if slope > 0 else 2 * size
    if most is None and low >= ENDLESS * room:
        raise BadInput(f"the tokenizer reads {low} pieces of text as {at_low} tokens: it has no vocabulary")
    return low
