"""What RULER's subtasks share: exact lengths, official scoring, provenance."""

from __future__ import annotations

import random
import re
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kvbench.contract.identity import fingerprint
from kvbench.contract.policy import param
from kvbench.contract.task import Answer, Sample, Samples, Setting, Task
from kvbench.errors import BadInput

from .fill import TooShort, fill

VERSION = 1  # of the generators: raise it when a sample changes
LONG, CHUNK = 32768, 4096  # tokens; ours: the paper chunks 128k, not 4k, and names no size
SAMPLES = 100  # without --limit; RULER makes 500


@dataclass(frozen=True)
class Text:
    """One example in RULER's parts. answers: the strings that are looked for in the answer.

    prefix: the beginning of the answer, without the space before it. reference: the whole answer as it
    would follow the prefix.
    """

    context: str
    question: str
    prefix: str
    reference: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Draft:
    """An example of any size. write: units of haystack -> text. most: units there are, None: endless."""

    write: Callable[[int], Text]
    most: int | None = None


@dataclass(frozen=True)
class Generator:
    """Examples by index. source, recipe: what they are made of, in words and as JSON-able values.

    total: examples there are, None: endless. skip: leave out the ones that do not fit the length.
    """

    draft: Callable[[int, random.Random], Draft]
    source: str
    recipe: list[Any]
    total: int | None = None
    skip: bool = False


@dataclass(frozen=True)
class Ruler(Task):
    """Base of the subtasks: the prompt and the room for the answer fill 95 to 100% of `length` tokens.

    From LONG tokens on the context is read and evicted in chunks, as KVP does with 128k tokens.
    """

    metric = "string_match"
    question: ClassVar[Literal["withheld", "seen"]] = "seen"
    data = "generated"

    length: int = param(1024, "RULER: 4096 to 131072; 1024 is what a model of 135M answers on a CPU")
    max_new_tokens: int = param(128, "RULER")

    def __post_init__(self) -> None:
        if self.length < 1 or self.max_new_tokens < 1:
            raise BadInput(
                f"{self.name}: length={self.length}, max_new_tokens={self.max_new_tokens}: both are numbers "
                "of tokens, 1 or more"
            )

    def loop(self) -> tuple[Literal["prefill", "chunked"], int | None]:
        return ("chunked", CHUNK) if self.length >= LONG else ("prefill", None)

    @abstractmethod
    def generator(self, setting: Setting) -> Generator:
        """Everything that does not depend on the sample's index."""

    def samples(self, setting: Setting) -> Samples:
        generator = self.generator(setting)
        wanted = SAMPLES if setting.limit is None else setting.limit
        made: list[Sample] = []
        short: list[int] = []
        index = 0
        while len(made) < wanted and index != generator.total:
            try:
                made.append(self._fill(index, generator, setting))
            except TooShort as error:
                short.append(error.least + self.max_new_tokens)
                if not generator.skip:
                    wanted -= 1  # go on: the message names what all samples need
            index += 1
        if short and not (made and generator.skip):
            least = min(short) if generator.skip else max(short)
            raise BadInput(
                f"{self.name}:length={self.length} is too short: without any haystack the prompt and "
                f"{self.max_new_tokens} new tokens need {least} tokens; raise length"
            )
        recipe = [VERSION, self.name, self.length, self.max_new_tokens, setting.seed, generator.recipe]
        return Samples(made, generator.source, fingerprint(recipe), seeded=True)

    def score(self, sample: Sample, answer: Answer) -> dict[str, float]:
        """Share of the expected strings found in the answer, whatever the case (string_match_all)."""
        found = self._found(sample, answer)
        return {"string_match": sum(found) / len(found)}

    @staticmethod
    def _found(sample: Sample, answer: Answer) -> list[bool]:
        said = re.sub(r"[\x00-\x1f]", "\n", answer.text.strip()).strip().lower()
        return [gold.lower() in said for gold in sample.gold]

    def _fill(self, index: int, generator: Generator, setting: Setting) -> Sample:
        draft = generator.draft(index, random.Random(f"{self.name} {setting.seed} {index}"))

        def sample(size: int) -> Sample:
            return self.sample(f"{setting.seed}-{index}", draft.write(size), setting.chat)

        room = self.length - self.max_new_tokens
        size = fill(lambda size: setting.count(sample(size)), room, draft.most)
        chosen = sample(size)
        used = setting.count(chosen) + self.max_new_tokens
        if used >= 0.95 * self.length:
            return chosen
        if size != draft.most and generator.skip:
            raise TooShort(used)  # not even one more word of the next document fits
        raise BadInput(
            f"{self.name}:length={self.length}: all the text that fits fills {used} tokens; change length, "
            "or give more data"
        )

    def sample(self, name: str, text: Text, chat: bool) -> Sample:
        """A template opens the model's turn itself, so there the prefix has no leading space."""
        return Sample(
            id=name,
            context=text.context,
            question=text.question,
            answer_prefix=text.prefix if chat else " " + text.prefix,
            reference=text.reference,
            gold=text.answers,
            max_new_tokens=self.max_new_tokens,
        )
