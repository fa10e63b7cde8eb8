"""A run that has ended, read from its folder: for when it cannot be repeated.

Its samples need the data and its keys the model, so without these the manifest must say that the same was
asked before and ended, and the rows must be whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pandas as pd

from ..contract.code import code_of, same_code
from ..contract.registry import POLICIES, TASKS, expand_tasks, spec_of
from ..contract.task import Task
from ..errors import KvbenchError
from ..store.manifest import read_manifest
from ..store.results import read_rows
from .config import RunConfig
from .plan import plan_task

LISTS = ("policies", "tasks", "budgets")  # of which a part may be asked again
ASIDE = (*LISTS, "out", "draft", "fresh", "seed", "seeds")


def finished_rows(config: RunConfig, path: Path) -> pd.DataFrame | None:
    """The rows of a configuration that ended in this folder, or None: where it did not end, where rows
    failed or are missing, where code has changed, or where the folder holds several readings of it."""
    try:
        manifest, rows = read_manifest(path), read_rows(path)
        tasks = [TASKS.parse(spec) for spec in expand_tasks(config.tasks)]
    except KvbenchError:
        return None
    if config.fresh or not any(_covers(run, config) for run in manifest["runs"]):
        return None
    if _changed(manifest.get("code", {})):
        return None
    found = [_of(rows, config, one, task) for task in tasks for one in config.of_each_seed()]
    if any(part is None for part in found):
        return None
    chosen = pd.concat([part for part in found if part is not None]).sort_index().reset_index(drop=True)
    chosen.attrs = rows.attrs
    return chosen


def _covers(run: Mapping[str, Any], config: RunConfig) -> bool:
    """Whether an invocation ended that asked for all of this."""
    if "settings" not in run or not {"rows", "executor"} & run.keys():
        return False
    defaults = {one.name: one.default for one in fields(RunConfig) if one.default is not MISSING}
    then = defaults | run["settings"]
    now = json.loads(json.dumps(config.as_dict()))
    if any(then[name] != now[name] for name in now if name not in ASIDE):
        return False
    seeds = set(then["seeds"] or [then["seed"]])
    return set(config.seeds or [config.seed]) <= seeds and all(
        set(now[name]) <= set(then[name]) for name in LISTS
    )


def _changed(code: Mapping[str, Any]) -> bool:
    """Whether a policy or task that is installed has other code than the rows."""
    for part, then in code.items():
        kind, _, name = part.partition(" ")
        try:
            now = code_of((POLICIES if kind == "policy" else TASKS).get(name))
        except KvbenchError:
            continue  # not installed: nothing to compare with
        if not same_code(then, now):
            return True
    return False


def _of(rows: pd.DataFrame, config: RunConfig, one: RunConfig, task: Task) -> pd.DataFrame | None:
    """The rows of a task and a seed, if they are whole."""
    plan = plan_task(one, task, [])
    schedule = plan.full.schedule
    full = rows["budget"].isna()
    keep = (rows["task_spec"] == spec_of(task)) & (rows["seed"] == one.seed)
    keep &= (rows["question"] == plan.question) & (rows["schedule"] == schedule.kind)
    keep &= (rows["chunk"] == schedule.chunk).fillna(False) if schedule.chunk else rows["chunk"].isna()
    keep &= full | ((rows["pins_mode"] == plan.pins) & rows["budget"].isin(config.budgets))
    if "all" not in config.policies:
        keep &= full | rows["spec"].isin([_canonical(spec) for spec in config.policies])
    found = rows[keep.astype(bool)]
    counts = found.groupby("sample").size()
    whole = counts.nunique() == 1 and not (found["status"] == "failed").any()
    alone = len(found[["template", "data"]].drop_duplicates()) == 1
    short = config.limit is None or len(counts) <= config.limit
    return found if whole and alone and short else None


def _canonical(spec: str) -> str:
    """The spec as rows have it; as written where its weights are not there."""
    try:
        return spec_of(POLICIES.parse(spec))
    except KvbenchError:
        return spec
