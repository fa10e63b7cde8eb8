"""The command that draws the named figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..contract.registry import split_specs
from ..errors import BadInput
from ..show.figures import OUT, Request, figure_kind
from .listing import list_ as list_of


def figure(
    name: Annotated[str | None, typer.Argument(help="Which figure; --list shows all.")] = None,
    paths: Annotated[list[str] | None, typer.Argument(help="What it takes, as --list says.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the figures and stop.")] = False,
    metric: Annotated[list[str] | None, typer.Option(help="Of runs; default: each task's main one.")] = None,
    each: Annotated[
        bool, typer.Option("--each", help="A panel per task, where a group has several.")
    ] = False,
    policy: Annotated[list[str] | None, typer.Option(help="Policies; default: the figure's own.")] = None,
    pins: Annotated[str | None, typer.Option(help="Of traces: none, native, or FIRST,LAST.")] = None,
    limit: Annotated[int | None, typer.Option(help="Traces to use; default: all.")] = None,
    sample: Annotated[int, typer.Option(help="Which trace, from 0, where a figure shows one.")] = 0,
    head: Annotated[str | None, typer.Option(help="A KV head, as L10.H0.")] = None,
    out: Annotated[str, typer.Option(help="Folder for PNG, SVG and CSV.")] = str(OUT),
) -> None:
    """Draw a figure of the KVP paper from stored runs, recorded traces, or measured times."""
    if list_:
        return list_of("figures")
    if name is None:
        raise BadInput("which figure? `kvbench figure --list` shows their names and what they take")
    asked = Request(
        paths=tuple(paths or ()), metrics=tuple(split_specs(metric or [])), each=each,
        policies=tuple(split_specs(policy or [])), pins=pins, limit=limit, sample=sample, head=head,
        out=Path(out),
    )  # fmt: skip
    for file in figure_kind(name).draw(asked):
        typer.echo(file)
