"""Tables of results/FIGURES.md: a few numbers of each figure, from the CSV file beside it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from .places import REFERENCE, Block, lines_of


def shown(figure: str) -> pd.DataFrame:
    return pd.read_csv(REFERENCE / "figures" / f"{figure}.csv")


def csv(parts: Sequence[str], options: dict[str, str]) -> list[str]:
    """`csv FIGURE COLUMN ROW [name=value;value]...`: means with intervals, a column per value of COLUMN.

    Options but digits keep the lines that have one of these values; what has no COLUMN (the full cache has
    no budget, "nan") stands in all of them.
    """
    figure, across, down = parts
    table, digits = shown(figure), int(options.get("digits", 2))
    for name in set(options) - {"digits"}:
        texts = [f"{value:g}" if isinstance(value, float) else str(value) for value in table[name]]
        table = table[pd.Series(texts, index=table.index).isin(options[name].split(";"))]
    cells = {}
    for line in table.to_dict("records"):
        mean, low, high = (f"{line[name]:.{digits}f}" for name in ("mean", "lo", "hi"))
        cells[line[down], line[across]] = mean if low == high else f"{mean} [{low},{high}]"
    heads, names = sorted(table[across].dropna().unique()), list(dict.fromkeys(table[down]))
    everywhere = {name: text for (name, head), text in cells.items() if pd.isna(head)}
    body = [
        [str(name), *(cells.get((name, head), everywhere.get(name, "")) for head in heads)] for name in names
    ]
    return lines_of([down, *(f"{head:g}" for head in heads)], body)


def head_costs(parts: Sequence[str], options: dict[str, str]) -> list[str]:
    """Each policy's mean cost and its best and worst head."""
    table = shown("head-costs")
    body = []
    overall = table.groupby("policy")["mean"].mean().sort_values()
    for policy, mean in overall.items():
        mine = table[table["policy"] == policy].sort_values("mean", kind="stable").to_dict("records")
        best, worst = mine[0], mine[-1]
        ends = [
            f"{one['mean']:.2f} [{one['lo']:.2f},{one['hi']:.2f}], {one['name']}" for one in (best, worst)
        ]
        body.append([str(policy), f"{mean:.2f}", *ends])
    return lines_of(["policy", "mean of 90 heads", "best head", "worst head"], body)


def heads(parts: Sequence[str], options: dict[str, str]) -> list[str]:
    """What figures 9a, 10, 11, 12, 21 and 22 say in numbers."""
    sharp = shown("importance").sort_values("effective_tokens")
    variance = shown("rank-variance")["variance"].mean()
    n = len(shown("rank-variance"))
    ranks = shown("rank-matrix").filter(regex=r"^rank_[0-9]+$").to_numpy()
    costs = shown("head-costs").pivot(index="name", columns="policy", values="mean")
    body = [
        ["9a", "effective tokens of the sharpest and the flattest head",
         f"{sharp['effective_tokens'].iloc[0]:.1f} and {sharp['effective_tokens'].iloc[-1]:.0f}"],
        ["9a", "share of the sharpest head's attention on one token", f"{sharp['share'].iloc[0]:.0%}"],
        ["10", f"variance of a position's rank over heads, mean of {n} positions", f"{variance:.0f}"],
        ["10", "the same as a share of that of random ranks", f"{variance / ((n**2 - 1) / 12):.0%}"],
        ["11", "heads that rank position 0 first", f"{(ranks[:, 0] == 0).mean():.0%}"],
        ["11", "heads that rank position 0 among the first five", f"{(ranks[:, :5] == 0).any(1).mean():.0%}"],
        ["11", "share of the first ten ranks in the last fifth of the context",
         f"{(ranks[:, :10] >= n * 4 / 5).mean():.0%}"],
        *(["12", f"mean rank correlation of two heads of layers {first} to {last}",
           f"{_correlation(first, last):.2f}"] for first, last in ((0, 7), (8, 15), (16, 23), (22, 29))),
        ["21, 22", "heads in which judgeq costs less than kvp",
         f"{(costs['judgeq'] < costs['kvp']).sum()} of {len(costs)}"],
    ]  # fmt: skip
    return lines_of(["figure", "quantity", "value"], body, 2)


def _correlation(first: int, last: int) -> float:
    """The mean over pairs of different heads in these layers."""
    table = shown("head-correlation").set_index("head").drop(columns="policy")
    names = [name for name in table.index if first <= int(name[1:].split(".")[0]) <= last]
    square = table.loc[names, names].to_numpy()
    return float(square[~np.eye(len(names), dtype=bool)].mean())


def rank_error(parts: Sequence[str], options: dict[str, str]) -> list[str]:
    """Mean error of the predicted rank, as a share of the length, by the oracle's rank."""
    table = shown("rank-error")
    place = table["oracle_rank"] / table["oracle_rank"].max()
    spans = {
        "first tenth": place <= 0.1,
        "tenth to half": (place > 0.1) & (place <= 0.5),
        "last half": place > 0.5,
    }
    columns = [table[span].groupby("policy", sort=False)["rank_error"].mean() for span in spans.values()]
    body = [[str(name), *(f"{column[name]:.3f}" for column in columns)] for name in columns[0].index]
    return lines_of(["policy", *spans], body)


def wall_clock(parts: Sequence[str], options: dict[str, str]) -> list[str]:
    """Times of prefill and scoring, and the share that scoring takes: median [least,most]."""
    table = shown("wall-clock")
    body = []
    for tokens, part in table.groupby("context_tokens"):
        prefill = part.loc[part["stage"] == "prefill", "median_s"].iloc[0]
        row = [str(tokens)]
        for line in part.to_dict("records"):
            told = [f"{line[name]:.3g}" for name in ("median_s", "least_s", "most_s")]
            share = f", {line['median_s'] / prefill:.1%}" if line["stage"] == "score" else ""
            row.append(f"{told[0]} [{told[1]},{told[2]}]{share}")
        body.append(row)
    names = table[table["context_tokens"] == table["context_tokens"].min()]["policy"].replace(
        {"full": "prefill"}
    )
    return lines_of(["context, tokens", *(f"{name}, s" for name in names)], body)


FIGURES: dict[str, Block] = {
    "csv": csv, "heads": heads, "head_costs": head_costs, "rank_error": rank_error, "wall_clock": wall_clock,
}  # fmt: skip
