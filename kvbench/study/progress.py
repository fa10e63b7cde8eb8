"""Progress on stderr: a bar with rate and time left in a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

EVERY = 30.0  # seconds between lines where there is no terminal
LONG = 600.0  # seconds of work that are told in advance


@contextmanager
def progress(shown: bool, total: int, unit: str, limit: str = "") -> Iterator[Callable[[str], None]]:
    """Yields advance(label), to be called once per finished `unit`; silent unless `shown`.

    limit: the option that makes the work smaller, named where it will take long.
    """
    if not shown:
        yield lambda label: None
        return
    if not sys.stderr.isatty():
        yield _Lines(total, unit, limit, sys.stderr).advance
        return
    from rich import progress as bars
    from rich.console import Console
    from rich.text import Text

    class Rate(bars.ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text(f"{task.speed:.2f} {unit}/s" if task.speed else "")

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        Rate(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=Console(stderr=True)) as bar:
        handle = bar.add_task(unit, total=total)
        warning = _Warning(total, limit)

        def advance(label: str) -> None:
            bar.update(handle, advance=1, description=label)
            if told := warning.after_one():
                bar.console.print(told)

        yield advance


class _Warning:
    """After the first unit of long work, how long all of it will take."""

    def __init__(self, total: int, limit: str) -> None:
        self._total, self._limit = total, limit
        self._started: float | None = time.monotonic()

    def after_one(self) -> str:
        if self._started is None:
            return ""
        seconds, self._started = (time.monotonic() - self._started) * self._total, None
        if seconds < LONG or not self._limit:
            return ""
        return f"about {duration(seconds)} for all {self._total}; {self._limit} takes fewer, and it resumes"


class _Lines:
    """A line at the start, every EVERY seconds, and at the end."""

    def __init__(self, total: int, unit: str, limit: str, out: TextIO) -> None:
        self._total, self._unit, self._out = total, unit, out
        self._warning = _Warning(total, limit)
        self._started = self._last = time.monotonic()
        self._done = 0
        self._say(f"0/{total} {unit}")

    def advance(self, label: str) -> None:
        self._done += 1
        now = time.monotonic()
        if told := self._warning.after_one():
            self._say(told)
        if now - self._last < EVERY and self._done < self._total:
            return
        self._last = now
        spent = now - self._started
        left = spent / self._done * (self._total - self._done)
        rest = f", {duration(left)} left" if left else f" in {duration(spent)}"
        self._say(f"{label}: {self._done}/{self._total} {self._unit}{rest}")

    def _say(self, line: str) -> None:
        print(line, file=self._out, flush=True)


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
