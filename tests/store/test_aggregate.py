"""Means and intervals, against arithmetic done by hand."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from kvbench.errors import UnknownName
from kvbench.stats.aggregate import aggregate, list_metrics
from kvbench.stats.bootstrap import RESAMPLES, Estimate, bootstrap_intervals
from kvbench.stats.panels import split_panels
from kvbench.store.results import Row, Store, read_rows
from tests.store.synthetic import make_run, row


def frame_of(tmp_path: Path, rows: list[Row]) -> pd.DataFrame:
    with Store.open(tmp_path / "run", {}, {}) as store:
        store.append(rows)
    return read_rows(tmp_path / "run")


def line(frame: pd.DataFrame, metric: str, policy: str = "knorm") -> pd.Series:
    found = frame[(frame["metric"] == metric) & (frame["policy"] == policy)]
    assert len(found) == 1
    return found.iloc[0]


def test_means_by_hand(tmp_path: Path) -> None:
    values = [(1.0, 0.5, 2), (0.0, 1.0, 4), (1.0, 3.0, 6)]
    rows = [
        row("knorm", 64, f"s{i}", kept=60 + i, metrics={"accuracy": a, "nll": nll, "nll_tokens": n})
        for i, (a, nll, n) in enumerate(values)
    ]
    frame = aggregate(frame_of(tmp_path, rows))
    assert line(frame, "accuracy")["mean"] == pytest.approx(2 / 3)
    assert line(frame, "nll")["mean"] == pytest.approx(1.5)
    assert line(frame, "ppl")["mean"] == pytest.approx(math.exp((1 + 4 + 18) / 12))
    assert line(frame, "ppl")["lo"] < line(frame, "ppl")["mean"] < line(frame, "ppl")["hi"]
    assert line(frame, "kept")["mean"] == line(frame, "accuracy")["kept"] == 61
    assert line(frame, "prefill_s")["unit"] == "s"
    assert set(frame["n"]) == {3}
    assert "nll_tokens" not in set(frame["metric"])


def test_the_interval_of_answers_is_wilsons(tmp_path: Path) -> None:
    rows = [row("knorm", 64, f"s{i}", metrics={"accuracy": float(i < 10)}) for i in range(20)]
    found = line(aggregate(frame_of(tmp_path, rows), ["accuracy"]), "accuracy")
    theirs = scipy.stats.binomtest(10, 20).proportion_ci(method="wilson")
    assert (found["lo"], found["hi"]) == pytest.approx((theirs.low, theirs.high))


def test_a_quantity_that_happens_to_be_zero_is_no_answer(tmp_path: Path) -> None:
    rows = [row("knorm", 64, f"s{i}", metrics={"missed_mass": 0.0, "accuracy": 0.0}) for i in range(9)]
    found = aggregate(frame_of(tmp_path, rows), ["missed_mass", "accuracy"]).set_index("metric")["hi"]
    assert found["missed_mass"] == 0
    assert found["accuracy"] > 0.2


def test_bootstrap_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    items = [Estimate(tuple(f"{t}-{i}" for i in range(40)), rng.normal(size=40)) for t in range(100)]
    covered = np.mean([low < 0 < high for low, high in bootstrap_intervals(items)])
    assert 0.87 < covered < 0.99  # 0.95, less a little for n = 40; 100 trials have a deviation of 0.022


def test_one_sample_has_no_interval(tmp_path: Path) -> None:
    found = line(aggregate(frame_of(tmp_path, [row("knorm", 64)])), "accuracy")
    assert (found["mean"], found["n"]) == (1.0, 1)
    assert math.isnan(found["lo"])
    assert math.isnan(found["hi"])


def test_numbers_depend_neither_on_order_nor_on_company(tmp_path: Path) -> None:
    rows = read_rows(make_run(tmp_path, samples=9))
    names = ["accuracy", "kl", "ppl", "label_share"]
    every = aggregate(rows, names)
    shuffled = aggregate(rows.sample(frac=1, random_state=3), names)
    keys = ["task", "policy", "budget", "metric"]
    numbers = [*keys, "mean", "lo", "hi", "n"]

    def settled(frame: pd.DataFrame) -> pd.DataFrame:
        return frame[numbers].sort_values(keys).reset_index(drop=True)

    pd.testing.assert_frame_equal(settled(shuffled), settled(every), check_exact=True)
    alone = aggregate(rows[(rows["spec"] == "tova") & (rows["task"] == "boolq")], ["kl"])
    same = every[(every["policy"] == "tova") & (every["task"] == "boolq") & (every["metric"] == "kl")]
    pd.testing.assert_frame_equal(settled(alone), settled(same), check_exact=True)


@pytest.mark.parametrize(
    "change",
    [
        {"chunk": 64, "schedule": "chunked"},
        {"question": "seen"},
        {"pins": [4, 16]},
        {"model": "x"},
    ],
)
def test_configurations_never_mix(tmp_path: Path, change: dict[str, Any]) -> None:
    rows = [row("knorm", 64), row("knorm", 64, **change, metrics={"accuracy": 0.0})]
    frame = aggregate(frame_of(tmp_path, rows), ["accuracy"])
    assert sorted(frame["mean"]) == [0.0, 1.0]


def test_skipped_and_failed_are_counted_with_reasons_and_not_averaged(tmp_path: Path) -> None:
    rows = [
        row("knorm", 64, "s0"),
        row("knorm", 64, "s1", status="failed", reason="out of memory", metrics={"accuracy": 0.0}),
        row("tova", 64, "s0", status="skipped", reason="no queries", metrics={}),
        row("tova", 64, "s1", status="skipped", reason="no queries", metrics={}),
    ]
    frame = aggregate(frame_of(tmp_path, rows), ["accuracy"])
    found = line(frame, "accuracy")
    assert (found["mean"], found["n"], found["n_failed"], found["n_skipped"]) == (1.0, 1, 1, 0)
    assert found["reasons"] == "failed: out of memory (1)"
    empty = line(frame, "accuracy", "tova")
    assert (empty["n"], empty["n_skipped"], empty["reasons"]) == (0, 2, "skipped: no queries (2)")
    assert math.isnan(empty["mean"])


def test_choice_tasks_show_majority_rate_and_label_share(tmp_path: Path) -> None:
    gold, said = ["1", "1", "1", "0"], ["0", "0", "1", "0"]
    rows = [
        row("knorm", 64, f"s{i}", gold_label=g, label=p)
        for i, (g, p) in enumerate(zip(gold, said, strict=True))
    ]
    frame = aggregate(frame_of(tmp_path, rows))
    rate, share = line(frame, "majority_rate"), line(frame, "label_share")
    assert (rate["mean"], rate["detail"], rate["n"]) == (0.75, "1", 4)
    assert (share["mean"], share["detail"]) == (0.75, "0")
    assert math.isnan(rate["lo"])
    assert line(frame, "accuracy")["majority"] == 0.75


def test_unknown_metric_lists_what_the_rows_have(tmp_path: Path) -> None:
    rows = frame_of(tmp_path, [row("knorm", 64)])
    assert list_metrics(rows) == ["accuracy", "kept", "prefill_s", "answer_s"]
    with pytest.raises(UnknownName, match="accuracy, answer_s, kept"):
        aggregate(rows, ["kl"])


def test_unloaded_plugins_metric_is_aggregated_all_the_same(tmp_path: Path) -> None:
    rows = frame_of(tmp_path, [row("knorm", 64, f"s{i}", metrics={"odd_one": float(i)}) for i in range(3)])
    assert line(aggregate(rows, ["odd_one"]), "odd_one")["mean"] == 1.0


def test_full_cache_joins_every_panel(tmp_path: Path) -> None:
    chunked = {"schedule": "chunked", "chunk": 64}
    rows = [row("full", None), row("knorm", 64), row("knorm", 64, **chunked), row("full", None, model="m")]
    found = split_panels(aggregate(frame_of(tmp_path, rows), ["accuracy"]))
    assert [setting["schedule"] for setting, _ in found] == ["chunked", "prefill"]
    assert [lines["label"].tolist() for _, lines in found] == [["full", "knorm"]] * 2


def test_two_runs_of_one_policy_are_told_apart(tmp_path: Path) -> None:
    rows = frame_of(tmp_path, [row("knorm", 64), replace(row("knorm", 64), key="k", config="bf16")])
    ((_, lines),) = split_panels(aggregate(rows.assign(run=["a", "b"]), ["accuracy"]))
    assert lines["label"].tolist() == ["knorm (a)", "knorm (b)"]


def test_an_interval_has_the_same_bits_alone_and_in_company() -> None:
    rng, ids = np.random.default_rng(6), tuple(f"s{i:02}" for i in range(45))
    items = [Estimate(ids, rng.normal(size=45)) for _ in range(37)]
    together = bootstrap_intervals(items)
    assert together == [bootstrap_intervals([item])[0] for item in items]
    assert together == bootstrap_intervals(items[::-1])[::-1]


def test_equal_estimates_are_resampled_once_and_bounds_are_bca() -> None:
    """Whatever else is asked for, and against Efron's formulas on the same draws."""
    rng = np.random.default_rng(2)
    ids = tuple(f"s{i:02}" for i in range(30))
    one, other = rng.normal(size=30), rng.random(size=30)
    items = [Estimate(ids, one), Estimate(ids, other, other + 1), Estimate(ids, one.copy())]
    first, second, third = bootstrap_intervals(items)
    assert first == third == bootstrap_intervals(items[:1])[0]
    assert second == bootstrap_intervals(items[1:2])[0]
    seed = hashlib.sha256("\0".join(ids).encode()).digest()
    draws = np.random.default_rng(int.from_bytes(seed[:8], "little")).integers(0, 30, size=(RESAMPLES, 30))
    means, normal = one[draws].mean(1), scipy.stats.norm
    bias = normal.ppf((means < one.mean()).mean())
    off = one.mean() - np.array([np.delete(one, i).mean() for i in range(30)])
    skew = (off**3).sum() / (6 * (off**2).sum() ** 1.5)
    shifted = bias + normal.ppf([0.025, 0.975])
    ends = normal.cdf(bias + shifted / (1 - skew * shifted))
    assert first == pytest.approx(tuple(np.quantile(means, ends)), rel=1e-6)
