"""The contract of a trainer: recipes (dataclasses) and a function that turns traces into a weights file."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .errors import BadInput, UnknownName
from .policy import Policy
from .spec import build, parameters

Report = Callable[[str], None]


@dataclass(frozen=True)
class Trainer:
    """What `kvbench train --policy NAME` runs.

    recipes: named, complete settings; the first is the default. train: (recipe, traces folder, weights
    file, report) -> the card that is stored in the file.
    """

    recipes: Mapping[str, Any]
    train: Callable[[Any, Path, Path, Report], dict[str, Any]]

    def recipe(self, name: str | None, changes: Mapping[str, str]) -> Any:
        """A recipe with some settings changed, values as written on the command line.

        Raises UnknownName for a recipe or setting that is not there, BadInput for a bad value.
        """
        chosen = name or next(iter(self.recipes))
        if chosen not in self.recipes:
            raise UnknownName("recipe", chosen, self.recipes)
        base = self.recipes[chosen]
        parsed = build(type(base), dict(changes), f"recipe '{chosen}'")
        known = [parameter.name for parameter in parameters(type(base))]
        return replace(base, **{key: getattr(parsed, key) for key in changes if key in known})


def trainer_of(policy: type[Policy]) -> Trainer:
    """The trainer of a policy class. Raises BadInput for a policy that has nothing to learn."""
    if policy.trainer is None:
        raise BadInput(f"policy '{policy.name}' has nothing to train; policies that learn declare a trainer")
    module, _, name = policy.trainer.partition(":")
    found = getattr(importlib.import_module(module), name)
    assert isinstance(found, Trainer), policy.trainer
    return found
