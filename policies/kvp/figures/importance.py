"""Figures of one recorded trace: what the future of its heads attends to, and how rankings err."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize

from kvbench.contract.look import style_of
from kvbench.errors import BadInput
from kvbench.learn.ranked import RecordedRanker, SplitRanking, boundary, learned_policies
from kvbench.learn.trace import Trace, TraceSet
from kvbench.show.kit import (
    FONT,
    GRID,
    TRACES,
    WIDTH,
    Request,
    Style,
    add_axes,
    add_heading,
    assign_styles,
    inputs,
    new_figure,
    round_numbers,
    save,
    shorten,
    use_fonts,
)

from . import heads
from .heads import find_head, head_name
from .recorded_costs import HINT

EIGHT = 8  # representative heads, as in the paper
WRONG = LinearSegmentedColormap.from_list("wrong", colormaps["plasma"](np.linspace(0, 0.85, 256)))


@dataclass(frozen=True)
class RankedTrace:
    """One trace, ranked. title: the model, the trace and its rules in words."""

    ranked: SplitRanking
    title: str
    looks: dict[str, Style]

    @property
    def shape(self) -> tuple[int, int]:
        """Layers, KV heads per layer."""
        return self.ranked.utility.shape[0], self.ranked.utility.shape[1]


def rank_trace(asked: Request, name: str, specs: Sequence[str] | None = None) -> RankedTrace:
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
    looks = assign_styles(ranker.specs, style_of(ranker.policies))
    return RankedTrace(ranked, _title(traces, trace, f", pins {pins}" if ranker.policies else ""), looks)


def _title(traces: TraceSet, trace: Trace, rules: str) -> str:
    future = trace.info.tokens - trace.info.context
    return (
        f"{traces.header['model']}, one trace of {traces.folder.name} ({shorten(trace.info.task)}): "
        f"{trace.info.context} tokens of context, {future} of future{rules}"
    )


def importance(asked: Request) -> list[Path]:
    """Future attention by oracle rank, of heads from the sharpest to the flattest."""
    shown = rank_trace(asked, "importance", [])
    chosen = heads.representative(shown.ranked.utility, EIGHT)
    effective = heads.effective_tokens(shown.ranked.utility)
    share = heads.shares(shown.ranked.utility).sort(-1, descending=True).values.numpy()
    lines = []
    fig = new_figure(WIDTH, 4.4)
    axes = add_axes(fig)[0, 0]
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
    add_heading(fig, [shown.title])
    fig.legend(
        loc="outside right center", frameon=False, fontsize=FONT - 2, title_fontsize=FONT - 2,
        title="head: effective tokens\n(exp of the entropy)",
    )  # fmt: skip
    return save(fig, asked.out, "importance", round_numbers(pd.concat(lines)), compact=True)


def rank_errors(asked: Request) -> list[Path]:
    """One head's tokens: bars at their oracle rank, as high as their future attention, coloured by how far
    off each policy ranks them."""
    shown = rank_trace(asked, "rank-error")
    utility = shown.ranked.utility
    place = find_head(asked.head, shown.shape) if asked.head else heads.representative(utility, EIGHT)[1]
    oracle = heads.oracle_order(utility)[place].numpy()
    heights = utility[place].numpy()[oracle]
    floor = heights[heights > 0].min() / 2 if (heights > 0).any() else 1e-9
    specs = list(shown.ranked.orders)
    rank = np.arange(1, len(oracle) + 1)
    lines = []
    fig = new_figure(WIDTH, 1.3 + 1.9 * len(specs))
    cells = add_axes(fig, len(specs), sharex=True)[:, 0]
    for axes, spec in zip(cells, specs, strict=True):
        error = heads.rank_error(shown.ranked.orders[spec], utility)[place].numpy()[oracle]
        bars = axes.bar(rank, heights - floor, bottom=floor, width=1.0, color=WRONG(error / ERROR))
        for bar in bars:
            bar.set_rasterized(True)
        cost = heads.budget_costs(shown.ranked.orders[spec][place], utility[place]).sum().item()
        axes.set_yscale("log")
        axes.set_ylim(floor, heights.max() * 1.5)
        axes.set_xlim(0.5, len(rank) + 0.5)
        title = f"{shorten(spec)}: mean error {error.mean():.3f}, eviction cost {cost:.3g}"
        axes.set_title(title, fontsize=FONT - 1, loc="left")
        lines.append(
            pd.DataFrame(
                {
                    "policy": shorten(spec),
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
    use_fonts(bar.ax)
    bar.set_label("rank error / tokens", fontsize=FONT - 1)
    add_heading(fig, [shown.title, f"KV head {head_name(*place)}"])
    return save(fig, asked.out, "rank-error", round_numbers(pd.concat(lines)), compact=True)


ERROR = 0.5  # rank error (share of the tokens) from which on a bar has the last colour
