"""The command that measures time and memory."""

from __future__ import annotations

from typing import Annotated

import typer

from ..contract.registry import POLICIES, expand_policies, split_specs
from ..contract.spec import split_name
from ..errors import BadInput
from .options import DEFAULT_MODEL, Device, DType, ModelName, OutFolder, Quiet, Traceback


def speed(
    policy: Annotated[list[str], typer.Option(help="Policies: name or name:param=value, or all.")],
    lengths: Annotated[
        list[str], typer.Option(help="Context lengths in tokens; may exceed what the model was trained for.")
    ] = ["512,1024,2048"],  # noqa: B006 - typer reads the default, nobody changes it
    budget: Annotated[int, typer.Option(help="KV pairs per KV head per layer after compaction.")] = 256,
    new_tokens: Annotated[int, typer.Option(help="Tokens to decode from each compacted cache.")] = 32,
    repeat: Annotated[int, typer.Option(help="Passes per length; the table shows medians.")] = 3,
    model: ModelName = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: DType = "auto",
    out: OutFolder = None,
    quiet: Quiet = False,
    traceback: Traceback = False,
) -> None:
    """Time prefill, scoring, ranking, compaction and decoding; count operations; measure peak memory.

    Rows are stored; repeating a command measures only what is missing.
    """
    counts = tuple(_count(piece) for piece in split_specs(lengths))
    specs = tuple(split_specs(policy))
    for spec in expand_policies(specs):
        POLICIES.target(split_name(spec)[0])
    from ..audit.speed.measure import SpeedConfig
    from ..audit.speed.measure import speed as measure
    from ..show.speed import draw, tables, title
    from ..store.manifest import read_manifest

    config = SpeedConfig(specs, counts, budget, new_tokens, repeat, model, device, dtype, out)
    result = measure(config, not quiet)
    manifest = read_manifest(result.path)
    heading = title(result.rows, manifest["fixed"])
    typer.echo(f"{heading}\n\n{tables(result.rows)}")
    for note in result.notes:
        typer.echo(f"note: {note}")
    for path in draw(result.rows, heading, manifest.get("style", {}), result.path / "figures"):
        typer.echo(path)
    typer.echo(f"rows: {result.path}")


def _count(text: str) -> int:
    if not text.isdigit():
        raise BadInput(f"--lengths '{text}': write token counts as 512,1024")
    return int(text)
