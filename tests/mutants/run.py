"""Break a copy of the repository, run the tests that must notice, say what happened.

Each mutation runs in a process that is forked from one that has the libraries loaded but nothing of ours:
that saves the seconds of CPU that an import of transformers takes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .mutation import Mutation

LIMIT = 600.0  # seconds until a mutation counts as one that hangs
LEFT_OUT = (
    ".git",
    ".venv*",
    "build",
    "*.egg-info",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    ".hypothesis",
)
INSTALLED = ("policies", "tasks")  # folders that are packages inside kvbench

CAUGHT, SURVIVED, BROKEN, HANGS = "caught", "SURVIVED", "BROKEN", "HANGS"


@dataclass(frozen=True)
class Outcome:
    """verdict: caught, or what else. failed: the case of each named test that failed. seconds: it took."""

    verdict: str
    failed: tuple[str, ...] = ()
    seconds: float = 0.0


def copy_repository(root: Path, target: Path) -> None:
    """A copy that imports itself, whatever is installed; results are shared, because no test writes there."""
    ignored = shutil.ignore_patterns(*LEFT_OUT)
    shutil.copytree(root, target, ignore=lambda at, names: ignored(at, names) | ({"results"} & {*names}))
    (target / "results").symlink_to(root / "results")
    for name in INSTALLED:
        (target / "kvbench" / name).symlink_to(target / name)


def preload() -> None:
    """Import what every test of ours imports, before any process is forked."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    import hypothesis  # noqa: F401
    import pandas  # noqa: F401
    import torch
    from transformers.models.llama import modeling_llama  # noqa: F401

    torch.set_num_threads(1)


def run_all(root: Path, mutations: Sequence[Mutation], jobs: int) -> Iterator[tuple[Mutation, Outcome]]:
    """The outcome of each mutation, as they end, `jobs` at a time."""
    todo = list(reversed(mutations))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        free = [Path(folder) / str(number) for number in range(min(jobs, len(todo)))]
        for slot in free:
            copy_repository(root, slot)
        running: dict[int, tuple[Mutation, Path, str, float]] = {}
        while todo or running:
            while todo and free:
                mutation, slot = todo.pop(), free.pop()
                before = mutation.apply(slot)
                running[_start(slot, mutation.test_paths)] = (mutation, slot, before, time.monotonic())
            time.sleep(0.05)
            for child in list(running):
                mutation, slot, before, started = running[child]
                seconds = time.monotonic() - started
                ended = os.waitpid(child, os.WNOHANG)[0] == child
                if not ended and seconds < LIMIT:
                    continue
                if not ended:
                    os.killpg(child, signal.SIGKILL)
                    os.waitpid(child, 0)
                del running[child]
                (slot / mutation.file).write_text(before, encoding="utf-8")
                free.append(slot)
                found = _read(slot) if ended else Outcome(HANGS)
                yield mutation, replace(found, seconds=seconds)


def failing_anyway(root: Path, cases: Sequence[str]) -> set[str]:
    """Which of these test cases fail without any mutation: they have caught nothing."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        slot = Path(folder) / "clean"
        copy_repository(root, slot)
        os.waitpid(_start(slot, sorted(set(cases))), 0)
        return set(_read(slot).failed)


def _start(slot: Path, tests: Sequence[str]) -> int:
    """Run tests in a forked process that takes our modules from a copy; returns its id."""
    (slot / "outcome.json").unlink(missing_ok=True)
    child = os.fork()
    if child:
        return child
    try:
        os.setpgid(0, 0)
        _enter(slot)
        found = [_run_test(test) for test in tests]
        (slot / "outcome.json").write_text(json.dumps(found))
    finally:
        os._exit(0)


def _enter(slot: Path) -> None:
    """Make this process one that works in the copy and knows nothing of the original."""
    ours = {name for name in sys.modules if name.split(".")[0] in ("kvbench", "tests", "conftest")}
    for name in ours:
        del sys.modules[name]
    os.chdir(slot)
    sys.path[:] = [str(slot), *(entry for entry in sys.path if entry)]
    os.environ["PYTHONPATH"] = str(slot)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True  # a mutation and its original may have the same second and size
    out = os.open(slot / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)


class _FirstFailure:
    """A plugin of pytest that remembers the case that failed."""

    case = ""

    def pytest_runtest_logreport(self, report: object) -> None:
        if getattr(report, "failed", False) and not self.case:
            self.case = str(getattr(report, "nodeid", ""))


def _run_test(test: str) -> tuple[int, str]:
    """pytest's exit code, and the case that failed first."""
    import pytest

    seen = _FirstFailure()
    with contextlib.suppress(SystemExit):
        code = pytest.main(["-x", "-q", "--no-header", "-p", "no:cacheprovider", "--tb=short", test], [seen])
        return int(code), seen.case
    return 3, seen.case


def _read(slot: Path) -> Outcome:
    """What the process that ended has found."""
    file = slot / "outcome.json"
    if not file.is_file():
        return Outcome(BROKEN)
    found = json.loads(file.read_text())
    failed = tuple(case for code, case in found if code == 1)
    if all(code == 1 for code, _ in found):
        return Outcome(CAUGHT, failed)
    return Outcome(SURVIVED if all(code in (0, 1) for code, _ in found) else BROKEN, failed)


def case_name(case: str) -> str:
    """The name of a test, from that of one of its cases."""
    return re.sub(r"\[.*", "", case.rpartition("::")[2])
