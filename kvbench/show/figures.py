"""The named figures of `kvbench figure`: what each shows, what it takes, and who draws it.

A policy package adds its own through `Policy.figures`. Neither torch nor the engine is imported here:
whoever draws is looked up by the text "module:function".
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from ..contract.registry import POLICIES
from ..errors import BadInput, PluginError, UnknownName
from ..store.manifest import MANIFEST

PAPER = "arXiv:2602.10238"
REFERENCE = Path("results") / "reference"
OUT = Path("results") / "figures"
RUNS, TRACES, SPEED = "run folders", "a folder of kvbench trace", "a folder of kvbench speed"


@dataclass(frozen=True)
class Request:
    """What to draw. paths: inputs, see FigureKind.takes; none: the committed reference, where there is one.

    metrics: of run folders. each: one panel per task of a group. policies: which ones; none: the figure's
    own choice. pins: none, native or FIRST,LAST, when traces are ranked; None: the figure's own choice.
    limit: traces. sample: which trace, from 0. head: a KV head as "L10.H0". out: folder of the files.
    """

    paths: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    each: bool = False
    policies: tuple[str, ...] = ()
    pins: str | None = None
    limit: int | None = None
    sample: int = 0
    head: str | None = None
    out: Path = OUT

    def __post_init__(self) -> None:
        if self.sample < 0 or (self.limit is not None and self.limit < 1):
            raise BadInput(f"--sample {self.sample}, --limit {self.limit}: from 0, and from 1, on")


OPTIONS = {"metric": "metrics", "each": "each", "policy": "policies", "pins": "pins", "limit": "limit",
           "sample": "sample", "head": "head"}  # fmt: skip


@dataclass(frozen=True)
class FigureKind:
    """One figure. paper: the figure of PAPER it corresponds to. shows: one phrase. takes: its inputs, in
    words. options: those of OPTIONS it knows. target: "module:function" from a Request to the files."""

    name: str
    paper: str
    shows: str
    takes: str
    options: tuple[str, ...]
    target: str

    def draw(self, asked: Request) -> list[Path]:
        """Returns the files. Raises: BadInput for an option that this figure does not have; KvbenchError."""
        defaults = {field.name: field.default for field in fields(Request)}
        for option, field in OPTIONS.items():
            if option not in self.options and getattr(asked, field) != defaults[field]:
                known = ", ".join(f"--{name}" for name in self.options) or "none"
                raise BadInput(f"--{option}: figure '{self.name}' does not take it; its options: {known}")
        module, _, name = self.target.partition(":")
        function: Callable[[Request], list[Path]] = getattr(importlib.import_module(module), name)
        return function(asked)


ENGINE = (
    FigureKind(
        "budget-curves", "2, 3, 4, 5, 13-16", "metrics against the budget, a panel per task", RUNS,
        ("metric", "each", "policy"), "kvbench.show.grid:budget_curves",
    ),
    FigureKind(
        "learned", "8", "metrics against the budget, learned policies only", RUNS,
        ("metric", "each"), "kvbench.show.grid:learned_curves",
    ),
    FigureKind(
        "wall-clock", "7", "scoring and prefill against the context length", SPEED,
        (), "kvbench.show.speed:wall_clock",
    ),
)  # fmt: skip


def kinds() -> list[FigureKind]:
    """All figures: the engine's, then those of policies that can be imported.

    Raises: PluginError for two figures of one name, or a policy whose figures cannot be imported.
    """
    found = {kind.name: kind for kind in ENGINE}
    broken = POLICIES.failures()
    for target in dict.fromkeys(POLICIES.get(n).figures for n in POLICIES.names() if n not in broken):
        for kind in _of_policy(target) if target else ():
            if kind.name in found:
                raise PluginError(f"figure '{kind.name}' of {target} is declared twice: rename one of them")
            found[kind.name] = kind
    return list(found.values())


def _of_policy(target: str) -> tuple[FigureKind, ...]:
    module, _, name = target.partition(":")
    try:
        made: tuple[FigureKind, ...] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise PluginError(f"the figures {target} cannot be imported: {error}") from error
    return made


def figure_kind(name: str) -> FigureKind:
    """Look a figure up. Raises: UnknownName, which lists the known ones."""
    found = {kind.name: kind for kind in ENGINE}
    if name not in found:
        found = {kind.name: kind for kind in kinds()}
    if name not in found:
        raise UnknownName("figure", name, found, "`kvbench figure --list` says what each shows and takes.")
    return found[name]


def reference_folders() -> list[str]:
    """Committed run folders: those with a manifest and rows."""
    from ..store.results import ROWS

    found = {file.parent for file in REFERENCE.glob(f"*/{ROWS}*") if (file.parent / MANIFEST).is_file()}
    return sorted(map(str, found))


def inputs(asked: Request, name: str, takes: str, default: list[str], hint: str) -> tuple[str, ...]:
    """The given paths, or the committed ones. Raises: BadInput when there are neither."""
    paths = asked.paths or tuple(default)
    if not paths:
        raise BadInput(f"figure '{name}' needs {takes}: {hint}")
    return paths
