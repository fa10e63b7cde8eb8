"""The commands that say what there is, and whether a policy keeps the contract."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import BadInput
from .lazy_torch import without_torch
from .options import FAILED, Traceback, console, print_findings

LISTED = ("policies", "tasks", "models", "figures")


def list_(
    what: Annotated[str, typer.Argument(help="What to list: policies, tasks, models or figures.")],
    traceback: Traceback = False,
) -> None:
    """List policies, tasks, models or figures, including plugins that failed to load, and why."""
    if what not in LISTED:
        raise BadInput(f"list '{what}': choose one of {', '.join(LISTED)}")
    from . import describe

    for part in without_torch(getattr(describe, what)):
        console().print(part)


def info(
    name: Annotated[str, typer.Argument(help="A policy or task, with or without parameters.")],
    traceback: Traceback = False,
) -> None:
    """Describe a policy or task: parameters, the source of every default, needs, pins, ranking."""
    from . import describe

    for part in without_torch(lambda: describe.entry(name)):
        console().print(part, markup=False, highlight=False)
        console().print()


def check(
    name: Annotated[str, typer.Argument(help="A policy, with or without parameters.")],
    traceback: Traceback = False,
) -> None:
    """Run the contract checks on a policy, built-in or your own."""
    from ..audit.check import check_policy

    broken = print_findings(check_policy(name))
    if broken:
        typer.echo(f"error: policy '{name}' breaks {broken} of its laws", err=True)
        raise typer.Exit(FAILED)
    typer.echo(f"policy '{name}' keeps the contract")
