"""What every figure shares: its paper, fonts, the line above it, and the files it becomes.

Figures are objects of their own. Nothing global changes, so a figure looks the same in any program.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ..contract.files import replace_file
from ..errors import StoreError
from ..store.manifest import shown_data

FONT = 12  # points, on WIDTH: readable when the figure is shrunk to half a page
FAMILY = "DejaVu Sans"  # comes with matplotlib: the same everywhere
WIDTH = 7.6  # inches
DPI, COMPACT = 200, 130  # dots per inch of a PNG, and of images inside an SVG
GRID: dict[str, Any] = {"color": "#dddddd", "linewidth": 0.6}


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    return Figure(figsize=(width, height), layout="constrained")


def add_axes(fig: Figure, rows: int = 1, columns: int = 1, **options: Any) -> NDArray[Any]:
    """Axes in our fonts, without a frame on the top and on the right: (row, column). options: of subplots."""
    cells: NDArray[Any] = fig.subplots(rows, columns, squeeze=False, **options)
    for axes in cells.flat:
        axes.spines[["top", "right"]].set_visible(False)
        use_fonts(axes)
    return cells


def use_fonts(axes: Axes) -> None:
    """Our size and family for what names the axes, colour bars included."""
    axes.tick_params(which="both", labelsize=FONT, labelfontfamily=FAMILY)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_fontsize(FONT)
        axis.get_offset_text().set_fontsize(FONT)


def add_heading(fig: Figure, lines: Sequence[str], width: int = 88) -> None:
    """What is shown, above everything, left: one line each, wrapped at `width` characters."""
    text = "\n".join(piece for line in lines for piece in textwrap.wrap(line, width))
    fig.suptitle(text, fontsize=FONT - 1, x=0.01, horizontalalignment="left")


def round_numbers(lines: pd.DataFrame) -> pd.DataFrame:
    """The same with six significant digits: what a figure of thousands of points needs."""
    real = lines.select_dtypes("float").columns
    return lines.assign(**{str(name): [float(f"{value:.6g}") for value in lines[name]] for name in real})


def save(
    fig: Figure, folder: Path, name: str, lines: pd.DataFrame | None = None, compact: bool = False
) -> list[Path]:
    """Write a figure as PNG and SVG, equal bytes for equal figures.

    lines: what it shows; they go into a CSV file beside it, whose hash the figure carries, so that
    `kvbench verify` can tell whether the rows still say what the figure shows. compact: fewer dots and
    colours, and text as text in the SVG, for figures of many panels. What was there stays until all is drawn.
    Raises: StoreError.
    """
    marks: dict[str, str] = {}
    drawn: dict[str, bytes] = {}
    for text in fig.findobj(Text):
        text.set_fontfamily(FAMILY)
    if lines is not None:
        shown = lines.drop(columns="run", errors="ignore")
        data = shown.to_csv(index=False, lineterminator="\n").encode()
        marks = {"Description": shown_data(data)}
    drawn["png"] = _compact(fig, marks) if compact else _drawn(fig, "png", DPI, {"Software": None, **marks})
    drawn["svg"] = _svg(fig, marks, "none" if compact else "path")
    if lines is not None:
        drawn["csv"] = data
    files = [folder / f"{name}.{end}" for end in drawn]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in zip(files, drawn.values(), strict=True):
            replace_file(file, partial(_write, content))
    except OSError as error:
        raise StoreError(
            f"cannot write figures to {folder} ({error.strerror}): choose another --out"
        ) from error
    return files


def _write(content: bytes, file: Path) -> None:
    file.write_bytes(content)


def _drawn(fig: Figure, kind: str, dpi: int, metadata: Mapping[str, str | None]) -> bytes:
    buffer = io.BytesIO()
    fig.savefig(buffer, format=kind, dpi=dpi, metadata=dict(metadata))
    return buffer.getvalue()


def _svg(fig: Figure, marks: Mapping[str, str], text: str) -> bytes:
    """text: "path", or "none" for text as text. What an SVG writer reads from the global settings alone is
    set for as long as it writes."""
    with matplotlib.rc_context({"svg.hashsalt": "kvbench", "svg.fonttype": text}):
        return _drawn(fig, "svg", COMPACT, {"Date": None, "Creator": None, **marks})


def _compact(fig: Figure, marks: Mapping[str, str]) -> bytes:
    """A PNG of fewer dots and 256 colours: the most frequent ones, or, where a colour bar names colours,
    those that cover all."""
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png", dpi=COMPACT)
    info = PngInfo()
    for key, value in marks.items():
        info.add_text(key, value)
    bar = any(axes.get_label() == "<colorbar>" for axes in fig.axes)
    method = Image.Quantize.MAXCOVERAGE if bar else Image.Quantize.MEDIANCUT
    image = Image.open(buffer).convert("RGB").quantize(256, method=method, kmeans=int(bar))
    compact = io.BytesIO()
    image.save(compact, format="png", optimize=True, pnginfo=info)
    return compact.getvalue()
