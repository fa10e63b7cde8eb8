"""Values of two policies on the same samples, and what their differences say.

Rows are paired by seed and sample. Seeds of one sample are averaged before anything is tested, so that
asking one question three times is not three questions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..contract.cell import FULL
from ..contract.metrics import Metric
from ..errors import BadInput
from ..store.frame import brackets_of
from .aggregate import column_of, nothing_evicted
from .bootstrap import Estimate, Floats, pool_rows
from .intervals import intervals
from .panels import ROW_SETTING, SETTING, join_seeds
from .significance import detectable_effect, holm, mcnemar, run_tests

FLAGS = ("beats_full", "below_majority", "majority", "majority_label", "n_empty", "seen_share")
COLUMNS = [
    "task", "policy", "baseline", "budget", "metric", "unit", "mean", "baseline_mean", "difference", "lo",
    "hi", "n", "n_fit", "win", "tie", "loss", "p_sign", "test", "p", "p_holm", "detectable", "beats_full",
    "below_majority", "majority", "majority_label", "n_empty", "seen_share", "seeds",
]  # fmt: skip


def usable_rows(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Rows that have a value of the metric, as the column `value`, and what groups and pairs them."""
    column = column_of(rows, metric)
    if column not in rows:  # a number of a cell, as the majority rate is
        rows = rows.assign(**{column: math.nan})
    names = [name for name in (*ROW_SETTING, "spec", "budget", "seed", "sample", "curve") if name in rows]
    found = rows[(rows["status"] == "ok") & rows[column].notna()]
    return found[names].assign(value=found[column].to_numpy(dtype=float), fits=nothing_evicted(found))


def are_answers(usable: pd.DataFrame, metric: Metric) -> bool:
    """Does a metric count answers that are wrong (0) or right (1) in these rows?"""
    return metric.counts_answers(usable["value"].unique())


@dataclass(frozen=True)
class PairedValues:
    """Values of two policies on the (sample, seed) pairs that both have, by ascending sample, each (n,).

    fits: whether nothing was evicted for mine.
    """

    samples: NDArray[np.object_]
    seeds: NDArray[np.object_]
    mine: Floats
    theirs: Floats
    fits: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.samples)

    @cached_property
    def difference(self) -> Estimate:
        return pool_rows(self.samples, self.mine - self.theirs)

    @property
    def differences(self) -> Floats:
        """One per sample: the mean over its seeds."""
        item = self.difference
        return item.values if item.weights is None else item.values / item.weights


# Of one policy at one setting and budget, by (seed, sample): a value, and whether nothing was evicted.
Values = dict[tuple[Any, str], tuple[float, bool]]


def values_of(rows: pd.DataFrame) -> Values:
    """The `value` of each row (see `usable_rows`); of a full cache that two runs have, the first run's.

    Raises: BadInput when these are several configurations.
    """
    keys = list(zip(rows["seed"], rows["sample"], strict=True))
    found: Values = {}
    for key, *value in zip(keys, rows["value"], rows["fits"], strict=True):
        found.setdefault(key, (value[0], value[1]))
    if len(found) < len(keys) and rows["spec"].iloc[0] != FULL:
        raise BadInput(
            f"{rows['spec'].iloc[0]} has several configurations at one setting and budget: "
            "compare the run folders one by one"
        )
    return found


def match_samples(mine: Values, theirs: Values) -> PairedValues:
    """Both sides on the seeds and samples that both have, in the order of mine."""
    keys = [key for key in mine if key in theirs]
    seeds, samples = (np.array([key[part] for key in keys], dtype=object) for part in (0, 1))
    one, other = (np.array([side[key][0] for key in keys]) for side in (mine, theirs))
    fits = np.array([mine[key][1] for key in keys], dtype=bool)
    return PairedValues(samples, seeds, one, other, fits)


def measure_pairs(
    lines: Sequence[Mapping[str, Any]], pairs: Sequence[PairedValues], metric: Metric, binary: bool
) -> list[dict[str, Any]]:
    """Each line with the numbers of its pair. binary: the metric's values are 0 or 1."""
    yes_no = [binary and both.difference.weights is None for both in pairs]  # means over seeds are no answers
    differences = [both.differences for both in pairs]
    tests = run_tests(differences, yes_no)
    moves = [both.difference for both in pairs]
    moves = [replace(move, kind="pairs") if one else move for move, one in zip(moves, yes_no, strict=True)]
    found = []
    for line, both, moved, one, test, (low, high) in zip(
        lines, pairs, differences, yes_no, tests, intervals(moves), strict=True
    ):
        better = -moved if metric.better == "lower" else moved
        win, loss, n = int((better > 0).sum()), int((better < 0).sum()), len(moved)
        found.append(
            {
                **line,
                "metric": metric.name, "unit": metric.unit, "mean": both.mine.mean(),
                "baseline_mean": both.theirs.mean(), "difference": both.difference.value,
                "lo": low, "hi": high, "n": n, "n_fit": len(set(both.samples[both.fits])),
                "win": win, "tie": n - win - loss, "loss": loss, "p_sign": mcnemar(win, loss),
                "test": test.name, "p": test.p, "detectable": detectable_effect(moved, one),
                "seeds": join_seeds(seed for seed in both.seeds if not pd.isna(seed)),
            }
        )  # fmt: skip
    return found


def order_lines(lines: Sequence[Mapping[str, Any]], rows: pd.DataFrame) -> pd.DataFrame:
    """Types, Holm's correction, and an order: budgets ascending, then policies.

    rows: those behind the lines, from `prepare_rows`.
    """
    specs = list(dict.fromkeys(rows.sort_index()["spec"]))
    names = [name for name in COLUMNS if name not in FLAGS]
    frame = pd.DataFrame(lines, columns=[*names, *SETTING[1:]])
    frame = frame.astype({"budget": "Int64", "chunk": "Int64"})
    correct(frame, SETTING, ~frame["policy"].isin(brackets_of(rows)))
    order = frame.assign(policy=frame["policy"].map(specs.index)).sort_values([*SETTING, "budget", "policy"])
    ready = frame.loc[order.index].reset_index(drop=True)
    ready.attrs = rows.attrs
    return ready


def correct(lines: pd.DataFrame, setting: Sequence[str], asked: pd.Series) -> None:
    """Fill in p_holm: p, corrected for the comparisons of one metric that are made at one budget.

    asked: comparisons that can be of interest; brackets, which bound the others, are not. NaN for the rest,
    and where nothing is evicted in any sample.
    """
    lines["p_holm"] = math.nan
    tested = lines[asked & (lines["n_fit"] < lines["n"])]
    for _, part in tested.groupby([*setting, "budget"], sort=False, dropna=False):
        lines.loc[part.index, "p_holm"] = holm(part["p"].tolist())
