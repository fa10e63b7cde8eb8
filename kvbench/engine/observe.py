"""From a layer that is being read to what policies see of it: some rows of a bucket, as one batch.

In: a layer's new queries and the cache behind them. Out: an Observation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..contract.observation import Observation, ProbeLayer
from ..contract.second_pass import ContextText
from .attention import Layer
from .bind import BoundPolicies


@dataclass(frozen=True, eq=False)
class Moment:
    """When tokens compete. seen: tokens read so far, evicted ones included. new: those of the last chunk.

    draw: key of random draws. future: u per layer, see `FutureAttention`; None while it is not known.
    question: tokens of the question among the last that were read; 0 while it is withheld. text: the whole
    context, for policies with a second pass; None where it is not known.
    """

    seen: int
    new: int
    draw: int
    future: Mapping[int, Tensor] | None = None
    question: int = 0
    text: ContextText | None = None


def observe_rows(
    bound: BoundPolicies, layer: Layer, rows: Sequence[int], moment: Moment, hidden: Tensor | None = None,
    probe: int = 0, second: Tensor | None = None,
) -> Observation:  # fmt: skip
    """What policies see of these rows of the layer's bucket, by their place in the batch, ascending.

    hidden: what the attention module received, all rows of the batch. probe: extra tokens of this pass; they
    stand last in the cache, and do not compete. second: attention of a second pass, all rows of the bucket.
    """
    geometry = bound.lm.geometry
    first = layer.bucket.rows.start
    inside = [row - first for row in rows]
    stored = layer.bucket.view(layer.index)
    slots = stored[0].shape[2] - probe
    keys, values, positions = (_counted(_take(tensor[:, :, :slots], inside)) for tensor in stored)
    queries = _take(layer.queries, inside)
    future = None if moment.future is None else moment.future[layer.index]
    return Observation(
        layer=layer.index,
        n_layers=geometry.layers,
        full_index=geometry.full_layers.index(layer.index),
        keys=keys,
        values=values,
        positions=positions,
        new=moment.new,
        seen=moment.seen,
        scaling=layer.scaling,
        _draw=moment.draw,
        _queries=queries[:, :, probe:],
        _hidden=None if hidden is None else _take(hidden, rows),
        _future=None if future is None else lambda: future,
        _parts=bound.parts.get(layer.index),
        _question=moment.question,
        _second=None if second is None else _take(second, inside),
        _probe=ProbeLayer(queries, _take(stored[0][:, :, slots:], inside)) if probe else None,
    )


def _take(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Rows of a batch: a view of neighbours, else a copy."""
    if rows[-1] - rows[0] == len(rows) - 1:
        return tensor[rows[0] : rows[-1] + 1]
    return tensor[torch.tensor(rows).to(tensor.device, non_blocking=True)]


def _counted(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of which torch counts the writes, also in inference mode."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(tensor)  # type: ignore[call-overload]
