"""Figures from stored results: a metric against the absolute budget, with intervals.

Nothing is run here, and neither torch nor the engine is imported.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from .aggregate import aggregate, available
from .config import FULL, file_name
from .errors import StoreError, UnknownName
from .footnotes import majority, only_pins
from .manifest import MANIFEST, read_manifest, shown_data
from .metrics import describe, is_known
from .panels import describe_setting, main_metric, panels, short
from .results import read_rows
from .style import GREY, LOWER, UPPER, Style, styles

BESIDE = ("agreement", "kl", "missed_mass", "eviction_cost")  # drawn beside a task's main metric
CHOICE = ("accuracy", "acc_norm")  # what a majority rate can be compared with
FONT = 12  # points, on 7.6 inches: readable when the figure is shrunk to half a page
RC: Any = {
    "font.size": FONT,
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same everywhere
    "svg.hashsalt": "kvbench",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
DPI = 200


def plot(
    paths: str | Path | Iterable[str | Path], metric: str | None = None, out: str | Path | None = None
) -> list[Path]:
    """Draw the results of one or more run folders: a PNG, an SVG and a CSV per task, setting and metric.

    metric: one name, or several separated by commas; None draws each task's main metric and BESIDE.
    out: folder for the files, else `figures` in the first run folder. Equal results give equal SVG
    bytes. Returns the files. Raises: UnknownName for a metric that the results lack, listing those
    they have; StoreError when there is nothing to draw or no place for it.
    """
    several = [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]
    rows = read_rows(several)
    asked = None if metric is None else [name.strip() for name in metric.split(",")]
    for name in asked or ():
        if name not in available(rows):
            hint = "That metric exists but was not measured here." if is_known(name) else ""
            raise UnknownName("metric", name, available(rows), hint)
    tasks, declared = sections(several)
    found = panels(aggregate(rows, asked))
    looks = looks_of([lines for _, lines in found], declared)
    files: list[Path] = []
    for (setting, lines), name in zip(found, _file_names([setting for setting, _ in found]), strict=True):
        for item in dict.fromkeys(asked or [main_metric(lines, setting["task"], tasks), *BESIDE]):
            part = lines[(lines["metric"] == item) & (lines["n"] > 0)]
            if len(part):
                base = Path(out) if out is not None else home(several[0]) / "figures"
                files += save(figure(part, setting, looks), base, f"{name}-{file_name(item)}", part)
    if not files:
        raise StoreError(f"no usable rows in {several[0]}: `kvbench table` shows what was skipped or failed")
    return files


def figure(lines: pd.DataFrame, setting: Mapping[str, Any], looks: Mapping[str, Style]) -> Figure:
    """One metric of one panel (see kvbench.panels), as a figure that nothing else refers to."""
    metric = str(lines["metric"].iloc[0])
    rest = lines[lines["policy"] != FULL]
    with matplotlib.rc_context(RC):
        fig = Figure(figsize=(7.6, 4.4), layout="constrained")
        axes = fig.subplots()
        for line in lines[lines["policy"] == FULL].to_dict("records"):
            _draw_full(axes, line, looks[line["label"]])
        order = _drawing_order(rest, looks)
        single = rest["budget"].nunique() == 1  # points of one budget stand side by side
        for index, label in enumerate(order):
            shift = 2 ** (0.8 * ((index + 0.5) / len(order) - 0.5)) if single else 1.0
            _draw_policy(axes, rest[rest["label"] == label].sort_values("budget"), looks[label], shift)
        rate = majority(lines) if metric in CHOICE else None
        if rate is not None:
            text = f"majority rate {rate[0]:.2f}"
            axes.axhline(rate[0], color=GREY, linewidth=0.8, linestyle=(0, (6, 3)), label=text, zorder=1)
        _scale(axes, lines, metric)
        fig.suptitle(_title(lines, setting), fontsize=FONT - 1, x=0.01, horizontalalignment="left")
        _legend(fig, axes, rest, looks)
    return fig


def sections(paths: Sequence[Path]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tasks and style sections of all manifests; bare row files go without."""
    tasks: dict[str, Any] = {}
    declared: dict[str, Any] = {}
    for path in paths:
        if (home(path) / MANIFEST).exists():
            manifest = read_manifest(home(path))
            tasks |= manifest.get("tasks", {})
            declared |= manifest.get("style", {})
    return tasks, declared


def home(path: Path) -> Path:
    return path.parent if path.suffix == ".jsonl" else path


def looks_of(parts: Sequence[pd.DataFrame], declared: Mapping[str, Any]) -> dict[str, Style]:
    """Styles by label; where two runs differ, each run's curve has a colour of its own."""
    extended = dict(declared)
    labels: list[str] = []
    for lines in parts:
        for policy, label in dict.fromkeys(zip(lines["policy"], lines["label"], strict=True)):
            labels.append(label)
            if label != policy:
                extended[label] = {**declared.get(policy, {}), "color": None}
    return styles(labels, extended)


def _drawing_order(rest: pd.DataFrame, looks: Mapping[str, Style]) -> list[str]:
    """The legend's order: between the brackets, policies as they come."""
    labels = list(dict.fromkeys(rest["label"]))
    return sorted(labels, key=lambda label: {UPPER: 0, LOWER: 2}.get(looks[label].line, 1))


def _draw_full(axes: Axes, line: Mapping[Any, Any], look: Style) -> None:
    axes.axhline(line["mean"], color=look.color, linewidth=look.width, label=_full_label(line), zorder=2)
    if math.isfinite(line["lo"]) and line["lo"] < line["hi"]:
        axes.axhspan(line["lo"], line["hi"], color=look.color, alpha=0.06, linewidth=0, zorder=0)


def _full_label(line: Mapping[Any, Any]) -> str:
    name = "full cache" if line["label"] == FULL else str(line["label"])
    tokens = line["context_tokens"]
    return f"{name} (≈{tokens:.0f} pairs)" if math.isfinite(tokens) else name


def _draw_policy(axes: Axes, part: pd.DataFrame, look: Style, shift: float) -> None:
    """One curve with its band. shift: factor on the budgets as drawn."""
    budgets = part["budget"].to_numpy(dtype=float) * shift
    mean, low, high = (part[name].to_numpy(dtype=float) for name in ("mean", "lo", "hi"))
    label = str(part["label"].iloc[0])
    shared: dict[str, Any] = {"color": look.color, "zorder": 2 if look.bracket else 3}
    marker = look.marker or ({UPPER: "+", LOWER: "x"}[look.line] if len(part) == 1 else "")
    (curve,) = axes.plot(
        budgets, mean, look.line, linewidth=look.width, marker=marker, markersize=6, **shared
    )
    told = textwrap.fill(short(label), 30)
    curve.set_label(f"{told} (bracket)" if look.line in (LOWER, UPPER) else told)
    curve.set_gid(label)
    if len(part) > 1:
        axes.fill_between(budgets, low, high, color=look.color, alpha=0.05, linewidth=0, zorder=1)
        for edge in (low, high):  # without it, bands that overlap become one grey patch
            axes.plot(budgets, edge, color=look.color, linewidth=0.6, alpha=0.35, label="_edge", zorder=1)
    else:  # a band needs two budgets
        axes.vlines(budgets, low, high, linewidth=1.2, **shared)
    pinned = only_pins(part).to_numpy()
    if pinned.any() and look.marker:
        axes.plot(
            budgets[pinned], mean[pinned], linestyle="", marker=look.marker, markersize=6,
            markerfacecolor="white", markeredgecolor=look.color, zorder=4,
        )  # fmt: skip


def _scale(axes: Axes, lines: pd.DataFrame, metric: str) -> None:
    """Ticks at the measured budgets; the vertical axis within the metric's limits."""
    axes.set_ylabel(describe(metric).label)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    means = lines["mean"].to_numpy(dtype=float)
    limits = describe(metric).limits
    least, most = means.min(), means.max()
    if limits is not None and limits[1] is None and least > 0 and most > 30 * least:
        if least < 1e-4 * most:  # rounding noise around 0 must not fill the axis: linear there
            axes.set_yscale("symlog", linthresh=1e-3 * most, linscale=0.5)
            axes.set_ylim(bottom=0)
        else:
            axes.set_yscale("log")
    elif limits is not None:
        bottom, top = axes.get_ylim()
        if limits[0] is not None:
            bottom = max(bottom, limits[0] - 0.02 * (top - bottom))
        if limits[1] is not None:
            top = min(top, limits[1] + 0.02 * (top - bottom))
        axes.set_ylim(bottom, top)
    budgets = sorted({float(budget) for budget in lines["budget"].dropna()})
    axes.set_xlabel("budget (KV pairs per KV head per layer)")
    if not budgets:
        axes.set_xticks([])
        return
    axes.set_xscale("log", base=2)
    if len(budgets) == 1:
        axes.set_xlim(budgets[0] / 1.5, budgets[0] * 1.5)
    axes.xaxis.set_major_locator(FixedLocator(budgets))
    axes.xaxis.set_major_formatter(FixedFormatter(_tick_labels(budgets)))
    axes.xaxis.set_minor_locator(NullLocator())


def _tick_labels(budgets: Sequence[float]) -> list[str]:
    """Numbers, left out where they would run into the one before."""
    room = math.log(budgets[-1] / budgets[0]) / 14
    labels: list[str] = []
    last = -math.inf
    for budget in budgets:
        fits = math.log(budget) - last >= room
        labels.append(f"{budget:.0f}" if fits else "")
        last = math.log(budget) if fits else last
    return labels


def _title(lines: pd.DataFrame, setting: Mapping[str, Any]) -> str:
    counts = sorted({int(n) for n in lines["n"]})
    n = f"n = {counts[0]}" if len(counts) == 1 else f"n = {counts[0]} to {counts[-1]}"
    model, rules = describe_setting(setting).split(", ", 1)
    text = [f"{setting['task']}, {model}, {n}", f"schedule {rules.split(', template')[0]}"]
    return "\n".join(line for part in text for line in textwrap.wrap(part, 88))


def _legend(fig: Figure, axes: Axes, rest: pd.DataFrame, looks: Mapping[str, Style]) -> None:
    """Outside the axes: the curves, then what the ways of drawing mean."""
    handles, _ = axes.get_legend_handles_labels()
    keys: list[Artist] = []
    if rest["lo"].notna().any():
        keys.append(Patch(color=GREY, alpha=0.25, linewidth=0, label="95% interval"))
    if any(looks[label].line == "--" for label in rest["label"]):
        keys.append(Line2D([], [], color=GREY, linestyle="--", label="reads attention"))
    if only_pins(rest).any():
        hollow: dict[str, Any] = {"marker": "o", "markerfacecolor": "white", "markeredgecolor": GREY}
        keys.append(Line2D([], [], linestyle="", label="only pins stay", **hollow))
    fig.legend(
        handles=[*handles, *keys],
        loc="outside right center",
        frameon=False,
        fontsize=FONT - 2,
        handlelength=2.6,
    )


def _file_names(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The task, and what tells panels of one task apart."""
    names = []
    for setting in settings:
        rivals = [other for other in settings if other["task"] == setting["task"]]
        parts = [str(setting["task"])]
        for field in setting:
            if len({str(other[field]) for other in rivals}) > 1:
                parts.append(f"{field}={setting[field]}")
        names.append(file_name("-".join(parts)))
    return names


def save(fig: Figure, folder: Path, name: str, lines: pd.DataFrame | None = None) -> list[Path]:
    """Write a figure as PNG and SVG, equal bytes for equal figures.

    lines: what it shows; they go into a CSV file beside it, whose hash the figure carries, so that
    `kvbench verify` can tell whether the rows still say what the figure shows. Raises: StoreError.
    """
    files = [folder / f"{name}.png", folder / f"{name}.svg"]
    told = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if lines is not None:
            data = lines.drop(columns="run").to_csv(index=False, lineterminator="\n").encode()
            told = {"Description": shown_data(data)}
            files.append(folder / f"{name}.csv")
            files[-1].write_bytes(data)
        with matplotlib.rc_context(RC):
            fig.savefig(files[0], dpi=DPI, metadata={"Software": None, **told})
            fig.savefig(files[1], metadata={"Date": None, "Creator": None, **told})
    except OSError as error:
        raise StoreError(
            f"cannot write figures to {folder} ({error.strerror}): choose another --out"
        ) from error
    return files
