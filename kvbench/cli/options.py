"""Options that several commands share."""

from __future__ import annotations

import logging
import re
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..contract.cell import FULL
from ..errors import LOG, BadInput
from ..study.executors import Executor, Local

if TYPE_CHECKING:
    from rich.console import Console

    from ..audit.finding import Finding


NAMES = ("local", "ray")
DEFAULT_MODEL = "smollm2-135m"
REFUSED, INTERRUPTED = 2, 130  # exit codes
FAILED = 1  # exit code

# Options that several commands take.
ModelName = Annotated[str, typer.Option(help="Alias, local folder or hub id of the model.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, or cuda:all (layers spread over all GPUs).")]
DType = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]
TemplateArgs = Annotated[
    list[str] | None,
    typer.Option(help="KEY=VALUE for the chat template, as in enable_thinking=false; may repeat."),
]
OutFolder = Annotated[
    str | None, typer.Option(help="Run folder; default: derived from the settings, under results/.")
]
ExecutorName = Annotated[
    str, typer.Option(help="Where to compute: local, or ray (workers of a Ray cluster).")
]
Workers = Annotated[
    int | None, typer.Option(help="Ray workers; default: one per GPU, or per machine without GPUs.")
]
RayAddress = Annotated[
    str | None, typer.Option(help="Ray cluster; default: RAY_ADDRESS, a local cluster, or a new one.")
]


Quiet = Annotated[bool, typer.Option("--quiet", help="No progress on stderr.")]


class _Tracebacks(logging.StreamHandler[Any]):
    """Shows every traceback once: a policy that fails, fails in each sample."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._shown: set[tuple[str, ...]] = set()

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info and record.exc_info[1]
        if error:
            place = (repr(error), *traceback.format_tb(error.__traceback__))
            if place not in self._shown:
                self._shown.add(place)
                super().emit(record)


def _show_tracebacks(context: typer.Context, asked: bool) -> bool:
    """Show what plugins raise, until the command ends."""
    if asked:
        handler, level = _Tracebacks(), LOG.level

        def undo() -> None:
            LOG.removeHandler(handler)
            LOG.setLevel(level)

        LOG.addHandler(handler)
        LOG.setLevel(logging.DEBUG)
        context.find_root().call_on_close(undo)  # after the message of an error that ends the command
    return asked


Traceback = Annotated[
    bool,
    typer.Option(
        "--traceback",
        callback=_show_tracebacks,
        is_eager=True,
        help="Show the whole traceback of a policy or task that fails (in this process).",
    ),
]


def make_executor(name: str, workers: int | None = None, address: str | None = None) -> Executor:
    """The executor of the command line. Raises BadInput for what does not go together."""
    if name not in NAMES:
        raise BadInput(f"--executor '{name}': choose one of {', '.join(NAMES)}")
    if name == "local":
        if workers is not None or address is not None:
            raise BadInput("--workers and --ray-address go with --executor ray; local is this process")
        return Local()
    from ..study.executor_ray import RayExecutor

    return RayExecutor(workers, address)


def parse_budgets(given: list[str]) -> tuple[int, ...]:
    """Budgets from comma-separated texts. Raises: BadInput for anything but whole numbers from 1."""
    budgets = []
    for piece in filter(None, (part.strip() for text in given for part in text.split(","))):
        if not re.fullmatch(r"[0-9]+", piece) or int(piece) < 1:
            raise BadInput(
                f"budget '{piece}': a budget is a whole number of KV pairs per KV head and layer, 1 or more, "
                f"as in --budgets 20,100,500; the full cache ('{FULL}') is always evaluated in addition"
            )
        budgets.append(int(piece))
    return tuple(budgets)


def parse_seeds(given: list[str]) -> tuple[int, ...]:
    """Seeds from comma-separated texts. Raises: BadInput for anything but whole numbers."""
    pieces = [piece for piece in (part.strip() for text in given for part in text.split(",")) if piece]
    for piece in pieces:
        if not re.fullmatch(r"[0-9]+", piece):
            raise BadInput(f"seed '{piece}': a seed is a whole number, as in --seeds 0,1,2")
    return tuple(map(int, pieces))


def console() -> Console:
    """Standard output; wide where it is not a terminal, so that nothing is cut in a file or a pipe."""
    from rich.console import Console

    return Console(soft_wrap=False, width=None if sys.stdout.isatty() else 160)


def print_findings(findings: Iterable[Finding]) -> int:
    """Print findings one by one; returns how many failed."""
    broken = 0
    for finding in findings:
        typer.echo(f"{'ok  ' if finding.passed else 'FAIL'}  {finding.law}")
        if finding.detail:
            typer.echo(f"      {finding.detail}")
        broken += not finding.passed
    return broken


def tasks_of(paths: list[str]) -> dict[str, dict[str, Any]]:
    """What the manifests say about the tasks, where there are manifests."""
    from ..store.manifest import MANIFEST, read_manifest

    known: dict[str, dict[str, Any]] = {}
    for path in map(Path, paths):
        folder = path.parent if path.is_file() else path
        if (folder / MANIFEST).is_file():
            known |= read_manifest(folder).get("tasks", {})
    return known
