"""`kvbench.run`: check everything, build the samples, evaluate what is missing, store every row.

Order matters: whatever can be refused is refused before the model's weights load, and a run whose
rows are all there never loads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from ..contract.cell import FULL
from ..contract.code import code_of
from ..contract.identity import fingerprint
from ..contract.look import style_of
from ..contract.metrics import dump_metrics
from ..contract.policy import Policy
from ..contract.registry import POLICIES, TASKS, expand_policies, expand_tasks, spec_of
from ..contract.task import Sample, Task
from ..errors import BadInput, KvbenchError
from ..stats.aggregate import aggregate
from ..store.files import file_name
from ..store.results import Row, Store, check_writable, read_manifest, read_rows
from .config import RunConfig
from .executors import Executor, Local, LostJob
from .finished import finished_rows
from .interrupt import deferred_interrupt
from .plan import check_data, check_fits, check_rules, plan_task
from .progress import progress as progress_bar
from .rows import failed_rows, sample_rows
from .workload import Workload

if TYPE_CHECKING:
    from ..model.open import LoadedModel, OpenModel
    from ..model.prompt import Prompt

# What is measured of every cell, whatever the task. A run without any usable row has these columns, too.
MEASURED = ("agreement", "kl", "nll", "nll_tokens", "missed_mass", "eviction_cost", "kv_bytes")


@dataclass(frozen=True)
class RunResult:
    """What a run gives back.

    rows: one line per (cell, sample); a metric is NaN where a row lacks it. table: aggregates with intervals.
    path: the run folder. notes: what a reader of the numbers must know. failed: rows whose policy broke its
    contract, or whose workers died. peak: the most bytes in use while this call computed, 0 where it did not.
    computed, reused: rows of this configuration that this call made, and that were in the folder before.
    """

    rows: pd.DataFrame
    table: pd.DataFrame
    path: Path
    notes: list[str] = field(default_factory=list)
    failed: int = 0
    peak: int = 0
    computed: int = 0
    reused: int = 0


@dataclass(frozen=True)
class Job:
    """One sample to evaluate. task: its place among the tasks. wanted: keys of the rows to compute."""

    task: int
    sample: Sample
    prompt: Prompt | str
    wanted: frozenset[str]


def run(config: RunConfig, progress: bool = True, executor: Executor | None = None) -> RunResult:
    """Evaluate every policy x budget of a configuration and return rows and aggregates.

    Rows already in the run folder are not computed again, except those of `config.fresh`. progress: show a
    bar on stderr. executor: who computes; None is this process. Raises KvbenchError for anything that cannot
    be run, before the weights load.
    """
    with executor or Local() as executor:
        return _run(config, progress, executor)


def _run(config: RunConfig, progress: bool, executor: Executor) -> RunResult:
    tasks = [TASKS.parse(spec) for spec in expand_tasks(config.tasks)]
    path = Path(config.out) if config.out else _default_folder(config)
    try:
        policies, opened = _open(config, tasks, path, executor)
    except KvbenchError as error:
        return _finished(config, path, error)
    fits = partial(check_fits, opened=opened, force=config.force_weights)
    policies, left_out = _fitting(config, policies, fits)
    work = []
    for task in tasks:
        own, notes = _fitting(config, policies, partial(check_rules, config, task))
        work += [Workload.build(one, plan_task(one, task, own), opened) for one in config.of_each_seed()]
        left_out += notes
    fixed = {
        "model": opened.name,
        "model_sha256": opened.sha256,
        "prompting_sha256": opened.prompting_sha256,
        "model_revision": opened.revision,
        "dtype": str(opened.dtype).removeprefix("torch."),
        "device": opened.device.type,
    }
    extra = {
        "style": style_of(policies),
        "tasks": {spec_of(item.plan.task): item.info for item in work},
        "data": {item.samples.sha256: item.data for item in work},
        "metrics": dump_metrics(),
        "code": _code(policies, tasks),
    }
    with Store.open(path, fixed, extra, config.as_dict(), config.fresh) as store:
        jobs = [Job(index, *found) for index, item in enumerate(work) for found in item.missing(store.done)]
        computed = sum(len(job.wanted) for job in jobs)
        if jobs:
            fewer = "--limit N" if config.limit is None else ""
            with progress_bar(progress, len(jobs), "samples", fewer) as advance:
                _compute(work, jobs, opened, executor, store, advance)
        rules = {key: rule for item in work for key, rule in item.rules().items()}
        store.label(rules)
        facts = {**executor.facts(), "peak_bytes": executor.peak} if jobs else {}
        store.finish({**facts, "rows": sum(len(item.keys()) for item in work)})
        notes = [*_sources(work), *left_out, *store.notes]
    rows = read_rows(path)
    keys = set().union(*(item.keys() for item in work))
    asked = rows["budget"].isna() | (rows["pins_mode"] == rows["key"].map(rules))
    rows = rows[rows["key"].isin(keys) & asked].reset_index(drop=True)  # other rows of the folder stay out
    result = _result(rows, path, [item.samples.metric for item in work], notes + _sliding(opened))
    return replace(result, peak=executor.peak, computed=computed, reused=len(rows) - computed)


def _open(
    config: RunConfig, tasks: list[Task], path: Path, executor: Executor
) -> tuple[list[Policy], OpenModel]:
    """The policies, and the model without its weights. Raises KvbenchError for what cannot be used here."""
    _early_checks(config, tasks, path)
    policies = [POLICIES.parse(spec) for spec in expand_policies(config.policies)]
    executor.check("policy", [policy.name for policy in policies])
    executor.check("task", [task.name for task in tasks])
    return policies, executor.open(config.model, config.device, config.dtype)


def _finished(config: RunConfig, path: Path, error: KvbenchError) -> RunResult:
    """The result of a run that ended in its folder and cannot be repeated. Raises: the error, if none did."""
    rows = finished_rows(config, path)
    if rows is None:
        raise error
    notes = [
        f"complete: {len(rows)} rows, shown as they are stored, because they cannot be made here: {error}"
    ]
    stored = read_manifest(path).get("tasks", {})
    metrics = [stored[task]["metric"] for task in rows["task_spec"].unique() if task in stored]
    return replace(_result(rows, path, metrics, notes), reused=len(rows))


def _code(policies: list[Policy], tasks: list[Task]) -> dict[str, dict[str, str | None]]:
    """The code of every policy and task, by kind and name."""
    return {
        **{f"policy {policy.name}": code_of(type(policy)) for policy in policies},
        **{f"task {task.name}": code_of(type(task)) for task in tasks},
    }


def _compute(
    work: list[Workload],
    jobs: list[Job],
    opened: OpenModel,
    executor: Executor,
    store: Store,
    advance: Callable[[str], None],
) -> None:
    """Compute and store the rows of every job, as they come."""
    plans = [replace(item, samples=replace(item.samples, items=[])) for item in work]  # they travel in jobs
    with deferred_interrupt() as interrupt:
        found = executor.compute(opened.load, partial(_rows_of, plans), jobs)
        for index, rows in interrupt.between(found):
            job = jobs[index]
            item = work[job.task]
            if isinstance(rows, LostJob):
                rows = failed_rows(item, job.sample, job.wanted, rows.reason)
            elif {row.key for row in rows} != job.wanted:
                raise BadInput(
                    f"a worker computed sample '{job.sample.id}' with other weights or another kvbench: give "
                    "every machine the same files and the same version"
                )
            store.append(rows)
            advance(item.plan.task.name)


def _rows_of(plans: list[Workload], lm: LoadedModel, job: Job) -> list[Row]:
    return sample_rows(plans[job.task], lm, job.sample, job.prompt, job.wanted)


def _fitting(
    config: RunConfig, policies: list[Policy], check: Callable[[Policy], None]
) -> tuple[list[Policy], list[str]]:
    """The policies that a check lets through, and notes on those that "all" brought and that it does not.

    Raises BadInput for one that was asked for by name.
    """
    fitting, notes = [], []
    for policy in policies:
        try:
            check(policy)
            fitting.append(policy)
        except BadInput as error:
            if spec_of(policy) in config.policies or "all" not in config.policies:
                raise
            notes.append(f"{spec_of(policy)} is left out: {error}")
    return fitting, notes


def _early_checks(config: RunConfig, tasks: list[Task], path: Path) -> None:
    """Refuse bad data, models and folders within seconds."""
    from ..model.open import check_model

    if len({spec_of(task) for task in tasks}) < len(tasks):
        raise BadInput("the same task is given twice: keep one of them")
    check_data(config.data, tasks)
    check_model(config.model)
    check_writable(path)


def _default_folder(config: RunConfig) -> Path:
    """A folder that the same command finds again; more budgets, policies or samples go there too."""
    growing = ("policies", "budgets", "limit", "draft", "out", "seeds", "fresh", "force_weights")
    own = {key: value for key, value in config.as_dict().items() if key not in growing}
    if not config.template_args:
        del own["template_args"]  # so that commands of before the option find their folders
    names = file_name("-".join(spec.partition(":")[0] for spec in config.tasks)).lstrip(".")
    model = file_name(config.model).strip("._")
    return Path("results") / f"{names[:60]}-{model[-40:]}-{fingerprint(own)[:8]}"


def _sources(work: list[Workload]) -> list[str]:
    """Where the samples come from, tasks of one source together."""
    tasks: dict[str, list[str]] = {}
    for item in work:
        tasks.setdefault(item.samples.source, []).append(spec_of(item.plan.task))
    return [f"data of {', '.join(names)}: {source}" for source, names in tasks.items()]


def _result(rows: pd.DataFrame, path: Path, metrics: list[str], notes: list[str]) -> RunResult:
    """Rows and aggregates of a configuration. metrics: the main ones of its tasks."""
    notes = notes + _sample_notes(rows)
    failed = rows[rows["status"] == "failed"]
    for spec, reason in sorted(set(zip(failed["spec"], failed["reason"], strict=True))):
        notes.append(f"{spec}: {int((failed['spec'] == spec).sum())} rows failed: {reason}")
    table = aggregate(rows)
    absent = [
        f"metric:{name}" for name in dict.fromkeys([*metrics, *MEASURED]) if f"metric:{name}" not in rows
    ]
    return RunResult(rows.assign(**dict.fromkeys(absent, math.nan)), table, path, notes, len(failed))


def _sliding(opened: OpenModel) -> list[str]:
    geometry = opened.geometry
    sliding = geometry.layers - len(geometry.full_layers)
    if not sliding:
        return []
    return [
        f"{sliding} of {geometry.layers} layers have a sliding window and are never evicted; budgets apply "
        "to the others"
    ]


def _sample_notes(rows: pd.DataFrame) -> list[str]:
    """What the rows of the full cache note, with the number of samples; other cells add only their pins."""
    full = rows[(rows["policy"] == FULL) & (rows["status"] == "ok")]
    noted = full[full["note"] != ""].groupby(["task_spec", "note"], sort=False)
    return [
        f"{task}: {len(part)} of {(full['task_spec'] == task).sum()} samples: {note}"
        for (task, note), part in noted
    ]
