"""Small seeded observations, and a plain reading of the ranking rule, for tests of policies."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.audit.specimen import random_parts
from kvbench.contract.observation import Observation
from kvbench.contract.pins import Pins

QUERY_HEADS, KV_HEADS, DIM = 8, 2, 8
NO_PINS = Pins()


def scene(
    slots: int,
    *,
    new: int | None = None,
    pins: Pins = NO_PINS,
    batch: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Observation:
    """One layer with random contents: 8 query heads, 2 KV heads, head size 8.

    new: tokens of the last chunk (default: all slots). The slots before them are then survivors of
    earlier evictions, a different third of the earlier positions in each row and KV head; those that
    `pins` protected are among them.
    """
    draw = torch.Generator().manual_seed(seed)
    new = slots if new is None else new
    old = slots - new
    shape = (batch, KV_HEADS, slots, DIM)
    luck = torch.rand(batch, KV_HEADS, 3 * old, generator=draw)
    luck[..., : pins.first] = 2.0
    luck[..., max(3 * old - pins.last, 0) :] += torch.arange(min(pins.last, 3 * old))  # the newest first
    earlier = luck.argsort(dim=-1, descending=True, stable=True)[..., :old].sort(-1).values
    latest = torch.arange(3 * old, 3 * old + new).expand(batch, KV_HEADS, new)
    future = torch.rand(1, KV_HEADS, 3 * old + new, generator=draw)
    second = torch.rand(batch, QUERY_HEADS, slots, generator=torch.Generator().manual_seed(seed))
    return Observation(
        layer=3,
        n_layers=6,
        keys=torch.randn(shape, generator=draw).to(dtype),
        values=torch.randn(shape, generator=draw).to(dtype),
        positions=torch.cat((earlier, latest), -1),
        new=new,
        seen=3 * old + new,
        scaling=DIM**-0.5,
        _draw=seed,
        _queries=torch.randn(batch, QUERY_HEADS, new, DIM, generator=draw).to(dtype),
        _hidden=torch.randn(batch, new, 16, generator=draw).to(dtype),
        _future=lambda: future,
        _parts=random_parts(DIM, QUERY_HEADS, other=False),
        _question=min(new, 3),
        _second=second,
    )


def ranked(score: Tensor, seen: Observation, pins: Pins) -> list[list[int]]:
    """The slots of each KV head of row 0 in the order they are kept, by sorting Python tuples."""
    orders = []
    for values, positions in zip(score[0].tolist(), seen.positions[0].tolist(), strict=True):

        def place(slot: int, values: list[float] = values, positions: list[int] = positions) -> tuple:
            position = positions[slot]
            if position < pins.first:
                return (0, position)
            if position >= seen.seen - pins.last:
                return (1, -position)
            return (2, -values[slot], -position)

        orders.append(sorted(range(len(values)), key=place))
    return orders
