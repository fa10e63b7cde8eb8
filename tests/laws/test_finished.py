"""A run whose rows are all there is shown again without its weights, its data, or a folder to write in."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from pandas.testing import assert_frame_equal
from typer.testing import CliRunner

import kvbench
from kvbench.cli import main as cli
from kvbench.errors import KvbenchError, StoreError
from kvbench.study import runner

PASSAGE = "hello world, the answer is in the world. " * 4


@pytest.fixture
def asked(folder: str, tmp_path: Path) -> dict[str, Any]:
    """The arguments of a run that has ended."""
    model, data = tmp_path / "model", tmp_path / "rows.jsonl"
    shutil.copytree(folder, model)
    lines = [json.dumps({"question": f"is it {i}", "answer": True, "passage": PASSAGE}) for i in range(3)]
    data.write_text("\n".join(lines))
    arguments: dict[str, Any] = {
        "policies": ("knorm", "snapkv:window=4"), "tasks": ("boolq",), "budgets": (8, 20), "seeds": (0, 1),
        "model": str(model), "data": str(data), "device": "cpu", "out": str(tmp_path / "run"),
    }  # fmt: skip
    kvbench.run(kvbench.RunConfig(**arguments), progress=False)
    return arguments


def _again(asked: dict[str, Any], **changes: Any) -> kvbench.RunResult:
    return kvbench.run(kvbench.RunConfig(**asked | changes), progress=False)


def _lose(asked: dict[str, Any], what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if what == "folder":

        def refuse(path: Path) -> None:
            raise StoreError(f"cannot write to {path} (Read-only file system)")

        monkeypatch.setattr(runner, "check_writable", refuse)
    elif what == "weights":
        for file in Path(asked["model"]).glob("*.safetensors"):
            file.unlink()
    else:
        path = Path(asked[what])
        os.rename(path, path.with_name("elsewhere"))


@pytest.mark.parametrize("what", ["model", "weights", "data", "folder"])
def test_it_is_complete(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    before = _again(asked)
    _lose(asked, what, monkeypatch)
    after = _again(asked)
    assert_frame_equal(after.rows, before.rows)
    assert_frame_equal(after.table, before.table)
    assert (after.computed, after.reused) == (0, len(before.rows))
    assert any(note.startswith(f"complete: {len(before.rows)} rows") for note in after.notes)
    part = _again(asked, policies=("knorm",), budgets=(20,), seeds=(), seed=1)
    assert len(part.rows) == 3 * 2
    assert set(part.rows["spec"]) == {"full", "knorm"}


@pytest.mark.parametrize(
    "more",
    [
        {"budgets": (8, 20, 33)},
        {"policies": ("knorm", "random")},
        {"seeds": (0, 1, 2)},
        {"limit": 2},
        {"question": "seen"},
        {"pins": "4,4"},
        {"fresh": ("knorm",)},
    ],
)
def test_what_was_never_asked_is_refused(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    _lose(asked, "data", monkeypatch)
    with pytest.raises(KvbenchError, match="no such file"):
        _again(asked, **more)


def _edit(asked: dict[str, Any], name: str, change: Any) -> None:
    path = Path(asked["out"]) / name
    path.write_text(change(path.read_text()))


def test_what_did_not_end_is_refused(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def unended(text: str) -> str:
        manifest = json.loads(text)
        manifest["runs"] = [
            {key: run[key] for key in run if key not in ("rows", "executor")} for run in manifest["runs"]
        ]
        return json.dumps(manifest)

    _edit(asked, "manifest.json", unended)
    _lose(asked, "model", monkeypatch)
    with pytest.raises(KvbenchError, match="does not exist"):
        _again(asked)


def test_missing_rows_and_changed_code_are_refused(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _lose(asked, "model", monkeypatch)
    whole = (Path(asked["out"]) / "rows.jsonl").read_text()
    _edit(asked, "rows.jsonl", lambda text: "".join(text.splitlines(keepends=True)[:-1]))
    with pytest.raises(KvbenchError, match="does not exist"):
        _again(asked)
    _edit(asked, "rows.jsonl", lambda text: whole)
    assert _again(asked).reused
    monkeypatch.setattr("kvbench.study.finished.same_code", lambda then, now: False)
    with pytest.raises(KvbenchError, match="does not exist"):
        _again(asked)


@pytest.mark.usefixtures("toys")
def test_a_run_without_results_says_so(folder: str, tmp_path: Path) -> None:
    """Every sample is too long: no figure can be drawn, and Python finds the columns of the metrics."""
    command = ["run", "--policy", "knorm", "--task", "laws_toy", "--budgets", "8", "--model", folder]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvbench.study.samples._prompt", lambda *_: "too long")
        done = CliRunner().invoke(cli.app, [*command, "--out", str(tmp_path / "cli")])
        asked = kvbench.RunConfig(("knorm",), ("laws_toy",), (8,), model=folder, out=str(tmp_path / "api"))
        rows = kvbench.run(asked, progress=False).rows
    assert done.exit_code == 1
    assert "next:" not in done.stdout
    assert "no sample gave a result" in done.stderr
    assert "too long" in done.stdout
    assert rows[["metric:accuracy", "metric:kl", "metric:nll"]].isna().all(axis=None)
    assert len(rows) == 8
