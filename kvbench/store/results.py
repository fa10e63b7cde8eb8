"""A run folder: manifest.json says how the numbers were made, rows.jsonl holds one line per (cell, sample).

A row is written once and belongs to exactly one configuration. Killing the process at any moment
loses at most the sample in flight; the next run finds the rest done. A finished folder may be kept small
with `gzip -n rows.jsonl`: it is read as before, and a run that adds to it unpacks it first.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..contract.files import replace_file
from ..errors import StoreError
from .manifest import MANIFEST, note_run, prepare_manifest, read_manifest
from .read import read_rows
from .row import SCHEMA, Row
from .row_files import PACKED, ROWS, digest, line_of, parse, set_apart, stored_bytes, stored_rows
from .row_reader import RowReader

__all__ = [
    "PACKED",
    "ROWS",
    "SCHEMA",
    "TORN",
    "Row",
    "Store",
    "check_writable",
    "read_manifest",
    "read_rows",
    "stored_rows",
]

TORN = "rows.torn"  # what a killed process left half written, kept for inspection
REPLACED = "rows.replaced"  # rows that --fresh computes again
LOCK = ".lock"


class Store:
    """A run folder opened for writing, by one process at a time.

    done: keys that need no further work (status ok or skipped). notes: what the user should hear
    about the folder's state. Text is stored ASCII-escaped, so any string survives, lone surrogates
    included (a high surrogate followed by a low one reads back as the character they stand for).
    """

    def __init__(self, path: Path, lock: int) -> None:
        """Use `Store.open`."""
        self.path = path
        self.done: set[str] = set()
        self.notes: list[str] = []
        self._lock: int | None = lock
        self._rows: int | None = None
        self._seen: dict[str, tuple[str, str]] = {}  # key -> (status, digest of everything but times)

    @classmethod
    def open(
        cls,
        path: str | Path,
        fixed: Mapping[str, Any],
        extra: Mapping[str, Any],
        settings: Mapping[str, Any] | None = None,
        fresh: Collection[str] = (),
    ) -> Store:
        """Create or resume a run folder.

        fixed: whatever changes the numbers of all rows; must equal what the folder was made with.
        extra: sections merged into the manifest ("style", "tasks"). settings: of this invocation, noted
        so that it can be repeated. fresh: policies and tasks whose rows are set aside, to be computed again.
        Raises: StoreError when the folder cannot be written, is in use, has another `fixed`, or has rows of a
        policy or task whose code (extra["code"]) has changed and that is not fresh.
        """
        folder = Path(path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StoreError(
                f"cannot write to {folder} ({error.strerror}): choose a writable folder with --out"
            ) from error
        store = cls(folder, lock)
        try:
            store._take_lock()
            store._load(fixed, extra, settings, fresh)
        except OSError as error:
            store.close()
            raise StoreError(f"cannot use {folder} ({error.strerror}): {_remedy(error)}") from error
        except BaseException:
            store.close()
            raise
        return store

    def _take_lock(self) -> None:
        assert self._lock is not None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreError(
                f"{self.path} is in use by another run: wait until it ends, or give this one another --out"
            ) from error
        except OSError as error:  # not every network file system has locks
            raise StoreError(
                f"cannot lock {self.path} ({error.strerror}): two runs could write there at once; choose "
                "a folder on another file system with --out"
            ) from error

    def _load(
        self, fixed: Mapping[str, Any], extra: Mapping[str, Any], settings: Mapping[str, Any] | None,
        fresh: Collection[str],
    ) -> None:  # fmt: skip
        rows = self.path / ROWS
        packed = b"" if rows.exists() else stored_bytes(self.path)
        some = packed or (rows.exists() and rows.stat().st_size)
        if some and not (self.path / MANIFEST).exists():
            raise StoreError(
                f"the rows file in {self.path} has no {MANIFEST} beside it: nobody knows how it was made, so "
                "put the manifest back or use another --out"
            )
        self.notes += prepare_manifest(self.path, fixed, extra, settings, fresh)
        if not rows.exists() and (self.path / PACKED).exists():
            self._unpack(packed)
        if fresh and rows.exists():
            self._renew(rows, fresh)
        self._rows = os.open(rows, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        _sync_folder(self.path)
        data = rows.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            self._set_aside(data[whole:])
            os.ftruncate(self._rows, whole)
            os.fsync(self._rows)
        for row in parse(rows, data[:whole]):
            self._remember({row.key: (row.status, digest(row))})

    def _unpack(self, data: bytes) -> None:
        """Replace packed rows by plain ones; the packed ones go when the others are safely there."""
        replace_file(self.path / ROWS, lambda draft: draft.write_bytes(data))
        _sync_folder(self.path)
        (self.path / PACKED).unlink()
        self.notes.append(f"{self.path / PACKED} was unpacked to {ROWS}, to be added to")

    def _renew(self, rows: Path, fresh: Collection[str]) -> None:
        """Move the rows of these policies and tasks to REPLACED."""
        stay, old = set_apart(rows.read_bytes(), fresh)
        if old:
            self._add_to(REPLACED, b"".join(old))
            replace_file(rows, lambda draft: draft.write_bytes(b"".join(stay)))
            self.notes.append(f"{len(old)} rows of {', '.join(fresh)} were moved to {self.path / REPLACED}")

    def _set_aside(self, tail: bytes) -> None:
        self._add_to(TORN, tail + b"\n")
        self.notes.append(
            f"the last row of {self.path / ROWS} was half written ({len(tail)} bytes, moved to {TORN}); "
            "its sample is computed again"
        )

    def _add_to(self, name: str, data: bytes) -> None:
        with open(self.path / name, "ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def append(self, rows: Sequence[Row]) -> None:
        """Write the rows of one sample, all or none: one write, then fsync.

        A row already there with equal content (times aside) is not written again; a failed one is
        superseded. Raises: StoreError when a key already has other content, when a row cannot be read
        back, or when the disk refuses; then none of these rows is in the folder.
        """
        if self._rows is None:
            raise StoreError(f"{self.path} is closed for writing: open it again with Store.open")
        fresh: dict[str, tuple[str, str]] = {}
        lines: list[str] = []
        for row in rows:
            line = line_of(row)
            entry = row.status, digest(RowReader().read(json.loads(line)))
            known = fresh.get(row.key) or self._seen.get(row.key)
            if known == entry:
                continue
            if known is not None and known[0] != "failed":
                raise StoreError(
                    f"{self.path}: row {row.key} ({row.spec}, sample {row.sample!r}) is there "
                    "with other content. The same configuration gave two results: use another --out, "
                    "and report it if nothing but the time has changed"
                )
            fresh[row.key] = entry
            lines.append(line)
        if lines:
            self._write(("\n".join(lines) + "\n").encode("ascii"))
            self._remember(fresh)

    def _remember(self, entries: Mapping[str, tuple[str, str]]) -> None:
        self._seen.update(entries)
        self.done.update(key for key, (status, _) in entries.items() if status != "failed")

    def _write(self, block: bytes) -> None:
        assert self._rows is not None
        start = os.fstat(self._rows).st_size
        try:
            view = memoryview(block)
            while view:  # one write in practice; a short one continues or fails
                view = view[os.write(self._rows, view) :]
            os.fsync(self._rows)
        except BaseException as error:
            try:
                os.ftruncate(self._rows, start)
            except OSError:  # the torn tail stays for the next open; nothing may be added behind it
                os.close(self._rows)
                self._rows = None
            if isinstance(error, OSError):
                raise StoreError(
                    f"cannot write to {self.path / ROWS} ({error.strerror}): {_remedy(error)} and run the "
                    "same command again, finished samples are kept"
                ) from error
            raise

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Note in the manifest how this invocation went, once its rows are written. Raises: StoreError."""
        try:
            note_run(self.path, facts)
        except OSError as error:
            raise StoreError(
                f"cannot write to {self.path} ({error.strerror}): {_remedy(error)}; all rows are kept"
            ) from error

    def close(self) -> None:
        """Release the folder; a second call does nothing."""
        for name in ("_rows", "_lock"):
            descriptor = getattr(self, name)
            if descriptor is not None:
                os.close(descriptor)
                setattr(self, name, None)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_writable(folder: Path) -> None:
    """Refuse early what could not be stored later; leaves nothing behind. Raises StoreError."""
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        probe.touch()
        probe.unlink()
        if new:
            folder.rmdir()  # what is refused later leaves no empty folder; the writer makes it again
    except OSError as error:
        raise StoreError(
            f"cannot write to {folder} ({error.strerror}): choose a writable folder with --out"
        ) from error


def _remedy(error: OSError) -> str:
    """What helps when a folder cannot be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "free space"
    return "make the folder writable"


def _sync_folder(path: Path) -> None:
    """Make new names in a folder survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
