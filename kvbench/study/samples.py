"""The samples of one task: built, tokenised, and the keys of their rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..contract.cell import Cell
from ..contract.identity import fingerprint
from ..contract.registry import spec_of
from ..contract.spec import parameters_of
from ..contract.task import Sample, Setting, guarded
from ..errors import BadInput
from .config import RunConfig
from .plan import TaskPlan

if TYPE_CHECKING:
    from ..model.open import OpenModel
    from ..model.prompt import Prompt


@dataclass(frozen=True)
class Work:
    """One task's samples, tokenised, and the row keys they need.

    chat: whether the chat template is applied. source, sha256, seeded: of the data. metric: the main one.
    items: each sample with its prompt, or with the reason why it is skipped.
    """

    config: RunConfig
    plan: TaskPlan
    opened: OpenModel
    chat: bool
    source: str
    sha256: str
    seeded: bool
    metric: str
    items: list[tuple[Sample, Prompt | str]]

    @classmethod
    def build(cls, config: RunConfig, plan: TaskPlan, opened: OpenModel) -> Work:
        """Build and tokenise the samples; one that does not fit the model becomes a reason to skip it."""
        from ..model.prompt import build_prompt, count_tokens, render_turns, token_ends, uses_chat

        tokenizer = opened.tokenizer
        if config.template == "chat" and plan.task.template == "none":
            raise BadInput(f"--template chat: task '{plan.task.name}' is running text, without a user's turn")
        chat = uses_chat(tokenizer, config.template) and plan.task.template != "none"
        setting = Setting(
            seed=config.seed,
            limit=config.limit,
            data=config.data,
            chat=chat,
            count=lambda sample: count_tokens(sample, tokenizer, chat),
            render=lambda turns, answer=False: render_turns(turns, tokenizer, chat, answer),
            ends=lambda text: token_ends(text, tokenizer),
        )
        made = guarded(plan.task, "to make its samples", lambda: plan.task.samples(setting))
        items: list[tuple[Sample, Prompt | str]] = []
        for sample in made.samples[: config.limit]:
            prompt = guarded(
                plan.task,
                f"to give sample {sample.id!r} a prompt",
                partial(build_prompt, sample, tokenizer, plan.question, chat),  # type: ignore[arg-type]
            )
            total = len(prompt.context) + prompt.room(sample.max_new_tokens)
            reason = f"prompt and answer take {total} tokens, the model reads {opened.geometry.max_length}"
            reason += f"; {plan.task.too_long}" if plan.task.too_long else ""
            items.append((sample, prompt if total <= opened.geometry.max_length else reason))
        ids = [sample.id for sample, _ in items]
        if len(set(ids)) < len(ids):
            raise BadInput(f"task '{plan.task.name}' gives two samples the same id: ids must be unique")
        metric = made.metric or plan.task.metric
        return cls(config, plan, opened, chat, made.source, made.sha256, made.seeded, metric, items)

    @property
    def info(self) -> dict[str, Any]:
        """The task's part of the manifest."""
        task = self.plan.task
        return {
            "metric": self.metric,
            "source": task.source,
            "data": self.source,
            "data_sha256": self.sha256,
        }

    @property
    def data(self) -> dict[str, Any]:
        """What the manifest says about the data with this hash."""
        seed = self.config.seed if self.seeded else None
        return {"task": spec_of(self.plan.task), "seed": seed, "source": self.source}

    def missing(self, done: set[str]) -> list[tuple[Sample, Prompt | str, frozenset[str]]]:
        """Samples with at least one row to compute, and the keys of those rows."""
        found = []
        for sample, prompt in self.items:
            wanted = frozenset(self.key(cell, sample) for cell in self.plan.all_cells) - done
            if wanted:
                found.append((sample, prompt, wanted))
        return found

    def configuration(self, cell: Cell) -> dict[str, Any]:
        """Everything that changes a cell's numbers, except the sample."""
        task = self.plan.task
        return {
            **cell.as_dict(),
            "weights": cell.policy.identity if cell.policy else "",
            "task": task.name,
            "task_params": parameters_of(task),
            "data_sha256": self.sha256,
            "model": self.opened.name,
            "model_sha256": self.opened.sha256,
            "dtype": str(self.opened.dtype),
            "question": self.plan.question,
            "template": "chat" if self.chat else "none",
            "seed": self.config.seed,
        }

    def family(self, cell: Cell) -> str:
        """The identity of a configuration apart from its seed: rows of one family are pooled."""
        settings = self.configuration(cell)
        for name in ("seed", "data_sha256") if self.seeded else ("seed",):
            settings.pop(name)
        return fingerprint(settings)

    def key(self, cell: Cell, sample: Sample) -> str:
        """The identity of a row: its configuration and its sample."""
        return fingerprint([fingerprint(self.configuration(cell)), sample.id])

    def keys(self) -> set[str]:
        return {self.key(cell, sample) for sample, _ in self.items for cell in self.plan.all_cells}
