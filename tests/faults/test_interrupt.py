"""Ctrl-C: the sample in work is finished and stored, and the command exits with 130."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbench.study.interrupt import deferred_interrupt
from tests.laws.runs import by_key, config, forked, lines, recorded

# Ctrl-C once, and in a second folder twice, while the second sample of the second task is scored.
PROGRAM = """
import os, signal
from typer.testing import CliRunner
from kvbench.cli import main as cli
from tests.laws import toy
toy.add()
score, left = toy.Toy.score, 0
def pressed(self, sample, answer):
    global left
    while left and (self.kind, sample.id) == ("generate", "1"):
        left -= 1
        os.kill(os.getpid(), signal.SIGINT)
    return score(self, sample, answer)
toy.Toy.score = pressed
for times in (1, 2):
    left = times
    done = CliRunner().invoke(cli.app, (os.environ["COMMAND"] + str(times)).split())
    print(times, done.exit_code, done.stderr)
"""
SAMPLES = {1: 6, 2: 5}  # once: the sample in work is finished; twice: it is given up


@pytest.fixture(autouse=True)
def interrupts() -> Iterator[None]:
    """Ctrl-C as in a terminal: a shell starts what runs in its background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("toys")
def test_an_interrupted_run(folder: str, tmp_path: Path) -> None:
    settings = config(folder, tmp_path / "whole")
    command = f"run --policy {','.join(settings.policies)} --task {','.join(settings.tasks)} --budgets 8,20 "
    command += f"--model {folder} --device cpu --out {tmp_path}/"
    done = forked(PROGRAM, COMMAND=command)
    assert done.returncode == 0, done.stderr
    recorded(settings)
    for times, samples in SAMPLES.items():
        out = tmp_path / str(times)
        told = done.stdout.split(f"{times} 130", 1)[1]
        assert "finishing the sample in work; press Ctrl-C again" in told
        assert f"finished samples are saved in {out}" in told
        rows = lines(out)
        assert len({(row["task_spec"], row["sample"]) for row in rows}) == samples
        assert len(rows) == 7 * samples
        recorded(config(folder, out))
        assert by_key(lines(out)) == by_key(lines(tmp_path / "whole"))


def test_the_handler_is_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with deferred_interrupt() as interrupt:
        assert list(interrupt.between([1, 2])) == [1, 2]
        signal.raise_signal(signal.SIGINT)
        given = interrupt.between([1, 2])
        assert next(given) == 1
        with pytest.raises(KeyboardInterrupt):
            next(given)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_of_the_program_and_other_threads_are_left_alone() -> None:
    def own(number: int, frame: object) -> None:
        pass

    before = signal.signal(signal.SIGINT, own)
    try:
        with deferred_interrupt():
            assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)
    seen: list[object] = []

    def work() -> None:
        with deferred_interrupt():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
