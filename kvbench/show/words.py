"""Numbers, counts and lists as text: the same in tables, figures and pages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ..contract.metrics import Metric


def number(value: float, metric: Metric) -> str:
    """A value in the precision that suits its unit."""
    unit = metric.unit
    if not math.isfinite(value):
        return str(value)
    if unit == "bytes":
        return f"{value / 2**20:.2f}MiB"
    if unit in ("FLOP", "FLOP/s"):
        return f"{value / 1e9:.3g}G"
    if unit == "pairs":
        return f"{value:.0f}" if value == round(value) else f"{value:.1f}"
    if unit == "0..1":
        return f"{value:.2f}"
    digits = 3 if abs(value) < 1 else 2 if abs(value) < 10 else 1
    return f"{value:.{digits}f}"


def difference_text(value: float, metric: Metric) -> str:
    """A difference in the precision of its metric, with its sign."""
    return ("+" if value > 0 else "") + number(value, metric)


def probability(p: float) -> str:
    if math.isnan(p):
        return "-"
    return "<0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def sample_count(numbers: Iterable[int]) -> str:
    """ "24", or "20 to 24" where numbers differ."""
    counts = sorted({int(n) for n in numbers})
    return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def join(items: Iterable[object]) -> str:
    return ", ".join(map(str, items))


def enumerate_words(items: Sequence[object]) -> str:
    """ "64", "64 and 128", "64, 128 and 256"."""
    texts = [str(item) for item in items]
    return texts[0] if len(texts) == 1 else f"{join(texts[:-1])} and {texts[-1]}" if texts else ""


def as_words(name: str) -> str:
    """A metric's name as words."""
    return name.replace("_", " ")
