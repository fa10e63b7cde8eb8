"""RULER's aggregation tasks: the common words of a numbered list, the frequent words of a coded text.

    Below is a numbered list of words. In these words, some appear more often than others. Memorize the
    ones that appear most often.
    1. bridge 2. lantern 3. bridge ...
    Question: What are the 10 most common words in the above list? Answer: The top 10 words that appear
    most often in the list are:

The quirk that matters: no single token holds the answer. What is asked for is a property of all of
them, so every policy loses something with every token.
"""

from __future__ import annotations

import random
import re
import string
from dataclasses import dataclass

from kvbench.contract.data import filler
from kvbench.contract.policy import param
from kvbench.contract.registry import register_task
from kvbench.contract.task import Setting

from .base import Draft, Generator, Ruler, Text
from .text import ADJECTIVES, NOUNS, compounds

SOURCE = "arXiv:2404.06654"
COMMON = 10
LONG = 4096  # RULER has shorter lists below this length
CWE = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the "
    "ones that appear most often.\n",
    "Question: What are the 10 most common words in the above list?",
    "Answer: The top 10 words that appear most often in the list are:",
)
FWE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most "
    "frequently appeared coded words. ",
    "Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
    "frequently appeared words in the above coded text?",
    "Answer: According to the coded text above, the three most frequently appeared words are:",
)
LEAST = 27  # words drawn at least: with fewer the third coded word does not appear
LETTERS = 6  # of a coded word
TOP = 3
ALPHA = 2.0
TOKENS_PER_WORD = 50  # RULER: one coded word in the vocabulary per so many tokens of length


@register_task("ruler/cwe", source=SOURCE)
@dataclass(frozen=True)
class CommonWords(Ruler):
    """RULER cwe: ten words that appear 30 times each among words that appear 3 times, after an example.

    The example has 40 words, ten of them 10 times, the others 3 times. Below 4096 tokens RULER takes 6
    times and once instead, and an example of 20 words, 3 times and once; so does this.
    Reference: the numbered words in the order in which they were drawn, as in the example's answer.

    Source: RULER, arXiv:2404.06654 (format and scoring of NVIDIA/RULER, also in lm-eval).
    Differs: RULER's words come from the package wonderwords; ours are the words of 4 letters and more of
    the reference that every Python carries, and adjective-noun pairs where they do not suffice. The list
    has at least 10 uncommon words. The example's answer has a space before it.
    """

    max_new_tokens: int = param(120, "RULER")

    def generator(self, setting: Setting) -> Generator:
        singles = sorted(set(re.findall(r"(?<![\w.])[a-z]{4,}(?!\w)", filler())))
        often, seldom = (30, 3) if self.length >= LONG else (6, 1)
        shown = (40, 10, 3) if self.length >= LONG else (20, 3, 1)

        def draft(index: int, draw: random.Random) -> Draft:
            solved = _words(draw.sample(singles, shown[0]), shown[1], shown[2], draw)
            words = draw.sample(singles, len(singles)) + compounds(draw)
            example = f"{solved.context}{solved.question} {solved.prefix}{solved.reference}\n"
            order = draw.random()

            def write(size: int) -> Text:
                shuffler = random.Random(order)
                text = _words(words[: 2 * COMMON + size], often, seldom, shuffler)
                return Text(example + text.context, text.question, text.prefix, text.reference, text.answers)

            return Draft(write, len(words) - 2 * COMMON)

        recipe = [singles, ADJECTIVES, NOUNS, often, seldom, shown]
        return Generator(draft, f"generated, seed {setting.seed}, words of Python's reference", recipe)


def _words(words: list[str], often: int, seldom: int, draw: random.Random) -> Text:
    """A numbered list in which the first ten words are the common ones."""
    common = words[:COMMON]
    listed = common * often + words[COMMON:] * seldom
    draw.shuffle(listed)
    head, question, prefix = CWE
    return Text(head + _numbered(listed) + "\n", question, prefix, " " + _numbered(common), tuple(common))


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


@register_task("ruler/fwe", source=SOURCE)
@dataclass(frozen=True)
class FrequentWords(Ruler):
    """RULER fwe: the three most frequent coded words, frequencies by Zipf's law with exponent 2.

    The most frequent "word" is "...", which the question says to ignore; the vocabulary has one coded
    word per 50 tokens of length. Reference: the three words, most frequent first.

    Source: RULER, arXiv:2404.06654 (format and scoring of NVIDIA/RULER, also in lm-eval).
    Differs: RULER leaves no room for the answer, here the length includes it. In a short text rounding
    can make the fourth word as frequent as the third: here it then appears less often, so that there is
    one right answer. Words that rounding leaves out are dots. The vocabulary has at least 5 words.
    """

    max_new_tokens: int = param(50, "RULER")

    def generator(self, setting: Setting) -> Generator:
        vocabulary = max(self.length // TOKENS_PER_WORD, TOP + 2)

        def draft(index: int, draw: random.Random) -> Draft:
            coded = _coded(draw, vocabulary)
            order = draw.random()

            def write(size: int) -> Text:
                counts = _zipf(LEAST + size, vocabulary)
                said = [word for word, times in zip(coded, counts, strict=True) for _ in range(times)]
                random.Random(order).shuffle(said)
                head, question, prefix = FWE
                answers = tuple(coded[1 : 1 + TOP])
                reference = " " + " ".join(answers)
                return Text(f"{head}{' '.join(said)}\n", question, prefix, reference, answers)

            return Draft(write)

        return Generator(draft, f"generated, seed {setting.seed}", [ALPHA, LETTERS, vocabulary])


def _coded(draw: random.Random, size: int) -> list[str]:
    """The dots, then different coded words, by falling frequency."""
    words: dict[str, None] = {"...": None}
    while len(words) < size:
        words["".join(draw.choices(string.ascii_lowercase, k=LETTERS))] = None
    return list(words)


def _zipf(total: int, vocabulary: int) -> list[int]:
    """How often each word of the vocabulary appears in a text of so many words.

    The largest draw by Zipf's law that is not longer; dots fill the rest.
    """
    low, high = LEAST, 2 * total + LEAST + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if sum(_shares(middle, vocabulary)) <= total else (low, middle)
    dots, *others = _shares(low, vocabulary)
    return [max(dots, total - sum(others)), *others]


def _shares(drawn: int, vocabulary: int) -> list[int]:
    """Zipf's law rounded down, with no word after the third coded one as frequent as that one."""
    from scipy.special import zeta  # takes a while to import, and listing tasks needs none of it

    all_words = zeta(ALPHA)
    times = [int(drawn * rank**-ALPHA / all_words) for rank in range(1, vocabulary + 1)]
    return times[: 1 + TOP] + [min(count, times[TOP] - 1) for count in times[1 + TOP :]]
