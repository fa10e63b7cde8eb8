"""A 95% interval for every estimate: by counting where samples are right or wrong, else by bootstrap.

A bootstrap of 24 right answers out of 24 says [1,1]. So rates get Wilson's interval, and differences of two
rates on the same samples Bonett and Price's (2012), which stay honest near 0 and 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .bootstrap import Estimate, Z, bootstrap_intervals

FEW = 10  # samples below which a bootstrap interval is too narrow, as tests/stats/test_coverage.py measures


def intervals(items: Sequence[Estimate]) -> list[tuple[float, float]]:
    """(lo, hi) of each estimate; (nan, nan) for fewer than two samples, or a value that is not finite."""
    rest = [item for item in items if item.kind == "mean"]
    drawn = iter(bootstrap_intervals(rest))
    return [next(drawn) if item.kind == "mean" else _counted(item) for item in items]


def _counted(item: Estimate) -> tuple[float, float]:
    n = len(item.samples)
    if n < 2:
        return math.nan, math.nan
    right, wrong = int((item.values > 0).sum()), int((item.values < 0).sum())
    return wilson(right, n) if item.kind == "rate" else bonett_price(right, wrong, n)


def wilson(right: int, n: int) -> tuple[float, float]:
    """Wilson's score interval of a rate (Wilson 1927; Brown, Cai and DasGupta 2001)."""
    rate, more = right / n, Z**2 / n
    middle = (rate + more / 2) / (1 + more)
    half = Z / (1 + more) * math.sqrt(rate * (1 - rate) / n + more / n / 4)
    low = 0.0 if right == 0 else middle - half
    return low, 1.0 if right == n else middle + half


def bonett_price(wins: int, losses: int, n: int) -> tuple[float, float]:
    """The adjusted Wald interval of (wins - losses) / n for paired answers (Bonett and Price 2012)."""
    win, loss = (wins + 1) / (n + 2), (losses + 1) / (n + 2)
    half = Z * math.sqrt((win + loss - (win - loss) ** 2) / (n + 2))
    return max(-1.0, win - loss - half), min(1.0, win - loss + half)
