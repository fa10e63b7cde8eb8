"""`kvbench train --policy kvp`: from a folder of traces to a file of weights with its card."""

from __future__ import annotations

import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvbench.errors import WorkersLost
from kvbench.learn.trace import TraceSet
from kvbench.learn.training import Report, Trainer, card_of
from kvbench.store.results import check_writable
from kvbench.study.executors import Executor, LostJob

from .checkpoint import write_weights
from .course import TrainingSet
from .recipe import RECIPES, KVPRecipe
from .scorer import ScorerShape, ScorerWeights
from .train import train


def train_file(recipe: KVPRecipe, folder: Path, out: Path, report: Report) -> dict[str, Any]:
    """Train on the traces and write the weights; resumes from `out`.state when it is there.

    report: told progress in words. Returns the card: data, recipe, seed, steps, validation cost,
    model and its fingerprint.
    """
    traces = TraceSet(folder)
    check_writable(out.parent)
    started = time.perf_counter()

    last = [0, started]  # step and time of the last report

    def told(step: int, reward: float, cost: float | None) -> None:
        if cost is None:
            return
        now = time.perf_counter()
        rate = (now - last[1]) / max(1, step - last[0])
        last[:] = [step, now]
        left = rate * (recipe.steps - step)
        report(
            f"step {step}/{recipe.steps}  reward {reward:.3f}  validation cost {cost:.3f}  "
            f"{rate:.2f} s/step, {left:.0f} s left"
        )

    state = out.with_name(out.name + ".state")
    report("computing utilities of every visited split")
    lesson = TrainingSet.prepare(recipe, traces)
    last[1] = time.perf_counter()
    weights, cost = train(recipe, lesson, resume=state, report=told)
    card = make_card(recipe, traces, cost) | {"seconds": round(time.perf_counter() - started, 1)}
    write(out, weights, recipe, traces, card)
    state.unlink(missing_ok=True)
    return card


def train_sharded(
    recipe: KVPRecipe, folder: Path, out: Path, report: Report, executor: Executor
) -> dict[str, Any]:
    """`train_file` with the layers dealt out to workers: the same weights, because heads learn apart.

    Workers read the traces and keep their state beside `out`, so both lie where all machines see them;
    a layer whose worker died goes on from its state.
    """
    traces = TraceSet(folder)
    check_writable(out.parent)
    started = time.perf_counter()
    count = min(executor.width(), traces.layers)
    edges = [traces.layers * i // count for i in range(count + 1)]
    parts = [range(first, stop) for first, stop in pairwise(edges)]
    report(f"training {traces.layers} layers in {count} parts")
    work = partial(_train_part, recipe, out.absolute())
    results: dict[int, tuple[ScorerWeights, float]] = {}
    for index, found in executor.compute(partial(TraceSet, folder.absolute()), work, parts):
        layers = parts[index]
        if isinstance(found, LostJob):
            raise WorkersLost(f"{_told(layers)} could not be trained: {found.reason}")
        results[index] = found
        report(f"{_told(layers)}: validation cost {found[1]:.3f}")
    weights = ScorerWeights.joined([results[index][0] for index in range(count)])
    cost = sum(results[index][1] * len(parts[index]) for index in range(count)) / traces.layers
    card = make_card(recipe, traces, cost) | {"seconds": round(time.perf_counter() - started, 1)}
    write(out, weights, recipe, traces, card)
    for layers in parts:
        _state(out, layers).unlink(missing_ok=True)
    return card


def _train_part(recipe: KVPRecipe, out: Path, traces: TraceSet, layers: range) -> tuple[ScorerWeights, float]:
    lesson = TrainingSet.prepare(recipe, traces, layers)
    return train(recipe, lesson, resume=_state(out, layers))


def _told(layers: range) -> str:
    return f"layers {layers.start} to {layers.stop - 1}"


def _state(out: Path, layers: range) -> Path:
    return out.with_name(f"{out.name}.state-{layers.start}-{layers.stop}")


def make_card(recipe: KVPRecipe, traces: TraceSet, cost: float) -> dict[str, Any]:
    """What the weights are: model, data, recipe (with seed and steps) and validation cost."""
    return card_of("kvp", recipe, RECIPES["cpu"], traces) | {"validation_cost": cost}


def write(
    out: Path, weights: ScorerWeights, recipe: KVPRecipe, traces: TraceSet, card: dict[str, Any]
) -> None:
    """Write weights and card to one file."""
    shape = ScorerShape(traces.layers, traces.kv_heads, traces.dim, recipe.hidden, recipe.position)
    write_weights(out, weights, shape, card, traces.seen_text)


TRAINER = Trainer(recipes=RECIPES, train=train_file, train_sharded=train_sharded)
