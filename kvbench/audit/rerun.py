"""`kvbench rerun`: repeat a run from its manifest and say which rows differ."""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..contract.registry import POLICIES
from ..errors import BadInput, StoreError
from ..store.manifest import MANIFEST, read_manifest
from ..store.results import ROWS, Row, stored_rows
from ..store.row_files import line_of
from ..study.runner import run
from .sources import settings_of

SHOWN = 20  # differences in the report
LATER = ("family", "data", "cut_tokens")  # fields that rows of the first releases do not have


@dataclass
class Repetition:
    """What a repetition gave. equal: rows that are the same bit for bit, times aside. close: rows whose
    metrics are the same within the tolerance. different: what differs, in words, by key. missing: keys
    that the repetition did not give. notes: what the runs said.
    """

    path: Path
    tolerance: float
    equal: int = 0
    close: int = 0
    different: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        total = self.equal + self.close + len(self.different)
        lines = [f"note: {note}" for note in self.notes]
        lines += [
            f"{total} rows of {self.path} repeated: {self.equal} equal bit for bit (times aside), "
            f"{self.close} within {self.tolerance:g}, {len(self.different)} different"
        ]
        if self.missing:
            lines.append(
                f"{len(self.missing)} rows did not come again, the first: {self.missing[0]}: the data, the "
                "weights of a policy or kvbench itself have changed"
            )
        lines += [f"  {told}" for told in list(self.different.values())[:SHOWN]]
        if len(self.different) > SHOWN:
            lines.append(f"  and {len(self.different) - SHOWN} more")
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
    return report


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
        return
    then, now = before.as_dict(), after.as_dict()
    apart = {"schema", "times", "metrics", *(name for name in LATER if then[name] is None)}
    told = [
        f"{name} {then.get(name)!r} then, {now.get(name)!r} now"
        for name in {**then, **now}
        if name not in apart and then.get(name) != now.get(name)
    ]
    old, new = before.metrics, after.metrics
    moved = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    far = [name for name in moved if not _close(old.get(name), new.get(name), report.tolerance)]
    told += [f"{name} {old.get(name)} then, {new.get(name)} now" for name in far]
    if told:
        report.different[key] = f"{before.title}: {'; '.join(told)}"
    elif moved:
        report.close += 1
    else:
        report.equal += 1


def _close(old: float | None, new: float | None, tolerance: float) -> bool:
    if old is None or new is None:
        return False
    return abs(old - new) <= tolerance * max(1.0, abs(old))
