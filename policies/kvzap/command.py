"""`kvbench train --policy kvzap`: from a folder of traces to a file of weights with its card.

The contexts of the traces are read again, with KVzip's repetition behind them; see `learn.reread`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from kvbench.contract.calibration import Calibration, write_calibration
from kvbench.contract.eviction import eviction_cost
from kvbench.contract.policy import TrainedFor
from kvbench.errors import BadInput
from kvbench.learn.ranked import open_recorder
from kvbench.learn.reread import Reread, reread
from kvbench.learn.trace import Trace, TraceSet, utilities
from kvbench.learn.training import Report, Trainer, card_of, held_out
from kvbench.model.lm import LoadedModel
from kvbench.policies.kvzip import KVzip
from kvbench.store.results import check_writable

from .fit import MLP, Fit, Linear
from .policy import PARTS, predict
from .recipe import RECIPES, KVzapRecipe

TEACHER = KVzip(chunk=1 << 20, plus=True)  # in one piece: the softmax of the official targets
FLOOR = 1e-12  # below which a target's logarithm is not taken


def train_file(recipe: KVzapRecipe, folder: Path, out: Path, report: Report) -> dict[str, Any]:
    """Fit the weights to the logarithm of KVzip+'s scores. Returns the card, with the eviction cost and the
    share of variance explained on the traces that were held out."""
    traces = TraceSet(folder)
    check_writable(out.parent)
    if not all(info.ids for info in traces.infos):
        raise BadInput(f"{folder} does not say which tokens it was recorded from: record it again")
    started = time.perf_counter()
    learned, measuring = held_out(traces, recipe.validation)
    lm = open_recorder(traces).load()
    draw = torch.Generator().manual_seed(recipe.seed)
    fit: Fit = MLP(recipe) if recipe.hidden else Linear(recipe)
    for count, index in enumerate(learned, start=1):
        found = context_of(lm, traces[index])
        at = torch.randperm(found.score.shape[2], generator=draw)[: recipe.tokens]
        fit.add([x[at] for x in found.hidden], found.score[:, :, at].clamp_min(FLOOR).log())
        if count % 10 == 0 or count == len(learned):
            seconds = time.perf_counter() - started
            report(
                f"read {count}/{len(learned)} contexts, {seconds / count * (len(learned) - count):.0f} s left"
            )
    tensors = fit.finish(report)
    card = card_of("kvzap", recipe, RECIPES["linear"], traces) | validated(lm, traces, measuring, tensors)
    card["seconds"] = round(time.perf_counter() - started, 1)
    fits = TrainedFor(traces.layers, traces.kv_heads, traces.dim, traces.header["model_sha256"])
    write_calibration(out, Calibration(dict(zip(PARTS, tensors, strict=True)), fits, card, traces.seen_text))
    return card


def context_of(lm: LoadedModel, trace: Trace) -> Reread:
    """Hidden states and targets of the tokens before the question."""
    return reread(lm, trace.info.ids[: max(1, trace.info.context)], TEACHER)


def validated(
    lm: LoadedModel, traces: TraceSet, chosen: list[int], tensors: tuple[torch.Tensor, ...]
) -> dict[str, float]:
    """Mean eviction cost where the question begins, and the mean over layers and heads of the share of the
    targets' variance that is explained."""
    costs, shares = [], []
    for index in chosen:
        trace = traces[index]
        found = context_of(lm, trace)
        n = found.score.shape[2]
        for layer, hidden in enumerate(found.hidden):
            score = predict(tuple(part[layer] for part in tensors), hidden).T  # (kv_head, token)
            q, k, _ = (part.float() for part in trace.layer(layer))
            (utility,) = utilities(q, k, trace.info.scaling, [n])
            order = n - 1 - score.flip(-1).argsort(dim=-1, descending=True, stable=True)
            costs.append(eviction_cost(order, utility).mean())
            wanted = found.score[layer].clamp_min(FLOOR).log()
            shares.append(1 - ((score - wanted).square().mean(-1) / wanted.var(-1, correction=0)).mean())
    return {
        "validation_cost": torch.stack(costs).mean().item(),
        "explained": torch.stack(shares).mean().item(),
    }


TRAINER = Trainer(recipes=RECIPES, train=train_file)
