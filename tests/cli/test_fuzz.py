"""Random command lines end in a run, or in one message and exit code 2; never in a traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from kvbench.cli import main as cli
from kvbench.contract.spec import split_specs
from kvbench.stats.aggregate import aggregate
from kvbench.store.results import read_rows
from kvbench.study import runner
from kvbench.study.config import RunConfig
from tests.store.synthetic import make_run

FUZZ = settings(
    derandomize=True,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
RIGHT = {
    "--policy": "snapkv:window=8,kernel=3,tova", "--task": "boolq", "--budgets": "20,100", "--seeds": "0,1",
    "--pins": "4,16", "--chunk": "64", "--limit": "3", "--schedule": "chunked", "--question": "seen",
    "--protocol": "paper", "--template": "none", "--dtype": "float32",
}  # fmt: skip
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "mine", samples=2)


@st.composite
def altered(draw: st.DrawFn) -> dict[str, str]:
    """The right options, one or two of them spoilt: replaced, or with characters put in or taken out."""
    options = dict(RIGHT)
    for name in draw(st.lists(st.sampled_from(sorted(RIGHT)), min_size=1, max_size=2, unique=True)):
        text = options[name]
        at = draw(st.integers(0, len(text)))
        spoilt = [
            TEXT,
            st.just(text[:at] + text[at + 1 :]),
            TEXT.map(lambda more, text=text, at=at: text[:at] + more + text[at:]),
            st.integers(-(10**30), 10**30).map(str),
        ]
        options[name] = draw(st.one_of(spoilt))
    return options


@FUZZ
@given(options=altered())
def test_runs(folder: Path, options: dict[str, str]) -> None:
    rows = read_rows(folder)
    got: list[RunConfig] = []

    def run(config: RunConfig, *args: Any, **more: Any) -> runner.RunResult:
        got.append(config)
        return runner.RunResult(rows, aggregate(rows, ["accuracy"]), folder)

    with patch.object(runner, "run", run):
        done = CliRunner().invoke(cli.app, ["run", *[part for pair in options.items() for part in pair]])
    assert done.exit_code in (0, 2), (done.exception, done.output)
    assert (done.exit_code == 0) == bool(got)
    if not got:
        assert "Traceback" not in done.stderr
        assert "rror" in done.stderr  # ours say "error:", typer's "Error" in a frame
    for config in got:
        assert all(isinstance(budget, int) and budget > 0 for budget in config.budgets)
        assert list(config.budgets) == sorted(set(config.budgets))
        assert all(0 <= seed < 2**63 for seed in config.seeds)


@settings(FUZZ, max_examples=8)
@given(st.lists(TEXT, max_size=3))
def test_other_commands(arguments: list[str]) -> None:
    for command in ("table", "plot", "compare", "verify", "rerun", "info", "check", "list"):
        done = CliRunner().invoke(cli.app, [command, *arguments])
        assert done.exit_code in (0, 1, 2), (command, done.exception)
        assert done.exception is None or isinstance(done.exception, SystemExit), (command, done.exception)


NAMES = st.text(st.sampled_from("abcxyz_-./"), min_size=1, max_size=6)
VALUES = st.text(st.sampled_from("abc019.-_/"), min_size=1, max_size=5)


@FUZZ
@given(st.lists(st.tuples(NAMES, st.lists(st.tuples(NAMES, VALUES), max_size=3)), min_size=1, max_size=4))
def test_specs_are_split_where_they_were_joined(parts: list[tuple[str, list[tuple[str, str]]]]) -> None:
    specs = [
        name + (":" + ",".join(f"{key}={value}" for key, value in pairs) if pairs else "")
        for name, pairs in parts
    ]
    assert split_specs(",".join(specs)) == specs
    assert split_specs(specs) == specs
