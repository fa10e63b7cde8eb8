"""Axes and charts: where points lie, and a rank correlation as scipy computes it."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from matplotlib.colors import to_rgb

from kvbench.show.panel import Panel, build_panels, read_declarations
from kvbench.show.report.chart import BOTTOM, HEIGHT, LEFT, TOP, picture_of
from kvbench.show.report.look import CONTRAST, DARK, assign_looks, brighten, luminance, outline
from kvbench.show.report.relation import FEW_POLICIES, cells_table, in_words, relate, spearman
from kvbench.show.scale import budget_scale, scale_of
from kvbench.show.style import MARKERS, PALETTE
from kvbench.store.results import read_rows
from tests.report.made import make_run
from tests.store.synthetic import BUDGETS


@pytest.fixture(scope="module")
def panel(tmp_path_factory: pytest.TempPathFactory) -> Panel:
    run = make_run(tmp_path_factory.mktemp("run"), samples=12)
    return build_panels(read_rows(run), read_declarations([run]))[0][0]


def test_a_linear_axis() -> None:
    axis = scale_of([0.2, 0.8], (300.0, 0.0), (0.0, 1.0))
    assert not axis.log
    assert axis.at(0.2) > axis.at(0.5) > axis.at(0.8)
    assert axis.at(0.5) == pytest.approx(150)
    assert [text for _, text in axis.marks] == ["0.2", "0.4", "0.6", "0.8"]
    assert scale_of([0.0, 1.0], (0.0, 1.0), (0.0, 1.0)).low == pytest.approx(-0.03, abs=0.01)
    flat = scale_of([0.5, 0.5], (0.0, 100.0))
    assert flat.at(0.5) == pytest.approx(50)


def test_a_logarithmic_axis_where_values_span_more_than_a_factor_of_30() -> None:
    assert not scale_of([0.1, 2.9], (0.0, 100.0)).log
    axis = scale_of([0.1, 3.1], (0.0, 100.0))
    assert axis.log
    assert axis.at(math.sqrt(0.1 * 3.1)) == pytest.approx(50)
    assert not scale_of([0.1, 3.1], (0.0, 100.0), may_log=False).log
    assert not scale_of([-0.1, 3.1], (0.0, 100.0)).log


def test_rounding_noise_does_not_fill_the_axis() -> None:
    axis = scale_of([1e-17, 0.0, 0.01, 1.0], (0.0, 100.0))
    assert axis.log
    assert axis.low == pytest.approx(0.01 / 1.15)
    assert axis.at(1e-17) == axis.at(0.0) == 0
    assert axis.at(0.01) > 5
    assert axis.marks[0] == (0.0, "≈0")
    assert not scale_of([0.0, 0.5, 1.0], (0.0, 100.0)).log


def test_budgets_are_marked_where_there_is_room() -> None:
    assert [text for _, text in budget_scale([32, 64, 128], (0.0, 100.0)).marks] == ["32", "64", "128"]
    crowded = budget_scale([32, 33, 128, 1024], (0.0, 100.0)).marks
    assert [text for _, text in crowded] == ["32", "", "128", "1024"]
    assert budget_scale([64], (0.0, 100.0)).at(64) == 50


def test_every_curve_goes_through_its_means(panel: Panel) -> None:
    drawn = assign_looks(panel.order, panel.looks)
    chart = picture_of(panel, "accuracy", drawn, "c")
    assert chart.kind == "curves"
    assert {curve.look.label for curve in chart.strokes} == set(panel.order) - {"full"}
    lines = panel.of("accuracy")
    pixels = {text: y for y, text in chart.y}
    low, high = sorted(pixels, key=float)[0], sorted(pixels, key=float)[-1]
    for curve in chart.strokes:
        means = lines[lines["label"] == curve.look.label].sort_values("budget")["mean"]
        points = [tuple(map(float, point.split(","))) for point in curve.line.split()]
        assert len(points) == len(curve.marks) == len(BUDGETS)
        for (x, y), mean in zip(points, means, strict=True):
            share = (mean - float(low)) / (float(high) - float(low))
            assert y == pytest.approx(pixels[low] + share * (pixels[high] - pixels[low]), abs=0.02)
            assert x > LEFT
            assert TOP <= y <= HEIGHT - BOTTOM
    (full, rate) = chart.guides
    assert full.text == "full cache"
    assert rate.text.startswith("majority rate 0.")


def test_what_is_the_same_at_every_budget_has_one_line_per_policy(panel: Panel) -> None:
    lines = panel.measured
    cost = lines["metric"] == "eviction_cost"
    first = lines[cost].groupby("label")[["mean", "lo", "hi"]].transform("first")
    same = Panel(
        panel.setting,
        lines.assign(**lines.loc[~cost, ["mean", "lo", "hi"]].combine_first(first)),
        panel.ready,
        panel.main,
        panel.looks,
    )
    chart = picture_of(same, "eviction_cost", assign_looks(panel.order, panel.looks), "c")
    assert chart.kind == "dots"
    means = {curve.look.label: curve.marks[0].x for curve in chart.strokes}
    assert len(means) == len(panel.order) - 1
    assert list(means.values()) == sorted(means.values())  # the best on top
    assert picture_of(panel, "eviction_cost", assign_looks(panel.order, panel.looks), "c").kind == "curves"


def test_the_correlation_is_scipys() -> None:
    rng = np.random.default_rng(3)
    x = rng.integers(0, 9, 40).astype(float)
    y = x + rng.normal(0, 4, 40)
    rho, low, high = spearman(x, y, [str(i) for i in range(40)])
    assert rho == pytest.approx(scipy.stats.spearmanr(x, y).statistic)
    reference = scipy.stats.bootstrap(
        (x, y), lambda a, b: scipy.stats.spearmanr(a, b).statistic, paired=True, vectorized=False,
        n_resamples=400, method="percentile", rng=np.random.default_rng(1),
    ).confidence_interval  # fmt: skip
    assert (low, high) == pytest.approx(tuple(reference), abs=0.06)
    assert low < rho < high
    assert all(math.isnan(value) for value in spearman(x, np.ones(40), list("ab") * 20))
    assert all(math.isnan(value) for value in spearman(x[:3], y[:3], list("abc")))


def test_cells_of_one_policy_are_no_independent_points() -> None:
    """Four budgets of each of five policies say little about policies: the interval widens."""
    rng = np.random.default_rng(4)
    level = np.repeat(rng.normal(0, 3, 5), 4)
    x, y = level + rng.normal(0, 0.1, 20), level + rng.normal(0, 2, 20)
    _, low, high = spearman(x, y, [name for name in "abcde" for _ in range(4)])
    _, less, more = spearman(x, y, [str(i) for i in range(20)])
    assert high - low > more - less


def test_policies_with_unequal_numbers_of_cells() -> None:
    x, y = np.arange(7.0), np.array([0.0, 2, 1, 3, 5, 4, 6])
    rho, low, high = spearman(x, y, list("aaabbcd"))
    assert low <= rho <= high
    assert rho == pytest.approx(scipy.stats.spearmanr(x, y).statistic)


def test_eviction_error_in_words(panel: Panel) -> None:
    drawn = assign_looks(panel.order, panel.looks)
    found = relate(panel, drawn, "r")
    pairs = [(x, y) for x in ("missed_mass", "eviction_cost") for y in ("accuracy", "kl")]
    assert [(one.x, one.y) for one in found] == pairs
    policies = len(panel.candidates)
    assert set(panel.order) - set(panel.candidates) == {"full", "oracle", "random"}
    text = found[1].text
    assert text.startswith(
        "Less eviction error goes closely with better results. Spearman's rank correlation is +"
    )
    who = f"{policies} policies at {len(BUDGETS)} budgets, brackets and cells that evict nothing left out"
    assert f"over n = {policies * len(BUDGETS)} cells ({who})" in text
    assert len([mark for curve in found[1].picture.strokes for mark in curve.marks]) == (policies + 2) * len(
        BUDGETS
    )
    header, body = cells_table(panel, found)
    assert header == ["policy", "budget", "accuracy", "kl", "missed mass", "eviction cost"]
    assert len(body) == (policies + 2) * len(BUDGETS)


def test_few_policies_show_no_relation() -> None:
    rng = np.random.default_rng(1)
    levels = np.arange(FEW_POLICIES, dtype=float)
    for count, told in ((FEW_POLICIES - 1, False), (FEW_POLICIES, True)):
        cells = pd.DataFrame(
            [
                {"label": f"p{policy}", "budget": budget, "x": level, "y": level + rng.normal(0, 0.01)}
                for policy, level in enumerate(levels[:count])
                for budget in (64, 128)
            ]
        )
        text = in_words(cells, "missed_mass", "lower")
        assert ("Less eviction error goes closely" in text) == told
        assert (f"Fewer than {FEW_POLICIES} policies show no relation" in text) != told


def test_eviction_cost_follows_no_budget() -> None:
    cells = pd.DataFrame({"label": list("abcdef"), "budget": 64, "x": range(6), "y": range(6)}, dtype=object)
    text = in_words(cells.astype({"x": float, "y": float}), "eviction_cost", "lower")
    assert "A larger budget lowers the error" not in text
    assert "Eviction cost is the same at every budget" in text


def test_colours_can_be_seen_on_the_dark_page() -> None:
    for color in (*PALETTE, "#000000", "#808080"):
        contrast = (luminance(to_rgb(brighten(color))) + 0.05) / (luminance(DARK) + 0.05)
        assert contrast >= CONTRAST - 0.05, color
    assert len({outline(marker) for marker in MARKERS}) == len(MARKERS)
