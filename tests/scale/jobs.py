"""Work for executors that needs no model; workers import it by name."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from kvbench.errors import UnknownName


def hold() -> str:
    return "what a worker holds"


def double(held: str, job: int) -> int:
    return 2 * job


def deadly(held: str, job: int | Path) -> int | str:
    """Doubles a number, but 3 kills every worker that tries it, and a missing file the first one."""
    if isinstance(job, int) and job != 3:
        return 2 * job
    if isinstance(job, Path) and job.exists():
        return job.name
    if isinstance(job, Path):
        job.touch()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def die_at_start() -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def refuse(held: str, job: int) -> int:
    raise UnknownName("thing", "x", ["y"])
