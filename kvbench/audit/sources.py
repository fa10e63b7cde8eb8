"""Looks up the model and the data of a run again, and compares their hashes with the manifest's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..contract.code import code_of, same_code
from ..contract.registry import POLICIES, TASKS, expand_tasks, spec_of
from ..errors import KvbenchError, StoreError
from ..model.open import OpenModel, open_model
from ..study.config import RunConfig
from ..study.plan import plan_task
from ..study.workload import Workload
from .finding import Finding


def settings_of(manifest: dict[str, Any]) -> list[RunConfig]:
    """The different invocations that filled a run folder, in order.

    Raises: StoreError where the manifest does not have them.
    """
    found = [run["settings"] for run in manifest.get("runs", []) if "settings" in run]
    if not found:
        raise StoreError(
            "this run folder does not say with which settings it was made (another command or an older "
            "kvbench wrote it): make it again with kvbench run"
        )
    try:
        return list(dict.fromkeys(RunConfig(**one) for one in found))
    except TypeError as error:
        raise StoreError(f"settings of another version of kvbench ({error}): use that version") from error


def check_sources(manifest: dict[str, Any], keys: set[str], where: str) -> Iterator[Finding]:
    """The model's fingerprint, then the data of every task. keys: of the rows that are there."""
    law = where + "the model has the fingerprint that the manifest says"
    try:
        configs = settings_of(manifest)
        opened = open_model(configs[0].model, configs[0].device, configs[0].dtype)
    except KvbenchError as error:
        yield Finding(law, False, str(error))
        return
    told = manifest["fixed"]["model_sha256"]
    same = opened.sha256 == told
    yield Finding(law, same, "" if same else f"{opened.name} has {opened.sha256}, the manifest says {told}")
    for part, code in manifest.get("code", {}).items():
        yield _code(part, code, where)
    for config in configs:
        for spec in expand_tasks(config.tasks):
            for one in config.of_each_seed():
                yield _data(one, spec, opened, keys, where)


def _code(part: str, told: dict[str, Any], where: str) -> Finding:
    """Whether a policy or task has the code that made the rows. part: "policy NAME" or "task NAME"."""
    kind, _, name = part.partition(" ")
    law = f"{where}{part} has the code that made the rows"
    try:
        here = code_of((POLICIES if kind == "policy" else TASKS).get(name))
    except KvbenchError as error:
        return Finding(law, False, str(error))
    same = same_code(here, told)
    return Finding(
        law, same, "" if same else f"it has changed since: kvbench run --fresh {name} computes again"
    )


def _data(config: RunConfig, spec: str, opened: OpenModel, keys: set[str], where: str) -> Finding:
    """Whether the samples, built again, have the rows of the full cache in the folder."""
    task = TASKS.parse(spec)
    limit = "all" if config.limit is None else config.limit
    law = (
        f"{where}the data of {spec_of(task)}, seed {config.seed}, {limit} samples, give the keys of the rows"
    )
    try:
        work = Workload.build(config, plan_task(config, task, []), opened)
    except KvbenchError as error:
        return Finding(law, False, str(error))
    samples = work.samples
    absent = [sample.id for sample, _ in samples.items if work.key(work.plan.full, sample) not in keys]
    if not absent:
        return Finding(law, True)
    return Finding(
        law,
        False,
        f"{len(absent)} of {len(samples.items)} samples have no row, the first: {absent[0]!r} (data sha256 "
        f"{samples.sha256}): the data have changed, or the run did not end",
    )
