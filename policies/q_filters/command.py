"""`kvbench train --policy q_filters`: from a folder of traces to a file of directions with its card."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvbench.contract.calibration import Calibration
from kvbench.contract.policy import TrainedFor
from kvbench.errors import BadInput
from kvbench.learn.trace import TraceSet
from kvbench.learn.training import Report, Trainer, card_of, held_out
from kvbench.learn.validation import finish_calibration
from kvbench.store.results import check_writable

from .policy import FILTERS, QFilters


@dataclass(frozen=True)
class QFiltersRecipe:
    """queries: of each head, drawn evenly from the traces. validation: share of traces that only measure."""

    queries: int = 3000
    seed: int = 0
    validation: float = 0.1

    def __post_init__(self) -> None:
        if self.queries < 2 or not 0 < self.validation < 1:
            raise BadInput(
                f"queries {self.queries}, validation {self.validation}: use 2 queries or more, validation "
                "between 0 and 1"
            )


RECIPES = {"cpu": QFiltersRecipe()}


def train_file(recipe: QFiltersRecipe, folder: Path, out: Path, report: Report) -> dict[str, Any]:
    """Measure the filters, and their eviction cost on the traces that were held out. Returns the card."""
    traces = TraceSet(folder)
    check_writable(out.parent)
    started = time.perf_counter()
    learned, measuring = held_out(traces, recipe.validation)
    report(f"{recipe.queries} queries of every head from {len(learned)} traces")
    filters = torch.stack(
        [direction(rows_of(traces, learned, layer, recipe)) for layer in range(traces.layers)]
    )
    filters = filters.unflatten(1, (traces.kv_heads, -1)).mean(2)  # (layer, kv_head, dim)
    fits = TrainedFor(traces.layers, traces.kv_heads, traces.dim, traces.header["model_sha256"])
    made = Calibration(
        {FILTERS: filters}, fits, card_of("q_filters", recipe, RECIPES["cpu"], traces), traces.seen_text
    )
    return finish_calibration(out, made, traces, measuring, QFilters(weights=str(out)), started)


def rows_of(traces: TraceSet, chosen: list[int], layer: int, recipe: QFiltersRecipe) -> Tensor:
    """Queries of a layer, as many of each trace as of the others (+-1): (query_head, row, dim) float32."""
    draw = torch.Generator().manual_seed(recipe.seed)
    found = []
    for place, index in enumerate(chosen):
        queries = traces[index].layer(layer)[0]
        count = (place + 1) * recipe.queries // len(chosen) - place * recipe.queries // len(chosen)
        at = torch.randperm(queries.shape[1], generator=draw)[:count]
        found.append(queries[:, at].float())
    return torch.cat(found, 1)


def direction(queries: Tensor) -> Tensor:
    """(head, row, dim) -> (head, dim): the first right singular vector, with the sign of most rows."""
    vector = torch.linalg.svd(queries, full_matrices=False).Vh[:, 0]
    along = (queries @ vector[..., None])[..., 0]
    sign = torch.where((along > 0).float().mean(-1, keepdim=True) > 0.5, 1.0, -1.0)
    return vector * sign


TRAINER = Trainer(recipes=RECIPES, train=train_file)
