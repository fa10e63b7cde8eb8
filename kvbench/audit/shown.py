"""Do figures and tables still say what the rows say?"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from ..errors import BadInput
from ..show.report.numbers import read_lines as read_numbers
from ..stats.aggregate import aggregate, list_metrics
from ..store.manifest import shown_data
from ..store.results import read_rows
from .finding import Finding

LINE = ("config", "pins_mode", "metric")  # what names a line
NUMBERS = ("mean", "lo", "hi", "n")
CLOSE = 1e-9  # relative: a number written as text and read again is the same


class Current:
    """What the rows of some run folders say now. They are read, and each metric is aggregated, once.

    wider: of more folders, which may be what a figure or page shows when these rows alone do not give it.
    """

    def __init__(self, paths: Sequence[str | Path], wider: Current | None = None) -> None:
        self._paths = paths
        self._wider = wider
        self._lines: dict[tuple[str, ...], dict[Any, Any]] = {}
        self._metrics: set[str] = set()

    @cached_property
    def _rows(self) -> pd.DataFrame:
        return read_rows(self._paths)

    def lines(self, metrics: Iterable[str]) -> dict[tuple[str, ...], dict[Any, Any]]:
        """Aggregated lines by LINE, those of these metrics among them where the rows have such."""
        known = list_metrics(self._rows)
        names = [name for name in dict.fromkeys(metrics) if name in known and name not in self._metrics]
        if names:
            frame = aggregate(self._rows, names)
            self._lines |= {tuple(line[n] for n in LINE): line for line in frame.to_dict("records")}
            self._metrics.update(names)
        return self._lines

    def contradict(self, written: Sequence[Mapping[str, Any]]) -> str:
        """The first written number that the rows do not give, in words, or ""."""
        fault = self._contradict(written)
        return fault and self._wider.contradict(written) if self._wider else fault

    def _contradict(self, written: Sequence[Mapping[str, Any]]) -> str:
        now = self.lines(line["metric"] for line in written)
        for line in written:
            current = now.get(tuple(line[name] for name in LINE))
            if current is None:
                return (
                    f"{line['metric']} of config {line['config']} is not in the rows: draw or print it again"
                )
            for name in NUMBERS:
                if not _same(line[name], current[name]):
                    where = f"{current['policy']} at {current['budget']}, {line['metric']}"
                    return f"{where}: {name} is {line[name]} here and {current[name]} in the rows"
        return ""


def check_figures(folder: Path, current: Current, every: bool) -> Iterator[Finding]:
    """One finding per file of numbers in `figures`.

    current: of this run folder, then of all that it may show. every: an image without numbers is a fault.
    """
    place = folder / "figures"
    files = {file: _read_lines(file) for file in sorted(place.glob("*.csv"))}
    if files:
        current.lines(line["metric"] for lines in files.values() for line in lines)  # of all at once
    for file, lines in files.items():
        fault = current.contradict(lines) or _check_images(file)
        yield Finding(f"{file} says what the rows say, and its images were drawn from it", not fault, fault)
    named = {file.stem for file in files}
    bare = sorted(file.name for file in place.glob("*.svg") if file.stem not in named)
    if bare and every:
        law = f"every figure in {place} has its numbers beside it"
        yield Finding(law, False, f"{', '.join(bare)}: draw it again with kvbench plot")


def check_pages(folder: Path, current: Current) -> Iterator[Finding]:
    """One finding per page of `kvbench report` in the folder. current: as in check_figures."""
    for file in sorted(folder.glob("*.html")):
        try:
            lines, whole = read_numbers(file.read_text(encoding="utf-8"))
            changed = "its numbers are not those it was made with: make it again"
            fault = current.contradict(lines) if whole else changed
        except (BadInput, KeyError) as error:
            fault = f"{error}"
        yield Finding(f"{file} says what the rows say", not fault, fault)


def check_table(file: Path, current: Current) -> Finding:
    """Whether a csv or json file of `kvbench table` says what the rows say. Raises: BadInput."""
    fault = current.contradict(_read_lines(file))
    return Finding(f"{file} says what the rows say", not fault, fault)


def _read_lines(file: Path) -> list[dict[str, Any]]:
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


def _same(written: Any, value: Any) -> bool:
    missing = written in (None, "", "nan")
    if missing or pd.isna(value):
        return missing and bool(pd.isna(value))
    return math.isclose(float(written), float(value), rel_tol=CLOSE, abs_tol=CLOSE)


def _check_images(file: Path) -> str:
    """Which image beside a file of numbers was drawn from other ones, or ""."""
    mark = shown_data(file.read_bytes()).encode()
    for image in (file.with_suffix(".svg"), file.with_suffix(".png")):
        if not image.is_file():
            return f"{image.name} is missing: draw it again with kvbench plot"
        if mark not in image.read_bytes():
            return f"{image.name} was drawn from other numbers: draw it again with kvbench plot"
    return ""
