"""`kvbench show`: one sample whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

import kvbench
from kvbench.audit import sample
from kvbench.cli import main as cli
from kvbench.store.results import read_rows
from tests.laws import toy
from tests.laws.conftest import saved
from tests.laws.runs import config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("run")
    with toy.added():
        model = saved(folder / "model", chat=False, bos=False)
        asked = config(model, folder / "out", policies=("knorm", "streaming_llm"), limit=2)
        kvbench.run(asked, progress=False)
        yield folder / "out"


def show(*command: object) -> str:
    done = CliRunner().invoke(cli.app, ["show", *map(str, command)])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_sample(run: Path) -> None:
    rows = read_rows(run)
    name = rows["sample"].iloc[0]
    text = show(run, "--sample", name)
    own = rows[rows["sample"] == name]
    for task in own["task_spec"].unique():
        assert f"sample {name} of {task}" in text
    assert "context, " in text
    assert "question:" in text
    lines = [line.split() for line in text.splitlines()]
    for _, row in own.iterrows():
        budget = [] if pd.isna(row["budget"]) else [str(row["budget"])]
        assert any(line[: 1 + len(budget)] == [row["spec"], *budget] for line in lines)
    assert "kept by most heads" not in text


def test_kept_tokens(run: Path) -> None:
    """StreamingLLM at 8 keeps 4 first and 4 last tokens in every head."""
    name = read_rows(run)["sample"].iloc[0]
    text = show(run, "--sample", name, "--kept")
    assert "knorm at 8: share of heads that keep a token" in text
    part = text[text.index("streaming_llm at 8:") :].splitlines()[1]
    (first, stop), (last, end) = re.findall(r"(\d+)-(\d+) ['\"]", part)
    assert (int(first), int(stop)) == (0, 3)
    assert int(end) - int(last) == 3


def test_long_runs_of_kept_tokens_show_their_ends(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "RUN", 2)
    monkeypatch.setattr(sample, "RUNS", 1)
    name = read_rows(run)["sample"].iloc[0]
    short, whole = (show(run, "--sample", name, "--kept", *more) for more in ((), ("--whole",)))
    line, all_of_it = (text[text.index("streaming_llm at 8:") :].splitlines()[1] for text in (short, whole))
    assert ", and 1 more: --whole prints them" in line
    assert " ... " in line
    assert "more" not in all_of_it
    assert " ... " not in all_of_it


def test_an_unknown_sample_names_those_there_are(run: Path) -> None:
    done = CliRunner().invoke(cli.app, ["show", str(run), "--sample", "nobody"])
    assert done.exit_code == cli.REFUSED
    assert read_rows(run)["sample"].iloc[0] in done.stderr


def test_without_the_task_the_answers_are_shown(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = read_rows(run)["sample"].iloc[0]
    monkeypatch.setattr(toy.Toy, "samples", lambda self, setting: 1 // 0)
    text = show(run, "--sample", name)
    assert "its prompt cannot be built again: " in text
    assert "streaming_llm" in text
