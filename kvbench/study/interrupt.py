"""Ctrl-C ends a run after the sample in work, not in its middle."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")


class Interrupt:
    """Whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.asked = False

    def between(self, results: Iterable[Result]) -> Iterator[Result]:
        """The results; when it was pressed, after the one in work, KeyboardInterrupt."""
        for result in results:
            yield result
            if self.asked:
                raise KeyboardInterrupt


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Inside the block the first Ctrl-C only sets a flag; a second one stops at once.

    Nothing changes outside of the main thread, or where a program has its own handler.
    """
    interrupt = Interrupt()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield interrupt
        return

    def note(number: int, frame: Any) -> None:
        if interrupt.asked:
            raise KeyboardInterrupt
        interrupt.asked = True
        print(
            "\nfinishing the sample in work; press Ctrl-C again to stop at once", file=sys.stderr, flush=True
        )

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
