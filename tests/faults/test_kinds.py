"""Kinds of public faults that no other test covers. Their ids are explained in tests/README.md."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvbench.cli import main as cli
from kvbench.contract.task import Sample
from kvbench.model.prompt import build_prompt
from kvbench.show.table import render
from kvbench.stats.aggregate import aggregate
from kvbench.store.results import Store, read_rows
from tests.laws.runs import config, recorded
from tests.store.synthetic import row
from tests.tiny import tiny_tokenizer

ROOT = Path(__file__).parents[2]


def test_b03_the_position_mode_is_told() -> None:
    """The paper renumbers positions inside the cache, kvbench does not: `info` says so."""
    text = " ".join(CliRunner().invoke(cli.app, ["info", "streaming_llm"]).stdout.split())
    assert 'position mode "original"' in text
    assert "renumbers them inside the cache" in text


@pytest.mark.usefixtures("toys")
def test_b29_b37_a_row_names_every_parameter(folder: str, tmp_path: Path) -> None:
    """Defaults included: the scoring window of a policy is in its rows, whatever was typed."""
    changes: dict[str, Any] = {
        "policies": ("snapkv", "snapkv:window=4"),
        "tasks": ("laws_toy",),
        "budgets": (8,),
    }
    result, _ = recorded(config(folder, tmp_path, limit=1, **changes))
    params = {spec: json.loads(text) for spec, text in result.rows[["spec", "params"]].to_numpy()}
    assert params["snapkv"] | {"window": 4} == params["snapkv:window=4"]
    assert params["snapkv"]["window"] == 32
    assert len(params["snapkv"]) > 2


@pytest.mark.parametrize("first", ["context", "question"])
@pytest.mark.usefixtures("toys")
def test_b37_an_instruction_may_stand_first(folder: str, tmp_path: Path, first: str) -> None:
    from unittest.mock import patch

    from tests.laws import toy

    asked, story = "Say what is in it. ", "hello world, the 1 is in the answer. " * 3
    context = asked + story if first == "question" else story
    sample = Sample("0", context, "" if first == "question" else asked, " the", max_new_tokens=2)
    changes: dict[str, Any] = {"policies": ("snapkv:window=4",), "budgets": (8,)}
    changes["tasks"] = ("laws_toy:kind=generate",)
    with patch.object(toy.Toy, "samples", lambda self, setting: toy.Samples([sample], "s", "0" * 64)):
        result, _ = recorded(config(folder, tmp_path, **changes))
    assert set(result.rows["status"]) == {"ok"}
    assert result.rows["kept"].tolist()[1] == 8


@pytest.mark.parametrize("context", ["", " ", "\n", "#### a ####", "<|user|>", "None", "\x00"])
@pytest.mark.parametrize(("chat", "bos"), [(False, False), (False, True), (True, False)])
def test_b38_b39_any_context_with_any_tokenizer(context: str, chat: bool, bos: bool) -> None:
    """No separator is searched for in the text, and a token that does not exist is not written."""
    tokenizer = tiny_tokenizer(chat=chat, bos=bos)
    sample = Sample("s", context, "is it? ", "yes")
    for question in ("withheld", "seen"):
        prompt = build_prompt(sample, tokenizer, question, chat)  # type: ignore[arg-type]
        ids = [*prompt.context, *prompt.question]
        text = tokenizer.decode(ids)
        assert len(prompt.question) >= 1
        assert f"{context}is it?" in text
        assert text.count("None") == context.count("None")
        assert ids.count(1) == (bos and not chat)


@pytest.mark.usefixtures("toys")
def test_b47_answers_of_one_token_come_from_the_evicted_cache(folder: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "policies": ("random",),
        "tasks": ("laws_toy",),
        "budgets": (1,),
        "pins": "none",
    }
    result, _ = recorded(config(folder, tmp_path, question="seen", **changes))
    rows = result.rows.set_index("spec")
    assert (rows.loc["random", "kept"] == 1).all()
    assert (rows.loc["random", "question_tokens"] == 1).all()  # the last token of the prompt is read after
    full, evicted = (rows.loc[spec, "metric:nll"].to_numpy() for spec in ("full", "random"))
    assert (abs(full - evicted) > 1e-3).all()


def test_b57_words_that_readers_take_for_nothing(tmp_path: Path) -> None:
    """Labels that a spreadsheet would call missing: as they are in every format."""
    words = ["None", "NA", "null", "nan", 'a,b "c"']
    rows = [row("knorm", 64, f"s{i}", label=word, gold_label=word) for i, word in enumerate(words)]
    with Store.open(tmp_path, {}, {}) as store:
        store.append(rows)
    frame = read_rows(tmp_path)
    assert frame["label"].tolist() == frame["gold_label"].tolist() == words
    for word, one in zip(words, rows, strict=True):
        with Store.open(tmp_path / one.sample, {}, {}) as store:
            store.append([one])
        lines = aggregate(read_rows(tmp_path / one.sample), ["accuracy"])
        read = list(csv.DictReader(io.StringIO(render(lines, "csv"))))
        assert read[0]["majority_label"] == word
        assert json.loads(render(lines, "json"))[0]["majority_label"] == word


@pytest.mark.parametrize("failing", ["ruff", "mypy", "lint-imports", "pytest"])
def test_b58_a_failing_check_makes_the_command_fail(tmp_path: Path, failing: str) -> None:
    """Nothing stands between a tool's exit code and that of `make test` and `.ci/run`."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / "tests").mkdir()
    for name in ("pyproject.toml", "constraints.txt", "tests/readme.py"):
        (tmp_path / name).write_text("")
    for venv in (".venv", ".venv-newest"):
        place = tmp_path / venv / "bin"
        place.mkdir(parents=True)
        for tool in ("ruff", "mypy", "lint-imports", "pytest", "python"):
            (place / tool).write_text(f"#!/bin/sh\nexit {int(tool == failing)}\n")
            (place / tool).chmod(0o755)
        for stamp in ("torch", "ready", "ready-to-test"):
            (tmp_path / venv / stamp).write_text("")
    for tool in ("chromium", "apt-get"):  # nothing is installed, whoever runs this
        (tmp_path / tool).write_text("#!/bin/sh\n")
        (tmp_path / tool).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}

    def status(*command: str) -> int:
        return subprocess.run(command, cwd=tmp_path, capture_output=True, env=env).returncode

    for command in (["make", "test"], ["bash", ".ci/run"]):
        assert status(*command) != 0, command
    (tmp_path / ".venv" / "bin" / failing).write_text("#!/bin/sh\n")
    (tmp_path / ".venv-newest" / "bin" / failing).write_text("#!/bin/sh\n")
    for command in (["make", "test"], ["bash", ".ci/run"]):
        assert status(*command) == 0, command
    (tmp_path / "tests" / "readme.py").write_text("raise SystemExit(1)")
    assert status("bash", ".ci/run") != 0


def test_the_tables_of_the_readme_name_tests_that_exist() -> None:
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", text))
    files = [file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py")]
    there = {name for code in files for name in re.findall(r"^def (test_\w+)", code, re.M)}
    assert len(named) > 60
    assert named - there == set()
    assert set(re.findall(r"^\| (B\d\d) \|", text, re.M)) == {f"B{number:02}" for number in range(1, 59)}
