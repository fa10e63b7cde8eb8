"""The answer: the best policy, what is not separated from it, and when a metric does not tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvbench.show.panel import Declarations, Panel, build_panels, read_declarations
from kvbench.show.report.best import ahead_of_full, answer, best_of, doubts
from kvbench.show.report.matrix import matrices
from kvbench.show.report.pins import compare_pins, share_pins
from kvbench.stats.significance import holm, mcnemar
from kvbench.store.results import read_rows
from tests.report.made import make_rows, row

N = 40


def panel_of(folder: Path, right: dict[str, list[int]], metric: str = "accuracy", **changes: Any) -> Panel:
    """One panel. right: per policy, the share of N samples it gets right at budgets 32 and 64, in samples."""
    rows = []
    for spec, counts in right.items():
        for budget, count in zip((None,) if spec == "full" else (32, 64), counts, strict=True):
            for index in range(N):
                values = {metric: float(index < count)}
                rows.append(row(spec, budget, f"s{index:02}", metrics=values, **changes))
    run = make_rows(folder, rows)
    (panel,), _ = build_panels(read_rows(run), read_declarations([run]))
    return panel


def test_leaders_ties_and_the_rest(tmp_path: Path) -> None:
    right = {
        "full": [40],
        "oracle": [40, 40],
        "random": [39, 0],
        "knorm": [30, 20],
        "tova": [28, 20],
        "snapkv": [10, 19],
    }
    panel = panel_of(tmp_path, right)
    first, second = best_of(panel, "accuracy")
    assert (first.budget, first.leaders, first.tied, first.rest) == (32, ("knorm",), ("tova",), ("snapkv",))
    assert (second.leaders, second.tied, second.rest) == (("knorm", "tova"), ("snapkv",), ())
    assert not first.open
    assert second.open
    assert first.value.startswith("0.75 [")
    assert answer([first, second], "accuracy") == (
        "Best by accuracy: knorm (not separated from tova) at 32; none of the 3 policies stands out at 64."
    )


@pytest.mark.parametrize("apart", [5, 6, 7, 8])
def test_interval_and_test_both_must_separate(tmp_path: Path, apart: int) -> None:
    """One against two others, 0 to `apart` discordant pairs: Holm doubles the smaller p."""
    panel = panel_of(tmp_path, {"knorm": [20, 20], "tova": [20 - apart, 20], "snapkv": [20 - apart, 20]})
    first, _ = best_of(panel, "accuracy")
    p = holm([mcnemar(apart, 0)] * 2)[0]
    assert (first.rest == ("tova", "snapkv")) == (p < 0.05) == (apart >= 7)


def test_less_is_better_where_the_metric_says_so(tmp_path: Path) -> None:
    rows = [
        row(spec, 64, f"s{index}", metrics={"kl": base + index / 100})
        for spec, base in (("knorm", 0.5), ("tova", 0.2), ("random", 0.0))
        for index in range(12)
    ]
    run = make_rows(tmp_path, rows)
    (panel,), _ = build_panels(read_rows(run), read_declarations([run]))
    (best,) = best_of(panel, "kl")
    assert (best.leaders, best.rest) == (("tova",), ("knorm",))
    (matrix,) = matrices(panel, "kl")
    cells = {label: dict(zip(matrix.labels, entries, strict=True)) for label, entries in matrix.rows}
    assert matrix.labels == ["knorm", "tova", "random"]
    assert cells["tova"]["knorm"].verdict == "better"
    assert cells["tova"]["knorm"].outcomes == "12/0/0"
    assert cells["tova"]["knorm"].difference == "-0.300"
    assert cells["knorm"]["tova"].verdict == "worse"
    assert cells["knorm"]["tova"].difference == "+0.300"
    assert cells["tova"]["tova"] is None
    assert (matrix.pairs, matrix.separated, matrix.n) == (1, 1, "12")  # random bounds the others: no test


def test_who_wins_most_samples_is_not_behind(tmp_path: Path) -> None:
    """Perplexity weighs by tokens: knorm is best by one long sample, tova is better on the other eleven."""
    rows = []
    for spec in ("knorm", "tova"):
        for index in range(12):
            ahead = 0.01 * (spec == "tova") if index == 0 else 0.1 * (spec == "knorm")
            values = {"nll": 1.0 + ahead, "nll_tokens": 10**6 if index == 0 else 1}
            rows.append(row(spec, 64, f"s{index:02}", metrics=values))
    run = make_rows(tmp_path, rows)
    (panel,), _ = build_panels(read_rows(run), Declarations({"boolq": {"metric": "ppl"}}, {}))
    assert panel.main == "ppl"
    (line,) = panel.pairs("ppl").to_dict("records")
    assert line["metric"] == "nll"
    assert line["p"] < 0.05
    assert line["lo"] > 0
    (best,) = best_of(panel, "ppl")
    assert (best.leaders, best.tied) == (("knorm",), ("tova",))


def test_rounding_makes_no_winner(tmp_path: Path) -> None:
    """With room for everything all keep the same; what is left comes from the order of the batch."""
    rows = [
        row(spec, 64, f"s{index}", metrics={"kl": noise})
        for spec, noise in (("knorm", 1e-8), ("tova", 2e-7), ("snapkv", 0.0))
        for index in range(20)
    ]
    run = make_rows(tmp_path, rows)
    (panel,), _ = build_panels(read_rows(run), read_declarations([run]))
    (best,) = best_of(panel, "kl")
    assert (best.leaders, best.open) == (("knorm", "tova", "snapkv"), True)
    (matrix,) = matrices(panel, "kl")
    assert matrix.separated == 0


def test_a_metric_that_does_not_tell(tmp_path: Path) -> None:
    right = {"full": [15], "knorm": [15, 15], "tova": [14, 16]}
    panel = panel_of(tmp_path, right, gold_label="yes", label="no")
    low, same = doubts(panel, "accuracy", best_of(panel, "accuracy"))
    assert "scores 0.38, below the majority rate of 1.00 (always answering 'yes')" in low
    assert same == "No policy is separated from the best at any budget: accuracy does not tell them apart."
    better = panel_of(tmp_path / "other", {"full": [10], "knorm": [30, 10], "tova": [10, 10]})
    (suspect,) = ahead_of_full(better, "accuracy")
    assert suspect.startswith(
        "Suspect: better than the full cache by more than the interval of the difference: knorm at 32."
    )


def test_pins_of_two_rules(tmp_path: Path) -> None:
    """Policies with the same pins under both rules have the same rows; the others are paired."""
    folders = []
    for rule, gain in (("native", 0.0), ("4,16", 0.25)):
        rows = []
        for index in range(8):
            for spec, pins in (("snapkv", [0, 32]), ("tova", [0, 0]), ("kvp", [4, 16])):
                shared = [4, 16] if rule != "native" else pins
                for budget in (32, 64):
                    values = {"accuracy": 0.5 + (gain if spec != "kvp" else 0.0)}
                    rows.append(row(spec, budget, f"s{index}", pins=shared, pins_mode=rule, metrics=values))
        folders.append(make_rows(tmp_path / rule.replace(",", "-"), rows))
    panels, _ = build_panels(read_rows(folders), read_declarations(folders))
    native, same = panels
    assert native.order == same.order == ["snapkv", "tova", "kvp"]  # kvp's rows have one key
    told = {
        one.rule: {policy: (pins, values) for policy, pins, values in one.rows} for one in share_pins(panels)
    }
    assert told["native"]["snapkv"] == ("last 32", [1.0, 0.5])
    assert told["native"]["tova"] == ("none", [0.0, 0.0])
    assert told["4,16"]["snapkv"] == ("first 4, last 16", [20 / 32, 20 / 64])
    (effect,), why = compare_pins(read_rows(folders), panels)
    assert why == ""
    assert effect.title == "boolq, accuracy (0..1, higher is better): pins 4,16 minus native pins"
    assert (effect.budgets, effect.same) == ([32, 64], ["kvp"])
    assert [line[0] for line in effect.rows] == ["snapkv", "tova"]
    assert {cell.split(" p ")[0] for line in effect.rows for cell in line[1:]} == {"+0.25 [+0.25,+0.25]"}
    nothing, why = compare_pins(read_rows(folders[:1]), panels[:1])
    assert nothing == []
    assert why.startswith("no policy has samples under 'native' and under another value")
