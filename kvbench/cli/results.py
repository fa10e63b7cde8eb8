"""Commands that work on stored results: draw, print, compare, check, repeat."""

from __future__ import annotations

from typing import Annotated

import typer

from ..contract.cell import FULL
from ..contract.registry import split_specs
from ..errors import BadInput
from .options import FAILED, Traceback, print_findings, tasks_of


def add_commands(app: typer.Typer) -> None:
    """Register plot, table, compare, report, verify, rerun and show."""
    for command in (plot, table, compare, report, verify, rerun, show):
        app.command()(command)


def plot(
    paths: Annotated[list[str], typer.Argument(help="Run folders or rows.jsonl files.")],
    metric: Annotated[
        list[str] | None, typer.Option(help="Metrics to draw; default: each task's main ones.")
    ] = None,
    versus: Annotated[
        str | None,
        typer.Option(help="schedule, question or pins: draw its two values side by side instead."),
    ] = None,
    out: Annotated[str | None, typer.Option(help="Folder; default: figures/ in the first run.")] = None,
) -> None:
    """Draw metrics against budgets, or two values of a rule side by side, from stored rows."""
    import os

    from ..show.plot import plot as draw
    from ..show.versus import versus as draw_versus

    metrics = split_specs(metric or [])
    if versus:
        files = draw_versus(paths, versus, metrics, out)
    else:
        files = draw(paths, ",".join(metrics) or None, out, workers=os.cpu_count() or 1)
    for path in files:
        typer.echo(path)


def table(
    paths: Annotated[list[str], typer.Argument(help="Run folders or rows.jsonl files.")],
    format: Annotated[str, typer.Option(help="Output: text, md, csv or json.")] = "text",
    metric: Annotated[
        list[str] | None, typer.Option(help="Metrics to print; default: all measured ones.")
    ] = None,
) -> None:
    """Print means with 95% intervals from stored rows."""
    from ..show.table import render
    from ..stats.aggregate import aggregate
    from ..store.results import read_rows

    check_format(format)
    frame = aggregate(read_rows(paths), split_specs(metric or []) or None)
    typer.echo(render(frame, format, tasks_of(paths)).rstrip("\n"))


def compare(
    paths: Annotated[list[str], typer.Argument(help="Run folders or rows.jsonl files.")],
    baseline: Annotated[str, typer.Option(help="Policy to compare with, named as in tables.")] = FULL,
    format: Annotated[str, typer.Option(help="Output: text, md, csv or json.")] = "text",
    metric: Annotated[
        list[str] | None, typer.Option(help="Metrics to compare; default: each task's main one, and kl.")
    ] = None,
    versus: Annotated[
        str | None,
        typer.Option(help="schedule, question or pins: compare each policy with itself under two values."),
    ] = None,
) -> None:
    """Compare policies with a baseline on the same samples: differences, tests, suspect results."""
    from ..show.comparison_table import render_comparison
    from ..stats.compare import compare as compare_rows
    from ..stats.compare_rules import compare_rules
    from ..store.results import read_rows

    check_format(format)
    rows, metrics, tasks = read_rows(paths), split_specs(metric or []) or None, tasks_of(paths)
    if versus is None:
        frame = compare_rows(rows, baseline, metrics, tasks)
    elif baseline != FULL:
        raise BadInput("--versus compares each policy with itself: leave --baseline out")
    else:
        frame = compare_rules(rows, versus, metrics, tasks)
    typer.echo(render_comparison(frame, format).rstrip("\n"))


def report(
    paths: Annotated[list[str], typer.Argument(help="Run folders or rows.jsonl files.")],
    out: Annotated[
        str | None, typer.Option(help="HTML file to write; default: report.html in the first run folder.")
    ] = None,
) -> None:
    """Write one HTML page from stored rows: best policies, curves, all pairs, pins, provenance."""
    from ..show.report import report as write

    typer.echo(write(paths, out))


def verify(
    paths: Annotated[list[str], typer.Argument(help="Run folders; name all that a figure or page shows.")],
    table: Annotated[
        list[str] | None,
        typer.Option(help="csv or json output of `kvbench table` to check against the rows."),
    ] = None,
    sources: Annotated[
        bool, typer.Option("--sources", help="Also load model and data again and compare their hashes.")
    ] = False,
) -> None:
    """Check that rows, manifest, figures, pages and tables of run folders are consistent."""
    from ..audit.verify import verify as verify_runs

    broken = print_findings(verify_runs(paths, table or [], sources))
    if broken:
        typer.echo(f"error: {broken} checks failed", err=True)
        raise typer.Exit(FAILED)
    typer.echo("everything checked fits together")


def rerun(
    path: Annotated[str, typer.Argument(help="A run folder.")],
    samples: Annotated[
        int | None, typer.Option(help="Repeat this many random samples per task; default: all.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="Largest difference that counts as equal, relative to max(1, value).")
    ] = 1e-4,
    out: Annotated[
        str | None, typer.Option(help="Folder to keep the repeated rows in; default: not kept.")
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Repeat a run from its manifest and report the rows that differ."""
    from ..audit.rerun import rerun as repeat

    report = repeat(path, samples, tolerance, out)
    typer.echo(report.text())
    if report.different or report.missing:
        raise typer.Exit(FAILED)


def show(
    path: Annotated[str, typer.Argument(help="A run folder.")],
    sample: Annotated[str, typer.Option(help="Id of the sample, as in the rows.")],
    whole: Annotated[bool, typer.Option("--whole", help="Print all of the context, not its ends.")] = False,
    kept: Annotated[
        bool, typer.Option("--kept", help="Load the model and show which tokens each policy keeps.")
    ] = False,
    traceback: Traceback = False,
) -> None:
    """Show one sample whole: its prompt, the right answer, what every policy answered and kept."""
    from ..audit.sample import show_sample

    for line in show_sample(path, sample, whole, kept):
        typer.echo(line)


def check_format(name: str) -> None:
    from ..show.table import FORMATS

    if name not in FORMATS:
        raise BadInput(f"--format '{name}': choose one of {', '.join(FORMATS)}")
