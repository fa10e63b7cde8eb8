"""How sure a paired difference is: exact tests, their correction, and what n samples could show at all.

A difference is one number per sample (policy minus baseline). Of two yes/no answers it is -1, 0 or 1 and
the test is McNemar's; else the signs of the differences are flipped at random. Both ask the same: how
often would a mean so far from 0 come out if policy and baseline were interchangeable on every sample?
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np

from .bootstrap import Floats

ALPHA, POWER = 0.05, 0.8
EXACT = 13  # up to so many differences that are not 0, all flips are tried
FLIPS = 20_000
BLOCK = 4_000_000  # signs drawn at once: bounds memory


@dataclass(frozen=True)
class Test:
    """name: "mcnemar", or "flip" for the permutation test. p: two-sided, not corrected."""

    __test__ = False  # no test of pytest's

    name: str
    p: float


def run_tests(items: Sequence[Floats], binary: Sequence[bool]) -> list[Test]:
    """The test of each item: differences (n,). binary: they come from yes/no answers. Without any, p = 1."""
    flips = iter(flip_signs([item for item, yes_no in zip(items, binary, strict=True) if not yes_no]))
    return [
        Test("mcnemar", mcnemar(int((item > 0).sum()), int((item < 0).sum())))
        if yes_no
        else Test("flip", next(flips))
        for item, yes_no in zip(items, binary, strict=True)
    ]


def mcnemar(first: int, second: int) -> float:
    """Exact two-sided p of a split of discordant pairs so uneven by chance (binomial, 1/2)."""
    n = first + second
    tail = sum(math.comb(n, k) for k in range(min(first, second) + 1))
    return min(1.0, 2 * tail / 2**n)


def flip_signs(items: Sequence[Floats]) -> list[float]:
    """Two-sided p of the mean of each item's differences (n,) under random signs.

    Exact up to EXACT differences that are not 0; beyond, FLIPS random ones with a fixed seed, and the
    observed one counts among them, so that p is never 0. Items with equally many get the same signs, so
    these are drawn once.
    """
    p = [1.0] * len(items)
    by_count: dict[int, list[int]] = {}
    for index, item in enumerate(items):
        by_count.setdefault(int((item != 0).sum()), []).append(index)
    for n, members in by_count.items():
        if n:
            moved = np.stack([np.abs(items[i][items[i] != 0]) for i in members], axis=1)
            # sums in another order may differ in the last bits
            observed = np.array([abs(math.fsum(items[i])) * (1 - 1e-9) for i in members])
            for index, value in zip(members, _flip(moved, observed), strict=True):
                p[index] = float(value)
    return p


def _flip(moved: Floats, observed: Floats) -> Floats:
    """The share of signs whose sum is as far from 0 as the observed one. moved: (n, item) without 0."""
    n = len(moved)
    if n <= EXACT:
        return np.asarray((np.abs(_every_sign(n) @ moved) >= observed).mean(0))
    rng, extreme, left = np.random.default_rng(0), np.zeros(moved.shape[1]), FLIPS
    while left:
        size = min(left, max(1, BLOCK // n))
        signs = rng.integers(0, 2, size=(size, n), dtype=np.int8) * 2.0 - 1.0
        extreme += (np.abs(signs @ moved) >= observed).sum(0)
        left -= size
    return np.asarray((extreme + 1) / (FLIPS + 1))


@cache
def _every_sign(n: int) -> Floats:
    """All signs that n differences can have, (2**n, n)."""
    return np.array(list(itertools.product((-1.0, 1.0), repeat=n)))


def holm(p: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm's step-down), in the order given."""
    corrected, reached = [0.0] * len(p), 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        reached = max(reached, min(1.0, (len(p) - rank) * p[index]))
        corrected[index] = reached
    return corrected


def detectable_effect(differences: Floats, binary: bool) -> float:
    """The smallest true mean difference that n such samples find in 4 of 5 tries at p < 0.05.

    From the spread that was seen, by the normal approximation, which is wrong for few samples: no test
    on signs can pass with fewer than 6 samples that differ, so a yes/no metric needs 6/n at least.
    NaN where the differences are all alike, and so tell no spread, and where n is too small for any test.
    """
    n = len(differences)
    needed = math.ceil(1 - math.log2(ALPHA))  # discordant pairs of one direction until 2 / 2**k < ALPHA
    spread = float(differences.std(ddof=1)) if n > 1 else 0.0
    normal = NormalDist()
    effect = (normal.inv_cdf(1 - ALPHA / 2) + normal.inv_cdf(POWER)) * spread / math.sqrt(max(n, 1))
    if binary and n:
        return max(effect, needed / n) if needed <= n else math.nan
    return effect if spread and n >= needed else math.nan
