"""`--traceback` shows where in a policy or task a failure comes from, once, and switches itself off."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from kvbench.cli import main as cli
from kvbench.errors import LOG
from tests.laws import toy
from tests.laws.conftest import saved

SHOWING = ("run", "check", "info", "list", "trace", "train", "eviction-error", "rerun", "speed")
RAISING = {"raise": "score / (1 // 0)", "undeclared": "seen.attention_sums.mean(1)", "exit": "SystemExit(3)"}


@pytest.fixture(autouse=True)
def toys() -> Iterator[None]:
    with toy.added():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved(tmp_path_factory.mktemp("model"), chat=False, bos=False)


def _run(model: str, out: Path, policy: str, *more: str) -> Any:
    command = ["run", "--policy", policy, "--task", "laws_toy", "--budgets", "8", "--model", model]
    return CliRunner().invoke(cli.app, [*command, "--limit", "2", "--out", str(out), *more])


@pytest.mark.parametrize("fault", RAISING)
def test_a_failing_policy_shows_its_line_once(model: str, tmp_path: Path, fault: str) -> None:
    asked = _run(model, tmp_path / "a", f"laws_faulty:fault={fault}", "--traceback")
    plain = _run(model, tmp_path / "b", f"laws_faulty:fault={fault}")
    assert asked.exit_code == plain.exit_code == 1
    assert asked.stderr.count(RAISING[fault]) == 1  # of two samples
    assert "Traceback" not in plain.stderr
    assert asked.stdout.split("peak")[0] == plain.stdout.split("peak")[0]
    assert "toy.py, line" in asked.stdout
    assert not LOG.handlers
    assert LOG.level == logging.NOTSET


def test_a_failing_task_shows_its_line(model: str, tmp_path: Path) -> None:
    with patch.object(toy.Toy, "samples", lambda *_: [][0]):
        asked = _run(model, tmp_path, "knorm", "--traceback")
    assert asked.exit_code == cli.REFUSED
    assert asked.stderr.count("lambda *_: [][0]") == 1
    assert asked.stderr.strip().splitlines()[-1].startswith("error: task 'laws_toy'")


def test_check_shows_the_line() -> None:
    with patch.object(toy.Faulty, "score", lambda *_: [][0]):
        asked = CliRunner().invoke(cli.app, ["check", "laws_faulty", "--traceback"])
    assert asked.stderr.count("lambda *_: [][0]") == 1
    assert "another score" not in asked.stdout  # nothing was scored


def test_every_command_that_calls_plugins_has_the_option() -> None:
    for command in cli.app.registered_commands:
        name = command.name or str(command.callback and command.callback.__name__)
        if name in SHOWING:
            assert command.callback is not None
            assert "traceback" in inspect.signature(command.callback).parameters, name
