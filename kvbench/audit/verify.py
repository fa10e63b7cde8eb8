"""`kvbench verify`: do rows, manifest, figures and tables of run folders belong together?

Nothing is run again (that is `kvbench rerun`). Hashes are computed anew from what the rows say, so a row
that was edited, or moved here from another run, does not fit its own key any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..contract.cell import FULL
from ..contract.identity import config_of, key_of
from ..contract.metrics import describe
from ..store.manifest import MANIFEST, read_manifest, stored_metrics
from ..store.results import PACKED, ROWS, Row, stored_rows
from ..store.row_files import digest
from .finding import Finding
from .shown import Current, check_figures, check_pages, check_table

SLACK = 1e-5  # what rounding in float32 may put outside of a metric's limits


@dataclass(frozen=True)
class Run:
    """A run folder as it was read.

    history: all rows in the order of writing. rows: the last one of each key. own: those that `kvbench run`
    wrote.
    """

    path: Path
    manifest: dict[str, Any]
    history: list[Row]
    tail: bytes

    @cached_property
    def rows(self) -> list[Row]:
        return list({row.key: row for row in self.history}.values())

    @cached_property
    def own(self) -> list[Row]:
        return [row for row in self.rows if self.hashes(row)]

    def hashes(self, row: Row) -> list[str]:
        """Hashes that the data of a row may have; none for rows that `kvbench run` did not write."""
        spec = row.task_spec
        known = [key for key, entry in self.manifest.get("data", {}).items() if entry["task"] == spec]
        newest = self.manifest.get("tasks", {}).get(spec, {}).get("data_sha256")
        return [*known, *([newest] if newest else [])]


def verify(
    paths: Sequence[str | Path], tables: Sequence[str | Path] = (), sources: bool = False
) -> Iterator[Finding]:
    """Check run folders, their figures, pages and the given tables; one finding per check.

    tables: csv or json files that `kvbench table` wrote from these folders. sources: also look the model
    and the data up and compare their hashes with the manifest's.
    A folder that is no run folder, beside others that are, is passed over and named.
    Raises: StoreError for a folder without readable rows or manifest.
    """
    wanted = [Path(path) for path in paths]
    runs_only = [path for path in wanted if _is_run(path)] or wanted
    for path in wanted:
        if path not in runs_only:
            yield Finding(f"{path}: not checked", True, "no run folder: neither manifest nor rows")
    runs = [Run(path, read_manifest(path), *stored_rows(path)) for path in runs_only]
    for run in runs:
        where = f"{run.path}: " if len(runs) > 1 else ""
        for law, check in CHECKS.items():
            yield _finding(where + law, check(run), _remark(law, run))
        if sources:
            from .sources import check_sources

            yield from check_sources(run.manifest, {row.key for row in run.rows}, where)
    every = Current(runs_only)
    for run in runs:
        current = Current([run.path], every) if len(runs) > 1 else every
        yield from check_figures(run.path, current, every=bool(run.own))
        yield from check_pages(run.path, current)
    for table in tables:
        yield check_table(Path(table), every)


def _is_run(path: Path) -> bool:
    """Whether a folder has anything of a run; what is broken in it is told when it is read."""
    return not path.is_dir() or any((path / name).exists() for name in (MANIFEST, ROWS, PACKED))


def _finding(law: str, faults: Iterable[str], remark: str) -> Finding:
    found = list(faults)
    if not found:
        return Finding(law, True, remark)
    return Finding(law, False, found[0] if len(found) == 1 else f"{len(found)} cases, the first: {found[0]}")


def _named(row: Row) -> str:
    return f"row {row.key} ({row.title})"


def _once(run: Run) -> Iterator[str]:
    """Only a failed row may be superseded; one row may stand there for several rules of pins."""
    if run.tail:
        yield f"the last line is half written ({len(run.tail)} bytes): the next `kvbench run` sets it aside"
    before: dict[str, dict[str, Row]] = {}
    for row in run.history:
        rules = before.setdefault(row.key, {})
        good = [old for old in rules.values() if old.status != "failed"]
        if row.pins_mode in rules and rules[row.pins_mode] in good:
            yield f"{_named(row)} is there twice"
        elif good and digest(good[0]) != digest(row):
            yield f"{_named(row)} is there with two contents"
        rules[row.pins_mode] = row


def _belongs(run: Run) -> Iterator[str]:
    model, styled = run.manifest.get("fixed", {}).get("model"), {FULL, *run.manifest.get("style", {})}
    for row in run.rows:
        if model is not None and row.settings["model"] != model:
            yield f"{_named(row)}: of model {row.settings['model']}, the manifest says {model}"
        if row.spec not in styled:
            yield f"{_named(row)}: the manifest has no policy '{row.spec}'"
        if "data" in run.manifest and not run.hashes(row):
            yield f"{_named(row)}: the manifest has no data of '{row.task_spec}'"


def _keys(run: Run) -> Iterator[str]:
    fixed = run.manifest.get("fixed", {})
    of_all = {"model_sha256": fixed.get("model_sha256"), "dtype": f"torch.{fixed.get('dtype')}"}
    for row in run.own:
        told = {**row.settings, **of_all}
        if row.config not in [config_of({**told, "data_sha256": digest}) for digest in run.hashes(row)]:
            yield f"{_named(row)}: its settings, the model and the data do not give config {row.config}"
        elif row.key != key_of(row.config, row.sample):
            yield f"{_named(row)}: config and sample do not give its key"


def _kept(run: Run) -> Iterator[str]:
    for row in run.own:
        if row.status == "ok":
            context, budget = row.context_tokens, row.settings["budget"]
            if context is None or row.kept is None:
                yield f"{_named(row)}: it does not say how many tokens there were, or were kept"
                continue
            wanted = context if budget is None else min(budget, context)
            if row.kept != wanted:
                yield f"{_named(row)}: kept {row.kept} of {context} tokens, which should be {wanted}"


def _limits(run: Run) -> Iterator[str]:
    stored = stored_metrics(run.manifest)
    for row in run.rows:
        for name, value in [*row.metrics.items(), *row.times.items()] if row.status == "ok" else []:
            low, high = describe(name, stored).limits or (None, None)
            if value is None or not math.isfinite(value):
                yield f"{_named(row)}: {name} is {value!r}"
            elif (low is not None and value < low - SLACK) or (high is not None and value > high + SLACK):
                yield f"{_named(row)}: {name} is {value}, outside of its limits {low} to {high}"


CHECKS: dict[str, Callable[[Run], Iterator[str]]] = {
    "every line of rows.jsonl is a row, and every row is there once": _once,
    "every row belongs to the manifest": _belongs,
    "key and config of every row follow from what it says": _keys,
    "kept pairs are the budget, or the context where it is shorter": _kept,
    "every metric is finite and within its limits": _limits,
}


def _remark(law: str, run: Run) -> str:
    """What a passed check did not cover."""
    left = len(run.rows) - len(run.own)
    if left and CHECKS[law] in (_keys, _kept):
        return f"{left} rows are not of `kvbench run` and were not checked for this"
    failed = sum(row.status != "ok" for row in run.rows)
    return f"{failed} rows were skipped or failed" if failed and CHECKS[law] is _limits else ""
