"""Runs through the public door, with what the model saw and what is on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import kvbench
from kvbench.model.open import LoadedModel, OpenModel
from kvbench.study.runner import RunResult
from tests.laws.lab import Forward, watched

ROOT = Path(kvbench.__file__).parent.parent


def config(model: str, out: Path, **changes: Any) -> kvbench.RunConfig:
    given: dict[str, Any] = {
        "policies": ("knorm", "random", "snapkv"),
        "tasks": ("laws_toy", "laws_toy:kind=generate"),
        "budgets": (8, 20),
        "model": model,
        "device": "cpu",
        "out": str(out),
    }
    return kvbench.RunConfig(**(given | changes))


def recorded(settings: kvbench.RunConfig) -> tuple[RunResult, list[Forward]]:
    """A run and every forward of its model."""
    load = OpenModel.load
    forwards: list[Forward] = []
    with ExitStack() as stack:

        def watching(self: OpenModel) -> LoadedModel:
            lm = load(self)
            stack.callback(lambda: forwards.extend(seen))
            seen = stack.enter_context(watched(lm.model))
            return lm

        with patch.object(OpenModel, "load", watching):
            result = kvbench.run(settings, progress=False)
    return result, forwards


def lines(folder: Path) -> list[dict[str, Any]]:
    """The rows on disk, without times."""
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "times"} for row in rows]


def by_key(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    assert len({row["key"] for row in rows}) == len(rows), "a row was written twice"
    return {row["key"]: row for row in rows}


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=ROOT)


def forked(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process forked from this one.

    It has what is loaded here, which saves the seconds of CPU that `python` needs for its imports; use that
    one where a process must be new, with its own hash seed and no module of ours.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                sys.stdout, sys.stderr = out, err
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                os.environ.update(environment)
                exec(compile(code, "<forked>", "exec"), {"__name__": "__main__"})
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                out.flush()
                err.flush()
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for stream in (out, err):
            stream.seek(0)
        return subprocess.CompletedProcess(code, status, out.read(), err.read())
