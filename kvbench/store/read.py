"""Rows of run folders as one frame, for tables, figures and tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from ..contract.metrics import Metric
from ..errors import StoreError
from .frame import frame
from .manifest import MANIFEST, read_manifest, stored_metrics
from .row import Row
from .row_files import ROWS, parse, stored_bytes


def read_rows(paths: str | Path | Iterable[str | Path]) -> pd.DataFrame:
    """All rows of one or more run folders (or .jsonl files), one per key and rule of pins; the last one wins.

    A policy's own pins may be what another rule pins, too: such rows have one key and belong to both rules.
    Columns: the row's fields, `metric:NAME` and `time:NAME` (float, NaN where absent). Parameters are
    JSON text, pins "first,last"; budget and chunk are Int64 with NA; run is the folder as it was named.
    Strings stay strings. The frame also carries the metrics that the runs declared (see `metrics_of`).
    Raises: StoreError when a folder has no rows, damaged ones, or rows of a newer kvbench.
    """
    several = [paths] if isinstance(paths, str | Path) else list(paths)
    rows: dict[tuple[str, str], tuple[Row, str]] = {}
    stored: dict[str, Metric] = {}
    brackets: set[str] = set()
    for path in map(Path, several):
        file = path if path.suffix == ".jsonl" else path / ROWS
        data = stored_bytes(file.parent, file.name)
        lines = parse(file, data[: data.rfind(b"\n") + 1])
        found = {(row.key, row.pins_mode): (row, str(path)) for row in lines}
        if not found:
            raise StoreError(
                f"no rows in {path}: make some with `kvbench run --policy all --task boolq "
                f"--budgets 64,128 --out {path}`, or name the folder of an earlier run"
            )
        rows.update(found)
        if (file.parent / MANIFEST).is_file():
            manifest = read_manifest(file.parent)
            stored = {**stored_metrics(manifest), **stored}
            brackets |= {spec for spec, style in manifest.get("style", {}).items() if style.get("bracket")}
    return frame([row for row, _ in rows.values()], [run for _, run in rows.values()], stored, brackets)
