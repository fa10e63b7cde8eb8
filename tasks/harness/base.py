"""From lm-eval's documents to samples, and from answers to lm-eval's metrics."""

from __future__ import annotations

import hashlib
import importlib.util
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from typing import TYPE_CHECKING, Any, ClassVar

from kvbench.contract.data import DataRow, Dataset, check
from kvbench.contract.task import Answer, Sample, Samples, Setting, Task
from kvbench.errors import BadInput

from .border import BEFORE
from .config import Config

if TYPE_CHECKING:
    from .offline import DocumentPrompt, Offline


LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # lm-eval reads all
MAX_NEW_TOKENS = 256  # lm-eval's default


@dataclass(frozen=True)
class Gold:
    """What scoring needs: lm-eval's task and requests of one document. label: the right choice."""

    task: Offline = field(compare=False, repr=False)
    requests: list[Any] = field(compare=False, repr=False)
    label: str | None


@dataclass(frozen=True)
class HarnessRows:
    """One lm-eval task and the rows that it evaluates.

    config: as `config.read` gives it. shown: the rows few-shot examples are drawn from. prefix: of the
    samples' ids.
    """

    config: Config
    rows: list[DataRow]
    shown: list[DataRow] = field(default_factory=list)
    prefix: str = ""


@dataclass(frozen=True)
class Harness(Task):
    """Base of tasks that lm-eval defines. Prompt, examples, choices, filters, metrics are lm-eval's.

    border: where the context ends (see border.py). reported: lm-eval's metrics to report, () all that are
    means over samples. labels: whether all samples have the same choices, so that a majority rate means
    something. packages: what lm-eval's metrics import.

    Under a chat template lm-eval counts the white space that ends the template as a part of every choice;
    here it belongs to the prompt. That adds the same number to all choices of a sample.
    """

    takes_data = True
    border: ClassVar[str] = BEFORE
    reported: ClassVar[tuple[str, ...]] = ()
    labels: ClassVar[bool] = False
    packages: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def parts(self, setting: Setting) -> tuple[list[HarnessRows], str, str]:
        """(lm-eval tasks with their rows, source of the rows in words, sha256)."""

    @abstractmethod
    def datasets(self) -> list[Dataset]:
        """What must be there: the evaluated rows first."""

    def samples(self, setting: Setting) -> Samples:
        """In the order of the rows; several parts take turns, so that a limit is fair to all of them."""
        parts, source, sha256 = self.parts(setting)
        streams = (self._stream(part, setting) for part in parts)
        wanted = len(parts) if setting.limit is None else min(setting.limit, len(parts))
        turns = chain.from_iterable(zip_longest(*islice(streams, wanted)))
        made = list(islice((sample for sample in turns if sample is not None), setting.limit))
        return Samples(made, source, sha256, metric=self._main(made))

    def score(self, sample: Sample, answer: Answer) -> dict[str, float]:
        found = sample.gold.task.grade(sample.gold.requests, answer)
        return {name: found[name] for name in self.reported or found}

    def check(self, data: str | None) -> None:
        missing = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if missing:
            raise BadInput(
                f"{self.name}: lm-eval's metrics need {', '.join(missing)}: pip install {' '.join(missing)}"
            )
        for index, dataset in enumerate(self.datasets()):
            check(dataset, data if index == 0 else None)

    def label(self, sample: Sample) -> str | None:
        return sample.gold.label if self.labels else None

    def few_shots(self) -> int | None:
        """Few-shot examples; None as the configuration says."""
        return None

    def fitted(self, doc: DataRow, write: Callable[[DataRow], Sample], setting: Setting) -> Sample:
        """The sample of a document, which a task may cut first. write: from a document to its sample."""
        return write(doc)

    def _stream(self, part: HarnessRows, setting: Setting) -> Iterator[Sample]:
        from .offline import load, quiet

        def render(turns: list[dict[str, str]]) -> str:
            return setting.render(turns, answer=True)

        def write(doc: DataRow) -> Sample:
            with quiet():
                return sample_of(task, task.ask(index, doc, setting.chat, render), name, setting.chat)

        task = load(part.config, part.rows, part.shown, self.border, self.few_shots())
        for index, doc in enumerate(task.task_docs):
            name = f"{part.prefix}{index}"
            yield self.fitted(doc, write, setting)

    def _main(self, made: list[Sample]) -> str:
        """The main metric, where the class does not name it."""
        return self.metric or (made[0].gold.task.names[0] if made else "")


def sample_of(task: Offline, prompt: DocumentPrompt, name: str, chat: bool) -> Sample:
    """A sample from what lm-eval asks. name: its id."""
    choices: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    tokens = 0
    if isinstance(prompt.gold, int):
        choices = tuple(request.arguments[1] for request in prompt.requests)
        reference = choices[prompt.gold]
    else:
        reference = task.delimiter(prompt.requests[0].doc, chat) + prompt.gold
        tokens, stop = limits(prompt.requests[0].arguments[1])
    return Sample(
        id=name,
        context=prompt.context,
        question=prompt.question,
        reference=reference,
        choices=choices,
        gold=Gold(task, prompt.requests, reference.strip() if choices else None),
        max_new_tokens=tokens,
        stop=stop,
        rendered=True,
        bare=prompt.bare,
        note=prompt.note,
    )


def limits(generation: Config) -> tuple[int, tuple[str, ...]]:
    """(tokens to generate at most, strings that end the answer), with lm-eval's defaults."""
    tokens = next((generation[name] for name in LENGTHS if generation.get(name) is not None), MAX_NEW_TOKENS)
    until = generation.get("until") or []
    return int(tokens), tuple(filter(None, [until] if isinstance(until, str) else until))


def joined(*digests: str) -> str:
    """One sha256 for several; a single one is itself."""
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest()
