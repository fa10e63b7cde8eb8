"""What there is to run, for reading: `kvbench list` and `kvbench info`."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from ..contract.cell import FULL
from ..contract.pins import Pins
from ..contract.policy import Policy
from ..contract.registry import POLICIES, TASKS, Registry, parameters
from ..contract.spec import split_name
from ..contract.task import Task
from ..errors import BadInput, DataNotFound, UnknownName

FULL_DOC = (
    "full: the cache without eviction. Every run evaluates it: agreement and kl are measured against it."
)

OWN = "its own"  # a metric that is known only with the parameters


def policies() -> list[Table]:
    """Registered policies, then the broken ones. Imports all of them."""
    rows, broken = [], POLICIES.failures()
    for name in POLICIES.names():
        if name in broken:
            continue
        try:
            policy: Policy = POLICIES.parse(name)
            needs_attention = any(need.is_attention for need in policy.needs)
            rows.append([name, "yes" if needs_attention else "no", _pins(policy.pins), policy.source])
        except Exception as error:
            broken[name] = f"{POLICIES.target(name)}: {error}"
    listing = _table("policies", ["name", "needs attention", "native pins", "source"], rows)
    return [listing, *_broken_table(POLICIES, broken)]


def tasks() -> list[Table]:
    """Registered tasks, then the broken ones. Imports all of them."""
    rows, broken = [], TASKS.failures()
    for name in TASKS.names():
        if name not in broken:
            task: type[Task] = TASKS.get(name)
            rows.append([name, task.metric or OWN, *_defaults(name, task), task.data])
    listing = _table("tasks", ["name", "metric", "schedule", "question", "data here", "data"], rows)
    return [listing, *_broken_table(TASKS, broken)]


def models() -> list[Table]:
    """Short names of models, and what else `--model` takes."""
    from ..model.open import ALIASES

    rows = [[name, description] for name, description in ALIASES.items()]
    rows.append(["FOLDER", "a local folder in the transformers format"])
    rows.append(["ORG/NAME[@REVISION]", "a model of the hub"])
    return [_table("models", ["name", "what it is"], rows)]


def figures() -> list[Table]:
    """What `kvbench figure` draws. Imports all policies, which may bring figures of their own."""
    from ..show.figures import PAPER, kinds

    rows = [
        [kind.name, kind.paper, kind.shows, kind.takes, " ".join(f"--{option}" for option in kind.options)]
        for kind in kinds()
    ]
    return [_table("figures", ["name", f"in {PAPER}", "shows", "takes", "options"], rows)]


def entry(spec: str) -> list[Table | str]:
    """Everything to know about one policy or task. Raises: UnknownName, PluginError."""
    name, _ = split_name(spec)
    if name == FULL:
        return [FULL_DOC]
    found = [registry for registry in (POLICIES, TASKS) if name in registry.names()]
    if not found:
        raise UnknownName("policy or task", name, [FULL, *POLICIES.names(), *TASKS.names()])
    parts: list[Table | str] = []
    for registry in found:
        thing = registry.parse(spec) if _is_complete(registry, spec) else registry.get(name)
        facts = _policy_facts(thing) if isinstance(thing, Policy) else _task_facts(thing)
        facts.append(["registered by", f"{registry.target(name)}, {registry.where(name)}"])
        parts += [f"{registry.kind} {name}", inspect.getdoc(registry.get(name)) or "(no description)"]
        parts += [_parameters(thing), _table("", ["", ""], facts, header=False)]
    return parts


def _is_complete(registry: Registry, spec: str) -> bool:
    """Whether there is one thing to show: a bare name may lack values that must be given."""
    given = (p.default for p in parameters(registry.get(split_name(spec)[0])))
    return ":" in spec or dataclasses.MISSING not in given


def _policy_facts(policy: Policy) -> list[list[str]]:
    needs = ", ".join(sorted(need.value for need in policy.needs)) or "positions only"
    return [
        ["source", policy.source],
        ["needs", needs],
        ["native pins", _pins(policy.pins)],
        ["ranking", policy.ranking],
        ["applied repeatedly", policy.repeated],
        *([f"weights: {name}", json.dumps(value)] for name, value in policy.card.items()),
    ]


def _task_facts(task: Task | type[Task]) -> list[list[str]]:
    return [
        ["source", task.source],
        ["data", task.data],
        ["metric", task.metric or OWN],
        *([["data here", _availability(task)]] if isinstance(task, Task) else []),
        ["schedule", _schedule(task)],
        ["question", task.question],
        ["pins", task.pins],
    ]


def _parameters(thing: Any) -> Table | str:
    """Of an instance with its values, or of a class."""
    rows = []
    for parameter in parameters(thing if isinstance(thing, type) else type(thing)):
        given = parameter.default is dataclasses.MISSING
        default = "must be given" if given else str(parameter.default)
        value = default if isinstance(thing, type) else str(getattr(thing, parameter.name))
        shown = default if value == default else f"{default}, here {value}"
        rows.append([parameter.name, parameter.type_name, shown, parameter.source or "not stated"])
    return (
        _table("", ["parameter", "type", "default", "source of the default"], rows)
        if rows
        else "No parameters."
    )


def _broken_table(registry: Registry, reasons: dict[str, str]) -> list[Table]:
    title = f"broken {registry.group.split('.')[1]}"
    return [_table(title, ["name", "error"], [list(pair) for pair in reasons.items()])] if reasons else []


def _defaults(name: str, cls: type[Task]) -> list[str]:
    """Schedule, question and availability of data, with the default parameters."""
    try:
        task: Task = TASKS.parse(name)
    except BadInput:  # a parameter must be given, so nothing is known yet
        return ["as its parameters say", cls.question, "as its parameters say"]
    return [_schedule(task), task.question, _availability(task)]


def _schedule(task: Task | type[Task]) -> str:
    schedule, chunk = task.loop() if isinstance(task, Task) else (task.schedule, task.chunk)
    return f"{schedule}, {chunk} tokens" if chunk else schedule


def _availability(task: Task) -> str:
    """Whether the task runs on this machine without --data."""
    try:
        task.check(None)
    except DataNotFound:
        return "no: needs --data, or the hub"
    except BadInput as error:  # something else that it needs
        return f"no: {error}"
    return "yes"


def _pins(pins: Pins) -> str:
    return f"first {pins.first}, last {pins.last}" if pins.total else "none"


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], header: bool = True) -> Table:
    """Plain cells: text from plugins is never read as markup."""
    table = Table(title=title or None, title_justify="left", show_header=header, box=None, pad_edge=False)
    for position, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=position == 0)
    for row in rows:
        table.add_row(*map(Text, row))
    return table
