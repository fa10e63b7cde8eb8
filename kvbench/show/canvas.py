"""What every figure shares: fonts, sizes, the line above it, and the files it becomes."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from ..errors import StoreError
from ..store.manifest import shown_data

FONT = 12  # points, on WIDTH: readable when the figure is shrunk to half a page
WIDTH = 7.6  # inches
RC: Any = {
    "font.size": FONT,
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same everywhere
    "svg.hashsalt": "kvbench",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
DPI, COMPACT = 200, 130  # dots per inch of a PNG, and of images inside an SVG
GRID: dict[str, Any] = {"color": "#dddddd", "linewidth": 0.6}


def heading(fig: Figure, lines: Sequence[str], width: int = 88) -> None:
    """What is shown, above everything, left: one line each, wrapped at `width` characters."""
    text = "\n".join(piece for line in lines for piece in textwrap.wrap(line, width))
    fig.suptitle(text, fontsize=FONT - 1, x=0.01, horizontalalignment="left")


def counted(numbers: Sequence[int]) -> str:
    """ "n = 24", or "n = 20 to 24" where numbers differ."""
    counts = sorted(set(numbers))
    return f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}"


def short_numbers(lines: pd.DataFrame) -> pd.DataFrame:
    """The same with six significant digits: what a figure of thousands of points needs."""
    real = lines.select_dtypes("float").columns
    return lines.assign(**{str(name): [float(f"{value:.6g}") for value in lines[name]] for name in real})


def save(
    fig: Figure, folder: Path, name: str, lines: pd.DataFrame | None = None, compact: bool = False
) -> list[Path]:
    """Write a figure as PNG and SVG, equal bytes for equal figures.

    lines: what it shows; they go into a CSV file beside it, whose hash the figure carries, so that
    `kvbench verify` can tell whether the rows still say what the figure shows. compact: fewer dots and
    colours, and text as text in the SVG, for figures of many panels. Raises: StoreError.
    """
    files = [folder / f"{name}.png", folder / f"{name}.svg"]
    told = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if lines is not None:
            shown = lines.drop(columns="run", errors="ignore")
            data = shown.to_csv(index=False, lineterminator="\n").encode()
            told = {"Description": shown_data(data)}
            files.append(folder / f"{name}.csv")
            files[-1].write_bytes(data)
        with matplotlib.rc_context({**RC, "svg.fonttype": "none" if compact else "path"}):
            if compact:
                _save_compact(fig, files[0], told)
            else:
                fig.savefig(files[0], dpi=DPI, metadata={"Software": None, **told})
            fig.savefig(files[1], dpi=COMPACT, metadata={"Date": None, "Creator": None, **told})
    except OSError as error:
        raise StoreError(
            f"cannot write figures to {folder} ({error.strerror}): choose another --out"
        ) from error
    return files


def _save_compact(fig: Figure, file: Path, told: Mapping[str, str]) -> None:
    """A PNG of fewer dots and 256 colours: the most frequent ones, or, where a colour bar names colours,
    those that cover all."""
    buffer = io.BytesIO()
    fig.savefig(buffer, format="png", dpi=COMPACT)
    info = PngInfo()
    for key, value in told.items():
        info.add_text(key, value)
    bar = any(axes.get_label() == "<colorbar>" for axes in fig.axes)
    method = Image.Quantize.MAXCOVERAGE if bar else Image.Quantize.MEDIANCUT
    image = Image.open(buffer).convert("RGB").quantize(256, method=method, kmeans=int(bar))
    image.save(file, optimize=True, pnginfo=info)
