"""kvbench compares KV-cache eviction policies. `kvbench.run(RunConfig(...))` is the whole API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .config import RunConfig
from .policy import Need, Pins, Policy, param
from .registry import register, register_task
from .task import Answer, Sample, Samples, Setting, Task

if TYPE_CHECKING:
    from .runner import RunResult, run

__version__ = "0.1.0"
__all__ = [
    "Answer", "Need", "Pins", "Policy", "RunConfig", "RunResult", "Sample", "Samples", "Setting", "Task",
    "param", "register", "register_task", "run",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """`run` and `RunResult` load on first use, because they import torch."""
    if name in ("run", "RunResult"):
        from . import runner as module

        return getattr(module, name)
    raise AttributeError(f"module 'kvbench' has no attribute '{name}'")
