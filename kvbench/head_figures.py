"""Figures of one recorded trace, head by head: what the future attends to, and how rankings order it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure

from . import heads
from .canvas import FONT, GRID, RC, WIDTH, heading, save, short_numbers
from .errors import BadInput
from .figures import TRACES, Request, inputs
from .heads import find_head, head_name
from .panels import short
from .ranked import Ranked, RecordedRanker, boundary, learned_policies
from .recorded_costs import HINT
from .runner import style_of
from .style import Style, styles
from .trace import Trace, TraceSet

EIGHT = 8  # representative heads, as in the paper
WRONG = LinearSegmentedColormap.from_list("wrong", colormaps["plasma"](np.linspace(0, 0.85, 256)))


@dataclass(frozen=True)
class Shown:
    """One trace, ranked. title: the model, the trace and its rules in words."""

    ranked: Ranked
    title: str
    looks: dict[str, Style]

    @property
    def shape(self) -> tuple[int, int]:
        """Layers, KV heads per layer."""
        return self.ranked.utility.shape[0], self.ranked.utility.shape[1]


def _rank(asked: Request, name: str, specs: Sequence[str] | None = None) -> Shown:
    """The chosen trace. specs: policies instead of the asked ones. Raises: KvbenchError."""
    paths = inputs(asked, name, TRACES, [], HINT)
    if len(paths) > 1:
        raise BadInput(f"figure '{name}' shows one folder of traces, {len(paths)} were given")
    traces = TraceSet(paths[0])
    if asked.sample >= len(traces):
        raise BadInput(f"--sample {asked.sample}: {paths[0]} has {len(traces)} traces, from 0 on")
    trace = traces[asked.sample]
    pins = asked.pins or "none"
    chosen = asked.policies or learned_policies() if specs is None else specs
    ranker = RecordedRanker.open(traces, chosen, pins)
    (ranked,) = ranker.rank(trace, boundary(trace))
    looks = styles(ranker.specs, style_of(ranker.policies))
    return Shown(ranked, _title(traces, trace, f", pins {pins}" if ranker.policies else ""), looks)


def _title(traces: TraceSet, trace: Trace, rules: str) -> str:
    future = trace.info.tokens - trace.info.context
    return (
        f"{traces.header['model']}, one trace of {traces.folder.name} ({short(trace.info.task)}): "
        f"{trace.info.context} tokens of context, {future} of future{rules}"
    )


def importance(asked: Request) -> list[Path]:
    """Future attention by oracle rank, of heads from the sharpest to the flattest."""
    shown = _rank(asked, "importance", [])
    chosen = heads.representative(shown.ranked.utility, EIGHT)
    effective = heads.effective_tokens(shown.ranked.utility)
    share = heads.shares(shown.ranked.utility).sort(-1, descending=True).values.numpy()
    lines = []
    with matplotlib.rc_context(RC):
        fig = Figure(figsize=(WIDTH, 4.4), layout="constrained")
        axes = fig.subplots()
        for index, place in enumerate(chosen):
            values, count = share[place], float(effective[place])
            color = colormaps["viridis"](0.92 * index / max(1, len(chosen) - 1))
            rank = np.arange(1, len(values) + 1)
            seen = values > 0
            axes.plot(
                rank[seen],
                values[seen],
                color=color,
                linewidth=1.8,
                label=f"{head_name(*place)}: {count:.3g}",
            )
            lines.append(
                pd.DataFrame(
                    {"head": head_name(*place), "effective_tokens": count, "rank": rank, "share": values}
                )
            )
        axes.set(xscale="log", yscale="log", xlabel="token, by oracle rank")
        axes.set_ylim(bottom=max(axes.get_ylim()[0], 1e-7))
        axes.set_ylabel("share of the head's future attention")
        axes.grid(**GRID)
        heading(fig, [shown.title])
        fig.legend(
            loc="outside right center", frameon=False, fontsize=FONT - 2, title_fontsize=FONT - 2,
            title="head: effective tokens\n(exp of the entropy)",
        )  # fmt: skip
    return save(fig, asked.out, "importance", short_numbers(pd.concat(lines)), compact=True)


def rank_errors(asked: Request) -> list[Path]:
    """One head's tokens: bars at their oracle rank, as high as their future attention, coloured by how far
    off each policy ranks them."""
    shown = _rank(asked, "rank-error")
    utility = shown.ranked.utility
    place = find_head(asked.head, shown.shape) if asked.head else heads.representative(utility, EIGHT)[1]
    oracle = heads.oracle_order(utility)[place].numpy()
    heights = utility[place].numpy()[oracle]
    floor = heights[heights > 0].min() / 2 if (heights > 0).any() else 1e-9
    specs = list(shown.ranked.orders)
    rank = np.arange(1, len(oracle) + 1)
    lines = []
    with matplotlib.rc_context(RC):
        fig = Figure(figsize=(WIDTH, 1.3 + 1.9 * len(specs)), layout="constrained")
        cells = fig.subplots(len(specs), 1, squeeze=False, sharex=True)[:, 0]
        for axes, spec in zip(cells, specs, strict=True):
            error = heads.rank_error(shown.ranked.orders[spec], utility)[place].numpy()[oracle]
            bars = axes.bar(rank, heights - floor, bottom=floor, width=1.0, color=WRONG(error / ERROR))
            for bar in bars:
                bar.set_rasterized(True)
            cost = heads.budget_costs(shown.ranked.orders[spec][place], utility[place]).sum().item()
            axes.set_yscale("log")
            axes.set_ylim(floor, heights.max() * 1.5)
            axes.set_xlim(0.5, len(rank) + 0.5)
            told = f"{short(spec)}: mean error {error.mean():.3f}, eviction cost {cost:.3g}"
            axes.set_title(told, fontsize=FONT - 1, loc="left")
            lines.append(
                pd.DataFrame(
                    {
                        "policy": short(spec),
                        "head": head_name(*place),
                        "oracle_rank": rank,
                        "attention": heights,
                        "position": oracle,
                        "rank_error": error,
                    }
                )
            )
        cells[-1].set_xlabel("token, by oracle rank")
        fig.supylabel("future attention (sum over future tokens)", fontsize=FONT - 1)
        bar = fig.colorbar(ScalarMappable(Normalize(0, ERROR), WRONG), ax=list(cells), extend="max")
        bar.set_label("rank error / tokens", fontsize=FONT - 1)
        heading(fig, [shown.title, f"KV head {head_name(*place)}"])
    return save(fig, asked.out, "rank-error", short_numbers(pd.concat(lines)), compact=True)


ERROR = 0.5  # rank error (share of the tokens) from which on a bar has the last colour


def rank_variance(asked: Request) -> list[Path]:
    """Mean and variance over heads of the rank that each position gets."""
    shown = _rank(asked, "rank-variance")
    count = shown.shape[0] * shown.shape[1]
    lines = []
    with matplotlib.rc_context(RC):
        fig = Figure(figsize=(WIDTH, 5.4), layout="constrained")
        upper, lower = fig.subplots(2, 1, sharex=True)
        for spec, order in shown.ranked.orders.items():
            mean, variance = (part.numpy() for part in heads.rank_moments(order))
            x, color = np.arange(len(mean)), shown.looks[spec].color
            upper.plot(x, mean, color=color, linewidth=1.0, label=short(spec))
            sigma = np.sqrt(variance)
            upper.fill_between(x, mean - sigma, mean + sigma, color=color, alpha=0.15, linewidth=0)
            lower.plot(x, variance, color=color, linewidth=1.0)
            lower.axhline(variance.mean(), color=color, linewidth=1.2, linestyle="--")
            lines.append(
                pd.DataFrame({"policy": short(spec), "position": x, "mean_rank": mean, "variance": variance})
            )
        upper.set_ylabel("rank, mean ±1 SD")
        upper.invert_yaxis()
        lower.set_ylabel("variance of the rank\n(dashed: its mean)")
        lower.set_ylim(bottom=0)
        lower.set_xlabel("position (token)")
        for axes in (upper, lower):
            axes.grid(axis="y", **GRID)
        heading(
            fig,
            [
                shown.title,
                f"over n = {count} KV heads; rank 1 is kept longest; {_variances(lines, len(mean))}",
            ],
        )
        fig.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=FONT - 2)
    return save(fig, asked.out, "rank-variance", short_numbers(pd.concat(lines)), compact=True)


def _variances(lines: Sequence[pd.DataFrame], tokens: int) -> str:
    told = ", ".join(f"{part['policy'].iloc[0]} {part['variance'].mean():.0f}" for part in lines)
    return f"mean variance: {told}; of random ranks {(tokens**2 - 1) / 12:.0f}"


def rank_matrix(asked: Request) -> list[Path]:
    """Every head's ranking, one row each, coloured by the original position."""
    shown = _rank(asked, "rank-matrix")
    specs = list(shown.ranked.orders)
    lines = []
    with matplotlib.rc_context(RC):
        fig = Figure(figsize=(WIDTH, 1.0 + 3.2 * len(specs)), layout="constrained")
        cells = fig.subplots(len(specs), 1, squeeze=False, sharex=True)[:, 0]
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
            axes.set_title(short(spec), fontsize=FONT - 1, loc="left")
            _layer_ticks(axes, shown.shape, "y")
            axes.set_ylabel("KV head", fontsize=FONT - 1)
            table = pd.DataFrame(order, columns=[f"rank_{rank}" for rank in range(1, n + 1)])
            table.insert(0, "head", _names(shown.shape))
            table.insert(0, "policy", short(spec))
            lines.append(table)
        cells[-1].set_xlabel("predicted rank (1 is kept longest)")
        bar = fig.colorbar(image, ax=list(cells))
        bar.set_label("original position (token)", fontsize=FONT - 1)
        heading(fig, [shown.title])
    return save(fig, asked.out, "rank-matrix", pd.concat(lines), compact=True)


def head_correlation(asked: Request) -> list[Path]:
    """Spearman rank correlation between the rankings of every pair of heads."""
    shown = _rank(asked, "head-correlation")
    specs = list(shown.ranked.orders)
    lines = []
    with matplotlib.rc_context(RC):
        rows = -(-len(specs) // 2)
        fig = Figure(figsize=(WIDTH, 1.0 + (3.6 if len(specs) > 1 else 6.0) * rows), layout="constrained")
        cells = fig.subplots(rows, min(2, len(specs)), squeeze=False).flatten()
        for axes, spec in zip(cells, specs, strict=False):
            matrix = heads.spearman(shown.ranked.orders[spec]).numpy()
            image = axes.imshow(matrix, vmin=-1, vmax=1, cmap="RdBu_r", interpolation="none")
            others = matrix[~np.eye(len(matrix), dtype=bool)]
            axes.set_title(f"{short(spec)}\nmean of pairs {others.mean():.2f}", fontsize=FONT - 1, loc="left")
            _layer_ticks(axes, shown.shape, "x")
            _layer_ticks(axes, shown.shape, "y")
            table = pd.DataFrame(np.round(matrix, 4), columns=_names(shown.shape))
            table.insert(0, "head", _names(shown.shape))
            table.insert(0, "policy", short(spec))
            lines.append(table)
        for axes in cells[len(specs) :]:
            axes.remove()
        bar = fig.colorbar(image, ax=list(cells[: len(specs)]), shrink=0.7)
        bar.set_label("Spearman rank correlation", fontsize=FONT - 1)
        heading(fig, [shown.title, "KV heads in the order of the layers"])
    return save(fig, asked.out, "head-correlation", pd.concat(lines), compact=True)


def _layer_ticks(axes: Axes, shape: tuple[int, int], which: str) -> None:
    """Every fifth layer, at its first head."""
    layers = range(0, shape[0], 5)
    places, names = [layer * shape[1] for layer in layers], [f"L{layer}" for layer in layers]
    ticks: Any = axes.set_xticks if which == "x" else axes.set_yticks
    ticks(places, names, fontsize=FONT - 2)


def _names(shape: tuple[int, int]) -> list[str]:
    return [head_name(layer, head) for layer, head in np.ndindex(*shape)]
