"""Where policies and tasks are found by name: entry points and decorators, one door for all.

Built-ins and plugins register in the entry-point groups `kvbench.policies` and `kvbench.tasks`;
`@register` also admits a class that lives in a notebook or a script. The registry holds classes or
the text "module:Class", never instances, and imports a class only when it is asked for.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from ..errors import BadInput, KvbenchError, PluginError, UnknownName, place_of
from .cell import FULL
from .policy import Policy
from .spec import FIRST, Parameter, build, parameters, spec_of, split_name, split_specs
from .task import Task

__all__ = [
    "POLICIES", "TASKS", "Parameter", "Registry", "expand_policies", "expand_tasks", "parameters",
    "register", "register_task", "spec_of", "split_specs",
]  # fmt: skip

Kind = TypeVar("Kind", bound=type)
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*(/[A-Za-z0-9_][A-Za-z0-9_.+-]*)*")


@dataclass(frozen=True)
class Place:
    """Where a name comes from. target: "module:qualname"; where: distribution or file, in words."""

    target: str
    where: str
    entry: EntryPoint | None = None

    def __str__(self) -> str:
        return f"{self.target} from {self.where}"


class Registry:
    """Classes of one kind by name, discovered lazily in an entry-point group.

    kind: the word used in messages ("policy"). group: entry-point group. base: the class that
    everything registered here extends.
    """

    def __init__(self, kind: str, group: str, base: type = object) -> None:
        self.kind = kind
        self.group = group
        self.base = base
        self._places: dict[str, Place] | None = None
        self._classes: dict[str, type] = {}

    def names(self) -> list[str]:
        """All names, built-ins first, in the order of their declaration.

        Raises: PluginError where two places claim one name.
        """
        return list(self._found())

    def target(self, name: str) -> str:
        """ "module:qualname" of a name. Raises: UnknownName."""
        return self._place(name).target

    def where(self, name: str) -> str:
        """The distribution or file that registers a name. Raises: UnknownName."""
        return self._place(name).where

    def installed(self, name: str) -> bool:
        """Whether other processes find a name, too: through an entry point. Raises: UnknownName."""
        return self._place(name).entry is not None

    def get(self, name: str) -> type[Any]:
        """The class of a name, imported now.

        Raises: UnknownName; PluginError when the import fails or gives something else than a
        registered class of this kind.
        """
        place = self._place(name)
        if name not in self._classes:
            self._classes[name] = self._load(name, place)
        return self._classes[name]

    def failures(self) -> dict[str, str]:
        """Names that cannot be imported, with the reason. Imports everything: for listings."""
        reasons = {}
        for name in self.names():
            try:
                self.get(name)
            except PluginError as error:
                reasons[name] = str(error)
        return reasons

    def parse(self, text: str) -> Any:
        """The instance that a spec like `snapkv:window=64,kernel=7` describes.

        Raises: UnknownName for a name or parameter that is not there; BadInput for a bad value.
        """
        name, values = split_name(text)
        return build(self.get(name), values, f"{self.kind} '{name}'")

    def add(self, name: str, cls: type) -> None:
        """Register a class at run time.

        The class behind an entry point may register under its own name, and a class that is
        defined again (a notebook cell run twice, a reload) replaces itself.
        Raises: PluginError when another class has the name.
        """
        place = Place(f"{cls.__module__}:{cls.__qualname__}", _file_of(cls))
        found = self._found()
        before = found.get(name)
        again = before is not None and before.target == place.target
        if again and before is not None and before.entry is None and cls.__module__ != "__main__":
            again = before.where == place.where  # two files may hold modules of one name
        self._claim(found, name, place, again)
        self._classes[name] = cls

    def _place(self, name: str) -> Place:
        found = self._found()
        if name not in found:
            hint = f"'{FULL}' needs no {self.kind}: it is always evaluated." if name == FULL else ""
            raise UnknownName(self.kind, name, found, hint)
        return found[name]

    def _found(self) -> dict[str, Place]:
        if self._places is None:
            found: dict[str, Place] = {}
            for entry in sorted(entry_points(group=self.group), key=_order):
                self._claim(found, entry.name, Place(entry.value, _distribution(entry), entry))
            self._places = found
        return self._places

    def _claim(self, found: dict[str, Place], name: str, place: Place, again: bool = False) -> None:
        if name in (FULL, "all"):
            raise PluginError(f"{self.kind} name '{name}' is reserved: rename {place}")
        if not NAME.fullmatch(name):
            raise PluginError(
                f"{self.kind} name {name!r} of {place}: a name has letters, digits, '_', '-', '.' and '+', "
                "and '/' between such words, none of which begins with '.'"
            )
        if again:
            return
        if name in found:
            raise PluginError(
                f"{self.kind} name '{name}' is registered twice: by {found[name]}, and by {place}. "
                "Rename one of them or uninstall one of the packages."
            )
        found[name] = place

    def _load(self, name: str, place: Place) -> type:
        told = f"{self.kind} '{name}' ({place})"
        try:
            cls = place.entry.load() if place.entry else None
        except KvbenchError:
            raise
        except (Exception, SystemExit) as error:
            self._classes.pop(name, None)  # its decorator may have run before the failure
            raise PluginError(
                f"{told} cannot be imported: {type(error).__name__}: {error}{place_of(error)}. Repair or "
                "uninstall it."
            ) from error
        if not (isinstance(cls, type) and issubclass(cls, self.base)):
            raise PluginError(f"{told} is not a class that extends {self.base.__name__}")
        if vars(cls).get("name") != name:
            raise PluginError(f"{told} must carry the name of its entry point: decorate it with '{name}'")
        return cls


POLICIES = Registry("policy", "kvbench.policies", Policy)
TASKS = Registry("task", "kvbench.tasks", Task)


def register(name: str, *, source: str) -> Callable[[Kind], Kind]:
    """Class decorator: make a policy known under `name`. source: paper or repository.

    Raises: PluginError for a reserved name, a name that is taken, or a class that is no Policy.
    """
    return _decorator(POLICIES, name, source)


def register_task(name: str, *, source: str) -> Callable[[Kind], Kind]:
    """Class decorator: make a task known under `name`. See `register`."""
    return _decorator(TASKS, name, source)


def expand_policies(specs: Iterable[str]) -> list[str]:
    """Specs with "all" replaced by every registered policy, without duplicates and without "full"."""
    chosen: list[str] = []
    for spec in specs:
        for one in POLICIES.names() if spec == "all" else [spec]:
            if one != FULL and one not in chosen:
                chosen.append(one)
    return chosen


def expand_tasks(specs: Iterable[str]) -> list[str]:
    """Specs with a group replaced by its tasks: "ruler" stands for every registered "ruler/...".

    Parameters of a group go to each of its tasks that has them: "ruler:length=512".
    Raises: UnknownName for a parameter that no task of the group has.
    """
    chosen: list[str] = []
    for spec in specs:
        name, values = split_name(spec)
        names = TASKS.names()
        group = [] if name in names else [one for one in names if one.startswith(f"{name}/")]
        chosen += _members(name, group, values) if group else [spec]
    return chosen


def _members(name: str, group: list[str], values: dict[str, str]) -> list[str]:
    """The specs of a group's tasks, each with the values that it knows."""
    if not values:
        return group  # nothing to look up, so nothing is imported
    known = {one: {parameter.name for parameter in parameters(TASKS.get(one))} for one in group}
    everywhere = set().union(*known.values())
    for key in values:
        if key == FIRST:
            raise BadInput(f"'{values[key]}' has no name: write parameters as {name}:NAME=VALUE,NAME=VALUE")
        if key not in everywhere:
            raise UnknownName("parameter", key, everywhere, f"Asked of the tasks {name}/...")
    chosen = []
    for one in group:
        mine = ",".join(f"{key}={value}" for key, value in values.items() if key in known[one])
        chosen.append(f"{one}:{mine}" if mine else one)
    return chosen


def _decorator(registry: Registry, name: str, source: str) -> Callable[[Kind], Kind]:
    def admit(cls: Kind) -> Kind:
        if not (isinstance(cls, type) and issubclass(cls, registry.base)):
            raise PluginError(f"{registry.kind} '{name}': {cls!r} must extend {registry.base.__name__}")
        registry.add(name, cls)
        cls.name, cls.source = name, source  # type: ignore[attr-defined]
        return cls

    return admit


def _order(entry: EntryPoint) -> tuple[bool, str]:
    distribution = entry.dist.name if entry.dist else ""
    return (distribution != "kvbench", distribution)


def _distribution(entry: EntryPoint) -> str:
    if entry.dist is None:
        return "an unnamed distribution"
    return f"{entry.dist.name} {entry.dist.version} in {entry.dist.locate_file('')}"


def _file_of(cls: type) -> str:
    try:
        return inspect.getsourcefile(cls) or "this session"
    except (TypeError, OSError):
        return "this session"
