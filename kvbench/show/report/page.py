"""From run folders to one page: what each part shows, then the templates."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ... import __version__
from ...contract.files import replace_file
from ...contract.metrics import Metric
from ...errors import StoreError
from ...stats.panels import SETTING, describe_setting, shorten
from ...stats.significance import ALPHA
from ...store.results import read_rows
from ..comparison_table import NAMES
from ..footnotes import footnotes
from ..panel import Panel, build_panels, read_declarations, run_folder
from ..words import enumerate_words, number, sample_count
from .best import Best, ahead_of_full, answer, best_of, doubts
from .chart import WIDTH, Picture, picture_of
from .look import Look, assign_looks
from .matrix import Matrix, matrices
from .numbers import mark, write_lines
from .pins import compare_pins, share_pins
from .provenance import describe_sources
from .relation import Relation, cells_table, relate

PAGE = "report.html"


@dataclass(frozen=True)
class Verdict:
    """One metric that policies are judged by: the headline table, and the pairs. by: what samples are
    compared by. beside: what each bracket has at each budget. test: its name, in words.
    """

    metric: str
    by: str
    label: str
    bests: list[Best]
    brackets: list[str]
    beside: dict[int, list[str]]
    doubts: list[str]
    suspects: list[str]
    matrices: list[Matrix]
    test: str


@dataclass(frozen=True)
class Section:
    """One panel on the page. tell: what tells it from others of its task. answer: by the metric that decides,
    the first one without doubts; doubts: why those before it do not.
    """

    ident: str
    title: str
    tell: str
    setting: str
    n: str
    answer: str
    doubts: list[str]
    suspects: list[str]
    judged: list[Verdict]
    pictures: list[Picture]
    relations: list[Relation]
    cells: tuple[list[str], list[list[str]]]
    looks: list[Look]
    roles: dict[str, str]
    notes: list[str]


def write_page(paths: Sequence[Path], out: str | Path | None) -> Path:
    """See `kvbench.show.report.report`."""
    file = Path(out) if out is not None else run_folder(paths[0]) / PAGE
    if file.is_dir():
        raise StoreError(f"--out {file} is a folder: name a file, as {file / PAGE}")
    text = render(paths)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        data = text.encode("utf-8", "backslashreplace")
        replace_file(file, lambda draft: draft.write_bytes(data))
    except OSError as error:
        raise StoreError(f"cannot write {file} ({error.strerror}): choose another --out") from error
    return file


def render(paths: Sequence[Path]) -> str:
    """The page as text."""
    names = _names(paths)
    rows = read_rows(paths)
    rows = rows.assign(
        run=rows["run"].map({str(path): name for path, name in zip(paths, names, strict=True)})
    )
    every, lines = build_panels(rows, read_declarations(paths))
    panels = [panel for panel in every if panel.judged]
    if not panels:
        raise StoreError(f"no usable rows in {paths[0]}: `kvbench table` shows what was skipped or failed")
    labels = list(dict.fromkeys(label for panel in panels for label in panel.order))
    drawn = assign_looks(labels, panels[0].looks)
    numbers = write_lines(lines)
    env = Environment(
        loader=PackageLoader("kvbench.show.report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    script = _source(env, "report.js")
    changes, unchanged = compare_pins(rows, panels)
    return env.get_template("report.html.j2").render(
        title=_title(list(dict.fromkeys(panel.task for panel in panels))),
        version=__version__, facts=_facts(panels, rows), looks=drawn, alpha=ALPHA,
        parts=[
            _build_section(panel, drawn, f"p{number}", _tell(panel, panels))
            for number, panel in enumerate(panels, start=1)
        ],
        shares=share_pins(panels), effects=changes, unchanged=unchanged,
        sources=describe_sources(paths, names, rows),
        mark=mark(numbers), numbers=Markup(numbers), style=_source(env, "report.css"), script=script,
        policy=_hash(script), width=WIDTH, short=shorten, words=enumerate_words,
        command=["kvbench", "report", *names],
    )  # fmt: skip


def _title(tasks: Sequence[str]) -> str:
    return enumerate_words(tasks) if len(tasks) <= 3 else f"{tasks[0]} and {len(tasks) - 1} other tasks"


def _names(paths: Sequence[Path]) -> list[str]:
    """Folders by their last part, or as they were given where that is not enough."""
    last = [run_folder(path).resolve().name for path in paths]
    return last if len(set(last)) == len(set(map(str, paths))) else [str(path) for path in paths]


def _source(env: Environment, name: str) -> Markup:
    assert env.loader is not None
    return Markup(env.loader.get_source(env, name)[0])


def _hash(script: str) -> str:
    """What a content security policy calls a script that may run."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def _facts(panels: Sequence[Panel], rows: pd.DataFrame) -> list[tuple[str, str]]:
    """What was compared, in a few lines."""
    models = list(dict.fromkeys(str(panel.setting["model"]) for panel in panels))
    policies = list(dict.fromkeys(label for panel in panels for label in panel.candidates))
    budgets = sorted({budget for panel in panels for budget in panel.budgets})
    missing = int((rows["status"] != "ok").sum())
    return [
        ("Model", enumerate_words(models)),
        (
            "Tasks",
            enumerate_words(list(dict.fromkeys(f"{panel.task} ({_count(panel)})" for panel in panels))),
        ),
        (f"{len(policies)} policies", enumerate_words([shorten(label) for label in policies])),
        ("Budgets", f"{enumerate_words(budgets)} KV pairs per KV head per layer"),
        ("Rows", f"{len(rows)}, {missing} of them skipped or failed" if missing else f"{len(rows)}"),
    ]


def _count(panel: Panel) -> str:
    return f"n = {sample_count(panel.measured['n'])}"


def _tell(panel: Panel, panels: Sequence[Panel]) -> str:
    """In what a panel differs from others of the same task."""
    rivals = [other.setting for other in panels if other.task == panel.task]
    words = {"pins_mode": "pins", "chunk": "chunks of"}
    names = [name for name in SETTING if len({str(other[name]) for other in rivals}) > 1]
    return ", ".join(f"{words.get(name, name)} {panel.setting[name]}" for name in names)


def _build_section(panel: Panel, drawn: dict[str, Look], ident: str, tell: str) -> Section:
    judged = [_judge(panel, metric) for metric in panel.judged]
    deciding = next((one for one in judged if one.bests and not one.doubts), None)
    first = deciding or judged[0]
    doubted = [doubt for one in judged[: judged.index(first)] for doubt in one.doubts]
    doubted += first.doubts if deciding is None else []
    related = relate(panel, drawn, f"{ident}-r")
    return Section(
        ident=ident,
        title=panel.task,
        tell=tell,
        setting=describe_setting(panel.setting),
        n=_count(panel),
        answer=answer(first.bests, first.metric),
        doubts=doubted,
        suspects=[text for one in judged for text in one.suspects],
        judged=judged,
        pictures=[
            picture_of(panel, metric, drawn, f"{ident}-c{place}")
            for place, metric in enumerate(panel.metrics)
        ],
        relations=related,
        cells=cells_table(panel, related),
        looks=[drawn[label] for label in panel.order],
        roles={label: panel.role(label) for label in panel.order},
        notes=footnotes(panel.lines),
    )


def _judge(panel: Panel, metric: str) -> Verdict:
    bests = best_of(panel, metric)
    lines, about = panel.of(metric), panel.about(metric)
    there = set(lines["label"])
    brackets = [label for label in panel.order if label in there and label not in panel.candidates]
    beside = {best.budget: [_at(lines, label, best.budget, about) for label in brackets] for best in bests}
    tests = list(dict.fromkeys(panel.pairs(metric)["test"]))
    return Verdict(
        metric, panel.per_sample(metric), about.label, bests, brackets, beside,
        doubts(panel, metric, bests), ahead_of_full(panel, metric), matrices(panel, metric),
        " or ".join(NAMES[test] for test in tests),
    )  # fmt: skip


def _at(lines: pd.DataFrame, label: str, budget: int, metric: Metric) -> str:
    """What a bracket or the full cache has at a budget."""
    mine = lines[(lines["label"] == label) & (lines["budget"].isna() | (lines["budget"] == budget))]
    return number(mine["mean"].iloc[0], metric) if len(mine) else ""
