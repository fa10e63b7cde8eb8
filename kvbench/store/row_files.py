"""The file of rows in a run folder, as it lies on the disk: plain, or packed by `gzip -n`."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import StoreError
from .manifest import SCHEMA

ROWS = "rows.jsonl"
PACKED = "rows.jsonl.gz"
STATUSES = ("ok", "skipped", "failed")


def stored_rows(path: str | Path) -> tuple[list[dict[str, Any]], bytes]:
    """Every row of a run folder as it was written, in order, and what follows the last whole line.

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


def parse(file: Path, data: bytes) -> Iterator[dict[str, Any]]:
    """Rows of a file that ends in a newline. Raises: StoreError naming the line."""
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
            check(row)
        except ValueError as error:
            raise StoreError(
                f"{file}, line {number} is not JSON: move that line elsewhere and run the same command again"
            ) from error
        except StoreError as error:
            raise StoreError(f"{file}, line {number}: {error}") from error
        yield row


def check(row: Any) -> None:
    if not isinstance(row, dict) or not isinstance(row.get("key"), str):
        raise StoreError("not a kvbench row (no key): move the line elsewhere and run again")
    if not isinstance(row.get("schema"), int) or row["schema"] > SCHEMA:
        raise StoreError(
            f"row schema {row.get('schema')}, but this kvbench reads up to {SCHEMA}: upgrade kvbench"
        )
    if row.get("status") not in STATUSES:
        raise StoreError(f"status {row.get('status')!r}: must be one of {', '.join(STATUSES)}")


def digest(row: Mapping[str, Any]) -> str:
    """Identity of a row's content; times differ between equal runs and do not count."""
    try:
        text = json.dumps({k: v for k, v in row.items() if k != "times"}, sort_keys=True)
        json.dumps(row.get("times"))
    except TypeError as error:
        raise StoreError(f"row {row['key']} cannot be stored: {error}; use plain Python values") from error
    return hashlib.sha256(text.encode()).hexdigest()
