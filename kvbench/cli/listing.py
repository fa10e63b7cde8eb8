"""The commands that say what there is, and whether a policy keeps the contract."""

from __future__ import annotations

from typing import Annotated

import typer

from ..errors import BadInput
from .options import FAILED, console, print_findings

LISTED = ("policies", "tasks", "models", "figures")


def list_(what: Annotated[str, typer.Argument(help="policies, tasks, models or figures.")]) -> None:
    """List policies, tasks, models or figures, with broken plugins and why they are broken."""
    if what not in LISTED:
        raise BadInput(f"list '{what}': choose one of {', '.join(LISTED)}")
    from . import describe

    for part in getattr(describe, what)():
        console().print(part)


def info(name: Annotated[str, typer.Argument(help="A policy or a task, parameters allowed.")]) -> None:
    """Describe a policy or task: parameters, the source of every default, what it needs and keeps."""
    from . import describe

    for part in describe.entry(name):
        console().print(part, markup=False, highlight=False)
        console().print()


def check(name: Annotated[str, typer.Argument(help="A policy, parameters allowed.")]) -> None:
    """Try the contract on a policy: yours, a plugin's or a built-in one."""
    from ..audit.check import check_policy

    broken = print_findings(check_policy(name))
    if broken:
        typer.echo(f"error: policy '{name}' breaks {broken} of its laws", err=True)
        raise typer.Exit(FAILED)
    typer.echo(f"policy '{name}' keeps the contract")
