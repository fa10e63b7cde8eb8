"""The samples of one task, built and tokenised: for a run, for traces, and for checking either."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ..contract.spec import parse_template_args
from ..contract.task import Sample, Samples, Setting, Task, guarded
from ..errors import BadInput

if TYPE_CHECKING:
    from ..model.open import OpenModel
    from ..model.prompt import Prompt


@dataclass(frozen=True)
class SampleOptions:
    """What decides the samples of a task and their prompts; see RunConfig."""

    question: str
    limit: int | None = None
    seed: int = 0
    data: str | None = None
    template: Literal["auto", "chat", "none"] = "auto"
    template_args: tuple[str, ...] = ()


@dataclass(frozen=True)
class TaskSamples:
    """The samples of one task.

    options: which they were built with. chat: whether the chat template is applied. thought: the tag of a
    thought that it leaves open before the answer. source, sha256, seeded:
    of the data. metric: the main one. items: each sample with its prompt, or with the reason why it is
    skipped.
    """

    task: Task
    options: SampleOptions
    chat: bool
    source: str
    sha256: str
    seeded: bool
    metric: str
    items: list[tuple[Sample, Prompt | str]]
    thought: str | None = None

    @property
    def template_args(self) -> dict[str, Any]:
        """Values that the chat template was given; none without it."""
        return parse_template_args(self.options.template_args) if self.chat else {}


def prepare(task: Task, opened: OpenModel, options: SampleOptions) -> TaskSamples:
    """Build and tokenise the samples of a task; one that does not fit the model becomes a reason to skip it.

    Raises: BadInput for a template that the task cannot have, or samples that share an id; PluginError for
    a task whose own code fails.
    """
    from ..model.prompt import open_thought, uses_chat, with_template_args

    if options.template == "chat" and task.template == "none":
        raise BadInput(f"--template chat: task '{task.name}' is running text, without a user's turn")
    chat = uses_chat(opened.tokenizer, options.template) and task.template != "none"
    if options.template_args and options.template == "none":
        raise BadInput("--template-arg goes with a chat template; leave out --template none")
    if options.template_args:
        given = parse_template_args(options.template_args)
        opened = replace(opened, tokenizer=with_template_args(opened.tokenizer, given))
    thought = open_thought(opened.tokenizer) if chat else None
    made = _made(task, opened, options, chat)
    items = [
        (sample, _prompt(task, sample, opened, options.question, chat))
        for sample in made.samples[: options.limit]
    ]
    ids = [sample.id for sample, _ in items]
    if len(set(ids)) < len(ids):
        raise BadInput(f"task '{task.name}' gives two samples the same id: ids must be unique")
    metric = made.metric or task.metric
    return TaskSamples(task, options, chat, made.source, made.sha256, made.seeded, metric, items, thought)


def _made(task: Task, opened: OpenModel, options: SampleOptions, chat: bool) -> Samples:
    from ..model.prompt import count_tokens, render_turns, token_ends

    tokenizer = opened.tokenizer
    setting = Setting(
        seed=options.seed,
        limit=options.limit,
        data=options.data,
        chat=chat,
        count=lambda sample: count_tokens(sample, tokenizer, chat),
        render=lambda turns, answer=False: render_turns(turns, tokenizer, chat, answer),
        ends=lambda text: token_ends(text, tokenizer),
    )
    return guarded(task, "to make its samples", lambda: task.samples(setting))


def _prompt(task: Task, sample: Sample, opened: OpenModel, question: str, chat: bool) -> Prompt | str:
    """The prompt of a sample, or why the model cannot read it."""
    from ..model.prompt import build_prompt

    build = partial(build_prompt, sample, opened.tokenizer, question, chat)  # type: ignore[arg-type]
    prompt: Prompt = guarded(task, f"to give sample {sample.id!r} a prompt", build)
    total, most = len(prompt.context) + prompt.room(sample.max_new_tokens), opened.geometry.max_length
    if total <= most:
        return prompt
    advice = f"; {task.too_long}" if task.too_long else ""
    return f"prompt and answer take {total} tokens, the model reads {most}{advice}"
