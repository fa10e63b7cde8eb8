"""The command that evaluates policies: it reads options, calls the library, prints what it says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..contract.registry import POLICIES, TASKS, expand_policies, expand_tasks, split_specs
from ..contract.spec import split_name
from ..study.config import RunConfig
from .options import (
    DEFAULT_MODEL,
    FAILED,
    INTERRUPTED,
    Device,
    DType,
    ExecutorName,
    ModelName,
    OutFolder,
    Quiet,
    RayAddress,
    TemplateArgs,
    Traceback,
    Workers,
    make_executor,
    parse_budgets,
    parse_seeds,
    tasks_of,
)

if TYPE_CHECKING:
    from ..study.runner import RunResult


def run(
    policy: Annotated[list[str], typer.Option(help="Policies: name or name:param=value, or all.")],
    task: Annotated[list[str], typer.Option(help="Tasks: name, name:param=value, or a group of tasks.")],
    budgets: Annotated[
        list[str], typer.Option(help="KV pairs kept per KV head per layer, as in 20,100,500.")
    ],
    model: ModelName = DEFAULT_MODEL,
    limit: Annotated[int | None, typer.Option(help="Samples per task; default: all of them.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of generated samples and random policies.")] = 0,
    seeds: Annotated[
        list[str] | None, typer.Option(help="Several seeds, as in 0,1,2; tables and figures pool them.")
    ] = None,
    device: Device = "auto",
    dtype: DType = "auto",
    protocol: Annotated[
        str, typer.Option(help="paper: each task's and policy's own rules; controlled: the same for all.")
    ] = "paper",
    schedule: Annotated[
        str | None, typer.Option(help="When to evict: prefill or chunked; default: the task's.")
    ] = None,
    chunk: Annotated[int | None, typer.Option(help="Tokens per chunk of the chunked schedule.")] = None,
    pins: Annotated[
        str | None,
        typer.Option(help="Tokens always kept: native, none, or FIRST,LAST; overrides the protocol."),
    ] = None,
    question: Annotated[
        str | None,
        typer.Option(help="Read before eviction (seen) or after (withheld); overrides the protocol."),
    ] = None,
    template: Annotated[str, typer.Option(help="Chat template: auto, chat or none.")] = "auto",
    template_arg: TemplateArgs = None,
    data: Annotated[str | None, typer.Option(help="jsonl file of the task's samples.")] = None,
    force_weights: Annotated[
        bool, typer.Option("--force-weights", help="Accept weights trained for another file of this model.")
    ] = False,
    fresh: Annotated[
        list[str] | None,
        typer.Option(help="Policies or tasks whose rows are computed again, after a change of their code."),
    ] = None,
    draft: Annotated[
        bool, typer.Option(help="Verify likely answers in one pass: same results, less time.")
    ] = True,
    out: OutFolder = None,
    executor: ExecutorName = "local",
    workers: Workers = None,
    ray_address: RayAddress = None,
    quiet: Quiet = False,
    traceback: Traceback = False,
) -> None:
    """Evaluate policies on tasks at every budget. Repeating a command resumes its run folder."""
    options: dict[str, Any] = {
        "model": model, "limit": limit, "seed": seed, "seeds": parse_seeds(seeds or []), "device": device,
        "dtype": dtype, "protocol": protocol, "schedule": schedule, "chunk": chunk, "pins": pins,
        "question": question, "template": template, "data": data, "draft": draft, "out": out,
        "fresh": split_specs(fresh or []), "template_args": template_arg or (),
        "force_weights": force_weights,
    }  # fmt: skip
    specs = tuple(split_specs(policy)), tuple(split_specs(task))
    config = RunConfig(*specs, parse_budgets(budgets), **options)
    _report(_run(config, not quiet, executor, workers, ray_address))


def _run(
    config: RunConfig, progress: bool, executor: str, workers: int | None, address: str | None
) -> RunResult:
    """The run, or the end of the command when it is interrupted. Unknown names are refused at once."""
    _refuse_unknown(config)
    from ..study.runner import run as run_config

    try:
        return run_config(config, progress, make_executor(executor, workers, address))
    except KeyboardInterrupt as error:
        where = f"in {config.out} " if config.out else ""
        typer.echo(
            f"\ninterrupted: finished samples are saved {where}and nothing else is lost; type the same "
            "command to go on from there",
            err=True,
        )
        raise typer.Exit(INTERRUPTED) from error


def _refuse_unknown(config: RunConfig) -> None:
    """Look all names up before anything heavy loads; the runner reads the parameters."""
    for spec in expand_policies(config.policies):
        POLICIES.target(split_name(spec)[0])
    for spec in expand_tasks(config.tasks):
        TASKS.target(split_name(spec)[0])


def _report(result: RunResult) -> None:
    """Table, notes, what to type next. Ends the command where rows failed or none was measured."""
    from ..model.memory import format_size
    from ..show.table import render

    typer.echo(render(result.table, "text", tasks_of([str(result.path)])).rstrip("\n"))
    for note in result.notes:
        typer.echo(f"note: {note}")
    if result.peak:
        typer.echo(f"peak memory: {format_size(result.peak)}")
    typer.echo(f"computed {result.computed} rows, reused {result.reused}")
    typer.echo(f"rows: {result.path}")
    measured = bool((result.rows["status"] == "ok").any())
    if not measured:
        typer.echo("error: no sample gave a result; the reasons stand above", err=True)
    else:
        typer.echo(f"next: kvbench plot {result.path}")
    if result.failed or not measured:
        raise typer.Exit(FAILED)
