"""The command that draws the named figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..contract.registry import split_specs
from ..errors import BadInput
from .listing import list_ as list_of


def figure(
    name: Annotated[str | None, typer.Argument(help="Name of the figure; --list shows all.")] = None,
    paths: Annotated[list[str] | None, typer.Argument(help="Its inputs, as --list says.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the figures and exit.")] = False,
    metric: Annotated[
        list[str] | None, typer.Option(help="Metrics, for figures of runs; default: each task's main one.")
    ] = None,
    each: Annotated[bool, typer.Option("--each", help="One panel per task of a group.")] = False,
    policy: Annotated[
        list[str] | None, typer.Option(help="Policies to draw; default: the figure's own.")
    ] = None,
    pins: Annotated[
        str | None, typer.Option(help="Pins, for figures of traces: none, native, or FIRST,LAST.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Number of traces; default: all of them.")] = None,
    sample: Annotated[int, typer.Option(help="Index of the trace, for figures of one trace.")] = 0,
    head: Annotated[str | None, typer.Option(help="A KV head, as in L10.H0.")] = None,
    out: Annotated[str, typer.Option(help="Folder for PNG, SVG and CSV.")] = "results/figures",
) -> None:
    """Draw a figure of the KVP paper from stored runs, recorded traces, or measured times."""
    if list_:
        return list_of("figures")
    if name is None:
        raise BadInput("which figure? `kvbench figure --list` shows their names and what they take")
    from ..show.figures import Request, figure_kind

    asked = Request(
        paths=tuple(paths or ()), metrics=tuple(split_specs(metric or [])), each=each,
        policies=tuple(split_specs(policy or [])), pins=pins, limit=limit, sample=sample, head=head,
        out=Path(out),
    )  # fmt: skip
    for file in figure_kind(name).draw(asked):
        typer.echo(file)
