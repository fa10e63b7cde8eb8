"""Needle in a haystack: find one number in repeated text, at an exact length in tokens.

One prompt, shortened, of RULER's niah_single_1:

    A special magic number is hidden within the following text. Make sure to memorize it. ...
    The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.
    One of the special magic numbers for brave-otter is: 4127735.
    The grass is green. ...
    What is the special magic number for brave-otter mentioned in the provided text? The special ...

The quirk that matters: the haystack repeats one line, so a policy may drop nearly all of it freely.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Literal

from kvbench.config import fingerprint
from kvbench.errors import BadInput
from kvbench.policy import param
from kvbench.registry import register_task
from kvbench.task import Answer, Sample, Samples, Setting, Task

HEAD = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n"
)
NEEDLE = "One of the special magic numbers for {key} is: {value}."
QUESTION = "What is the special magic number for {key} mentioned in the provided text?"
PREFIX = "The special magic number for {key} mentioned in the provided text is"
NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
ADJECTIVES = (
    "amber brave calm clever cold dusty eager early fancy gentle glad golden happy hollow humble icy "
    "jolly keen late lively lucky mellow mighty modern narrow noble patient plain proud quick quiet rapid "
    "rustic shiny silent silver simple sleepy sober solid steady sunny tender tidy vivid warm wise witty"
)
NOUNS = (
    "anchor apple basket beacon bottle bridge button candle canyon castle cedar cherry cloud copper "
    "cradle desert eagle engine falcon feather forest garden hammer harbor island kettle ladder lantern "
    "lemon marble meadow mirror needle ocean orchard otter paddle pebble pepper rabbit ribbon river saddle "
    "spoon summit tiger turtle valley violin walnut whistle window"
)
VERSION = 1  # of the generator: raise it when a sample changes
SAMPLES = 100  # without --limit


@register_task("needle", source="arXiv:2404.06654")
@dataclass(frozen=True)
class Needle(Task):
    """RULER's niah_single_1: the whole prompt and the room for the answer fill `length` tokens.

    length: tokens of the prompt (template included) plus max_new_tokens; every sample uses 95 to 100%
    of it. Sample i depends on seed and i only. The needle stands before a line drawn uniformly from
    all lines, as RULER does for this haystack.
    Reference: a space, the number, a full stop: what RULER's answer prefix asks for.

    Raises BadInput when the length has no room for the template and one line of haystack.
    Source: RULER, arXiv:2404.06654 (format and scoring of NVIDIA/RULER, also in lm-eval).
    Differs: the question is withheld by default (RULER's prompts end in the question, so a policy
    that looks at the last tokens would know what is asked; `--question seen` is RULER's protocol).
    16 new tokens instead of 128: the answer needs 8. RULER grows the haystack in steps of at least 5
    lines and stops short; here it is filled by sentence, and by word where sentences are too coarse.
    Keys come from our own word list. Under a chat template the answer prefix has no leading space.
    """

    metric = "string_match"
    question = "withheld"
    data = "generated"

    length: int = param(1024, "RULER starts at 4096; 1024 is what a model of 135M answers on a CPU")
    max_new_tokens: int = param(16, "RULER: 128; the answer has 7 digits")
    haystack: Literal["noise"] = param("noise", "RULER niah_single_1")

    def __post_init__(self) -> None:
        if self.length < 1 or self.max_new_tokens < 1:
            raise BadInput(
                f"needle: length={self.length}, max_new_tokens={self.max_new_tokens}: both are numbers of "
                "tokens, 1 or more"
            )

    def samples(self, setting: Setting) -> Samples:
        total = SAMPLES if setting.limit is None else setting.limit
        least = self.max_new_tokens + max(
            setting.count(self._make(index, setting, len(NOISE), 0)) for index in range(total)
        )
        if least > self.length:
            raise BadInput(
                f"needle:length={self.length} is too short: template, needle, one line of haystack and "
                f"{self.max_new_tokens} new tokens need {least} tokens; raise length"
            )
        made, guess = [], self.length // 8
        for index in range(total):
            sample, guess = self._fill(index, setting, guess)
            made.append(sample)
        recipe = [VERSION, asdict(self), setting.seed, NOISE, ADJECTIVES, NOUNS]
        return Samples(made, f"generated, seed {setting.seed}, generator {VERSION}", fingerprint(recipe))

    def score(self, sample: Sample, answer: Answer) -> dict[str, float]:
        """Share of the gold strings found in the prediction, whatever the case (RULER's rule)."""
        said = re.sub(r"[\x00-\x1f]", "\n", answer.text.strip()).strip().lower()
        return {"string_match": sum(gold.lower() in said for gold in sample.gold) / len(sample.gold)}

    def _fill(self, index: int, setting: Setting, guess: int) -> tuple[Sample, int]:
        """The longest sample that fits and its sentences, found near the last sample's number."""
        room = self.length - self.max_new_tokens

        def make(sentences: int, words: int = 0) -> Sample:
            return self._make(index, setting, sentences, words)

        def fits(sentences: int, words: int = 0) -> bool:
            return setting.count(make(sentences, words)) <= room

        low, high = _bracket(fits, max(guess, len(NOISE)))
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        words = 0
        if setting.count(make(low)) + self.max_new_tokens < 0.96 * self.length:
            limit = len(NOISE[low % len(NOISE)].split())
            words = max(n for n in range(limit) if fits(low, n))
        return make(low, words), low

    def _make(self, index: int, setting: Setting, sentences: int, words: int) -> Sample:
        """Sample `index` with a haystack of so many sentences and words of the next one."""
        draw = random.Random(f"needle {setting.seed} {index}")
        key = f"{draw.choice(ADJECTIVES.split())}-{draw.choice(NOUNS.split())}"
        value = str(draw.randint(10**6, 10**7 - 1))
        lines = _haystack(sentences, words)
        lines.insert(int(draw.random() * len(lines)), NEEDLE.format(key=key, value=value))
        sample = Sample(
            id=f"{setting.seed}-{index}",
            context=HEAD + "\n".join(lines) + "\n",
            question=QUESTION.format(key=key),
            answer_prefix=" " + PREFIX.format(key=key),
            reference=f" {value}.",
            gold=(value,),
            max_new_tokens=self.max_new_tokens,
        )
        return replace(sample, answer_prefix=sample.answer_prefix.lstrip()) if setting.chat else sample


def _bracket(fits: Callable[[int], bool], guess: int) -> tuple[int, int]:
    """(fits, does not fit), by steps that double away from a guess; len(NOISE) is known to fit."""
    step, low = 1, len(NOISE)
    if fits(guess):
        while fits(guess + step):
            guess, step = guess + step, step * 2
        return guess, guess + step
    high = guess
    while high - step > low:
        if fits(high - step):
            return high - step, high
        high, step = high - step, step * 2
    return low, high


def _haystack(sentences: int, words: int) -> list[str]:
    """Lines of five sentences; the last line may be shorter and end in the middle of one."""
    said = [NOISE[i % len(NOISE)] for i in range(sentences)]
    if words:
        said.append(" ".join(NOISE[sentences % len(NOISE)].split()[:words]))
    return [" ".join(said[start : start + len(NOISE)]) for start in range(0, len(said), len(NOISE))]
