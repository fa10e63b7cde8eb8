"""A progress bar with rate and time left, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def progress(shown: bool, total: int, unit: str) -> Iterator[Callable[[str], None]]:
    """Yields advance(label), to be called once per finished `unit`; silent unless `shown`."""
    if not shown:
        yield lambda label: None
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
        yield lambda label: bar.update(handle, advance=1, description=label)
