"""Comparisons with a baseline as text, Markdown, CSV or JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from ..contract.metrics import Metric, describe
from ..errors import BadInput
from ..stats.panels import SETTING, describe_setting, join_seeds, short_names
from ..stats.significance import ALPHA
from ..store.frame import metrics_of
from .footnotes import note_empty, note_few, note_fitting, note_seen
from .table import FORMATS, grid, heading, json_lines
from .words import difference_text, number, probability, sample_count

NAMES = {"mcnemar": "exact McNemar test", "flip": "permutation test (random signs)"}


def render_comparison(frame: pd.DataFrame, fmt: str = "text") -> str:
    """What `compare` gives as one string.

    "text" and "md" show one block per task, setting and metric, a line per budget and policy, and what to
    distrust below; "csv" and "json" are the lines themselves. Raises: BadInput for another format.
    """
    if fmt == "json":
        return json_lines(frame)
    if fmt == "csv":
        return frame.to_csv(index=False, lineterminator="\n")
    if fmt not in FORMATS:
        raise BadInput(f"--format '{fmt}': choose one of {', '.join(FORMATS)}")
    parts = []
    names = short_names([*frame["policy"], *frame["baseline"]])
    frame = frame.assign(**{name: frame[name].map(names) for name in ("policy", "baseline")})
    for _, panel in frame.groupby(SETTING, sort=False, dropna=False):
        setting: dict[str, Any] = {name: panel[name].iloc[0] for name in SETTING}
        seeds = {int(seed) for text in panel["seeds"] for seed in text.split(",") if seed}
        parts.append(
            heading(f"{setting['task']}: {describe_setting(setting | {'seeds': join_seeds(seeds)})}", fmt)
        )
        for _, lines in panel.groupby("metric", sort=False):
            parts += [_block(lines, fmt), "\n".join(f"* {note}" for note in _notes(lines))]
    return "\n\n".join(parts) + "\n"


def _block(lines: pd.DataFrame, fmt: str) -> str:
    first = lines.iloc[0]
    metric, n = describe(first["metric"], metrics_of(lines)), sample_count(lines["n"])
    title = f"{first['task']}: {metric.label}, minus {first['baseline']}, n = {n}"
    moved = lines[lines["win"] + lines["loss"] > 0]
    header = [
        "policy",
        "budget",
        "mean",
        first["baseline"],
        "difference",
        "win/tie/loss",
        "p, sign",
        "p, mean",
        "p, Holm",
        "detectable",
    ]
    return grid(title, header, [_cells(line, metric) for line in moved.to_dict("records")], fmt)


def _cells(line: Mapping[Any, Any], metric: Metric) -> list[str]:
    interval = (
        f"[{difference_text(line['lo'], metric)},{difference_text(line['hi'], metric)}]"
        if line["n"] > 1
        else ""
    )
    marks = " (beats full)" if line["beats_full"] else ""
    return [
        line["policy"] + marks,
        str(line["budget"]),
        number(line["mean"], metric),
        number(line["baseline_mean"], metric),
        f"{difference_text(line['difference'], metric)} {interval}".strip(),
        f"{line['win']}/{line['tie']}/{line['loss']}",
        probability(line["p_sign"]),
        probability(line["p"]),
        probability(line["p_holm"]),
        "-" if pd.isna(line["detectable"]) else number(line["detectable"], metric),
    ]


def _notes(lines: pd.DataFrame) -> list[str]:
    """What the numbers mean, then what to distrust."""
    baseline = lines["baseline"].iloc[0]
    tests = " or ".join(NAMES[name] for name in dict.fromkeys(lines["test"]))
    notes = [
        f"difference: policy minus {baseline} on the same samples, with its 95% interval; a win is a sample "
        "where the policy is better.",
        f"p: two-sided; of wins and losses by the sign test, of the mean by the {tests}. Holm corrects the "
        "latter for the comparisons at its budget, without brackets and cells that evict nothing (-).",
        "detectable: the smallest true difference that this many samples detect with 80% power at "
        f"p < {ALPHA} before correction (-: fewer than 6 samples, or all alike); a smaller one may go "
        "undetected.",
        *note_seen(lines, lines["policy"]),
        *note_fitting(lines, lines["policy"]),
        *note_empty(lines, lines["policy"]),
        *note_few(lines),
    ]
    if (lines["seeds"].str.contains(",")).any():
        notes.append(
            "Several seeds: the differences of one sample under its seeds are averaged, n counts samples."
        )
    same = lines[lines["win"] + lines["loss"] == 0]
    if len(same):
        notes.append(f"Equal on every sample, and not listed above: {_list_cells(same)}.")
    return notes + _suspects(lines)


def _list_cells(lines: pd.DataFrame) -> str:
    """ "knorm, tova at 64; tova at 128"."""
    parts = lines.groupby("budget", sort=False)
    return "; ".join(f"{', '.join(part['policy'])} at {budget}" for budget, part in parts)


def _suspects(lines: pd.DataFrame) -> list[str]:
    notes = []
    ahead = lines[lines["beats_full"]]
    if len(ahead):
        notes.append(
            f"SUSPECT: better than the full cache by more than the interval: {_list_cells(ahead)}. About 1 "
            "in 40 comparisons of equals is, by luck; else look for a fault, or say why less context should "
            "help."
        )
    below = lines[lines["below_majority"]]
    if len(below):
        line = below.iloc[0]
        which = "every policy at every budget" if len(below) == len(lines) else _list_cells(below)
        notes.append(
            f"SUSPECT: below the majority rate of {line['majority']:.2f} (always "
            f"'{line['majority_label']}'): {which}. There {line['metric']} does not show that the model does "
            "the task: look at agreement and kl."
        )
    return notes
