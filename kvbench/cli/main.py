"""The command line: reads options, calls the library, prints what it says.

Imports stay inside the commands: a bad name or number is refused before torch loads, and `plot` and
`table` work where torch is not installed.
"""

from __future__ import annotations

import errno
import gc
import io
import sys
from typing import Annotated, Any

import typer

from .. import __version__
from ..errors import LOG, KvbenchError
from . import results, traces
from .figures import figure
from .listing import check, info, list_
from .options import INTERRUPTED, REFUSED
from .run import run
from .speed import speed


class Commands(typer.core.TyperGroup):
    """All commands, with one place that turns our errors into messages and exit codes."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KvbenchError as error:
            LOG.debug("traceback", exc_info=error.__cause__ or error)
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
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Compare KV-cache eviction policies: same prompts, same absolute budgets, one loop.",
)


def main() -> None:
    """Entry point of the `kvbench` command. What an output cannot show (half a surrogate pair) is escaped."""
    gc.set_threshold(50_000)  # imports and rows make many objects, and few of them garbage
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
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command()(run)
app.command("list")(list_)
for command in (info, check):
    app.command()(command)
for part in (results, traces):
    part.add_commands(app)
app.command()(speed)
app.command()(figure)
