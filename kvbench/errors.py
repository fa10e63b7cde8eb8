"""Every error a user can cause, in one tree.

KvbenchError
├── UnknownName        a policy, task, model or parameter that is not there
├── BadInput           a value, file or combination that cannot be run
│   └── DataNotFound   no source has the data
├── UnsupportedModel   the model does something the engine would get wrong
├── PluginError        a policy or task broke its contract, named
├── StoreError         a run folder that cannot be used
└── WorkersLost        workers elsewhere die, and nobody is left to do the work

Each message says what was asked, what is allowed and what to do.
"""

from __future__ import annotations

import difflib
import logging
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LOG = logging.getLogger("kvbench")
LIBRARIES = frozenset({"torch", "numpy", "transformers"})  # a plugin's mistake may show there first


class KvbenchError(Exception):
    """Base of all errors with a message meant for the user."""

    def __reduce__(self) -> Any:
        """Pickles as its class and message: it may come from a worker in another process."""
        return _restored, (type(self), str(self))


def _restored(kind: type[KvbenchError], message: str) -> KvbenchError:
    error = kind.__new__(kind)
    error.args = (message,)
    return error


class UnknownName(KvbenchError):
    """A name that is not registered; suggests the closest one.

    kind: what was looked up ("policy"), name: what was asked, known: what exists.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        known = sorted(known)
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        guess = f" Did you mean '{close[0]}'?" if close else ""
        listing = ", ".join(known) or "none"
        super().__init__(f"unknown {kind} '{name}'.{guess} Known: {listing}.{' ' + hint if hint else ''}")


class BadInput(KvbenchError):
    """A value, file or combination that cannot be run."""


class DataNotFound(BadInput):
    """No source has the data; the message names every source tried."""


class UnsupportedModel(KvbenchError):
    """The model needs something the engine does not do exactly."""


class PluginError(KvbenchError):
    """A policy or task broke its contract."""


class StoreError(KvbenchError):
    """A run folder that cannot be written, read or mixed with this command."""


class WorkersLost(KvbenchError):
    """Workers elsewhere die one after the other, or nobody is left to do the work."""


def place_of(error: BaseException) -> str:
    """ " (FILE, line N)" of the plugin's code that an error comes from, or "" where there is none.

    The whole traceback goes to the log, at level DEBUG; `--traceback` shows it.
    """
    LOG.debug("traceback of a plugin", exc_info=error)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        parts = Path(frame.filename).parts
        engine = "kvbench" in parts and not {"policies", "tasks"} & set(parts)
        if not engine and not LIBRARIES & set(parts) and not frame.filename.startswith("<"):
            return f" ({parts[-1]}, line {frame.lineno})"
    return ""
