"""The tables of the documents: one function a kind, from committed results to Markdown lines.

Sources are the rows of results/reference, the printed outputs beside them (kvp/, judgeq/), the study's CSV
and the CSV files of the figures. Nothing here is typed by hand but labels.
"""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Sequence
from functools import cache

import pandas as pd

from kvbench.contract.cell import FULL
from kvbench.contract.metrics import Metric, describe
from kvbench.contract.registry import POLICIES
from kvbench.contract.wrapper import Wrapper
from kvbench.show.words import difference_text, number, probability
from kvbench.stats.aggregate import aggregate
from kvbench.stats.compare import compare_pairs
from kvbench.stats.compare_rules import compare_rules
from kvbench.store.frame import metrics_of
from kvbench.store.results import read_rows

from .figure_blocks import FIGURES
from .heldout_blocks import heldout, heldout_paired
from .places import REFERENCE, Block, lines_of

LABELS = {FULL: "full cache", "oracle": "oracle (knows the future)"}
LAST = ("random",)


def block(line: str) -> str:
    """The table that a mark asks for. Raises: KeyError for a kind that is not there."""
    kind, *arguments = shlex.split(line)
    options = dict(part.split("=", 1) for part in arguments if re.match(r"[a-z_]+=", part))
    rest = [part for part in arguments if not re.match(r"[a-z_]+=", part)]
    return "\n".join(KINDS[kind](rest, options))


@cache
def rows_of(names: str) -> pd.DataFrame:
    """Rows of one run folder, or of several joined by '+'."""
    return read_rows([str(REFERENCE / name) for name in names.split("+")])


def interval(mean: float, low: float, high: float, metric: Metric) -> str:
    """`mean [lo,hi]`; without the interval where it has no width."""
    told, *ends = (number(value, metric) for value in (mean, low, high))
    return told if len(set(ends)) == 1 else f"{told} [{','.join(ends)}]"


def means(parts: Sequence[str], options: dict[str, str]) -> list[str]:
    """`means RUN METRIC BUDGETS [RUN METRIC BUDGETS]...`: a policy a line, a budget a column.

    title: the first header. policies: which, in this order; else the best of the first run first. labels:
    what else policies are called. schedule, task: only their rows.
    """
    columns: dict[str, dict[str, str]] = {}
    order: dict[str, float] = {}
    for run, metric, budgets in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        asked = [int(budget) for budget in budgets.split(",")]
        rows = rows_of(run)
        for column in ("schedule", "task"):
            if column in options:
                rows = rows[rows[{"task": "task_spec"}.get(column, column)] == options[column]]
        lines = aggregate(rows[rows["budget"].isin(asked) | (rows["spec"] == FULL)], [metric])
        about = describe(metric, metrics_of(rows))
        sign = 1 if about.better == "lower" else -1
        for policy, mine in lines.groupby("policy", sort=False):
            order.setdefault(str(policy), sign * mine["mean"].mean())
        for budget in asked:
            head = str(budget) if len(parts) == 3 else f"{run}, {metric}, {budget}"
            there = lines[(lines["budget"] == budget) | lines["budget"].isna()]
            columns[head] = {
                line["policy"]: interval(line["mean"], line["lo"], line["hi"], about)
                for line in there.to_dict("records")
            }
    names = options["policies"].split(";") if "policies" in options else ranked(order)
    own = [pair.partition("=") for pair in options.get("labels", "").split(";") if pair]
    labels = LABELS | {name: label for name, _, label in own}
    body = [
        [labels.get(name, name), *(column.get(name, "") for column in columns.values())] for name in names
    ]
    return lines_of([options.get("title", "policy"), *columns], body)


def subtasks(parts: Sequence[str], options: dict[str, str]) -> list[str]:
    """`subtasks RUN METRIC BUDGET`: means of each task of a run, a task a line."""
    run, metric, budget = parts
    rows, names = rows_of(run), options["policies"].split(";")
    about = describe(metric, metrics_of(rows))
    rows = rows[(rows["budget"] == int(budget)) | (rows["spec"] == FULL)]
    body = []
    for task, own in rows[rows["spec"].isin(names) & (rows["status"] == "ok")].groupby("task", sort=False):
        found = own.groupby("spec")[f"metric:{metric}"].mean()
        body.append([str(task).partition("/")[2], *(number(found[name], about) for name in names)])
    return lines_of(["subtask", *(LABELS.get(name, name) for name in names)], body)


def ranked(order: dict[str, float]) -> list[str]:
    """Brackets outside, policies between them by their mean over the budgets, the best first."""
    place = {FULL: -2, "oracle": -1} | dict.fromkeys(LAST, 1)
    return sorted(order, key=lambda name: (place.get(name, 0), order[name]))


def paired(parts: Sequence[str], options: dict[str, str]) -> list[str]:
    """`paired RUN BASELINE METRIC BUDGETS`: policy minus baseline on the same samples, corrected p, wins."""
    run, baseline, metric, budgets = parts
    return differences(compare_pairs(rows_of(run), baseline, metric), metric, budgets, options)


def rules(parts: Sequence[str], options: dict[str, str]) -> list[str]:
    """`rules RUN+RUN FIELD METRIC BUDGETS`: each policy under the other rule minus itself under the usual."""
    run, field, metric, budgets = parts
    rows = rows_of(run)
    evicted = rows[rows["spec"] != FULL]  # the full cache has one rule, and its flags are not shown
    return differences(compare_rules(evicted, field, [metric]), metric, budgets, options)


def differences(frame: pd.DataFrame, metric: str, budgets: str, options: dict[str, str]) -> list[str]:
    """Two columns a budget: difference with its interval; Holm's p with wins, ties and losses."""
    about = describe(metric, metrics_of(frame))
    asked = [int(budget) for budget in budgets.split(",")]
    names = options["policies"].split(";") if "policies" in options else list(dict.fromkeys(frame["policy"]))
    header, body = ["policy"], []
    for budget in asked:
        header += [f"{budget}: difference", "p (Holm), win/tie/loss"]
    for name in names:
        row = [LABELS.get(name, name)]
        for budget in asked:
            found = frame[(frame["policy"] == name) & (frame["budget"] == budget)].to_dict("records")
            for line in found[:1]:
                ends = f"[{number(line['lo'], about)},{number(line['hi'], about)}]"
                row.append(f"{difference_text(line['difference'], about)} {ends}")
                row.append(f"{probability(line['p_holm'])}, {line['win']}/{line['tie']}/{line['loss']}")
            row += ["", ""] * (not found)
        body.append(row)
    return lines_of(header, body)


def contexts(parts: Sequence[str], options: dict[str, str]) -> list[str]:
    """`contexts RUN...`: samples, lengths, samples that fit a budget whole, text that weights have seen."""
    body = []
    for run in parts:
        rows = rows_of(run)
        budgets = sorted({int(budget) for budget in rows["budget"].dropna()})
        full = rows[(rows["spec"] == FULL)].drop_duplicates(["task_spec", "sample"])["context_tokens"]
        fits = [f"{(full <= budget).sum()} at {budget}" for budget in budgets if (full <= budget).any()]
        ends = f"{full.min()} to {full.max()}"
        shares = rows[rows["spec"] == "kvp"].groupby("task_spec")["seen_share"].mean()
        seen = " to ".join(dict.fromkeys(f"{share:.0%}" for share in (shares.min(), shares.max())))
        numbers = [str(len(full)), ends, ", ".join(map(str, budgets)), ", ".join(fits) or "none", seen]
        body.append([run, *numbers])
    header = [
        "run",
        "samples",
        "context, tokens",
        "budgets",
        "samples with nothing evicted",
        "text KVP has seen",
    ]
    return lines_of(header, body, 6)


def peaks(parts: Sequence[str], options: dict[str, str]) -> list[str]:
    """`peaks RUN`: the most slots that a cache ever held, by schedule and budget, as counted in the rows."""
    rows = rows_of(parts[0]).dropna(subset=["budget"])
    body = []
    for (schedule, budget), part in rows.groupby(["schedule", "budget"]):
        found: dict[str, list[str]] = {}
        for spec, mine in part.groupby("spec"):
            ends = dict.fromkeys(str(int(end)) for end in (mine["peak"].min(), mine["peak"].max()))
            found.setdefault(" to ".join(ends), []).append(str(spec))
        usual = max(found, key=lambda slots: len(found[slots]))
        told = [f"{slots} ({', '.join(names)})" for slots, names in found.items() if slots != usual]
        body.append([str(schedule), str(budget), "; ".join([usual, *told])])
    return lines_of(["schedule", "budget", "peak, slots"], body, 3)


def correlations(parts: Sequence[str], options: dict[str, str]) -> list[str]:
    """`correlations RUN METRIC [RUN METRIC]...`: Spearman's rho of eviction errors with results, over cells.

    Cells are (policy, budget), brackets left out; beside each rho stands their number. Then without the
    budgets at which most samples keep their whole context, and the least and most rho of a single budget.
    """
    body = []
    for run, main in zip(parts[::2], parts[1::2], strict=True):
        rows = rows_of(run)
        policies = rows[~rows["spec"].isin([FULL, "oracle", "random"])]
        columns = {f"metric:{name}": name for name in ("missed_mass", "eviction_cost", "kl")}
        wide = policies.groupby(["spec", "budget"])[list(columns)].mean().rename(columns=columns)
        wide[main] = aggregate(policies, [main]).set_index(["policy", "budget"])["mean"]
        wide = wide.round(5).reset_index()  # what float32 may change has no order
        full = rows[rows["spec"] == FULL]["context_tokens"]
        evicting = wide[[(full <= budget).mean() < 0.5 for budget in wide["budget"]]]
        for error in ("missed_mass", "eviction_cost"):
            row = [run, error.replace("_", " ")]
            for result in ("kl", main):
                single = [spearman(part, error, result) for _, part in evicting.groupby("budget")]
                row += [
                    f"{spearman(wide, error, result):.2f} ({len(wide)})",
                    f"{spearman(evicting, error, result):.2f} ({len(evicting)})",
                    f"{min(single):.2f} to {max(single):.2f}",
                ]
            body.append(row)
    header = ["run", "error"]
    for result in ("kl", "the task's metric"):
        header += [f"{result}: all cells", "where most samples evict", "within one budget"]
    return lines_of(header, body, 2)


def spearman(cells: pd.DataFrame, one: str, other: str) -> float:
    return float(cells[one].corr(cells[other], method="spearman"))


def study(parts: Sequence[str], options: dict[str, str]) -> list[str]:
    """`study VARIANT... [file=study-12-drafts]`: lines of the study of KVP's open questions."""
    table = pd.read_csv(REFERENCE / "kvp" / f"{options.get('file', 'study')}.csv", index_col=0)
    columns = {
        "boundary cost": "cost, boundary",
        "uniform cost": "cost, uniform",
        "4x length: boundary cost": "cost, 4x length",
        "boundary missed@tight": "missed mass at 32",
        "needle@64": "needles at 64",
        "needle@128": "at 128",
        "needle@256": "at 256",
    }
    body = []
    for name in parts:
        values = {column: float(table[column][name]) for column in columns}
        told = [f"{value:.{2 if 'needle' in column else 3}f}" for column, value in values.items()]
        body.append([name, *told])
    return lines_of(["variant", *columns.values()], body)


def methods(parts: Sequence[str], options: dict[str, str]) -> list[str]:
    """`methods`: every registered policy of kvbench, from its class: a policy a line."""
    body = []
    for name in POLICIES.names():
        if not POLICIES.target(name).startswith("kvbench.policies."):
            continue
        policy = POLICIES.parse(name)
        text = " ".join((inspect.getdoc(type(policy)) or "").split())
        claim = text.partition(". ")[0].rstrip(".")
        differs = text.partition("Differs: ")[2].partition(". ")[0].rstrip(".") or "-"
        reads = ", ".join(sorted(need.value for need in policy.needs)) or "positions"
        kind = "wrapper" if isinstance(policy, Wrapper) else "ranking"
        training = "yes" if policy.trained_for else "on request" if policy.trainer else "no"
        facts = [f"`{name}`", claim, policy.source, kind, reads, training, policy.exactness, policy.parity]
        body.append([*facts, differs.replace("|", "/")])
    header = ["name", "what it does", "source", "kind", "reads", "trained", "exactness", "parity", "differs"]
    return lines_of(header, body, len(header))


KINDS: dict[str, Block] = {
    "means": means, "subtasks": subtasks, "paired": paired, "rules": rules, "contexts": contexts,
    "peaks": peaks, "correlations": correlations, "heldout": heldout, "heldout_paired": heldout_paired,
    "study": study, "methods": methods, **FIGURES,
}  # fmt: skip
