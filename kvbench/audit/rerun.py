"""`kvbench rerun`: repeat a run from its manifest and say which rows differ."""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..contract.registry import POLICIES, TASKS, expand_policies, expand_tasks
from ..contract.spec import split_name
from ..errors import BadInput, StoreError
from ..store.manifest import MANIFEST, read_manifest
from ..store.results import ROWS, Row, stored_rows
from ..store.row_files import line_of
from ..study.config import RunConfig
from ..study.runner import run
from .differences import differences
from .sources import settings_of

SHOWN = 20  # differences in the report


@dataclass
class Repetition:
    """What a repetition gave. equal: rows that are the same bit for bit, times aside. close: rows whose
    metrics are the same within the tolerance. near_ties, different: what differs, in words, by key; the
    former come again within the tolerance when one near-tie falls the other way. missing: keys that the
    repetition did not give. notes: what the runs said.
    """

    path: Path
    tolerance: float
    equal: int = 0
    close: int = 0
    near_ties: dict[str, str] = field(default_factory=dict)
    different: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        total = self.equal + self.close + len(self.near_ties) + len(self.different)
        lines = [f"note: {note}" for note in self.notes]
        lines += [
            f"{total} rows of {self.path} repeated: {self.equal} equal bit for bit (times aside), "
            f"{self.close} within {self.tolerance:g}, {len(self.near_ties)} after a near-tie that fell the "
            f"other way, {len(self.different)} different"
        ]
        if self.missing:
            lines.append(
                f"{len(self.missing)} rows did not come again, the first: {self.missing[0]}: the data, the "
                "weights of a policy or kvbench itself have changed"
            )
        lines += [f"  {told}" for told in [*self.near_ties.values(), *self.different.values()][:SHOWN]]
        if (more := len(self.near_ties) + len(self.different) - SHOWN) > 0:
            lines.append(f"  and {more} more")
        return "\n".join(lines)


def rerun(
    path: str | Path, samples: int | None = None, tolerance: float = 1e-4, out: str | Path | None = None,
    progress: bool = True,
) -> Repetition:  # fmt: skip
    """Repeat every invocation of a run folder, in its settings, and compare row by row.

    samples: repeat so many samples of each task and seed, drawn at random (the same ones each time). out:
    folder of the repetition, which goes on with what it holds; by default a new one that goes when the
    comparison is done.
    Raises: StoreError for a folder that cannot be repeated; whatever `run` raises.
    """
    if samples is not None and samples < 1:
        raise BadInput(f"--samples {samples}: repeat 1 or more")
    if not 0 <= tolerance < math.inf:
        raise BadInput(f"--tolerance {tolerance}: a number from 0 on")
    manifest = read_manifest(path)
    configs = settings_of(manifest)
    _check_registered(path, configs, manifest.get("code", {}))
    rows = {row.key: row for row in stored_rows(path)[0]}
    chosen = _chosen(rows, samples)
    report = Repetition(Path(path), tolerance)
    if out is not None and Path(out).resolve() == Path(path).resolve():
        raise BadInput(f"--out {out} is the run itself: name another folder")
    if out is not None and samples is not None and Path(out).exists():
        raise BadInput(f"--out {out} is there already: with --samples, name a new folder")
    with _folder(out) as folder:
        if not (folder / MANIFEST).exists():
            _begin(folder, manifest, [row for key, row in rows.items() if key not in chosen])
        for config in configs:
            policies = _policies_then(config.policies, rows)
            try:
                report.notes += run(replace(config, policies=policies, out=str(folder)), progress).notes
            except StoreError as error:
                raise StoreError(f"{path} cannot be repeated here: {error}") from error
        again = {row.key: row for row in stored_rows(folder)[0]}
    for key in chosen:
        _compare(report, key, rows[key], again.get(key))
    if report.different:
        _explain(report, configs, rows)
    return report


def _check_registered(
    path: str | Path, configs: Sequence[RunConfig], code: Mapping[str, Mapping[str, Any]]
) -> None:
    """Raises: BadInput for a policy or task that was registered in a script, and is not in this process."""
    for config in configs:
        asked = [
            ("policy", POLICIES, expand_policies(config.policies)),
            ("task", TASKS, expand_tasks(config.tasks)),
        ]
        for kind, registry, specs in asked:
            for name in {split_name(spec)[0] for spec in specs} - set(registry.names()):
                module = code.get(f"{kind} {name}", {}).get("module")
                place = f"module {module}, as the manifest says," if module else "a script"
                raise BadInput(
                    f"{kind} '{name}' of {path} is not installed here: {place} registered it. Install it "
                    f"with an entry point, or call kvbench.audit.rerun.rerun({str(path)!r}) where it is "
                    "registered"
                )


def _explain(report: Repetition, configs: Sequence[RunConfig], rows: Mapping[str, Row]) -> None:
    """Tell the rows that differ because a near-tie fell the other way from those that are different."""
    from .near_ties import flipped_ties

    different = {key: rows[key] for key in report.different if rows[key].status == "ok"}
    for key, tie in flipped_ties(configs, different, report.tolerance):
        report.near_ties[key] = f"{report.different.pop(key)}: a near-tie fell the other way ({tie})"


def _policies_then(specs: Sequence[str], rows: dict[str, Row]) -> tuple[str, ...]:
    """What was asked for, where "all" stands for the policies that there were then."""
    measured = {row.spec for row in rows.values()}
    known = [name for name in POLICIES.names() if name in measured]
    return tuple(name for spec in specs for name in (known if spec == "all" else [spec]))


def _chosen(rows: dict[str, Row], samples: int | None) -> list[str]:
    """Keys to repeat: of all rows, or of a few samples per task and seed."""
    groups: dict[tuple[str, int], dict[str, list[str]]] = {}
    for key, row in rows.items():
        group = groups.setdefault((row.task_spec, row.settings["seed"]), {})
        group.setdefault(row.sample, []).append(key)
    found: list[str] = []
    for name, group in groups.items():
        count = len(group) if samples is None else min(samples, len(group))
        drawn = random.Random(str(name)).sample(sorted(group), count)
        found += [key for sample in drawn for key in group[sample]]
    return found


@contextmanager
def _folder(out: str | Path | None) -> Iterator[Path]:
    if out is None:
        with tempfile.TemporaryDirectory(prefix="kvbench-rerun-") as folder:
            yield Path(folder)
    else:
        yield Path(out)


def _begin(folder: Path, manifest: dict[str, Any], rows: list[Row]) -> None:
    """A folder that holds what is not repeated, so that the run computes the rest.

    It begins with the old manifest: a model or a precision that has changed is refused.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).write_text(json.dumps({**manifest, "runs": []}))
    lines = "".join(line_of(row) + "\n" for row in rows)
    (folder / ROWS).write_text(lines, encoding="ascii")


def _compare(report: Repetition, key: str, before: Row, after: Row | None) -> None:
    if after is None:
        report.missing.append(key)
    elif told := differences(before, after, report.tolerance):
        report.different[key] = f"{before.title}: {'; '.join(told)}"
    elif before.metrics != after.metrics:
        report.close += 1
    else:
        report.equal += 1
