"""`kvbench train --policy judgeq`: from a folder of traces to a file of soft tokens with its card."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from kvbench.contract.policy import TrainedFor
from kvbench.learn.trace import TraceSet
from kvbench.learn.training import Report, Trainer, card_of
from kvbench.store.results import check_writable

from .checkpoint import SoftTokens, write_tokens
from .curve import draw
from .lesson import model_of
from .recipe import RECIPES, JudgeQRecipe
from .train import Curve, train


def train_file(recipe: JudgeQRecipe, folder: Path, out: Path, report: Report) -> dict[str, Any]:
    """Train on the traces, write the soft tokens, and draw the loss as a figure beside them (.png).

    Resumes from `out`.state when it is there. Returns the card: data, recipe, seed, steps, curve,
    validation cost, model and its fingerprint.
    """
    traces = TraceSet(folder)
    check_writable(out.parent)
    started = time.perf_counter()
    report("reading the model and the held-out traces")
    lm = model_of(traces)
    last = [0, time.perf_counter()]  # step and time of the last report

    def told(step: int, curve: Curve) -> None:
        now = time.perf_counter()
        rate = (now - last[1]) / max(1, step - last[0])
        last[:] = [step, now]
        ahead = f"  {rate:.2f} s/step, {rate * (recipe.steps - step):.0f} s left" if step else ""
        report(
            f"step {step}/{recipe.steps}  validation loss {curve.loss[-1]:.4f}  "
            f"cost {curve.cost[-1]:.3f}{ahead}"
        )

    state = out.with_name(out.name + ".state")
    rows, curve = train(recipe, traces, lm, resume=state, report=told)
    card = make_card(recipe, traces, curve) | {"seconds": round(time.perf_counter() - started, 1)}
    fits = TrainedFor(traces.layers, traces.kv_heads, traces.dim, traces.header["model_sha256"])
    write_tokens(out, SoftTokens(rows, fits, card, traces.seen_text))
    report(f"loss curve: {draw(curve, out.with_suffix('.png'))}")
    state.unlink(missing_ok=True)
    return card


def make_card(recipe: JudgeQRecipe, traces: TraceSet, curve: Curve) -> dict[str, Any]:
    """What the soft tokens are: model, data, recipe (with seed and steps), validation loss and cost."""
    return card_of("judgeq", recipe, RECIPES["cpu"], traces) | {
        "curve": {"steps": curve.steps, "loss": curve.loss, "cost": curve.cost},
        "untrained_cost": curve.cost[0],
        "validation_cost": curve.cost[-1],
    }


TRAINER = Trainer(recipes=RECIPES, train=train_file)
