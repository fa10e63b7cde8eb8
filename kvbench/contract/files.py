"""Files that are written as a whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def replace_file(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file in one step: readers, and whoever comes after a crash, find the old one or the new one.

    write: fills the file that it is given, a draft beside `path`. Raises: OSError.
    """
    draft = path.with_name(path.name + ".tmp")
    try:
        write(draft)
        descriptor = os.open(draft, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # on the disk before its name is
        finally:
            os.close(descriptor)
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
