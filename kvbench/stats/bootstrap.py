"""95% bootstrap intervals over samples (BCa), for many numbers measured on the same samples at once.

The unit is the sample: rows of one sample under several seeds are drawn together or not at all. BCa (Efron
1987) corrects the percentile interval for bias and skewness.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
LEVEL = 0.95
NORMAL = NormalDist()
Z = NORMAL.inv_cdf((1 + LEVEL) / 2)
DRAWS = 2_000_000  # indices drawn per block: bounds memory for large sets
BATCH = 256  # estimates per block, for the same reason

Floats = NDArray[np.float64]
Kind = Literal["mean", "rate", "pairs"]


@dataclass(frozen=True)
class Estimate:
    """One number estimated from samples: sum(values) / sum(weights), and its exponential where log is true.

    samples: ids in ascending order, (n,). values: (n,) float64. weights: (n,), or None for ones. kind: "rate"
    for answers that are 0 or 1, "pairs" for differences of two such answers, else "mean".
    """

    samples: tuple[str, ...]
    values: Floats
    weights: Floats | None = None
    log: bool = False
    kind: Kind = "mean"

    @property
    def value(self) -> float:
        """NaN without samples."""
        if not self.samples:
            return math.nan
        total = float(len(self.samples)) if self.weights is None else math.fsum(self.weights)
        ratio = math.fsum(self.values) / total if total else math.nan
        return math.exp(ratio) if self.log and ratio < 709 else ratio if not self.log else math.inf

    @property
    def content(self) -> tuple[bytes, bytes, bool]:
        """Equal for estimates that have equal intervals on equal samples."""
        return self.values.tobytes(), b"" if self.weights is None else self.weights.tobytes(), self.log


def pool_rows(
    samples: Iterable[str], values: Floats, weights: Floats | None = None, log: bool = False,
    kind: Kind = "mean",
) -> Estimate:  # fmt: skip
    """An estimate from rows sorted by sample; several rows of one sample (seeds) are one unit of resampling.

    weights: None for ones. The value is that of all rows. kind: of one row; sums over seeds are means.
    """
    ids = np.array(list(samples), dtype=object)
    starts = np.flatnonzero(np.r_[True, ids[1:] != ids[:-1]]) if len(ids) else np.empty(0, int)
    if len(starts) == len(ids):
        return Estimate(tuple(ids), values, weights, log, kind)
    counts = np.ones(len(ids)) if weights is None else weights
    sums, totals = (np.add.reduceat(column, starts) for column in (values, counts))
    means = sums / totals
    if weights is None and len(set(totals)) == 1 and set(means) <= {-1.0, 0.0, 1.0}:
        return Estimate(tuple(ids[starts]), means, None, log, kind)  # seeds that all say the same
    return Estimate(tuple(ids[starts]), sums, totals, log)


def bootstrap_intervals(items: Sequence[Estimate]) -> list[tuple[float, float]]:
    """(lo, hi) of each estimate; (nan, nan) for fewer than two samples, or a value that is not finite.

    The resamples depend on the sample ids alone: not on the order of rows, nor on which other
    cells are asked for, and all cells of a task are resampled alike.
    """
    bounds = [(math.nan, math.nan)] * len(items)
    together: dict[tuple[str, ...], dict[tuple[bytes, bytes, bool], list[int]]] = {}
    for index, item in enumerate(items):
        if len(item.samples) > 1 and np.isfinite(item.values).all():
            together.setdefault(item.samples, {}).setdefault(item.content, []).append(index)
    for samples, alike in together.items():
        groups = list(alike.values())
        for start in range(0, len(groups), BATCH):
            part = groups[start : start + BATCH]
            pairs = _bounds(samples, [items[group[0]] for group in part])
            for group, pair in zip(part, pairs, strict=True):
                for index in group:
                    bounds[index] = pair
    return bounds


def _bounds(samples: tuple[str, ...], items: Sequence[Estimate]) -> list[tuple[float, float]]:
    """Intervals of estimates that share their samples."""
    n = len(samples)
    tops = _on_grid(np.stack([item.values for item in items], axis=1))
    weighted = [index for index, item in enumerate(items) if item.weights is not None]
    bottoms = [item.weights for item in items if item.weights is not None]
    weights = _on_grid(np.stack(bottoms, axis=1)) if bottoms else np.empty((n, 0))
    ratios, totals = (np.empty((count, RESAMPLES)) for count in (len(items), len(weighted)))
    seed = hashlib.sha256("\0".join(samples).encode("utf-8", "surrogatepass")).digest()
    rng = np.random.default_rng(int.from_bytes(seed[:8], "little"))
    block = max(1, DRAWS // n)
    for start in range(0, RESAMPLES, block):
        size = min(block, RESAMPLES - start)
        draws = rng.integers(0, n, size=(size, n)) + np.arange(size)[:, None] * n
        counts = np.bincount(draws.ravel(), minlength=size * n).reshape(size, n).astype(np.float64)
        ratios[:, start : start + size] = (counts @ tops).T
        totals[:, start : start + size] = (counts @ weights).T
    plain = np.setdiff1d(np.arange(len(items)), weighted)
    ratios[plain] /= n
    ratios[weighted] /= totals
    bottoms_of = dict(zip(weighted, weights.T, strict=True))
    bounds = []
    for index, item in enumerate(items):
        bound = _bca(ratios[index], tops[:, index], bottoms_of.get(index, np.ones(n)))
        bounds.append((math.exp(bound[0]), math.exp(bound[1])) if item.log else bound)
    return bounds


def _bca(draws: Floats, top: Floats, bottom: Floats) -> tuple[float, float]:
    """The BCa interval of sum(top) / sum(bottom). draws: its resamples; they are reordered."""
    value = top.sum() / bottom.sum()
    below = ((draws < value).sum() + 0.5 * (draws == value).sum()) / len(draws)
    left_out = (top.sum() - top) / (bottom.sum() - bottom)
    off = left_out.mean() - left_out
    spread = (off**2).sum()
    if not 0 < below < 1 or spread == 0:  # every resample says the same
        return float(draws.min()), float(draws.max())
    bias, skew = NORMAL.inv_cdf(below), (off**3).sum() / (6 * spread**1.5)
    shifted = [bias + z for z in (-Z, Z)]
    ends = [NORMAL.cdf(bias + one / (1 - skew * one)) for one in shifted]
    places = [end * (len(draws) - 1) for end in ends]
    whole = sorted({int(place) + more for place in places for more in (0, 1) if place + more < len(draws)})
    draws.partition(whole)
    low, high = (_between(draws, place) for place in places)
    return low, high


def _between(draws: Floats, place: float) -> float:
    """The value at a place between two draws that stand where they would in order."""
    first = int(place)
    second = min(first + 1, len(draws) - 1)
    return float(draws[first] + (place - first) * (draws[second] - draws[first]))


def _on_grid(columns: Floats) -> Floats:
    """Round each column (n, k) to a grid so coarse that any sum of n entries is exact in float64.

    Then a matrix product gives the same bits for any number of columns and any order of adding,
    at a relative precision of about n * 2**-52.
    """
    largest = np.abs(columns).max(axis=0) * columns.shape[0]
    _, exponent = np.frexp(np.where(largest > 0, largest, 1.0))
    step = np.ldexp(1.0, exponent - 52)
    return np.asarray(np.round(columns / step) * step)
