"""What `kvbench speed` shows: tables of medians, and scoring against prefill over the context length.

Works on stored rows: neither torch nor the engine is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from ..contract.cell import FULL
from ..errors import BadInput
from ..stats.panels import shorten
from ..store.manifest import read_manifest
from ..store.results import read_rows
from .canvas import FONT, GRID, WIDTH, add_axes, add_heading, new_figure, save
from .curves import mark_values
from .figures import SPEED, Request, inputs
from .style import Style, assign_styles
from .table import text_table
from .words import sample_count

GIGA = 1e9


def tables(rows: pd.DataFrame) -> str:
    """Two tables: the prefill at every length, and what each policy adds to it."""
    ok = rows[rows["status"] == "ok"]
    prefill = [
        "context", "prefill s", "GFLOP", "GFLOP/s", "of a matmul", "decode tokens/s", "peak MiB",
    ]  # fmt: skip
    policy = [
        "policy", "context", "score s", "ms/layer", "of prefill", "GFLOP", "rank s", "compact s",
        "decode tokens/s", "peak MiB",
    ]  # fmt: skip
    body = [_prefill_line(length, part) for length, part in _by_length(ok[ok["spec"] == FULL])]
    parts = ["prefill, and decoding with the full cache", text_table(prefill, body)]
    lines = [
        _policy_line(length, str(spec), part)
        for length, same in _by_length(ok[ok["spec"] != FULL])
        for spec, part in same.groupby("spec", sort=False)
    ]
    if lines:
        parts += ["", "what each policy adds, and decoding with its budget", text_table(policy, lines)]
    failed = rows[rows["status"] == "failed"].drop_duplicates(["spec", "reason"])
    parts += [f"{line['spec']}: failed: {line['reason']}" for line in failed.to_dict("records")]
    return "\n".join(parts)


def title(rows: pd.DataFrame, fixed: Mapping[str, Any]) -> str:
    """What was measured, on what, and how often."""
    budgets = ", ".join(str(int(budget)) for budget in sorted(rows["budget"].dropna().unique()))
    times = sample_count(rows.groupby(["spec", "context_tokens"]).size())
    spread = "" if times == "1" else ": median [least,most]"
    threads = f", threads: {fixed['threads']}" if fixed["device"] == "cpu" else ""
    where = f"{fixed['dtype']} on {fixed['hardware']}{threads}"
    return f"{fixed['model']}, {where}, budget {budgets}, {times} pass{'es' * (times != '1')}{spread}"


def _by_length(rows: pd.DataFrame) -> list[tuple[int, pd.DataFrame]]:
    parts = [part for _, part in rows.groupby("context_tokens", sort=True)]
    return [(int(part["context_tokens"].iloc[0]), part) for part in parts]


def _prefill_line(length: int, part: pd.DataFrame) -> list[str]:
    rate = part["metric:prefill_flops"] / part["time:prefill_s"]
    share = rate / part["time:matmul_rate"]
    return [
        str(length),
        _spread(part["time:prefill_s"], _seconds),
        f"{part['metric:prefill_flops'].median() / GIGA:.0f}",
        f"{rate.median() / GIGA:.0f}",
        f"{share.median():.0%}",
        _spread(part["time:decode_rate"], _three),
        _peak(part),
    ]


def _policy_line(length: int, spec: str, part: pd.DataFrame) -> list[str]:
    score = part["time:score_s"]
    return [
        shorten(spec),
        str(length),
        _spread(score, _seconds),
        f"{(score / part['evicted_layers'].astype(float)).median() * 1000:.2f}",
        f"{(score / part['time:prefill_s']).median():.1%}",
        f"{part['metric:score_flops'].median() / GIGA:.2f}",
        _seconds(part["time:rank_s"].median()),
        _seconds(part["time:compact_s"].median()),
        _spread(part["time:decode_rate"], _three),
        _peak(part),
    ]


def _peak(part: pd.DataFrame) -> str:
    if "time:peak_bytes" not in part or part["time:peak_bytes"].isna().all():
        return "-"
    return f"{part['time:peak_bytes'].median() / 2**20:.0f}"


def _spread(values: pd.Series, show: Callable[[float], str]) -> str:
    """The median, and the least and the most where there are several."""
    text = show(values.median())
    return text if len(values) == 1 else f"{text} [{show(values.min())},{show(values.max())}]"


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _three(value: float) -> str:
    return f"{value:.3g}"


def wall_clock(asked: Request) -> list[Path]:
    """Draw stored rows of `kvbench speed` again. Raises: BadInput for rows of something else; StoreError."""
    hint = "make one with kvbench speed --policy all --out FOLDER"
    paths = inputs(asked, "wall-clock", SPEED, [], hint)
    if len(paths) > 1:
        raise BadInput(f"figure 'wall-clock' draws one folder, {len(paths)} were given: machines do not mix")
    rows, manifest = read_rows(paths), read_manifest(paths[0])
    if "time:prefill_s" not in rows or set(rows["task"]) != {"speed"}:
        raise BadInput(f"{paths[0]} holds no rows of kvbench speed: {hint}")
    fig = draw_figure(rows, title(rows, manifest["fixed"]), manifest.get("style", {}))
    return save(fig, asked.out, "wall-clock", _medians(rows), compact=True)


def draw(rows: pd.DataFrame, heading: str, declared: Mapping[str, Any], folder: Path) -> list[Path]:
    """The figure of a measurement, as PNG and SVG."""
    return save(draw_figure(rows, heading, declared), folder, "speed")


def draw_figure(rows: pd.DataFrame, heading: str, declared: Mapping[str, Any]) -> Figure:
    """Seconds of the prefill and of every policy's scores against the context length."""
    ok = rows[rows["status"] == "ok"]
    looks = assign_styles(dict.fromkeys(ok["spec"]), declared)
    fig = new_figure(WIDTH, 4.4)
    axes = add_axes(fig)[0, 0]
    _curve(axes, ok[ok["spec"] == FULL], "time:prefill_s", looks[FULL], "prefill")
    for spec, part in ok[ok["spec"] != FULL].groupby("spec", sort=False):
        _curve(axes, part, "time:score_s", looks[str(spec)], f"score: {shorten(str(spec))}")
    lengths = sorted({float(length) for length in ok["context_tokens"]})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    mark_values(axes.xaxis, lengths, [f"{length:.0f}" for length in lengths])
    axes.set_xlabel("context (tokens)")
    axes.set_ylabel("seconds, all layers")
    axes.grid(axis="y", **GRID)
    axes.set_axisbelow(True)
    add_heading(fig, [heading])
    fig.legend(loc="outside right center", frameon=False, fontsize=FONT - 2, handlelength=2.6)
    return fig


def _medians(rows: pd.DataFrame) -> pd.DataFrame:
    """What the figure shows: seconds of all layers per policy and length."""
    lines = []
    for length, same in _by_length(rows[rows["status"] == "ok"]):
        for spec, part in same.groupby("spec", sort=False):
            stage = "prefill" if spec == FULL else "score"
            seconds = part[f"time:{stage}_s"]
            shown = {"policy": shorten(str(spec)), "context_tokens": length, "stage": stage}
            numbers = {"median_s": seconds.median(), "least_s": seconds.min(), "most_s": seconds.max()}
            lines.append({**shown, **numbers, "n": len(part), "layers": int(part["layers"].iloc[0])})
    return pd.DataFrame(lines)


def _curve(axes: Any, part: pd.DataFrame, column: str, look: Style, label: str) -> None:
    """Medians, with bars from the least to the most."""
    grouped = part.groupby("context_tokens", sort=True)[column]
    middle = grouped.median()
    bars = [(middle - grouped.min()).to_numpy(), (grouped.max() - middle).to_numpy()]
    axes.errorbar(
        middle.index.to_numpy(dtype=float), middle.to_numpy(), yerr=bars, color=look.color, label=label,
        linestyle=look.line, linewidth=look.width, marker=look.marker or ".", markersize=6, elinewidth=1.0,
    )  # fmt: skip
