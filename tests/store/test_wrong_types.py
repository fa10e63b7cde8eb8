"""Valid JSON of another form than ours: one line that names the place, in every command that reads it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvbench.audit.sources import settings_of
from kvbench.cli import main as cli
from kvbench.contract.metrics import Metric
from kvbench.errors import KvbenchError, StoreError
from kvbench.store.manifest import read_manifest
from kvbench.store.manifest_form import check_manifest
from kvbench.store.results import Store, read_rows
from kvbench.study.config import RunConfig
from tests.store.synthetic import STYLE, TASKS, row

WRONG = (None, 3, 2.5, True, "x", [], [3], {}, {"a": 3})
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run with every section that a manifest may have."""
    path = tmp_path_factory.mktemp("runs") / "small"
    own = Metric("mine", "m", "of a plugin", "lower", (0.0, None))
    extra = {
        "style": STYLE,
        "tasks": {name: {**entry, "data_sha256": "0"} for name, entry in TASKS.items()},
        "data": {"0": {"task": "boolq", "seed": None, "source": "made"}},
        "metrics": {"mine": {**vars(own), "limits": [0.0, None]}},
        "code": {"policy knorm": {"module": "m", "distribution": None, "sha256": "0"}},
    }
    settings = RunConfig(("knorm",), ("boolq",), (64,), seeds=(0, 1)).as_dict()
    fixed = {"model": "smollm2-135m", "model_sha256": "0", "dtype": "float32", "device": "cpu"}
    with Store.open(path, fixed, extra, settings) as store:
        for name in ("s0", "s1"):
            store.append([row("full", None, name), row("knorm", 64, name, gold_label="yes", label="no")])
        store.finish({"executor": "local", "peak_bytes": 1, "rows": 4})
    return path


def _paths(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in inside:
        yield (*before, name)
        yield from _paths(inner, (*before, name))


def _changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    changed = copy.deepcopy(value)
    at = changed
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = new
    return changed


def _copy(folder: Path, to: Path, manifest: str | None = None, rows: str | None = None) -> Path:
    to.mkdir(exist_ok=True)
    (to / "manifest.json").write_text(manifest or (folder / "manifest.json").read_text())
    (to / "rows.jsonl").write_text(rows or (folder / "rows.jsonl").read_text())
    return to


def test_every_wrong_type_in_a_manifest_is_refused_or_harmless(folder: Path) -> None:
    """What passes the form is used as its readers use it."""
    good = json.loads((folder / "manifest.json").read_text())
    check_manifest(good)
    refused = 0
    for path in _paths(good):
        for wrong in WRONG:
            manifest = _changed(good, path, wrong)
            try:
                check_manifest(manifest)
                settings_of(manifest)
                {spec for spec, style in manifest["style"].items() if style.get("bracket")}
                {entry["task"] + entry.get("source", "") for entry in manifest["data"].values()}
                {entry["metric"] + entry.get("data_sha256", "") for entry in manifest["tasks"].values()}
                [run.get("versions", {}).get("commit") for run in manifest["runs"]]
                [code.get("sha256") for code in manifest["code"].values()]
            except KvbenchError:
                refused += 1
    assert refused > 300


@pytest.mark.parametrize(
    ("path", "wrong", "told"),
    [
        (("runs",), {}, "runs is {}, not a list"),
        (("fixed",), 3, "fixed is 3, not an object"),
        (("tasks", "boolq"), [], "tasks.boolq is [], not an object"),
        (("tasks", "boolq", "metric"), None, "tasks.boolq.metric is None, not a text"),
        (("style", "knorm"), "x", "style.knorm is 'x', not an object"),
        (("metrics", "mine", "limits"), [1], "metrics.mine.limits is [1]"),
        (("runs", 0, "settings", "policies"), "knorm", "runs[0].settings.policies is 'knorm', not a list"),
        (("schema",), True, "not a kvbench manifest"),
    ],
)
@pytest.mark.parametrize("command", ["table", "compare", "report", "plot", "verify", "rerun"])
def test_each_command_says_it_in_one_line(
    folder: Path, tmp_path: Path, command: str, path: tuple[Any, ...], wrong: Any, told: str
) -> None:
    good = json.loads((folder / "manifest.json").read_text())
    bad = _copy(folder, tmp_path / "bad", manifest=json.dumps(_changed(good, path, wrong)))
    done = CliRunner().invoke(cli.app, [command, str(bad)])
    assert done.exit_code == cli.REFUSED, done.output
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


def test_every_wrong_type_in_a_row_is_refused_or_shown(folder: Path, tmp_path: Path) -> None:
    from kvbench.show.table import render
    from kvbench.stats.aggregate import aggregate

    lines = (folder / "rows.jsonl").read_text().splitlines()
    good = json.loads(lines[1])
    refused = 0
    for path in _paths(good):
        for wrong in WRONG:
            text = "\n".join([lines[0], json.dumps(_changed(good, path, wrong)), *lines[2:], ""])
            bad = _copy(folder, tmp_path / "bad", rows=text)
            try:
                rows = read_rows(bad)
            except StoreError:
                refused += 1
                continue
            if wrong is None:  # once for what may be absent
                render(aggregate(rows))
    assert refused > 100


def test_emptied_metrics_are_shown_as_missing(folder: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    text = "".join(json.dumps({**one, "metrics": {}, "times": {}}) + "\n" for one in rows)
    bad = _copy(folder, tmp_path / "bad", rows=text)
    for command in ("table", "compare", "report", "plot", "verify"):
        done = CliRunner().invoke(cli.app, [command, str(bad)])
        assert done.exception is None or isinstance(done.exception, SystemExit), (command, done.exception)


def test_every_committed_manifest_has_the_form() -> None:
    found = list((ROOT / "results" / "reference").glob("*/manifest.json"))
    assert len(found) > 5
    for path in found:
        read_manifest(path.parent)
