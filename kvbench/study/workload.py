"""What one task and one seed ask of a run: cells x samples, and the keys of their rows."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..contract.cell import Cell
from ..contract.identity import config_of, family_of, key_of
from ..contract.registry import spec_of
from ..contract.spec import parameters_of
from ..contract.task import Sample
from .config import RunConfig
from .plan import TaskPlan, forced_from
from .samples import SampleOptions, TaskSamples, prepare

if TYPE_CHECKING:
    from ..model.open import OpenModel
    from ..model.prompt import Prompt


@dataclass(frozen=True)
class Workload:
    """The cells of a task and its samples, for one seed."""

    config: RunConfig
    plan: TaskPlan
    opened: OpenModel
    samples: TaskSamples

    @classmethod
    def build(cls, config: RunConfig, plan: TaskPlan, opened: OpenModel) -> Workload:
        """Prepare the samples that the plan's cells are evaluated on. Raises: as `prepare`."""
        options = SampleOptions(
            plan.question, config.limit, config.seed, config.data, config.template, config.template_args
        )
        return cls(config, plan, opened, prepare(plan.task, opened, options))

    @property
    def info(self) -> dict[str, Any]:
        """The task's part of the manifest."""
        return {
            "metric": self.samples.metric,
            "source": self.plan.task.source,
            "data": self.samples.source,
            "data_sha256": self.samples.sha256,
        }

    @property
    def data(self) -> dict[str, Any]:
        """What the manifest says about the data with this hash."""
        seed = self.config.seed if self.samples.seeded else None
        return {"task": spec_of(self.plan.task), "seed": seed, "source": self.samples.source}

    def missing(self, done: Set[str]) -> list[tuple[Sample, Prompt | str, frozenset[str]]]:
        """Samples with at least one row to compute, and the keys of those rows."""
        found = []
        for sample, prompt in self.samples.items:
            wanted = frozenset(self.key(cell, sample) for cell in self.plan.all_cells) - done
            if wanted:
                found.append((sample, prompt, wanted))
        return found

    def configuration(self, cell: Cell) -> dict[str, Any]:
        """The value of every axis of a cell's rows: everything that changes its numbers but the sample."""
        task = self.plan.task
        return {
            **cell.as_dict(),
            "weights": cell.policy.identity if cell.policy else "",
            "task": task.name,
            "task_params": parameters_of(task),
            "data_sha256": self.samples.sha256,
            "model": self.opened.name,
            "model_sha256": self.opened.sha256,
            "dtype": str(self.opened.dtype),
            "question": self.plan.question,
            "template": "chat" if self.samples.chat else "none",
            "seed": self.config.seed,
            "template_args": self.samples.template_args,
            "weights_for": forced_from(cell.policy, self.opened),
        }

    def family(self, cell: Cell) -> str:
        """The identity of a configuration apart from its seed: rows of one family are pooled."""
        return family_of(self.configuration(cell), self.samples.seeded)

    def key(self, cell: Cell, sample: Sample) -> str:
        """The identity of a row."""
        return key_of(self._configs[cell], sample.id)

    @cached_property
    def _configs(self) -> dict[Cell, str]:
        return {cell: config_of(self.configuration(cell)) for cell in self.plan.all_cells}

    def keys(self) -> set[str]:
        return {self.key(cell, sample) for sample, _ in self.samples.items for cell in self.plan.all_cells}

    def rules(self) -> dict[str, str]:
        """The rule of pins that asks for each row of a policy, by key."""
        cells = self.plan.cells
        return {self.key(cell, sample): self.plan.pins for sample, _ in self.samples.items for cell in cells}
