"""RULER's eight needle tasks: special magic numbers, words and uuids hidden in a haystack.

    ... One of the special magic numbers for brave-otter is: 4127735. ...

In a haystack of needles nothing but the key tells a policy what to keep; a withheld question hides it.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import ClassVar, Literal

from kvbench.contract.data import Dataset, docstrings, filler
from kvbench.contract.data import rows as data_rows
from kvbench.contract.identity import fingerprint
from kvbench.contract.policy import param
from kvbench.contract.registry import register_task
from kvbench.contract.task import Setting
from kvbench.errors import DataNotFound

from .base import Draft, Generator, Ruler, Text
from .text import ADJECTIVES, LINE, NOUNS, compounds, noise, number, read_text, sentences, uuid4

SOURCE = "arXiv:2404.06654"
NEEDLE = "One of the special magic {kind}s for {key} is: {value}."
ONE = (
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n",
    "What is the special magic {kind} for {query} mentioned in the provided text?",
    "The special magic {kind} for {query} mentioned in the provided text is",
)
MANY = (
    "Some special magic {kind}s are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind}s afterwards.\n",
    "What are all the special magic {kind}s for {query} mentioned in the provided text?",
    "The special magic {kind}s for {query} mentioned in the provided text are",
)
ESSAYS = Dataset(  # the copy that lm-eval reads
    hub="baber/paul_graham_essays", config=None, split="train", folder=None, columns=("text",)
)
DEPTHS = 40  # RULER draws the needles' depths in an essay from so many, evenly spaced from 0 to 100%


@dataclass(frozen=True)
class Niah(Ruler):
    """Base of the needle tasks. haystack_kind: noise (one line repeated), essay, or needle (other needles).

    key_kind, value_kind: word, number or uuid. keys, queries: there are, are asked for. values: of each key.
    """

    haystack_kind: ClassVar[Literal["noise", "essay", "needle"]] = "noise"
    key_kind: ClassVar[Literal["word", "uuid"]] = "word"
    value_kind: ClassVar[Literal["number", "uuid"]] = "number"
    keys: ClassVar[int] = 1
    values: ClassVar[int] = 1
    queries: ClassVar[int] = 1

    max_new_tokens: int = param(16, "RULER: 128; the answer has 7 digits")

    def generator(self, setting: Setting) -> Generator:
        essay, source = self._essay()
        recipe = [LINE, ADJECTIVES, NOUNS, fingerprint(essay)]

        def draft(index: int, draw: random.Random) -> Draft:
            return self._draft(draw, essay)

        return Generator(draft, f"generated, seed {setting.seed}{source}", recipe)

    def _essay(self) -> tuple[str, str]:
        """(the essay, its source in words); nothing where the haystack is generated."""
        return "", ""

    @property
    def anywhere(self) -> bool:
        """Whether each sample reads the essay from a place of its own, instead of from its beginning."""
        return False

    def _draft(self, draw: random.Random, essay: str) -> Draft:
        pairs = _pairs(draw, self.key_kind, self.value_kind)
        facts = [next(pairs) for _ in range(max(self.keys, self.values))]
        if self.values > 1:
            facts = [(facts[0][0], value) for _, value in facts]
        needles = [self._needle(fact) for fact in facts]
        asked = draw.sample(facts, self.queries) if self.values == 1 else facts
        query = _listed(list(dict.fromkeys(key for key, _ in asked)))
        gold = tuple(value for _, value in asked)
        draw.shuffle(needles)
        depths = [place / (DEPTHS - 1) for place in sorted(draw.sample(range(DEPTHS), len(needles)))]
        spot = draw.random()
        if self.anywhere:
            place = draw.randrange(len(essay))
            essay = essay[place:] + essay[:place]
        others: list[str] = []

        def body(size: int) -> str:
            if self.haystack_kind == "essay":
                return _in_essay(essay, size, needles, depths)
            if self.haystack_kind == "noise":
                return _between(noise(size), needles[0], spot)
            there = sum(map(len, others))
            while there < size:
                others.append(self._needle(next(pairs)))
                there += len(others[-1])
            return _between(_cut(others, size), needles[0], spot)

        head, question, prefix = (
            part.format(kind=self.value_kind, query=query) for part in (ONE if len(gold) == 1 else MANY)
        )
        reference = f" {_listed(list(gold))}."
        return Draft(lambda size: Text(head + body(size) + "\n", question, prefix, reference, gold))

    def _needle(self, fact: tuple[str, str]) -> str:
        return NEEDLE.format(kind=self.value_kind, key=fact[0], value=fact[1])


@dataclass(frozen=True)
class Essay(Niah):
    """Base of the needle tasks in an essay."""

    haystack_kind = "essay"
    data = "generated; essays: haystack=FILE, the hub's, else Python's reference"

    haystack: str | None = param(
        None,
        "RULER: essays, here from the hub, else Python's reference; or: hub, python, docstrings, a file",
    )

    @property
    def anywhere(self) -> bool:
        return self.haystack == "docstrings"

    def _essay(self) -> tuple[str, str]:
        file = self.haystack not in (None, "hub", "python", "docstrings")
        text, name = (read_text(str(self.haystack)), "a file") if file else _haystack(self.haystack)
        return " ".join(text.split()) + " ", f"; essay haystack: {name}, sha256 {fingerprint(text)}"

    def check(self, data: str | None) -> None:
        self._essay()


@register_task("ruler/niah_single_1", source=SOURCE)
@dataclass(frozen=True)
class Single1(Niah):
    """RULER niah_single_1: one number under a word, in a repeated line of noise.

    Source: RULER, arXiv:2404.06654 (format and scoring of NVIDIA/RULER, also in lm-eval). Differs: our own
    word lists; the last line is cut between words, to the exact length; 16 new tokens instead of 128.
    """


@register_task("ruler/niah_single_2", source=SOURCE)
@dataclass(frozen=True)
class Single2(Essay):
    """RULER niah_single_2: one number under a word, in an essay.

    Source: RULER, arXiv:2404.06654. Differs: as niah_single_1; `haystack` is a .txt file, a .jsonl with a
    text column, "hub" (RULER's essays), "python", or "docstrings", for training: see docs/tasks.md.
    """


@register_task("ruler/niah_single_3", source=SOURCE)
@dataclass(frozen=True)
class Single3(Essay):
    """RULER niah_single_3: one uuid under a word, in an essay.

    Source: RULER, arXiv:2404.06654. Differs: as niah_single_2; 40 new tokens instead of 128.
    """

    value_kind = "uuid"
    max_new_tokens: int = param(40, "RULER: 128; a uuid has 36 characters")


@register_task("ruler/niah_multikey_1", source=SOURCE)
@dataclass(frozen=True)
class MultiKey1(Essay):
    """RULER niah_multikey_1: four numbers under four words, in an essay; one is asked for.

    Source: RULER, arXiv:2404.06654. Differs: as niah_single_2.
    """

    keys = 4


@register_task("ruler/niah_multikey_2", source=SOURCE)
@dataclass(frozen=True)
class MultiKey2(Niah):
    """RULER niah_multikey_2: numbers under words, nothing but needles; one is asked for.

    Source: RULER, arXiv:2404.06654. Differs: as niah_single_1; none of the 15,624 keys comes twice.
    """

    haystack_kind = "needle"


@register_task("ruler/niah_multikey_3", source=SOURCE)
@dataclass(frozen=True)
class MultiKey3(Niah):
    """RULER niah_multikey_3: uuids under uuids, nothing but needles; one is asked for.

    Source: RULER, arXiv:2404.06654. Differs: as niah_multikey_2; 40 new tokens instead of 128.
    """

    haystack_kind = "needle"
    key_kind = value_kind = "uuid"
    max_new_tokens: int = param(40, "RULER: 128; a uuid has 36 characters")


@register_task("ruler/niah_multivalue", source=SOURCE)
@dataclass(frozen=True)
class MultiValue(Essay):
    """RULER niah_multivalue: four numbers under one word, in an essay; all are asked for, in drawn order.

    Source: RULER, arXiv:2404.06654. Differs: as niah_single_2; 40 new tokens instead of 128.
    """

    values = 4
    max_new_tokens: int = param(40, "RULER: 128; four numbers of 7 digits")


@register_task("ruler/niah_multiquery", source=SOURCE)
@dataclass(frozen=True)
class MultiQuery(Essay):
    """RULER niah_multiquery: four numbers under four words, in an essay; all are asked for.

    Source: RULER, arXiv:2404.06654. Differs: as niah_single_2; 40 new tokens instead of 128.
    """

    keys = queries = 4
    max_new_tokens: int = param(40, "RULER: 128; four numbers of 7 digits")


@functools.cache
def _haystack(asked: str | None) -> tuple[str, str]:
    """(text, its name). asked: "hub", "python", "docstrings", or None for the first that is there of two."""
    if asked == "docstrings":
        return docstrings(), "docstrings of Python's library, from a place drawn for each sample"
    if asked in (None, "hub"):
        try:
            found, source, _ = data_rows(ESSAYS, None)
            return "\n\n".join(str(row["text"]) for row in found), f"RULER's essays ({source})"
        except DataNotFound:
            if asked == "hub":
                raise
    return filler(), "Python's reference, not RULER's essays"


def _pairs(draw: random.Random, key: str, value: str) -> Iterator[tuple[str, str]]:
    """Endless (key, value). No value comes twice, and no key while there are new ones."""
    words = compounds(draw) if key == "word" else []
    seen: set[str] = set()
    for index in count():
        name = words[index % len(words)] if key == "word" else uuid4(draw)
        yield name, _value(draw, value, seen)


def _value(draw: random.Random, kind: str, seen: set[str]) -> str:
    value = ""
    while not value or value in seen:
        value = number(draw) if kind == "number" else uuid4(draw)
    seen.add(value)
    return value


def _listed(names: list[str]) -> str:
    """RULER's list: "a", "a, and b", "a, b, and c"."""
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + ", and " + names[-1]


def _between(lines: list[str], needle: str, spot: float) -> str:
    """The needle before a line drawn uniformly."""
    place = int(spot * len(lines))
    return "\n".join([*lines[:place], needle, *lines[place:]])


def _cut(lines: list[str], size: int) -> list[str]:
    """The first `size` characters; the last line may end anywhere."""
    kept = []
    for line in lines:
        if size <= 0:
            break
        kept.append(line[:size])
        size -= len(line)
    return kept


def _in_essay(essay: str, size: int, needles: list[str], depths: list[float]) -> str:
    """The first characters of the essay, which starts again where it ends, needles between sentences."""
    text = (essay * (size // len(essay) + 1))[:size]
    found = sentences(text.rstrip(" ")) if size else []
    parts: list[str] = []
    before = 0
    for needle, depth in zip(needles, depths, strict=True):
        place = int(len(found) * depth)
        parts += [*found[before:place], needle]
        before = place
    return " ".join([*parts, *found[before:]])
