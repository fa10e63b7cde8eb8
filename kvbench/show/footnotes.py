"""What a reader must know before believing a table: pins, missing samples, majority rate, layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

from ..contract.cell import FULL
from ..stats.aggregate import FORCED
from ..stats.intervals import FEW
from .words import join

SEEN = 0.2  # instructions and templates that training and test share stay below
INTERVAL = "95% interval over samples, Wilson's where answers are counted, else by bootstrap (BCa)"


def footnotes(lines: pd.DataFrame) -> list[str]:
    """Notes on one panel's aggregated lines (see panels), each one sentence or two."""
    notes = []
    if lines["lo"].notna().any():
        notes.append(f"[lo,hi]: {INTERVAL}.")
    if (lines["metric"] == "eviction_cost").any():
        notes.append("Eviction cost is that of the whole ranking, pins included: the same at every budget.")
    notes += note_seen(lines, lines["label"]) + note_few(lines) + note_fitting(lines, lines["label"])
    notes += _note_forced(lines)
    notes += note_empty(lines, lines["label"])
    notes += _note_majority(lines) + _note_pinned(lines) + _note_missing(lines) + _note_layers(lines)
    return notes


def note_seen(lines: pd.DataFrame, labels: pd.Series) -> list[str]:
    """How much of the prompts learned weights were trained on. labels: of each line."""
    shares = lines["seen_share"].groupby(labels, sort=False).mean().dropna()
    if shares.empty:
        return []
    told = join([f"{share:.0%} ({label})" for label, share in shares.items()])
    text = f"Of the 8-token runs of these prompts, weights were trained on {told}"
    if shares.max() < SEEN:
        return [f"{text}."]
    return [f"NOT UNSEEN TEXT. {text}: what they remember may count as what they learned."]


def _note_forced(lines: pd.DataFrame) -> list[str]:
    """That learned weights were made for another file of the model."""
    if FORCED not in lines:
        return []
    names = dict.fromkeys(lines.loc[lines[FORCED].fillna("") != "", "label"])
    if not names:
        return []
    return [f"--force-weights: trained for a model with another fingerprint: {', '.join(names)}."]


def note_few(lines: pd.DataFrame) -> list[str]:
    """That so few samples make intervals that cannot be trusted."""
    few = lines[(lines["n"] > 1) & (lines["n"] < FEW)]
    if few.empty:
        return []
    return [f"With fewer than {FEW} samples, bootstrap intervals are too narrow to rely on."]


def note_fitting(lines: pd.DataFrame, labels: pd.Series) -> list[str]:
    """Where the budget holds whole contexts, so that there is nothing to compare. labels: of each line."""
    cells = lines.assign(label=labels)[lines["n_fit"] > 0].drop_duplicates(["label", "budget"])
    texts = []
    for (budget, fit, n), part in cells.groupby(["budget", "n_fit", "n"], sort=True):
        every = len(part) == labels[lines["budget"] == budget].nunique()
        who = "" if every else f" ({', '.join(map(str, part['label']))})"
        texts.append(f"{fit} of {n} samples at {budget}{who}")
    return [f"The whole context fits, so that nothing is evicted: {'; '.join(texts)}."] if texts else []


def note_empty(lines: pd.DataFrame, labels: pd.Series) -> list[str]:
    """Where the model wrote nothing: agreement counts two empty answers as equal. labels: of each line."""
    cells = lines.assign(label=labels)[lines["n_empty"] > 0].drop_duplicates(["label", "budget"])
    texts = [
        f"{label}{'' if pd.isna(budget) else f' at {budget}'}: {empty} of {n} samples"
        for label, budget, empty, n in cells[["label", "budget", "n_empty", "n"]].to_numpy(dtype=object)
    ]
    return [f"Empty answers, two of which agree: {'; '.join(texts)}."] if texts else []


def only_pins(lines: pd.DataFrame) -> pd.Series:
    """True where the budget has no room beyond the pinned tokens, so that scores decide nothing."""
    total = lines["pins"].map(pins_total)
    return (lines["budget"].notna() & (total > 0) & (lines["budget"] <= total)).fillna(False).astype(bool)


def pins_total(text: str | None) -> int:
    """Tokens pinned, from "first,last"."""
    return sum(int(number) for number in text.split(",")) if text else 0


def majority(lines: pd.DataFrame) -> tuple[float, str] | None:
    """(rate, label) of a choice task, over the largest set of samples that a cell has."""
    rates = lines[lines["majority"].notna()].sort_values("n", ascending=False, kind="stable")
    if rates.empty:
        return None
    return float(rates["majority"].iloc[0]), str(rates["majority_label"].iloc[0])


def _note_majority(lines: pd.DataFrame) -> list[str]:
    found = majority(lines)
    if found is None:
        return []
    return [f"Majority rate: always answering '{found[1]}', the most common label, scores {found[0]:.2f}."]


def _note_pinned(lines: pd.DataFrame) -> list[str]:
    cells = lines[only_pins(lines)]
    texts = []
    for (label, pins), part in cells.groupby(["label", "pins"], sort=False):
        texts.append(f"{label} at {_budgets(part['budget'])} (pins {str(pins).replace(',', '+')})")
    if not texts:
        return []
    return [f"Only pinned tokens stay and the policy's score decides nothing: {'; '.join(texts)}."]


def _note_missing(lines: pd.DataFrame) -> list[str]:
    cells = lines[lines["reasons"].fillna("") != ""].drop_duplicates(["label", "budget"])
    budgets: dict[tuple[str, str], list[Any]] = {}
    for label, reasons, budget in cells[["label", "reasons", "budget"]].to_numpy(dtype=object):
        budgets.setdefault((label, reasons), []).append(
            budget
        )  # any text may be a reason: pandas groups not all
    texts = []
    for (label, reasons), found in budgets.items():
        where = "" if label == FULL else f" at {_budgets(found)}"
        texts.append(f"{label}{where}: {reasons}")
    return [f"Samples without a result, by cause (count): {' | '.join(texts)}."] if texts else []


def _note_layers(lines: pd.DataFrame) -> list[str]:
    partly = lines[(lines["evicted_layers"] > 0) & (lines["evicted_layers"] < lines["layers"])]
    pairs = partly[["evicted_layers", "layers"]].drop_duplicates().to_numpy()
    return [
        f"Budgets hold in {evicted} of {layers} layers: sliding-window layers keep their window and are "
        "never evicted."
        for evicted, layers in pairs
    ]


def _budgets(budgets: Iterable[Any]) -> str:
    return join(sorted({int(budget) for budget in budgets if not pd.isna(budget)})) or "no budget"
