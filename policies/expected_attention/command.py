"""`kvbench train --policy expected_attention`: mean and covariance of queries, from a folder of traces."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvbench.contract.calibration import Calibration
from kvbench.contract.policy import TrainedFor
from kvbench.contract.query_moments import QueryMoments, streamed_moments
from kvbench.errors import BadInput
from kvbench.learn.ranked import open_recorder
from kvbench.learn.trace import TraceSet
from kvbench.learn.training import Report, Trainer, card_of, held_out
from kvbench.learn.validation import finish_calibration
from kvbench.model.lm import LoadedModel
from kvbench.store.results import check_writable

from .policy import MOMENTS, ExpectedAttention


@dataclass(frozen=True)
class StatsRecipe:
    """sinks: first tokens of every trace that are left out. validation: share of traces that only measure."""

    sinks: int = 4
    validation: float = 0.1

    def __post_init__(self) -> None:
        if self.sinks < 0 or not 0 < self.validation < 1:
            raise BadInput(
                f"sinks {self.sinks}, validation {self.validation}: use sinks from 0 on, validation between "
                "0 and 1"
            )


RECIPES = {"cpu": StatsRecipe()}


def train_file(recipe: StatsRecipe, folder: Path, out: Path, report: Report) -> dict[str, Any]:
    """Measure the statistics, and their eviction cost on the traces that were held out. Returns the card."""
    traces = TraceSet(folder)
    check_writable(out.parent)
    started = time.perf_counter()
    learned, measuring = held_out(traces, recipe.validation)
    report(f"mean and covariance of the queries of {len(learned)} traces")
    lm = open_recorder(traces).load()
    moments = torch.stack(
        [measured(traces, learned, layer, recipe.sinks, lm) for layer in range(traces.layers)]
    )
    fits = TrainedFor(traces.layers, traces.kv_heads, traces.dim, traces.header["model_sha256"])
    card = card_of("expected_attention", recipe, RECIPES["cpu"], traces)
    made = Calibration({MOMENTS: moments}, fits, card, traces.seen_text)
    return finish_calibration(out, made, traces, measuring, ExpectedAttention(stats=str(out)), started)


def measured(traces: TraceSet, chosen: list[int], layer: int, sinks: int, lm: LoadedModel) -> Tensor:
    """Of all queries of a layer before their rotation, sinks left out: (query_head, 1 + dim, dim) float32."""
    rotary = lm.parts[lm.geometry.full_layers[layer]].rotary
    assert rotary is not None
    count, first, second = 0, torch.zeros(()), torch.zeros(())
    for index in chosen:
        queries = traces[index].layer(layer)[0][None, :, sinks:].float()
        tables = rotary.read(sinks, sinks + queries.shape[2], queries.device)
        found = streamed_moments(queries, tables)[0].double()
        one = QueryMoments(found[:, 0], found[:, 1:])
        first, second = first + queries.shape[2] * one.mean, second + queries.shape[2] * one.second
        count += queries.shape[2]
    mean, square = first / count, second / count
    return torch.cat([mean[:, None], square - mean[:, :, None] * mean[:, None, :]], 1).float()


TRAINER = Trainer(recipes=RECIPES, train=train_file, option="stats")
