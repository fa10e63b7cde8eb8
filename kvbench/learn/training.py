"""The contract of a trainer: recipes (dataclasses) and a function that turns traces into a weights file.

Also what trainers share: which traces they may learn from, where the future begins, the learning rate.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..contract.policy import Policy
from ..contract.spec import build, parameters
from ..errors import BadInput, UnknownName

if TYPE_CHECKING:
    from ..study.executors import Executor
    from .trace import TraceSet

Report = Callable[[str], None]
Split = Literal["uniform", "boundary", "mix"]
LEAST = 32  # tokens before a split point: below, there is nothing to rank


@dataclass(frozen=True)
class Trainer:
    """What `kvbench train --policy NAME` runs.

    recipes: named, complete settings; the first is the default. train: (recipe, traces folder, weights
    file, report) -> the card that is stored in the file. train_sharded: the same with an executor whose
    workers train parts that do not depend on each other; None where there are no such parts. option: the
    policy's parameter that names the file.
    """

    recipes: Mapping[str, Any]
    train: Callable[[Any, Path, Path, Report], dict[str, Any]]
    train_sharded: Callable[[Any, Path, Path, Report, Executor], dict[str, Any]] | None = None
    option: str = "weights"

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


def held_out(traces: TraceSet, share: float) -> tuple[list[int], list[int]]:
    """Indices of the traces to learn from and of those that only measure, the last ones.

    A draft that measures is not learned from at another length either. Raises BadInput for too few traces.
    """
    drafts = [info.draft for info in traces.infos]
    count = max(1, round(len(drafts) * share))
    kept = range(max(0, len(drafts) - count), len(drafts))
    measuring = {drafts[i] for i in kept}
    learned = [i for i in range(kept.start) if drafts[i] not in measuring]
    if not learned:
        raise BadInput(
            f"{len(drafts)} traces of {len(set(drafts))} different samples are too few to train and "
            "validate: record 2 or more"
        )
    return learned, list(kept)


def draw_visits(
    traces: TraceSet, chosen: list[int], count: int, split: Split, seed: int
) -> list[tuple[int, int]]:
    """`count` pairs (trace, split point) over the chosen traces, each trace as often as the others (+-1).

    The future begins at the split point: at the end of the context (boundary), anywhere (uniform), or
    half and half (mix).
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    visits: list[tuple[int, int]] = []
    while len(visits) < count:
        for i in torch.randperm(len(chosen), generator=generator).tolist():
            info = traces.infos[chosen[i]]
            draw = torch.rand(2, generator=generator).tolist()
            at_boundary = split == "boundary" or (split == "mix" and draw[0] < 0.5)
            least = min(LEAST, info.tokens - 2)
            n = info.context if at_boundary else least + int(draw[1] * (info.tokens - 1 - least))
            visits.append((chosen[i], max(1, min(n, info.tokens - 1))))
    return visits[:count]


class LearningRates(Protocol):
    """The part of a recipe that the learning rate follows."""

    @property
    def steps(self) -> int: ...
    @property
    def lr(self) -> float: ...
    @property
    def last_lr(self) -> float: ...
    @property
    def warmup(self) -> int: ...


def learning_rate(config: LearningRates, step: int) -> float:
    """Linear warm-up from 1% of lr, then cosine to last_lr."""
    if step < config.warmup:
        return config.lr * (0.01 + 0.99 * step / config.warmup)
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.last_lr + (config.lr - config.last_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def card_of(policy: str, recipe: Any, default: Any, traces: TraceSet) -> dict[str, Any]:
    """What the card of every trained policy says: model, data, how to make the weights again, and settings.

    default: the recipe that needs no options.
    """
    header = traces.header
    return {
        "policy": policy,
        "model": header["model"],
        "model_sha256": header["model_sha256"],
        "data": {key: header.get(key) for key in ("tasks", "length", "seed", "under", "response")},
        "traces": len(traces),
        "commands": commands(policy, recipe, default, traces),
        "recipe": asdict(recipe),
    }


def commands(policy: str, recipe: Any, default: Any, traces: TraceSet) -> list[str]:
    """The two commands that make a policy's weights again. default: the recipe that needs no options."""
    header = traces.header
    record = (
        f"kvbench trace --model {header['model']} --task {','.join(header['tasks'])} --samples {len(traces)}"
    )
    for option in ("length", "seed", "data", "under", "response"):
        if header.get(option) is not None:
            record += f" --{option} {header[option]}"
    record += " --hidden" if header.get("hidden") else ""
    defaults = asdict(default)
    changed = [f" --{k.replace('_', '-')} {v}" for k, v in asdict(recipe).items() if v != defaults[k]]
    return [
        f"{record} --out traces",
        f"kvbench train --policy {policy} --traces traces{''.join(changed)} --out FILE",
    ]
