"""The commands of offline learning: record traces, train a policy on them, measure rankings on them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from ..contract.registry import POLICIES, TASKS, expand_policies, expand_tasks, spec_of, split_specs
from ..contract.spec import split_name
from ..errors import BadInput, UnknownName
from .options import (
    DEFAULT_MODEL,
    FAILED,
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
)


def add_commands(app: typer.Typer) -> None:
    """Register trace, train and eviction-error."""
    app.command()(trace)
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(context_settings=settings)(train)
    app.command("eviction-error")(eviction_error)


def trace(
    task: Annotated[list[str], typer.Option(help="Tasks to sample from, in turn.")],
    samples: Annotated[int, typer.Option(help="Total number of traces.")],
    out: Annotated[str, typer.Option(help="Folder for the traces.")],
    model: ModelName = DEFAULT_MODEL,
    length: Annotated[
        str | None, typer.Option(help="Tokens per sample: 512, or a range as in 350-700.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of generated samples.")] = 0,
    data: Annotated[str | None, typer.Option(help="jsonl file of the task's samples.")] = None,
    template_arg: TemplateArgs = None,
    under: Annotated[
        str | None, typer.Option(help="POLICY:BUDGET: record future attention after this eviction.")
    ] = None,
    response: Annotated[
        str, typer.Option(help="data (the reference answer) or generated (the model's own answer).")
    ] = "data",
    store: Annotated[str, typer.Option(help="Precision on disk: float16, bfloat16 or float32.")] = "float16",
    hidden: Annotated[
        bool, typer.Option(help="Also record what attention modules receive, for policies that read it.")
    ] = False,
    device: Device = "auto",
    dtype: DType = "auto",
    executor: ExecutorName = "local",
    workers: Workers = None,
    ray_address: RayAddress = None,
    quiet: Quiet = False,
    traceback: Traceback = False,
) -> None:
    """Record queries, keys and values of every layer, one forward pass per sample; resumable."""
    specs = expand_tasks(split_specs(task))
    for spec in specs:
        TASKS.target(split_name(spec)[0])
    from ..learn.collect import TraceConfig, collect
    from .options import make_executor

    config = TraceConfig(
        tasks=tuple(specs), samples=samples, out=out, model=model, length=length, seed=seed,
        data=data, under=under, response=response, store=store, hidden=hidden, device=device, dtype=dtype,
        template_args=tuple(template_arg or ()),
    )  # fmt: skip
    found = collect(config, not quiet, typer.echo, make_executor(executor, workers, ray_address))
    typer.echo(f"{len(found)} traces in {out}")
    typer.echo(f"next: kvbench train --policy kvp --traces {shlex.quote(out)} --out kvp.safetensors")


def train(
    ctx: typer.Context,
    policy: Annotated[str, typer.Option(help="The learned policy to train.")],
    traces: Annotated[str, typer.Option(help="Folder that `kvbench trace` wrote.")],
    out: Annotated[str, typer.Option(help="Weights file to write.")],
    recipe: Annotated[
        str | None, typer.Option(help="Named settings of the trainer; default: its first.")
    ] = None,
    executor: ExecutorName = "local",
    workers: Workers = None,
    ray_address: RayAddress = None,
    traceback: Traceback = False,
) -> None:
    """Train a policy on recorded traces. Resumable; equal seeds give equal weights.

    Every setting of the recipe is also an option: --steps 500 --split boundary --objective softcost.
    """
    from pathlib import Path

    from ..learn.trace import TraceSet
    from ..learn.training import trainer_of
    from .options import make_executor

    trainer = trainer_of(POLICIES.get(policy))
    chosen = trainer.recipe(recipe, _pairs(ctx.args))
    with make_executor(executor, workers, ray_address) as where:
        where.check("policy", [policy])
        if executor == "local":
            card = trainer.train(chosen, Path(traces), Path(out), typer.echo)
        elif trainer.train_sharded is not None:
            card = trainer.train_sharded(chosen, Path(traces), Path(out), typer.echo, where)
        else:
            raise BadInput(f"--executor {executor}: {policy} is trained in one piece, use local")
    typer.echo(f"{out}: validation cost {card['validation_cost']:.3f} after {card['seconds']:.0f} s")
    model = TraceSet(traces).header["model"]
    fitting = "" if model == DEFAULT_MODEL else f" --model {shlex.quote(model)}"
    typer.echo(
        f"next: kvbench run --policy {shlex.quote(f'{policy}:{trainer.option}={out}')}{fitting} "
        "--task needle --budgets 64,128 --limit 8"
    )


def eviction_error(
    traces: Annotated[str, typer.Option(help="Folder that `kvbench trace` wrote.")],
    policy: Annotated[list[str], typer.Option(help="Policies, or all.")],
    budgets: Annotated[
        list[str] | None, typer.Option(help="Budgets at which to measure missed mass.")
    ] = None,
    split: Annotated[
        str, typer.Option(help="Where the future begins: boundary (the question) or uniform.")
    ] = "boundary",
    splits: Annotated[int, typer.Option(help="Split points per trace with --split uniform.")] = 4,
    pins: Annotated[str, typer.Option(help="Tokens always kept: native, none, or FIRST,LAST.")] = "none",
    baseline: Annotated[
        str | None, typer.Option(help="Also compare every policy with this one, paired by trace.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Number of traces; default: all of them.")] = None,
    per_head: Annotated[
        bool, typer.Option(help="Also write the mean cost of every layer and KV head.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of split points and of random policies.")] = 0,
    out: OutFolder = None,
    quiet: Quiet = False,
    traceback: Traceback = False,
) -> None:
    """Measure eviction cost and missed mass on recorded traces. A model is loaded for soft tokens only."""
    import json

    from ..learn.eviction_error import ErrorConfig, measure
    from .options import parse_budgets

    specs = tuple(split_specs(policy))
    for spec in expand_policies(specs):
        POLICIES.target(split_name(spec)[0])
    if baseline:
        compared = [spec_of(POLICIES.parse(spec)) for spec in expand_policies(specs)]
        baseline = spec_of(POLICIES.parse(baseline))
        if baseline not in compared:
            raise UnknownName("policy", baseline, compared, "The baseline is one of --policy.")
    extra: dict[str, Any] = {"budgets": parse_budgets(budgets)} if budgets else {}
    config = ErrorConfig(
        traces, specs, split=split, splits=splits, pins=pins, seed=seed, limit=limit, out=out, **extra
    )
    path, heads = measure(config, not quiet, typer.echo)
    if per_head:
        (path / "per_head.json").write_text(json.dumps(heads))
        typer.echo(f"per head: {path / 'per_head.json'}")
    _report(path, baseline, min(config.budgets))


def _report(path: Path, baseline: str | None, budget: int) -> None:
    """Tables of what was measured on traces. Ends the command where a policy failed.

    budget: whose rows are compared with the baseline's; eviction cost is the same at all.
    """
    from ..show.table import render
    from ..stats.aggregate import aggregate
    from ..stats.compare import compare_pairs
    from ..store.results import read_rows

    rows = read_rows(path)
    failed = rows[rows["status"] == "failed"].drop_duplicates("spec")
    for spec, reason in zip(failed["spec"], failed["reason"], strict=True):
        typer.echo(f"failed: {spec}: {reason}", err=True)
    rows = rows[~rows["spec"].isin(failed["spec"])]
    if not len(rows):
        raise typer.Exit(FAILED)
    typer.echo(render(aggregate(rows, ["eviction_cost", "missed_mass"]), "text").rstrip("\n"))
    if baseline:
        columns = ["policy", "difference", "lo", "hi", "n", "win", "tie", "loss", "p"]
        pairs = compare_pairs(rows[rows["budget"] == budget], baseline, "eviction_cost")[columns]
        typer.echo(
            f"\neviction cost minus that of {baseline}, paired over traces, 95% interval, permutation test:"
        )
        typer.echo(pairs.to_string(index=False, float_format=lambda value: f"{value:.3g}"))
    typer.echo(f"rows: {path}")
    typer.echo(f"next: kvbench plot {path} --metric missed_mass")
    if len(failed):
        raise typer.Exit(FAILED)


def _pairs(arguments: list[str]) -> dict[str, str]:
    """`--name value` or `--name=value` pairs. Raises BadInput for anything else."""
    pairs: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        if not option.startswith("--") or not (equals or rest):
            raise BadInput(f"'{option}': write settings of the recipe as --name value")
        pairs[option[2:].replace("-", "_")] = value if equals else rest.pop(0)
    return pairs
