"""Figures of one recorded trace: how alike the rankings of its heads are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from kvbench.show.kit import (
    FONT,
    GRID,
    WIDTH,
    Request,
    add_axes,
    add_heading,
    new_figure,
    round_numbers,
    save,
    shorten,
    use_fonts,
)

from . import heads
from .heads import head_name
from .importance import rank_trace


def rank_variance(asked: Request) -> list[Path]:
    """Mean and variance over heads of the rank that each position gets."""
    shown = rank_trace(asked, "rank-variance")
    count = shown.shape[0] * shown.shape[1]
    lines = []
    fig = new_figure(WIDTH, 5.4)
    upper, lower = add_axes(fig, 2, sharex=True)[:, 0]
    for spec, order in shown.ranked.orders.items():
        mean, variance = (part.numpy() for part in heads.rank_moments(order))
        x, color = np.arange(len(mean)), shown.looks[spec].color
        upper.plot(x, mean, color=color, linewidth=1.0, label=shorten(spec))
        sigma = np.sqrt(variance)
        upper.fill_between(x, mean - sigma, mean + sigma, color=color, alpha=0.15, linewidth=0)
        lower.plot(x, variance, color=color, linewidth=1.0)
        lower.axhline(variance.mean(), color=color, linewidth=1.2, linestyle="--")
        lines.append(
            pd.DataFrame({"policy": shorten(spec), "position": x, "mean_rank": mean, "variance": variance})
        )
    upper.set_ylabel("rank, mean ±1 SD")
    upper.invert_yaxis()
    lower.set_ylabel("variance of the rank\n(dashed: its mean)")
    lower.set_ylim(bottom=0)
    lower.set_xlabel("position (token)")
    for axes in (upper, lower):
        axes.grid(axis="y", **GRID)
    add_heading(
        fig,
        [
            shown.title,
            f"over n = {count} KV heads; rank 1 is kept longest; {_variances(lines, len(mean))}",
        ],
    )
    fig.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=FONT - 2)
    return save(fig, asked.out, "rank-variance", round_numbers(pd.concat(lines)), compact=True)


def _variances(lines: Sequence[pd.DataFrame], tokens: int) -> str:
    listed = ", ".join(f"{part['policy'].iloc[0]} {part['variance'].mean():.0f}" for part in lines)
    return f"mean variance: {listed}; of random ranks {(tokens**2 - 1) / 12:.0f}"


def rank_matrix(asked: Request) -> list[Path]:
    """Every head's ranking, one row each, coloured by the original position."""
    shown = rank_trace(asked, "rank-matrix")
    specs = list(shown.ranked.orders)
    lines = []
    fig = new_figure(WIDTH, 1.0 + 3.2 * len(specs))
    cells = add_axes(fig, len(specs), sharex=True)[:, 0]
    for axes, spec in zip(cells, specs, strict=True):
        order = shown.ranked.orders[spec].flatten(0, 1).numpy()
        n = order.shape[1]
        image = axes.imshow(
            order,
            aspect="auto",
            interpolation="none",
            cmap="viridis",
            extent=(0.5, n + 0.5, len(order) - 0.5, -0.5),
        )
        axes.set_title(shorten(spec), fontsize=FONT - 1, loc="left")
        _layer_ticks(axes, shown.shape, "y")
        axes.set_ylabel("KV head", fontsize=FONT - 1)
        table = pd.DataFrame(order, columns=[f"rank_{rank}" for rank in range(1, n + 1)])
        table.insert(0, "head", _names(shown.shape))
        table.insert(0, "policy", shorten(spec))
        lines.append(table)
    cells[-1].set_xlabel("predicted rank (1 is kept longest)")
    bar = fig.colorbar(image, ax=list(cells))
    use_fonts(bar.ax)
    bar.set_label("original position (token)", fontsize=FONT - 1)
    add_heading(fig, [shown.title])
    return save(fig, asked.out, "rank-matrix", pd.concat(lines), compact=True)


def head_correlation(asked: Request) -> list[Path]:
    """Spearman rank correlation between the rankings of every pair of heads."""
    shown = rank_trace(asked, "head-correlation")
    specs = list(shown.ranked.orders)
    lines = []
    rows = -(-len(specs) // 2)
    fig = new_figure(WIDTH, 1.0 + (3.6 if len(specs) > 1 else 6.0) * rows)
    cells = add_axes(fig, rows, min(2, len(specs))).flatten()
    for axes, spec in zip(cells, specs, strict=False):
        matrix = heads.spearman(shown.ranked.orders[spec]).numpy()
        image = axes.imshow(matrix, vmin=-1, vmax=1, cmap="RdBu_r", interpolation="none")
        others = matrix[~np.eye(len(matrix), dtype=bool)]
        title = f"{shorten(spec)}\nmean of pairs {others.mean():.2f}"
        axes.set_title(title, fontsize=FONT - 1, loc="left")
        _layer_ticks(axes, shown.shape, "x")
        _layer_ticks(axes, shown.shape, "y")
        table = pd.DataFrame(np.round(matrix, 4), columns=_names(shown.shape))
        table.insert(0, "head", _names(shown.shape))
        table.insert(0, "policy", shorten(spec))
        lines.append(table)
    for axes in cells[len(specs) :]:
        axes.remove()
    bar = fig.colorbar(image, ax=list(cells[: len(specs)]), shrink=0.7)
    use_fonts(bar.ax)
    bar.set_label("Spearman rank correlation", fontsize=FONT - 1)
    add_heading(fig, [shown.title, "KV heads in the order of the layers"])
    return save(fig, asked.out, "head-correlation", pd.concat(lines), compact=True)


def _layer_ticks(axes: Axes, shape: tuple[int, int], which: str) -> None:
    """Every fifth layer, at its first head."""
    layers = range(0, shape[0], 5)
    places, names = [layer * shape[1] for layer in layers], [f"L{layer}" for layer in layers]
    ticks: Any = axes.set_xticks if which == "x" else axes.set_yticks
    ticks(places, names, fontsize=FONT - 2)


def _names(shape: tuple[int, int]) -> list[str]:
    return [head_name(layer, head) for layer, head in np.ndindex(*shape)]
