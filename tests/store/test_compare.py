"""Paired comparisons, against scipy, against arithmetic done by hand, and as they are printed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from kvbench.errors import BadInput, UnknownName
from kvbench.show.comparison_table import render_comparison
from kvbench.stats.aggregate import aggregate, prepare_rows
from kvbench.stats.compare import compare, compare_all, compare_pairs
from kvbench.stats.compare_rules import compare_rules
from kvbench.stats.significance import detectable_effect, flip_signs, holm, mcnemar
from kvbench.store.results import Row, read_rows
from tests.store.synthetic import make_run, row
from tests.store.test_aggregate import frame_of

SAMPLES = 220


def b58() -> list[Row]:
    """220 samples, 80 both right, 30 against 12 discordant."""
    right = [(1.0, 1.0)] * 80 + [(1.0, 0.0)] * 30 + [(0.0, 1.0)] * 12 + [(0.0, 0.0)] * 98
    rows = []
    for index, (mine, base) in enumerate(right):
        rows.append(row("knorm", 64, f"s{index}", metrics={"accuracy": mine}))
        rows.append(row("tova", 64, f"s{index}", metrics={"accuracy": base}))
        rows.append(row("tova", 32, f"s{index}", metrics={"accuracy": 1.0}))
    return [*rows, row("knorm", 64, "only here", metrics={"accuracy": 0.0})]


def test_b58_paired_on_the_same_samples(tmp_path: Path) -> None:
    """p is 0.008 paired, 0.08 if unpaired."""
    (found,) = compare_pairs(frame_of(tmp_path, b58()), "tova", "accuracy").to_dict("records")
    assert (found["policy"], found["budget"], found["n"]) == ("knorm", 64, SAMPLES)
    assert (found["mean"], found["baseline_mean"]) == (110 / SAMPLES, 92 / SAMPLES)
    assert found["difference"] == pytest.approx(18 / SAMPLES)
    assert (found["win"], found["tie"], found["loss"], found["test"]) == (30, 178, 12, "mcnemar")
    assert (
        found["p"]
        == found["p_holm"]
        == scipy.stats.binomtest(12, 42).pvalue
        == pytest.approx(0.008, abs=5e-4)
    )
    pooled = (110 + 92) / (2 * SAMPLES)
    unpaired = 18 / SAMPLES / np.sqrt(2 * pooled * (1 - pooled) / SAMPLES)
    assert 2 * scipy.stats.norm.sf(unpaired) == pytest.approx(0.08, abs=0.01)
    assert 0 < found["lo"] < found["difference"] < found["hi"]
    low, high = scipy.stats.bootstrap(
        ([1.0] * 30 + [-1.0] * 12 + [0.0] * 178,), np.mean, method="percentile", rng=0
    ).confidence_interval
    assert (found["lo"], found["hi"]) == pytest.approx((low, high), abs=0.005)


@pytest.mark.parametrize(
    ("first", "second"), [(0, 0), (1, 0), (5, 0), (6, 0), (3, 3), (30, 12), (2, 19), (40, 41)]
)
def test_mcnemar_is_the_exact_binomial_test(first: int, second: int) -> None:
    expected = scipy.stats.binomtest(first, first + second).pvalue if first + second else 1.0
    assert mcnemar(first, second) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("n", [2, 5, 9, 12])
def test_sign_flip_is_scipys_permutation_test(n: int) -> None:
    differences = np.random.default_rng(n).normal(0.6, 1, n)
    exact = scipy.stats.permutation_test(
        (differences,), np.mean, permutation_type="samples", n_resamples=np.inf
    )
    assert flip_signs([differences])[0] == pytest.approx(exact.pvalue, rel=1e-12)
    with_ties = np.concatenate([differences, np.zeros(20)])
    assert flip_signs([with_ties])[0] == flip_signs([differences])[0]  # a flipped zero is a zero
    assert flip_signs([-differences])[0] == flip_signs([differences])[0]


def test_sign_flip_of_many_samples_is_near_the_t_test() -> None:
    for seed in range(5):
        differences = np.random.default_rng(seed).normal(0.2, 1, 80)
        expected = scipy.stats.ttest_1samp(differences, 0).pvalue
        assert flip_signs([differences])[0] == pytest.approx(expected, abs=0.015)
    assert 0 < flip_signs([np.full(60, 0.5)])[0] < 1e-4


def test_p_values_of_equals_are_uniform() -> None:
    """A test that calls too much significant would publish noise: 400 trials, deviation 0.011."""
    rng = np.random.default_rng(0)
    found = np.array([flip_signs([rng.normal(size=12)])[0] for _ in range(400)])
    assert (found <= 0.05).mean() <= 0.05 + 3 * 0.011


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_detectable_effect_is_found_in_four_of_five_tries() -> None:
    rng = np.random.default_rng(1)
    spread = rng.normal(size=50)
    effect = detectable_effect(spread / spread.std(ddof=1), binary=False)
    shifted = rng.normal(effect, 1, size=(400, 50))
    found = (scipy.stats.ttest_1samp(shifted, 0, axis=1).pvalue < 0.05).mean()
    assert 0.72 < found < 0.86  # 400 tries have a deviation of 0.02; the normal approximation costs a little


def test_detectable_effect_of_yes_or_no_needs_six_discordant_samples() -> None:
    assert mcnemar(6, 0) < 0.05 < mcnemar(5, 0)
    assert detectable_effect(np.zeros(40), binary=True) == 6 / 40
    assert np.isnan(detectable_effect(np.zeros(5), binary=True))
    assert np.isnan(detectable_effect(np.zeros(40), binary=False))
    assert np.isnan(detectable_effect(np.arange(5.0), binary=False))  # the least p of 5 samples is 2 / 2**5
    assert detectable_effect(np.array([1.0, -1.0] * 20), binary=True) > 6 / 40


def test_paired_with_the_full_cache_and_a_lower_is_better_metric(tmp_path: Path) -> None:
    rows = [row("full", None, f"s{i}", metrics={"nll": 1.0}) for i in range(4)]
    rows += [row("knorm", b, f"s{i}", metrics={"nll": 1.0 + i / b}) for b in (2, 4) for i in range(4)]
    found = compare_pairs(frame_of(tmp_path, rows), "full", "nll")
    assert found["budget"].tolist() == [2, 4]
    assert found["difference"].tolist() == [0.75, 0.375]
    assert found[["win", "tie", "loss"]].to_numpy().tolist() == [[0, 1, 3], [0, 1, 3]]
    assert found["p"].tolist() == [0.25, 0.25]  # 3 differences have 8 signs, 2 of them as extreme
    assert found["p_holm"].tolist() == [0.25, 0.25]  # one comparison at each budget
    assert found["p_sign"].tolist() == [0.25, 0.25]


def test_a_policy_without_common_samples_is_not_compared(tmp_path: Path) -> None:
    rows = [row("knorm", 64, "a"), row("tova", 64, "b"), row("tova", 64, "c", status="failed")]
    with pytest.raises(BadInput, match="nothing to compare with tova"):
        compare(frame_of(tmp_path, rows), "tova")


def test_paired_refuses_what_it_cannot_pair(tmp_path: Path) -> None:
    rows = frame_of(tmp_path, [row("knorm", 64), row("tova", 64), row("tova", 64, pins=[4, 0])])
    for asked in (compare_pairs, compare):
        with pytest.raises(UnknownName, match="knorm, tova"):
            asked(rows, "snapkv", "accuracy" if asked is compare_pairs else None)  # type: ignore[arg-type]
    with pytest.raises(UnknownName, match="unknown metric 'ppl'"):
        compare(rows, "tova", ["ppl"])
    with pytest.raises(BadInput, match="several configurations"):
        compare_pairs(rows, "tova", "accuracy")


# Seeds


def seeded(spec: str, budget: int | None, sample: str, seed: int, value: float) -> Row:
    """A row as a run of several seeds writes it: its family is the same for all seeds."""
    made = row(spec, budget, sample, seed=seed, metrics={"accuracy": value})
    return replace(made, family=f"{spec} {budget}")


def test_one_sample_under_three_seeds_is_one_sample(tmp_path: Path) -> None:
    """A policy without randomness says the same under every seed: nothing may look surer for it."""
    values = {f"s{i}": float(i % 3 > 0) for i in range(12)}
    one = [seeded("knorm", 64, name, 0, value) for name, value in values.items()]
    three = [seeded("knorm", 64, name, seed, value) for name, value in values.items() for seed in (0, 1, 2)]
    pooled, single = (
        aggregate(frame_of(tmp_path / str(len(rows)), rows), ["accuracy"]) for rows in (three, one)
    )
    assert pooled["seeds"].tolist() == ["0,1,2"]
    numbers = ["mean", "lo", "hi", "n"]
    pd.testing.assert_frame_equal(pooled[numbers], single[numbers])
    base = [seeded("tova", 64, name, seed, 0.0) for name in values for seed in (0, 1, 2)]
    few = compare_pairs(frame_of(tmp_path / "a", one + base[::3]), "tova", "accuracy").iloc[0]
    many = compare_pairs(frame_of(tmp_path / "b", three + base), "tova", "accuracy").iloc[0]
    names = ["difference", "lo", "hi", "n", "win", "tie", "loss", "p"]
    assert many["test"] == few["test"] == "mcnemar"
    assert many[names].to_dict() == pytest.approx(few[names].to_dict())


def test_a_random_policy_is_averaged_over_seeds_within_a_sample(tmp_path: Path) -> None:
    draws = {"a": (1.0, 0.0, 0.0), "b": (1.0, 1.0, 0.0)}
    rows = [
        seeded("random", 8, name, seed, v) for name, values in draws.items() for seed, v in enumerate(values)
    ]
    rows += [seeded("tova", 8, name, seed, 0.0) for name in draws for seed in (0, 1, 2)]
    frame = frame_of(tmp_path, rows)
    line = aggregate(frame, ["accuracy"]).set_index("policy").loc["random"]
    assert (line["mean"], line["n"]) == (0.5, 2)
    assert (line["lo"], line["hi"]) == pytest.approx((1 / 3, 2 / 3))  # both samples a, or both b
    found = compare_pairs(frame, "tova", "accuracy").iloc[0]
    assert (found["n"], found["win"], found["p"], found["test"]) == (2, 2, 0.5, "flip")


def test_samples_that_differ_by_seed_are_independent(tmp_path: Path) -> None:
    rows = [seeded("knorm", 64, f"{seed}-{i}", seed, float(i < 2)) for seed in (0, 1, 2) for i in range(4)]
    line = aggregate(frame_of(tmp_path, rows), ["accuracy"]).iloc[0]
    assert (line["n"], line["mean"], line["seeds"]) == (12, 0.5, "0,1,2")
    theirs = scipy.stats.binomtest(6, 12).proportion_ci(method="wilson")
    assert (line["lo"], line["hi"]) == pytest.approx((theirs.low, theirs.high))


def test_unequal_numbers_of_seeds_pair_where_both_have_rows(tmp_path: Path) -> None:
    rows = [seeded("knorm", 64, "a", seed, 1.0) for seed in (0, 1, 2)] + [seeded("tova", 64, "a", 1, 0.0)]
    found = compare_pairs(frame_of(tmp_path, rows), "tova", "accuracy").iloc[0]
    assert (found["n"], found["difference"], found["seeds"]) == (1, 1.0, "1")


def test_families_that_collide_or_are_missing_do_not_mix(tmp_path: Path) -> None:
    """Two data files give the same seed and sample twice; rows of older runs have no family."""
    one, other = seeded("knorm", 64, "a", 0, 1.0), seeded("knorm", 64, "a", 0, 0.0)
    twice = [one, replace(other, key="k", config="c")]
    assert sorted(aggregate(frame_of(tmp_path / "a", twice), ["accuracy"])["mean"]) == [0.0, 1.0]
    old = [row("knorm", 64, seed=seed, metrics={"accuracy": float(seed)}) for seed in (0, 1)]
    assert sorted(aggregate(frame_of(tmp_path / "b", old), ["accuracy"])["mean"]) == [0.0, 1.0]


# What is printed


def suspicious(tmp_path: Path) -> pd.DataFrame:
    rows = []
    for i in range(20):
        for spec, budget, right in (("full", None, 0.0), ("knorm", 8, float(i < 15)), ("tova", 8, 0.0)):
            rows.append(
                row(spec, budget, f"s{i}", gold_label="yes" if i else "no", metrics={"accuracy": right})
            )
    return frame_of(tmp_path, rows)


def test_b28_better_than_the_full_cache_is_flagged(tmp_path: Path) -> None:
    frame = compare(suspicious(tmp_path), "tova")
    assert frame["beats_full"].tolist() == [True]
    text = render_comparison(frame)
    assert "SUSPECT: better than the full cache by more than the interval: knorm at 8" in text
    assert "knorm (beats full)" in text


def test_b46_below_the_majority_rate_is_flagged(tmp_path: Path) -> None:
    frame = compare(suspicious(tmp_path), "full")
    assert frame["below_majority"].tolist() == [True, True]  # 0.75 and 0, always-yes scores 0.95
    text = render_comparison(frame)
    assert "SUSPECT: below the majority rate of 0.95 (always 'yes'): every policy at every budget" in text
    assert "Equal on every sample, and not listed above: tova at 8." in text


def test_nothing_is_flagged_without_a_reason(tmp_path: Path) -> None:
    rows = [row(spec, 8, f"s{i}", metrics={"accuracy": float((i + k) % 2)}) for i in range(8)
            for k, spec in enumerate(("knorm", "tova"))]  # fmt: skip
    rows += [row("full", None, f"s{i}", metrics={"accuracy": float(i % 2)}) for i in range(8)]
    frame = compare(frame_of(tmp_path, rows), "tova")
    assert not frame["beats_full"].any()
    assert not frame["below_majority"].any()
    assert "SUSPECT" not in render_comparison(frame)


def test_formats_agree(tmp_path: Path) -> None:
    rows = make_run(tmp_path, samples=12)
    from kvbench.store.results import read_rows

    stored = read_rows(rows)
    stored = stored[stored["budget"].isna() | (stored["budget"] == 64)]
    frame = compare(stored, "snapkv", None, {"boolq": {"metric": "accuracy"}})
    assert list(dict.fromkeys(frame["metric"])) == ["accuracy", "kl", "string_match"]
    objects = json.loads(render_comparison(frame, "json"))
    assert [item["p"] for item in objects] == frame["p"].tolist()
    assert render_comparison(frame, "csv").count("\n") == len(frame) + 1
    markdown = render_comparison(frame, "md")
    assert "### boolq: accuracy (0..1, higher is better), minus snapkv, n = 12" in markdown
    moved = frame[frame["win"] + frame["loss"] > 0]
    assert sum(line.startswith("| ") for line in markdown.splitlines()) == len(moved) + 2 * 4
    with pytest.raises(BadInput, match="--format 'pdf'"):
        render_comparison(frame, "pdf")


def two_rules() -> list[Row]:
    """Native pins are right on the first 6 of 20 samples, the same pins on 18; tova has one rule only."""
    rows = []
    for index in range(20):
        for mode, right in (("native", 6), ("4,16", 18)):
            changes: dict[str, Any] = {"pins_mode": mode, "metrics": {"accuracy": float(index < right)}}
            rows.append(
                row("snapkv", 64, f"s{index:02}", pins=[0, 32] if mode == "native" else [4, 16], **changes)
            )
        rows.append(row("tova", 64, f"s{index:02}", metrics={"accuracy": 1.0}))
    return rows


def test_a_policy_is_compared_with_itself_under_another_rule(tmp_path: Path) -> None:
    frame = compare_rules(frame_of(tmp_path, two_rules()), "pins", ["accuracy"])
    (found,) = frame.to_dict("records")
    assert (found["policy"], found["pins_mode"], found["baseline"]) == ("snapkv", "4,16", "pins native")
    assert (found["mean"], found["baseline_mean"], found["n"]) == (0.9, 0.3, 20)
    assert found["difference"] == pytest.approx(0.6)
    assert (found["win"], found["tie"], found["loss"]) == (12, 8, 0)
    assert found["p"] == scipy.stats.binomtest(0, 12).pvalue
    text = render_comparison(frame)
    assert "minus pins native" in text
    assert "pins 4,16" in text


@pytest.mark.parametrize(
    ("field", "told"),
    [("question", "no policy has samples under 'withheld'"), ("model", "choose one of")],
)
def test_a_rule_with_one_value_is_nothing_to_compare(tmp_path: Path, field: str, told: str) -> None:
    with pytest.raises(BadInput, match=told):
        compare_rules(frame_of(tmp_path, two_rules()), field, ["accuracy"])


def test_chunks_of_two_sizes_are_compared_with_one_shot_each(tmp_path: Path) -> None:
    rows = [row("knorm", 64, f"s{index}", metrics={"accuracy": 1.0}) for index in range(3)]
    for chunk, value in ((128, 0.0), (256, 1.0)):
        changes: dict[str, Any] = {"schedule": "chunked", "chunk": chunk, "metrics": {"accuracy": value}}
        rows += [row("knorm", 64, f"s{index}", **changes) for index in range(3)]
    frame = compare_rules(frame_of(tmp_path, rows), "schedule", ["accuracy"])
    assert frame[["chunk", "difference", "loss"]].to_numpy().tolist() == [[128, -1.0, 3], [256, 0.0, 0]]


def test_all_pairs_say_what_pairs_with_a_baseline_say(tmp_path: Path) -> None:
    rows = read_rows(make_run(tmp_path / "run", samples=14))
    own = prepare_rows(rows)
    own = own[own["task"] == "boolq"].assign(curve=lambda frame: frame["spec"])
    specs = list(dict.fromkeys(own.sort_index()["spec"]))
    for metric in ("accuracy", "kl"):
        frame = compare_all(own, metric, ["random"])
        assert len(frame) == 5 * len(specs) * (len(specs) - 1) / 2
        for baseline in ("tova", "full"):
            mine = frame[frame["baseline"] == baseline].set_index(["policy", "budget"])
            there = compare_pairs(rows[rows["task"] == "boolq"], baseline, metric)
            there = there.set_index(["policy", "budget"])
            assert len(mine) >= 5
            for name in ("mean", "difference", "lo", "hi", "n", "win", "tie", "loss", "p", "detectable"):
                assert mine[name].tolist() == there.loc[mine.index, name].tolist(), name
        for _, part in frame.groupby("budget"):
            random = part[["policy", "baseline"]].isin(["random"]).any(axis=1)
            assert part[random]["p_holm"].isna().all()
            assert part[~random]["p_holm"].tolist() == holm(part[~random]["p"].tolist())


def test_one_long_dialogue_decides_a_mean_and_no_sign_test(tmp_path: Path) -> None:
    worse = [0.1] * 11 + [-9.0]
    rows = [row("knorm", 64, f"s{i:02}", metrics={"nll": 1.0}) for i in range(12)]
    rows += [row("tova", 64, f"s{i:02}", metrics={"nll": 1.0 + more}) for i, more in enumerate(worse)]
    found = compare_pairs(frame_of(tmp_path, rows), "knorm", "nll").iloc[0]
    assert (found["win"], found["loss"], found["difference"] < 0) == (1, 11, True)
    assert found["p_sign"] == mcnemar(1, 11) < 0.05 < found["p"]


def test_brackets_and_budgets_that_evict_nothing_are_not_corrected_for(tmp_path: Path) -> None:
    rows = []
    for spec in ("full", "knorm", "tova", "random"):
        for budget in [None] if spec == "full" else [64, 1024]:
            for i in range(8):
                kept = min(budget or 300, 300)
                values = {"nll": 1.0 + len(spec) * i / (budget or 1000)}
                rows.append(row(spec, budget, f"s{i}", kept=kept, context_tokens=300, metrics=values))
    frame = frame_of(tmp_path, rows)
    frame.attrs["brackets"] = ["random"]
    found = compare_pairs(frame, "full", "nll").set_index(["policy", "budget"])
    assert found["n_fit"].tolist() == [0, 0, 0, 8, 8, 8]
    tested = found[found["p_holm"].notna()]
    assert tested.index.tolist() == [("knorm", 64), ("tova", 64)]
    assert tested["p_holm"].tolist() == holm(tested["p"].tolist())


def test_perplexity_is_compared_by_what_samples_add_to_it(tmp_path: Path) -> None:
    rows = [
        row(spec, budget, f"s{index}", metrics={"nll": 1.0 + index * (spec == "tova"), "nll_tokens": 3})
        for spec, budget in (("full", None), ("tova", 64))
        for index in range(8)
    ]
    asked, usual = (compare(frame_of(tmp_path, rows), "full", [name]) for name in ("ppl", "nll"))
    assert list(asked["metric"].unique()) == ["nll"]
    pd.testing.assert_frame_equal(asked, usual)
