"""Which policy is best at each budget, which ones are not separated from it, and the answer in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import pandas as pd

from ...contract.metrics import Metric
from ...stats.compare import CHOICE
from ...stats.panels import shorten
from ...stats.significance import ALPHA, holm
from ..footnotes import majority
from ..panel import Panel
from ..scale import NOISE
from ..words import as_words, enumerate_words, number


@dataclass(frozen=True)
class Best:
    """The best policies at a budget by one metric; labels, not texts.

    leaders: those with the best mean, up to rounding (NOISE). tied: those that the paired comparison does
    not separate from the first leader. rest: the others. value: mean with its interval, as text. pinned:
    leaders and tied ones that keep only pins here.
    """

    budget: int
    leaders: tuple[str, ...]
    tied: tuple[str, ...]
    rest: tuple[str, ...]
    value: str
    pinned: tuple[str, ...]

    @property
    def open(self) -> bool:
        """Whether nothing is separated from the best."""
        return not self.rest


def best_of(panel: Panel, metric: str) -> list[Best]:
    """One entry per budget with two policies or more; none for a metric without a better side."""
    better = panel.about(metric).better
    if better == "none":
        return []
    lines = panel.of(metric)
    lines = lines[lines["label"].isin(panel.candidates)]
    found = []
    for _, cells in lines.groupby("budget", sort=True):
        if len(cells) < 2:
            continue
        budget = int(cells["budget"].iloc[0])
        top = cells["mean"].max() if better == "higher" else cells["mean"].min()
        equal = cells[[abs(mean - top) <= NOISE for mean in cells["mean"]]]
        leaders = list(equal["label"])
        others = [label for label in cells["label"] if label not in leaders]
        worse = _worse(panel.pairs(metric), budget, leaders[0], others, better)
        tied = tuple(label for label in others if label not in worse)
        pinned = cells[cells["only_pins"] & ~cells["label"].isin(worse)]["label"]
        value = mean_text(equal.iloc[0], panel.about(metric))
        rest = tuple(label for label in others if label in worse)
        found.append(Best(budget, tuple(leaders), tied, rest, value, tuple(pinned)))
    return found


def _worse(pairs: pd.DataFrame, budget: int, best: str, others: Sequence[str], better: str) -> set[str]:
    """Labels that are worse than the best: the interval of the paired difference and the test both say so.

    The test is corrected (Holm) for the comparisons with the best at this budget.
    """
    here = pairs[pairs["budget"] == budget]
    ahead = here[(here["policy"] == best) & here["baseline"].isin(others)]
    behind = here[(here["baseline"] == best) & here["policy"].isin(others)]
    sign = 1 if better == "higher" else -1
    compared = [
        *(
            (one["baseline"], sign * one["lo"], sign * one["hi"], one["p"])
            for one in ahead.to_dict("records")
        ),
        *(
            (one["policy"], -sign * one["lo"], -sign * one["hi"], one["p"])
            for one in behind.to_dict("records")
        ),
    ]
    corrected = holm([p for *_, p in compared])
    return {
        label
        for (label, low, high, _), p in zip(compared, corrected, strict=True)
        if min(low, high) > 0 and p < ALPHA
    }


def mean_text(line: pd.Series, metric: Metric) -> str:
    """ "0.58 [0.38,0.79]", without an interval that has no width at this precision."""
    text, low, high = (number(line[name], metric) for name in ("mean", "lo", "hi"))
    return text if low == high else f"{text} [{low},{high}]"


def doubts(panel: Panel, metric: str, bests: Sequence[Best]) -> list[str]:
    """Why this metric may not tell the policies apart, each in a sentence; empty where it does."""
    found, name = [], as_words(metric)
    rate = majority(panel.measured) if metric in CHOICE else None
    if rate is not None:
        lines = panel.of(metric)
        full = lines[lines["label"].isin(panel.full) & (lines["mean"] < rate[0])]
        if len(full):
            score = number(full["mean"].iloc[0], panel.about(metric))
            found.append(
                f"The full cache itself scores {score}, below the majority "
                f"rate of {rate[0]:.2f} (always answering '{rate[1]}'): {name} does not show that the model "
                "does the task, whatever the policy."
            )
    if bests and all(best.open for best in bests):
        most = int(panel.of(metric)["n"].max())
        few = f" With n = {most} no test could." if 2 / 2**most >= ALPHA else ""
        found.append(
            f"No policy is separated from the best at any budget: {name} does not tell them apart.{few}"
        )
    return found


def ahead_of_full(panel: Panel, metric: str) -> list[str]:
    """What beats the full cache by more than the interval of the difference: a reason to look for a fault."""
    pairs = panel.pairs(metric)
    sign = {"higher": 1, "lower": -1}.get(panel.about(metric).better, 0)
    against = pairs[pairs["baseline"].isin(panel.full)]
    ahead = against[(sign * against["lo"] > 0) & (sign * against["hi"] > 0)]
    if ahead.empty:
        return []
    listed = "; ".join(
        f"{enumerate_words([shorten(label) for label in part['policy']])} at {budget}"
        for budget, part in ahead.groupby("budget")
    )
    return [
        f"Suspect: better than the full cache by more than the interval of the difference: {listed}. About 1 "
        "in 40 comparisons of equals is, by luck; else look for a fault, or say why less context should help."
    ]


def answer(bests: Sequence[Best], metric: str) -> str:
    """The best policy at each budget, as one sentence."""
    if not bests:
        return f"There are no two policies to compare by {as_words(metric)}."
    parts = []
    for text, group in groupby(bests, key=_answer_at):
        parts.append(f"{text} at {enumerate_words([best.budget for best in group])}")
    return f"Best by {as_words(metric)}: {'; '.join(parts)}."


def _answer_at(best: Best) -> str:
    count = len(best.leaders) + len(best.tied) + len(best.rest)
    if best.open:
        return f"none of the {count} policies stands out"
    leaders = enumerate_words([shorten(label) for label in best.leaders])
    if not best.tied:
        return leaders
    few = len(best.tied) <= 3
    tied = enumerate_words([shorten(label) for label in best.tied]) if few else f"{len(best.tied)} others"
    return f"{leaders} (not separated from {tied})"
