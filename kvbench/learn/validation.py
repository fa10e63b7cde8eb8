"""How good a trained score is: the eviction cost of its ranking on recorded traces.

In: traces and a score of their keys and values. Out: one number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..contract.eviction import eviction_cost
from ..contract.pins import Pins
from ..engine.order import rank
from .ranked import boundary
from .trace import TraceSet, utilities


def boundary_cost(
    traces: TraceSet, chosen: Iterable[int], score: Callable[[int, Tensor, Tensor], Tensor]
) -> float:
    """Mean eviction cost where the question begins, nothing pinned, over traces, layers and KV heads.

    score: (layer, keys, values) -> (kv_head, slot); keys and values (kv_head, slot, dim) float32.
    """
    costs = []
    for index in chosen:
        (n,) = boundary(trace := traces[index])
        for layer in range(traces.layers):
            q, k, v = (part.float() for part in trace.layer(layer))
            (utility,) = utilities(q, k, trace.info.scaling, [n])
            positions = torch.arange(n).expand(1, len(k), -1)
            order = rank(score(layer, k[:, :n], v[:, :n])[None], positions, Pins(), n)[0]
            costs.append(eviction_cost(order, utility).mean())
    return torch.stack(costs).mean().item()
