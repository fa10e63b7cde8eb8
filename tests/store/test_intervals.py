"""Intervals hold what they promise: coverage counted or simulated, and a second opinion from scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from kvbench.stats.bootstrap import Estimate, bootstrap_intervals
from kvbench.stats.intervals import bonett_price, intervals, wilson

SIZES = (6, 10, 24, 100)
RATES = (0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 0.95, 0.98)


def coverage(n: int, rate: float) -> float:
    """How often Wilson's interval holds the true rate, counted over all that n answers can be."""
    chance = stats.binom.pmf(range(n + 1), n, rate)
    held = [low <= rate <= high for low, high in (wilson(k, n) for k in range(n + 1))]
    return float(chance @ np.array(held))


@pytest.mark.parametrize("n", SIZES)
def test_wilson_covers(n: int) -> None:
    """Near 95% on average over rates, and never far below."""
    assert np.mean([coverage(n, rate) for rate in np.linspace(0.02, 0.98, 97)]) > 0.945
    assert min(coverage(n, rate) for rate in RATES) > 0.88


@pytest.mark.parametrize(("right", "n"), [(0, 24), (24, 24), (3, 10), (239, 300), (1, 2)])
def test_wilson_is_scipys(right: int, n: int) -> None:
    found = stats.binomtest(right, n).proportion_ci(method="wilson")
    assert wilson(right, n) == pytest.approx((found.low, found.high), abs=1e-12)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("win", "loss"), [(0.02, 0.0), (0.3, 0.02), (0.2, 0.2), (0.9, 0.05)])
def test_differences_of_answers_cover(n: int, win: float, loss: float) -> None:
    rng = np.random.default_rng(n)
    drawn = rng.multinomial(n, [win, loss, 1 - win - loss], size=2000)
    held = [
        low <= win - loss <= high
        for low, high in (bonett_price(wins, losses, n) for wins, losses, _ in drawn.tolist())
    ]
    assert np.mean(held) > 0.92


def test_agreement_of_all_samples_is_no_certainty() -> None:
    names = tuple(f"{i:02}" for i in range(24))
    always, tied = (Estimate(names, np.full(24, x), kind=kind) for x, kind in ((1.0, "rate"), (0.0, "pairs")))
    (low, high), (less, more) = intervals([always, tied])
    assert (round(low, 2), high) == (0.86, 1.0)
    assert less < 0 < more
    assert more == pytest.approx(-less)


def test_one_sample_has_no_interval() -> None:
    one = [Estimate(("a",), np.ones(1), kind=kind) for kind in ("mean", "rate", "pairs")]
    assert all(math.isnan(end) for pair in intervals(one) for end in pair)


def exponential(rng: np.random.Generator, n: int) -> tuple[np.ndarray, float]:
    return rng.exponential(size=n), 1.0


def normal(rng: np.random.Generator, n: int) -> tuple[np.ndarray, float]:
    return rng.normal(size=n), 0.0


@pytest.mark.parametrize(("draw", "n", "least"), [
    (normal, 10, 0.88), (normal, 24, 0.91), (normal, 100, 0.92),
    (exponential, 10, 0.82), (exponential, 24, 0.89), (exponential, 100, 0.92),
])  # fmt: skip
def test_bootstrap_covers(draw: object, n: int, least: float) -> None:
    """BCa of few samples is too narrow, which tables say below 10; skewed values need more of them."""
    rng, names = np.random.default_rng(n), tuple(f"{i:03}" for i in range(n))
    drawn = [draw(rng, n) for _ in range(600)]  # type: ignore[operator]
    found = bootstrap_intervals([Estimate(names, values) for values, _ in drawn])
    covered = np.mean([low <= true <= high for (low, high), (_, true) in zip(found, drawn, strict=True)])
    assert least < covered < 0.98


def test_bca_is_scipys() -> None:
    values = np.random.default_rng(3).exponential(size=40)
    found = bootstrap_intervals([Estimate(tuple(f"{i:02}" for i in range(40)), values)])[0]
    theirs = stats.bootstrap((values,), np.mean, n_resamples=20_000, method="BCa", random_state=0)
    interval = theirs.confidence_interval
    assert found == pytest.approx(
        (interval.low, interval.high), abs=0.02 * (interval.high - interval.low) + 0.01
    )


def test_bca_of_a_ratio_is_scipys() -> None:
    rng = np.random.default_rng(5)
    weights = rng.integers(1, 9, size=30).astype(float)
    values = rng.exponential(size=30) * weights
    item = Estimate(tuple(f"{i:02}" for i in range(30)), values, weights, log=True)
    theirs = stats.bootstrap(
        (values, weights), lambda top, bottom: np.exp(np.sum(top, -1) / np.sum(bottom, -1)), paired=True,
        vectorized=False, n_resamples=10_000, method="BCa", random_state=0,
    ).confidence_interval  # fmt: skip
    low, high = bootstrap_intervals([item])[0]
    assert (low, high) == pytest.approx((theirs.low, theirs.high), rel=0.02)
