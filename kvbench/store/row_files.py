"""The file of rows in a run folder, as it lies on the disk: plain, or packed by `gzip -n`."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import StoreError
from .row import Row
from .row_reader import RowReader

ROWS = "rows.jsonl"
PACKED = "rows.jsonl.gz"
TOGETHER = 1000  # lines of JSON read by one call


def stored_rows(path: str | Path) -> tuple[list[Row], bytes]:
    """Every row of a run folder in the order of writing, and what follows the last whole line.

    Raises: StoreError when there are none, or rows of a newer kvbench.
    """
    file = Path(path) / ROWS
    data = stored_bytes(Path(path))
    whole = data.rfind(b"\n") + 1
    rows = list(parse(file, data[:whole]))
    if not rows:
        raise StoreError(f"no rows in {path}: name a folder that `kvbench run` wrote")
    return rows, data[whole:]


def stored_bytes(folder: Path, name: str = ROWS) -> bytes:
    """The bytes of a row file, or of a packed one where there is no plain one; empty where there is neither.

    Raises: StoreError for a packed file that is damaged.
    """
    file, packed = folder / name, folder / (name + ".gz")
    if file.is_file() or not packed.is_file():
        return file.read_bytes() if file.is_file() else b""
    try:
        return gzip.decompress(packed.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise StoreError(
            f"{packed} is damaged ({error}): take it from where it came from again, or use another folder"
        ) from error


def parse(file: Path, data: bytes) -> Iterator[Row]:
    """Rows of a file that ends in a newline. Raises: StoreError naming the line."""
    reader = RowReader()
    lines = data.split(b"\n")[:-1]
    for start in range(0, len(lines), TOGETHER):
        part = lines[start : start + TOGETHER]
        together = _together(part)
        for number, line in enumerate(part, start=start):
            try:
                yield reader.read(json.loads(line) if together is None else together[number - start])
            except (ValueError, RecursionError) as error:
                raise StoreError(
                    f"{file}, line {number + 1} is not JSON: move that line elsewhere and run the same "
                    "command again"
                ) from error
            except StoreError as error:
                raise StoreError(f"{file}, line {number + 1}: {error}") from error


def _together(lines: Sequence[bytes]) -> list[Any] | None:
    """The objects of many lines from one call, which is faster; None where a line may not be one object."""
    if not all(line.startswith(b"{") and line.endswith(b"}") for line in lines):
        return None
    try:
        found: list[Any] = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        return None
    return found if len(found) == len(lines) else None


def set_apart(data: bytes, names: Collection[str]) -> tuple[list[bytes], list[bytes]]:
    """The lines of a row file that are not, and those that are, of one of these policies or tasks."""
    parts: tuple[list[bytes], list[bytes]] = [], []
    for line in data.splitlines(keepends=True):
        try:
            row = json.loads(line)
            mine = row["policy"] in names or row["task"] in names
        except (ValueError, TypeError, KeyError):  # reading the file will tell
            mine = False
        parts[mine].append(line)
    return parts


def line_of(row: Row) -> str:
    """A row as a line of JSON. Raises: StoreError for what JSON has no word for."""
    try:
        return json.dumps(row.as_dict(), ensure_ascii=True, separators=(",", ":"))
    except TypeError as error:
        raise StoreError(f"row {row.key} cannot be stored: {error}; use plain Python values") from error


def digest(row: Row) -> str:
    """Identity of a row's content; times differ between equal runs and do not count, nor does the question
    (the rule of pins) that asked for it."""
    aside = ("schema", "times", "pins_mode")
    content = {name: value for name, value in row.as_dict().items() if name not in aside}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
