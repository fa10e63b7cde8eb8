"""What the commands pass on and print; the engine itself is not run here."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kvbench
from kvbench.cli import main as cli
from kvbench.cli.options import FAILED
from kvbench.contract.registry import POLICIES, TASKS
from kvbench.errors import DataNotFound
from kvbench.stats.aggregate import aggregate
from kvbench.store.results import read_rows
from kvbench.study import runner
from kvbench.study.config import RunConfig
from tests.store.synthetic import make_run

RUN = ["run", "--policy", "snapkv:window=64,kernel=5,tova", "--policy", "oracle", "--task", "boolq",
       "--budgets", "100,20", "--budgets", "500"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "mine", samples=6)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[RunConfig]:
    """The runner, replaced by one that answers with stored rows; gives the configurations it got."""
    got: list[RunConfig] = []

    def run(config: RunConfig, progress: bool = True, executor: Any = None) -> runner.RunResult:
        got.append(config)
        rows = read_rows(folder)
        return runner.RunResult(rows, aggregate(rows), folder, ["remember this"], failed=config.seed)

    monkeypatch.setattr(runner, "run", run)
    return got


def invoke(*command: Any) -> Any:
    return CliRunner().invoke(cli.app, [str(part) for part in command])


def test_lists_join_and_options_repeat(engine: list[RunConfig]) -> None:
    result = invoke(*RUN, "--pins", "4,16", "--limit", "3", "--chunk", "64", "--schedule", "chunked")
    assert result.exit_code == 0, result.output
    assert engine == [
        RunConfig(
            policies=("snapkv:window=64,kernel=5", "tova", "oracle"),
            tasks=("boolq",),
            budgets=(20, 100, 500),
            pins="4,16",
            limit=3,
            chunk=64,
            schedule="chunked",
        )
    ]


@pytest.mark.parametrize("given", [["--seeds", "0,1", "--seeds", "2"], ["--seeds", " 0, 1,2,"]])
def test_seeds_join(engine: list[RunConfig], given: list[str]) -> None:
    invoke(*RUN, *given)
    assert engine[0].seeds == (0, 1, 2)


def test_a_run_ends_with_table_notes_and_the_next_command(engine: list[RunConfig], folder: Path) -> None:
    result = invoke(*RUN)
    table, _, rest = result.stdout.partition("note: remember this\n")
    assert "snapkv" in table
    assert "accuracy" in table
    assert f"kvbench plot {folder}" in rest


@pytest.mark.usefixtures("engine")
def test_a_run_with_failed_rows_does_not_exit_green() -> None:
    assert invoke(*RUN, "--seed", "2").exit_code == FAILED


def test_an_interrupted_run_says_what_is_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stop(config: RunConfig, progress: bool, executor: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", stop)
    result = invoke(*RUN, "--out", tmp_path)
    assert result.exit_code == cli.INTERRUPTED
    assert str(tmp_path) in result.stderr
    assert "same command" in result.stderr


def test_table_formats_agree(folder: Path) -> None:
    lines = json.loads(invoke("table", folder, "--format", "json", "--metric", "accuracy").stdout)
    assert {"task", "policy", "budget", "metric", "mean", "lo", "hi", "n"} <= set(lines[0])
    assert {line["metric"] for line in lines} == {"accuracy"}
    assert [line["budget"] for line in lines if line["policy"] == "full"] == [None]
    text = invoke("table", folder, "--format", "csv", "--metric", "accuracy").stdout
    assert len(list(csv.DictReader(io.StringIO(text)))) == len(lines)
    markdown = invoke("table", folder, "--format", "md", "--metric", "accuracy,kl").stdout
    assert "| snapkv" in markdown
    assert "kl" in markdown


def test_compare_prints_a_paired_table(folder: Path) -> None:
    given = ("compare", folder, "--baseline", "snapkv", "--metric", "accuracy")
    text = invoke(*given).stdout
    assert "boolq: accuracy (0..1, higher is better), minus snapkv, n = 6" in text
    assert "p, Holm" in text
    lines = json.loads(invoke(*given, "--format", "json").stdout)
    assert {"snapkv"} == {line["baseline"] for line in lines}
    assert all(0 < line["p"] <= (line["p_holm"] or 1) <= 1 for line in lines)
    assert invoke("compare", folder).exit_code == 0  # with the full cache


def test_plot_prints_the_files_it_wrote(folder: Path, tmp_path: Path) -> None:
    result = invoke("plot", folder, "--metric", "accuracy", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    files = result.stdout.split()
    assert files
    assert all(Path(name).stat().st_size > 0 for name in files)


@pytest.mark.parametrize(("what", "names"), [("policies", POLICIES.names), ("tasks", TASKS.names)])
def test_list_names_everything_registered(what: str, names: Callable[[], list[str]]) -> None:
    result = invoke("list", what)
    assert result.exit_code == 0, result.output
    listed = {line.split()[0] for line in result.stdout.splitlines() if line.strip()}
    assert set(names()) <= listed
    assert "broken" not in result.stdout


def test_list_tells_whose_data_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(self: object, data: str | None) -> None:
        raise DataNotFound("nowhere")

    monkeypatch.setattr(TASKS.get("ruler/qa_1"), "check", gone)
    lines = {line.split()[0]: line for line in invoke("list", "tasks").stdout.splitlines() if line.strip()}
    assert "no: needs --data" in lines["ruler/qa_1"]
    assert "no: needs --data" not in lines["ruler/vt"]
    assert "seen" in lines["ruler/vt"]
    assert "withheld" in lines["needle"]


def test_list_models_names_the_default() -> None:
    assert RunConfig(("a",), ("b",), (1,)).model in invoke("list", "models").stdout


@pytest.mark.parametrize("name", POLICIES.names())
def test_info_states_the_source_of_every_default(name: str) -> None:
    result = invoke("info", name)
    assert result.exit_code == 0, result.output
    assert POLICIES.get(name).source in result.stdout
    assert "not stated" not in result.stdout
    for word in ("ranking", "native pins", "applied repeatedly"):
        assert word in result.stdout


def test_info_shows_given_parameters_beside_the_default() -> None:
    assert "32, here 64" in invoke("info", "snapkv:window=64").stdout


def test_version_and_bare_command() -> None:
    assert invoke("--version").stdout == f"kvbench {kvbench.__version__}\n"
    usage = invoke()
    for command in ("run", "plot", "table", "list", "info", "check"):
        assert command in usage.output


def test_the_shell_completes() -> None:
    asked = {"_KVBENCH_COMPLETE": "complete_bash", "COMP_WORDS": "kvbench run --qu", "COMP_CWORD": "2"}
    done = CliRunner().invoke(cli.app, [], prog_name="kvbench", env=asked)
    assert done.stdout.split() == ["--question", "--quiet"]
