"""How good trained weights are: the eviction cost of their ranking on recorded traces.

In: traces and a policy that holds the weights. Out: one number.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..contract.calibration import Calibration, write_calibration
from ..contract.eviction import eviction_cost
from ..contract.policy import Policy
from ..contract.registry import spec_of
from .ranked import RecordedRanker, boundary
from .trace import TraceSet


def boundary_cost(traces: TraceSet, chosen: Iterable[int], policy: Policy) -> float:
    """Mean eviction cost where the question begins, nothing pinned, over traces, layers and KV heads."""
    ranker = RecordedRanker.of(traces, [policy])
    costs = []
    for index in chosen:
        (found,) = ranker.rank(traces[index], boundary(traces[index]))
        costs.append(eviction_cost(found.orders[spec_of(policy)], found.utility).mean())
    return torch.stack(costs).mean().item()


def finish_calibration(
    out: Path, made: Calibration, traces: TraceSet, measuring: Iterable[int], policy: Policy, started: float
) -> dict[str, Any]:
    """Write what was measured, see how it ranks held-out traces, and write that into its card, too.

    policy: one that reads `out`. started: when the work began, by `time.perf_counter`. Returns the card.
    """
    write_calibration(out, made)
    cost = boundary_cost(traces, measuring, policy)
    seconds = round(time.perf_counter() - started, 1)
    card = {**made.card, "validation_cost": cost, "seconds": seconds}
    write_calibration(out, replace(made, card=card))
    return card
