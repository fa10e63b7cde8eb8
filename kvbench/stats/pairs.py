"""Values of two policies on the same samples, and what their differences say.

Rows are paired by seed and sample. Seeds of one sample are averaged before anything is tested, so that
asking one question three times is not three questions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..contract.cell import FULL
from ..contract.metrics import Metric
from ..errors import BadInput
from .aggregate import column_of
from .bootstrap import Estimate, Floats, bootstrap_intervals, pool_rows
from .panels import ROW_SETTING, SETTING, join_seeds
from .significance import detectable_effect, holm, run_tests

FLAGS = ("beats_full", "below_majority", "majority", "majority_label")
COLUMNS = [
    "task", "policy", "baseline", "budget", "metric", "unit", "mean", "baseline_mean", "difference", "lo",
    "hi", "n", "win", "tie", "loss", "test", "p", "p_holm", "detectable", "beats_full", "below_majority",
    "majority", "majority_label", "seeds",
]  # fmt: skip


def usable_rows(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Rows that have a value of the metric, as the column `value`, and what groups and pairs them."""
    column = column_of(rows, metric)
    names = [name for name in (*ROW_SETTING, "spec", "budget", "seed", "sample", "curve") if name in rows]
    found = rows[(rows["status"] == "ok") & rows[column].notna()]
    return found[names].assign(value=found[column].to_numpy(dtype=float))


def is_binary(values: pd.Series) -> bool:
    """Are these yes/no answers?"""
    return bool(np.isin(values.to_numpy(dtype=float), (0.0, 1.0)).all())


@dataclass(frozen=True)
class PairedValues:
    """Values of two policies on the (sample, seed) pairs that both have, by ascending sample, each (n,)."""

    samples: NDArray[np.object_]
    seeds: NDArray[np.object_]
    mine: Floats
    theirs: Floats

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


Values = dict[tuple[Any, str], float]  # of one policy at one setting and budget, by (seed, sample)


def values_of(rows: pd.DataFrame) -> Values:
    """The `value` of each row (see `usable_rows`); of a full cache that two runs have, the first run's.

    Raises: BadInput when these are several configurations.
    """
    keys = list(zip(rows["seed"], rows["sample"], strict=True))
    found: Values = {}
    for key, value in zip(keys, rows["value"], strict=True):
        found.setdefault(key, value)
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
    return PairedValues(samples, seeds, *(np.array([side[key] for key in keys]) for side in (mine, theirs)))


def measure_pairs(
    lines: Sequence[Mapping[str, Any]], pairs: Sequence[PairedValues], metric: Metric, binary: bool
) -> list[dict[str, Any]]:
    """Each line with the numbers of its pair. binary: the metric's values are 0 or 1."""
    yes_no = [binary and both.difference.weights is None for both in pairs]  # means over seeds are no answers
    differences = [both.differences for both in pairs]
    tests = run_tests(differences, yes_no)
    bounds = bootstrap_intervals([both.difference for both in pairs])
    found = []
    for line, both, moved, one, test, (low, high) in zip(
        lines, pairs, differences, yes_no, tests, bounds, strict=True
    ):
        better = -moved if metric.better == "lower" else moved
        win, loss, n = int((better > 0).sum()), int((better < 0).sum()), len(moved)
        found.append(
            {
                **line,
                "metric": metric.name, "unit": metric.unit, "mean": both.mine.mean(),
                "baseline_mean": both.theirs.mean(), "difference": both.difference.value,
                "lo": low, "hi": high, "n": n, "win": win, "tie": n - win - loss, "loss": loss,
                "test": test.name, "p": test.p, "detectable": detectable_effect(moved, one),
                "seeds": join_seeds(seed for seed in both.seeds if not pd.isna(seed)),
            }
        )  # fmt: skip
    return found


def order_lines(lines: Sequence[Mapping[str, Any]], rows: pd.DataFrame) -> pd.DataFrame:
    """Types, Holm's correction within each setting, and an order: budgets ascending, then policies.

    rows: those behind the lines, from `prepare_rows`.
    """
    specs = list(dict.fromkeys(rows.sort_index()["spec"]))
    names = [name for name in COLUMNS if name not in FLAGS]
    frame = pd.DataFrame(lines, columns=[*names, *SETTING[1:]])
    frame = frame.astype({"budget": "Int64", "chunk": "Int64"})
    for _, part in frame.groupby(SETTING, sort=False, dropna=False):
        frame.loc[part.index, "p_holm"] = holm(part["p"].tolist())
    order = frame.assign(policy=frame["policy"].map(specs.index)).sort_values([*SETTING, "budget", "policy"])
    ready = frame.loc[order.index].reset_index(drop=True)
    ready.attrs = rows.attrs
    return ready
