"""Do figures and tables still say what the rows say?"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ..errors import BadInput
from ..show.report.numbers import read as read_numbers
from ..stats.aggregate import aggregate, list_metrics
from ..store.manifest import shown_data
from ..store.results import read_rows
from .finding import Finding

LINE = ("config", "pins_mode", "metric")  # what names a line
NUMBERS = ("mean", "lo", "hi", "n")
CLOSE = 1e-9  # relative: a number written as text and read again is the same


def figures(folder: Path, paths: Sequence[str | Path], every: bool) -> Iterator[Finding]:
    """One finding per file of numbers in `figures`.

    paths: all run folders that figures may show. every: an image without numbers is a fault.
    """
    place = folder / "figures"
    files = sorted(place.glob("*.csv"))
    for file in files:
        fault = _stale(_lines(file), paths) or _image(file)
        yield Finding(f"{file} says what the rows say, and its images show it", not fault, fault)
    named = {file.stem for file in files}
    bare = sorted(file.name for file in place.glob("*.svg") if file.stem not in named)
    if bare and every:
        law = f"every figure in {place} has its numbers beside it"
        yield Finding(law, False, f"{', '.join(bare)}: draw it again with kvbench plot")


def pages(folder: Path, paths: Sequence[str | Path]) -> Iterator[Finding]:
    """One finding per page of `kvbench report` in the folder. paths: all run folders that it may show."""
    for file in sorted(folder.glob("*.html")):
        try:
            lines, whole = read_numbers(file.read_text(encoding="utf-8"))
            fault = (
                _stale(lines, paths) if whole else "its numbers are not those it was made with: make it again"
            )
        except (BadInput, KeyError) as error:
            fault = f"{error}"
        yield Finding(f"{file} says what the rows say", not fault, fault)


def table_file(file: Path, paths: Sequence[str | Path]) -> Finding:
    """Whether a csv or json file of `kvbench table` says what the rows say. Raises: BadInput."""
    fault = _stale(_lines(file), paths)
    return Finding(f"{file} says what the rows say", not fault, fault)


def _lines(file: Path) -> list[dict[str, Any]]:
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".json":
            lines = json.loads(text)
        else:
            frame = pd.read_csv(file, keep_default_na=False, float_precision="round_trip", dtype=str)
            lines = frame.to_dict("records")
        return [{name: line[name] for name in (*LINE, *NUMBERS)} for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"{file} is not a table of kvbench ({error!r}): give a csv or json file that "
            "`kvbench table RUN --format csv` printed"
        ) from error


def _stale(lines: list[dict[str, Any]], paths: Sequence[str | Path]) -> str:
    """The first number that the rows do not give, in words, or ""."""
    rows = read_rows(paths)
    known = list_metrics(rows)
    names = list(dict.fromkeys(line["metric"] for line in lines if line["metric"] in known))
    frame = aggregate(rows, names)
    now = {tuple(line[name] for name in LINE): line for line in frame.to_dict("records")}
    for line in lines:
        current = now.get(tuple(line[name] for name in LINE))
        if current is None:
            return f"{line['metric']} of config {line['config']} is not in the rows: draw or print it again"
        for name in NUMBERS:
            if not _same(line[name], current[name]):
                told = f"{current['policy']} at {current['budget']}, {line['metric']}"
                return f"{told}: {name} is {line[name]} here and {current[name]} in the rows"
    return ""


def _same(written: Any, value: Any) -> bool:
    missing = written in (None, "", "nan")
    if missing or pd.isna(value):
        return missing and bool(pd.isna(value))
    return math.isclose(float(written), float(value), rel_tol=CLOSE, abs_tol=CLOSE)


def _image(file: Path) -> str:
    """Which image beside a file of numbers was drawn from other ones, or ""."""
    mark = shown_data(file.read_bytes()).encode()
    for image in (file.with_suffix(".svg"), file.with_suffix(".png")):
        if not image.is_file():
            return f"{image.name} is missing: draw it again with kvbench plot"
        if mark not in image.read_bytes():
            return f"{image.name} was drawn from other numbers: draw it again with kvbench plot"
    return ""
