"""The configuration of a run: frozen, and validated once, before any model loads."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ..contract.pins import parse_pins
from ..contract.spec import parse_template_args
from ..errors import BadInput


@dataclass(frozen=True)
class Protocol:
    """A named set of rules. None leaves a rule to the task."""

    question: Literal["withheld", "seen"] | None
    pins: str | None


# paper: question as in the task's paper, pins as in each policy's paper.
# controlled: question withheld, the same pins for every policy.
PROTOCOLS = {"paper": Protocol(None, None), "controlled": Protocol("withheld", "4,16")}


@dataclass(frozen=True)
class RunConfig:
    """One `kvbench run`.

    policies, tasks: names with parameters (`snapkv:window=64`); "all" is every policy.
    budgets: KV pairs kept per KV head per layer, pins included. limit: samples per task, None for all.
    protocol: a named set of rules (PROTOCOLS). pins, question, schedule, chunk: override the protocol;
    None takes the protocol's value, else the task's. data: jsonl file in the hub's schema. draft: verify
    likely answers in one pass, without changing results. seeds: several seeds instead of `seed`, each
    with its own rows. out: run folder; None derives one from the configuration, so repeating a command
    finds its rows. fresh: policies and tasks (names) whose rows in the folder are computed again.
    template_args: "KEY=VALUE", given to the chat template. force_weights: accept learned weights for another
    model of the same shape; every row of theirs says so.

    Raises: BadInput for values that are out of range or do not go together.
    """

    policies: tuple[str, ...]
    tasks: tuple[str, ...]
    budgets: tuple[int, ...]
    model: str = "smollm2-135m"
    limit: int | None = None
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    protocol: str = "paper"
    schedule: Literal["prefill", "chunked"] | None = None
    chunk: int | None = None
    pins: str | None = None
    question: Literal["withheld", "seen"] | None = None
    template: Literal["auto", "chat", "none"] = "auto"
    data: str | None = None
    draft: bool = True
    out: str | None = None
    seeds: tuple[int, ...] = ()
    fresh: tuple[str, ...] = ()
    template_args: tuple[str, ...] = ()
    force_weights: bool = False

    def __post_init__(self) -> None:
        for name in ("policies", "tasks", "budgets"):
            value = getattr(self, name)
            alone = isinstance(value, str) or not isinstance(value, Iterable)
            object.__setattr__(self, name, tuple([value] if alone else value))
            if not getattr(self, name):
                raise BadInput(f"no {name} given: name at least one")
        for name in ("fresh", "template_args"):
            value = getattr(self, name)
            object.__setattr__(self, name, tuple([value] if isinstance(value, str) else value))
        parse_template_args(self.template_args)
        for name in ("model", "data", "out"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, os.fspath(getattr(self, name)))
        budgets = {_whole("budget", one, 1, "a whole number of KV pairs") for one in self.budgets}
        object.__setattr__(self, "budgets", tuple(sorted(budgets)))
        seeds = [_whole("seed", one, 0, "a whole number") for one in self.seeds]
        object.__setattr__(self, "seeds", tuple(dict.fromkeys(seeds)))
        object.__setattr__(self, "seed", _whole("seed", self.seed, 0, "a whole number"))
        if self.seeds and self.seed:
            raise BadInput(f"--seed {self.seed} and --seeds: give one of them")
        for name, what in (("limit", "a number of samples"), ("chunk", "a number of tokens")):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _whole(f"--{name}", getattr(self, name), 1, what))
        if self.chunk is not None and self.schedule == "prefill":
            raise BadInput("--chunk goes with --schedule chunked; prefill reads the context in one piece")
        self._check_choice("protocol", tuple(PROTOCOLS))
        self._check_choice("schedule", (None, "prefill", "chunked"))
        self._check_choice("question", (None, "withheld", "seen"))
        self._check_choice("template", ("auto", "chat", "none"))
        self._check_choice("dtype", ("auto", "float32", "bfloat16"))
        asked = self.pins or PROTOCOLS[self.protocol].pins
        pins = parse_pins(asked) if asked else None
        if pins is not None and pins.total > self.budgets[0]:
            raise BadInput(
                f"budget {self.budgets[0]} < pins {pins.first} + {pins.last} = {pins.total}: "
                f"raise the budget to {pins.total} or pin fewer tokens"
            )

    def _check_choice(self, name: str, allowed: tuple[str | None, ...]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            names = ", ".join(text for text in allowed if text)
            raise BadInput(f"--{name} '{value}': choose one of {names}")

    def of_each_seed(self) -> list[RunConfig]:
        """One configuration per seed."""
        return [replace(self, seed=seed, seeds=()) for seed in self.seeds or (self.seed,)]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _whole(name: str, value: Any, least: int, what: str) -> int:
    """A whole number that rows can hold, also one of numpy. Raises: BadInput."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if isinstance(value, bool) or not least <= number < 2**63:
        raise BadInput(f"{name} {value}: must be {what}, from {least} to 2**63 - 1")
    return number
