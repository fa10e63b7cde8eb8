"""The command line: reads options, calls the library, prints what it says.

Imports stay inside the commands: a bad name or number is refused before torch loads, and `plot` and
`table` work where torch is not installed.
"""

from __future__ import annotations

import errno
import io
import re
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import __version__, cli_results, cli_traces
from .cli_figures import figure
from .cli_results import FAILED, tasks_of, told
from .cli_speed import speed
from .config import FULL, RunConfig
from .errors import BadInput, KvbenchError
from .registry import POLICIES, TASKS, expand_policies, expand_tasks, split_specs
from .spec import split_name

if TYPE_CHECKING:
    from rich.console import Console

    from .runner import RunResult

REFUSED, INTERRUPTED = 2, 130  # exit codes
LISTED = ("policies", "tasks", "models", "figures")


class Commands(typer.core.TyperGroup):
    """All commands, with one place that turns our errors into messages and exit codes."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KvbenchError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(REFUSED) from error
        except KeyboardInterrupt as error:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from error
        except OSError as error:
            if error.errno in (None, errno.EPIPE):
                raise
            typer.echo(f"error: {error.filename or 'a file'}: {error.strerror}", err=True)
            raise typer.Exit(REFUSED) from error


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Compare KV-cache eviction policies: same prompts, same absolute budgets, one loop.",
)


def main() -> None:
    """Entry point of the `kvbench` command. What an output cannot show (half a surrogate pair) is escaped."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="kvbench")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"kvbench {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    policy: Annotated[list[str], typer.Option(help="Policies: name or name:param=value, or all.")],
    task: Annotated[list[str], typer.Option(help="Tasks: name, name:param=value, or a group.")],
    budgets: Annotated[list[str], typer.Option(help="KV pairs kept per KV head and layer: 20,100,500.")],
    model: Annotated[str, typer.Option(help="Alias, local folder or hub id.")] = "smollm2-135m",
    limit: Annotated[int | None, typer.Option(help="Samples per task; default: all.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of generated samples and random policies.")] = 0,
    seeds: Annotated[
        list[str] | None, typer.Option(help="Several seeds, as 0,1,2; tables and figures pool them.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, or cuda:all: layers over all GPUs.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    protocol: Annotated[
        str, typer.Option(help="paper (each task's and policy's own rules) or controlled (the same for all).")
    ] = "paper",
    schedule: Annotated[str | None, typer.Option(help="prefill or chunked; default: the task's.")] = None,
    chunk: Annotated[int | None, typer.Option(help="Tokens per chunk of the chunked schedule.")] = None,
    pins: Annotated[
        str | None,
        typer.Option(help="native, none, or FIRST,LAST tokens always kept; default: the protocol's."),
    ] = None,
    question: Annotated[
        str | None, typer.Option(help="withheld or seen; default: the protocol's, then the task's.")
    ] = None,
    template: Annotated[str, typer.Option(help="auto, chat or none.")] = "auto",
    data: Annotated[str | None, typer.Option(help="jsonl file with the task's samples.")] = None,
    draft: Annotated[
        bool, typer.Option(help="Verify likely answers in one pass; same results, less time.")
    ] = True,
    out: Annotated[str | None, typer.Option(help="Run folder; default: one under results/.")] = None,
    executor: Annotated[str, typer.Option(help="local, or ray: workers of a Ray cluster.")] = "local",
    workers: Annotated[int | None, typer.Option(help="Of ray; default: one per GPU or machine.")] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="Of ray; default: RAY_ADDRESS, a local cluster, or a new one.")
    ] = None,
) -> None:
    """Evaluate policies on tasks at every budget. The same command resumes and adds to its run folder.

    Lists are separated by commas, and options may repeat.
    """
    options: dict[str, Any] = {
        "model": model, "limit": limit, "seed": seed, "seeds": parse_seeds(seeds or []), "device": device,
        "dtype": dtype, "protocol": protocol, "schedule": schedule, "chunk": chunk, "pins": pins,
        "question": question, "template": template, "data": data, "draft": draft, "out": out,
    }  # fmt: skip
    specs, names = split_specs(policy), split_specs(task)
    config = RunConfig(tuple(specs), tuple(names), parse_budgets(budgets), **options)
    _refuse_unknown(config)
    from .executors import executor_named
    from .runner import run as run_config

    try:
        result = run_config(config, executor=executor_named(executor, workers, ray_address))
    except KeyboardInterrupt as error:
        where = f"in {out} " if out else ""
        typer.echo(
            f"\ninterrupted: finished samples are saved {where}and nothing else is lost; type the same "
            "command to go on from there",
            err=True,
        )
        raise typer.Exit(INTERRUPTED) from error
    _report(result)
    if result.failed:
        raise typer.Exit(FAILED)


@app.command("list")
def list_(what: Annotated[str, typer.Argument(help="policies, tasks, models or figures.")]) -> None:
    """List policies, tasks, models or figures, with broken plugins and why they are broken."""
    if what not in LISTED:
        raise BadInput(f"list '{what}': choose one of {', '.join(LISTED)}")
    from . import describe

    for part in getattr(describe, what)():
        _console().print(part)


@app.command()
def info(name: Annotated[str, typer.Argument(help="A policy or a task, parameters allowed.")]) -> None:
    """Describe a policy or task: parameters, the source of every default, what it needs and keeps."""
    from . import describe

    for part in describe.entry(name):
        _console().print(part, markup=False, highlight=False)
        _console().print()


@app.command()
def check(name: Annotated[str, typer.Argument(help="A policy, parameters allowed.")]) -> None:
    """Try the contract on a policy: yours, a plugin's or a built-in one."""
    from .check import check_policy

    broken = told(check_policy(name))
    if broken:
        typer.echo(f"error: policy '{name}' breaks {broken} of its laws", err=True)
        raise typer.Exit(FAILED)
    typer.echo(f"policy '{name}' keeps the contract")


def parse_budgets(given: list[str]) -> tuple[int, ...]:
    """Budgets from comma-separated texts. Raises: BadInput for anything but whole numbers from 1."""
    budgets = []
    for piece in filter(None, (part.strip() for text in given for part in text.split(","))):
        if not re.fullmatch(r"[0-9]+", piece) or int(piece) < 1:
            raise BadInput(
                f"budget '{piece}': a budget is a whole number of KV pairs per KV head and layer, 1 or more, "
                f"as in --budgets 20,100,500; the full cache ('{FULL}') is always evaluated besides"
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


def _refuse_unknown(config: RunConfig) -> None:
    """Look all names up before anything heavy loads; the runner reads the parameters."""
    for spec in expand_policies(config.policies):
        POLICIES.target(split_name(spec)[0])
    for spec in expand_tasks(config.tasks):
        TASKS.target(split_name(spec)[0])


def _report(result: RunResult) -> None:
    from .memory import told
    from .table import render

    typer.echo(render(result.table, "text", tasks_of([str(result.path)])).rstrip("\n"))
    for note in result.notes:
        typer.echo(f"note: {note}")
    if result.peak:
        typer.echo(f"peak memory: {told(result.peak)}")
    typer.echo(f"rows: {result.path}")
    typer.echo(f"next: kvbench plot {result.path}")


def _console() -> Console:
    """Standard output; wide where it is not a terminal, so that nothing is cut in a file or a pipe."""
    from rich.console import Console

    return Console(soft_wrap=False, width=None if sys.stdout.isatty() else 160)


for part in (cli_results, cli_traces):
    part.add_commands(app)
app.command()(speed)
app.command()(figure)
