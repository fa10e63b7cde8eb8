"""What a log file sees of a long run: a line at the start, one every half minute, and the time it takes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvbench.cli import main as cli
from kvbench.study import progress as lines
from kvbench.study.progress import duration, progress
from tests.laws import toy
from tests.laws.conftest import saved


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that a test moves: seconds in the first place."""
    now = [0.0]
    monkeypatch.setattr(lines.time, "monotonic", lambda: now[0])
    return now


def test_lines_without_a_terminal(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    assert not sys.stderr.isatty()
    with progress(True, 4, "samples") as advance:
        for _ in range(4):
            clock[0] += 20
            advance("boolq")
    told = capsys.readouterr().err.splitlines()
    assert told == ["0/4 samples", "boolq: 2/4 samples, 40 s left", "boolq: 4/4 samples in 80 s"]


def test_long_work_is_told_in_advance(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress(True, 3000, "samples", "--limit N") as advance:
        clock[0] += 6
        advance("boolq")
        clock[0] += 6
        advance("boolq")
    told = capsys.readouterr().err.splitlines()
    assert told == ["0/3000 samples", "about 5.0 h for all 3000; --limit N takes fewer, and it resumes"]


def test_short_work_and_chosen_sizes_need_no_warning(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    for total, limit in ((50, "--limit N"), (3000, "")):
        with progress(True, total, "samples", limit) as advance:
            clock[0] += 6
            advance("boolq")
    assert "about" not in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "words"), [(12.4, "12 s"), (120, "2 min"), (9000, "2.5 h")])
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize("quiet", [False, True])
def test_quiet(tmp_path: Path, quiet: bool) -> None:
    model = saved(tmp_path / "model", chat=False, bos=False)
    command = ["run", "--policy", "knorm", "--task", "laws_toy", "--budgets", "8", "--limit", "1"]
    with toy.added():
        more = ["--model", model, "--out", str(tmp_path / "out"), *(["--quiet"] if quiet else [])]
        done = CliRunner().invoke(cli.app, [*command, *more])
    assert done.exit_code == 0, done.output
    assert ("samples" in done.stderr) is not quiet
