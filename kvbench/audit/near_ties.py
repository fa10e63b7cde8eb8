"""Which rows differ only because a near-tie fell the other way on another processor?

In: the rows of before that did not come again, and the settings of their run. Out: those that the engine
gives again within the tolerance when one near-tie at the cut falls the other way. A row of another schedule
than prefill is never explained so: what its later chunks hold depends on every cut before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..contract.cell import Cell
from ..contract.draws import draw_key
from ..contract.registry import POLICIES, TASKS, expand_policies, expand_tasks, spec_of
from ..contract.task import Sample
from ..engine.near_ties import NearTie, evaluate_near_ties
from ..model.open import LoadedModel, OpenModel, open_model
from ..model.prompt import Prompt
from ..store.row import Row
from ..study.config import RunConfig
from ..study.plan import plan_task
from ..study.rows import measured_row
from ..study.workload import Workload
from .differences import differences


def flipped_ties(
    configs: Sequence[RunConfig], rows: Mapping[str, Row], tolerance: float
) -> Iterator[tuple[str, NearTie]]:
    """The keys of rows that a near-tie explains, with the near-tie as it fell today.

    rows: as they were, by key.
    """
    opened = open_model(configs[0].model, configs[0].device, configs[0].dtype)
    loaded: LoadedModel | None = None
    done: set[str] = set()
    for work in _workloads(configs, rows, opened):
        for cell, sample, prompt, key in _find(work, rows):
            if key in done:
                continue
            done.add(key)
            loaded = loaded or opened.load()
            tie = _explain(work, loaded, cell, sample, prompt, rows[key], tolerance)
            if tie is not None:
                yield key, tie


def _workloads(
    configs: Sequence[RunConfig], rows: Mapping[str, Row], opened: OpenModel
) -> Iterator[Workload]:
    measured = {row.spec for row in rows.values()}
    tasks = {row.task_spec for row in rows.values()}
    for config in configs:
        policies = [POLICIES.parse(spec) for spec in expand_policies(config.policies)]
        wanted = [policy for policy in policies if spec_of(policy) in measured]
        for task in (TASKS.parse(spec) for spec in expand_tasks(config.tasks)):
            if spec_of(task) in tasks:
                for one in config.of_each_seed():
                    yield Workload.build(one, plan_task(one, task, wanted), opened)


def _find(work: Workload, rows: Mapping[str, Row]) -> Iterator[tuple[Cell, Sample, Prompt, str]]:
    """The cells and samples of a workload behind the rows."""
    samples = {row.sample for row in rows.values()}
    for sample, prompt in work.samples.items:
        if sample.id not in samples or isinstance(prompt, str):
            continue
        for cell in work.plan.cells:
            if (key := work.key(cell, sample)) in rows:
                yield cell, sample, prompt, key


def _explain(
    work: Workload, lm: LoadedModel, cell: Cell, sample: Sample, prompt: Prompt, before: Row, tolerance: float
) -> NearTie | None:
    key = draw_key(work.config.seed, spec_of(work.plan.task), sample.id)
    for tie, measured, full in evaluate_near_ties(lm, sample, prompt, cell, key):
        again = measured_row(work, cell, sample, prompt, measured, full)
        if not differences(before, again, tolerance):
            return tie
    return None
