"""RULER's variable tracking: which variables hold a number, through a chain of assignments.

    Memorize and track the chain(s) of variable assignment hidden in the following text.

    The grass is green. The sky is blue. ...
    VAR QWERT = 54321
    The grass is green. ...
    VAR ASDFG = VAR QWERT
    ...
    Question: Find all variables that are assigned the value 54321 in the text above. Answer: According to
    the chain(s) of variable assignment in the text above, 5 variables are assgined the value 54321, they
    are: QWERT ASDFG ...

The quirk that matters: an answer is right only when every link survives, so one evicted line costs all
variables after it.
"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass, replace

from kvbench.contract.policy import param
from kvbench.contract.registry import register_task
from kvbench.contract.task import Setting

from .base import Draft, Generator, Ruler, Text
from .text import LINE, noise

HOPS = 4
HEAD = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
QUESTION = "Question: Find all variables that are assigned the value {value} in the text above."
# The misspelling is RULER's and part of the prompt that published numbers were measured with.
PREFIX = (
    "Answer: According to the chain(s) of variable assignment in the text above, {count} variables are "
    "assgined the value {value}, they are:"
)
EXAMPLE_TOKENS = 500  # of RULER's solved example
EXAMPLE_LINES = 10  # of noise in it, at most
EXAMPLE_SHARE = 3  # the example takes at most a third of the length


@register_task("ruler/vt", source="arXiv:2404.06654")
@dataclass(frozen=True)
class VariableTracking(Ruler):
    """RULER vt: one chain of four hops, in a repeated line of noise, after one solved example.

    The example is as RULER's: names of three letters instead of five, about 500 tokens. Here it takes
    at most a third of the length, with as many lines of noise (10 at most) as that leaves, and is left
    out where the third cannot hold it without noise; the manifest says how many lines it has.
    Reference: the variables in the order of the chain, as in the example's answer.

    Source: RULER, arXiv:2404.06654 (format and scoring of NVIDIA/RULER, also in lm-eval).
    Differs: assignments stand on lines of their own, without the space RULER leaves after them; the
    answer prefix ends without a space. Where there are fewer lines of noise than assignments, several
    stand between the same two lines.
    """

    max_new_tokens: int = param(30, "RULER")

    def generator(self, setting: Setting) -> Generator:
        lines = self._example_lines(setting)

        def draft(index: int, draw: random.Random) -> Draft:
            example = "" if lines is None else _solved(draw, lines)
            names, value, spots = _chain(draw, 5)

            def write(size: int) -> Text:
                text = _text(names, value, spots, size)
                return replace(text, context=example + text.context)

            return Draft(write)

        shown = "without the solved example" if lines is None else f"example with {lines} lines of noise"
        return Generator(draft, f"generated, seed {setting.seed}, {shown}", [LINE, HOPS, lines])

    def _example_lines(self, setting: Setting) -> int | None:
        """The noise of the solved example, None where there is no room for the example."""
        limit = min(EXAMPLE_TOKENS, self.length // EXAMPLE_SHARE)
        for lines in range(EXAMPLE_LINES, -1, -1):
            solved = Text(_solved(random.Random("example"), lines), "", "", " ", ("",))
            if setting.count(self.sample("example", solved, setting.chat)) <= limit:
                return lines
        return None


def _chain(draw: random.Random, letters: int) -> tuple[list[str], str, list[float]]:
    """(variables, the number, where their lines stand: ascending shares of the text)."""
    names: dict[str, None] = {}
    while len(names) <= HOPS:
        names["".join(draw.choices(string.ascii_uppercase, k=letters))] = None
    return list(names), str(draw.randint(10000, 99999)), sorted(draw.random() for _ in names)


def _text(names: list[str], value: str, spots: list[float], words: int) -> Text:
    """The chain hidden in so many words of noise."""
    lines = noise(words)
    places = [int(spot * len(lines)) for spot in spots]
    if len(lines) > len(places):  # as RULER: two assignments never stand side by side
        for i in range(1, len(places)):
            places[i] = max(places[i], places[i - 1] + 1)
        for i, place in enumerate(reversed(places)):
            places[-1 - i] = min(place, len(lines) - 1 - i)
    held = [value, *(f"VAR {name}" for name in names)]
    for place, name, content in reversed(list(zip(places, names, held, strict=False))):
        lines.insert(place, f"VAR {name} = {content}")
    return Text(
        context=HEAD + "\n".join(lines) + "\n",
        question=QUESTION.format(value=value),
        prefix=PREFIX.format(count=len(names), value=value),
        reference=" " + " ".join(names),
        answers=tuple(names),
    )


def _solved(draw: random.Random, lines: int) -> str:
    """A whole example with its answer, as it stands before the real text."""
    text = _text(*_chain(draw, 3), lines * len(LINE.split()))
    return f"{text.context}{text.question} {text.prefix}{text.reference}\n\n"
