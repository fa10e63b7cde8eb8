"""The contract of a task: samples to answer, and the scoring of an answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

from ..errors import KvbenchError, PluginError, place_of

PLACEHOLDER = "kvbench probe 7f3a"  # finds the place of a text in a chat template; never a sample's text

Result = TypeVar("Result")


@dataclass(frozen=True)
class Sample:
    """One example.

    The prompt is `context + question`, rendered as one user turn if the model has a chat template,
    followed by `answer_prefix` (the beginning of the model's turn). With the question withheld, only
    `context` is in the cache when eviction happens.

    id: unique within the task and its parameters; if the seed changes the sample, it changes the id.
    choices: texts to compare by likelihood, or () to generate. reference: the continuation on which nll,
    kl and future attention are measured (the gold answer as it follows the prompt). gold: whatever
    `Task.score` needs. max_new_tokens, stop: limits of a generated answer (tokens; strings that end it).
    Without choices and with 0 new tokens nothing is generated; only the reference is measured.
    rendered: context, question and reference are final text, made with `Setting.render`; no template is
    applied, and special tokens in the text are parsed as such. bare: only the template precedes the
    question. cut: tokens of the data that the prompt leaves out. note: anything else a reader of the
    row must know.
    """

    id: str
    context: str
    question: str
    reference: str
    answer_prefix: str = ""
    choices: tuple[str, ...] = ()
    gold: Any = None
    max_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    rendered: bool = False
    bare: bool = False
    cut: int = 0
    note: str = ""


@dataclass(frozen=True)
class Answer:
    """The model's answer: a text, or log-likelihoods of the choices (nats).

    greedy[i]: whether greedy decoding would have produced choice i.
    """

    text: str = ""
    loglikelihoods: tuple[float, ...] = ()
    greedy: tuple[bool, ...] = ()

    @property
    def label(self) -> str:
        """What `agreement` compares: the best choice's index, or the generated text."""
        if not self.loglikelihoods:
            return self.text.strip()
        return str(max(range(len(self.loglikelihoods)), key=self.loglikelihoods.__getitem__))


def plain_turns(turns: list[dict[str, str]], answer: bool = False) -> str:
    """A dialogue as plain text, for models without a chat template. `answer` has no effect."""
    return "".join(f"{turn['role'].capitalize()}: {turn['content']}\n" for turn in turns)


def _no_tokenizer(text: str) -> list[int]:
    raise NotImplementedError("this setting has no tokenizer")


@dataclass(frozen=True)
class Setting:
    """What a task may use to build its samples.

    seed: seed of generated samples. limit: number of requested samples (None: all).
    data: path given by --data, or None. chat: whether a chat template will be applied (choices then carry
    no leading delimiter). count: tokens of a sample's whole prompt, template and answer prefix included.
    render: turns ({"role": ..., "content": ...}) in the model's chat template, or as plain text if it has
    none; with answer=True the text ends at the start of the model's turn. ends: for each token of a text,
    the index of the first character after it.
    """

    seed: int
    limit: int | None
    data: str | None
    chat: bool
    count: Callable[[Sample], int]
    render: Callable[..., str] = plain_turns
    ends: Callable[[str], list[int]] = _no_tokenizer


@dataclass(frozen=True)
class Samples:
    """Samples and the provenance of their data: source in words, sha256 of the data.

    seeded: whether the seed changes the data and thus the sha256. metric: the main metric, if only the
    samples determine it.
    """

    samples: Sequence[Sample]
    source: str
    sha256: str
    seeded: bool = False
    metric: str = ""


def guarded(task: Task, doing: str, call: Callable[[], Result]) -> Result:
    """The result of a task's own code. Raises: PluginError, naming the task, if that code fails."""
    try:
        return call()
    except KvbenchError:
        raise
    except Exception as error:
        raise PluginError(
            f"task '{task.name}' failed {doing}: {type(error).__name__}: {error}{place_of(error)}"
        ) from error


class Task(ABC):
    """Base of all tasks. Subclass as a frozen dataclass whose fields are the parameters.

    source: paper or repository. metric: name of the main metric (kvbench.contract.metrics).
    question: "withheld" (eviction happens before the question is read) or "seen".
    schedule, chunk: default schedule ("prefill", or "chunked" with tokens per chunk); see `loop`.
    pins: default pins, "native" or FIRST,LAST. takes_data: whether the task accepts --data.
    template: "auto" (the chat template if there is one), or "none" for running text.
    data: one phrase: where the examples come from. too_long: advice to the user about samples that exceed
    the model's context.
    """

    name: ClassVar[str] = ""
    source: ClassVar[str] = ""
    metric: ClassVar[str] = "accuracy"
    question: ClassVar[Literal["withheld", "seen"]] = "seen"
    schedule: ClassVar[Literal["prefill", "chunked"]] = "prefill"
    chunk: ClassVar[int | None] = None
    pins: ClassVar[str] = "native"
    template: ClassVar[Literal["auto", "none"]] = "auto"
    takes_data: ClassVar[bool] = False
    data: ClassVar[str] = ""
    too_long: ClassVar[str] = ""

    @abstractmethod
    def samples(self, setting: Setting) -> Samples:
        """Build the samples, in a fixed order that does not depend on the limit."""

    def loop(self) -> tuple[Literal["prefill", "chunked"], int | None]:
        """Default schedule and tokens per chunk; may depend on the parameters."""
        return self.schedule, self.chunk

    @abstractmethod
    def score(self, sample: Sample, answer: Answer) -> dict[str, float]:
        """Official metrics of one answer: name -> value in the unit of kvbench.contract.metrics."""

    def check(self, data: str | None) -> None:  # noqa: B027 - most generated tasks have nothing to check
        """Raise BadInput or DataNotFound early, before any model loads."""

    def label(self, sample: Sample) -> str | None:
        """The gold label of a choice task (for the majority rate), else None."""
        return None
