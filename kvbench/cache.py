"""The KV cache of many rows at once: preallocated, written in place, compacted by gathering.

Rows (kept sets under comparison) that hold equally many slots share a bucket, so nothing is padded:
a step reads exactly the pairs that are kept. Layers are independent tensors on their own devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Kept:
    """One row after an eviction: which row it comes from and the slots that stay.

    slots: per layer (kv_head, kept) int64, ascending.
    """

    source: int
    slots: list[Tensor]


class Bucket:
    """Rows with equally many slots.

    keys, values: per layer (row, kv_head, capacity, dim). positions: per layer (row, kv_head,
    capacity) int64, the original position of each slot, ascending. filled: per layer, slots in use.
    rows: the rows' place in the batch.
    """

    def __init__(self, rows: range, layers: int) -> None:
        self.rows = rows
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers
        self.positions: list[Tensor | None] = [None] * layers
        self.filled = [0] * layers
        self.capacity = [0] * layers

    def allocate(self, layer: int, capacity: int, keys: Tensor, values: Tensor) -> None:
        """Room for `capacity` slots, shaped and placed like these keys and values (row, kv_head, ., dim)."""
        shape = (len(self.rows), keys.shape[1], capacity)
        self.keys[layer] = keys.new_empty(*shape, keys.shape[-1])
        self.values[layer] = values.new_empty(*shape, values.shape[-1])
        self.positions[layer] = torch.empty(shape, dtype=torch.int64, device=keys.device)
        self.capacity[layer] = capacity

    def append(self, layer: int, keys: Tensor, values: Tensor, start: int) -> int:
        """Write new tokens (row, kv_head, new, dim) at positions start, start + 1, ...

        Returns how many slots were there before.
        """
        old, new = self.filled[layer], keys.shape[2]
        if self.keys[layer] is None:
            self.allocate(layer, self.capacity[layer], keys, values)
        if old + new > self.capacity[layer]:
            self._grow(layer, max(old + new, self.capacity[layer] * 3 // 2))
        self.filled[layer] = old + new
        new_keys, new_values, positions = self.view(layer)
        new_keys[:, :, old:] = keys
        new_values[:, :, old:] = values
        positions[:, :, old:] = torch.arange(start, start + new, device=keys.device)
        return old

    def _grow(self, layer: int, capacity: int) -> None:
        """Move a layer into larger tensors; the room asked for at creation makes this rare."""
        old = self.view(layer)
        self.allocate(layer, capacity, old[0], old[1])
        for source, target in zip(old, self.view(layer), strict=True):
            target.copy_(source)

    def view(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and positions in use: (row, kv_head, slot, dim), same, (row, kv_head, slot)."""
        keys, values, positions = self.keys[layer], self.values[layer], self.positions[layer]
        assert keys is not None
        assert values is not None
        assert positions is not None
        filled = self.filled[layer]
        return keys[:, :, :filled], values[:, :, :filled], positions[:, :, :filled]


class Cache:
    """Buckets of rows, in batch order. `room`: slots preallocated beyond those in use."""

    def __init__(self, buckets: list[Bucket], layers: int) -> None:
        self.buckets = buckets
        self.layers = layers

    @classmethod
    def empty(cls, layers: int, capacity: int) -> Cache:
        """One row without tokens; layers take shape and device from the first keys written."""
        bucket = Bucket(range(1), layers)
        bucket.capacity = [capacity] * layers
        return cls([bucket], layers)

    @property
    def rows(self) -> int:
        return sum(len(bucket.rows) for bucket in self.buckets)

    def mark(self) -> list[list[int]]:
        """The present lengths, to come back to with `rewind`."""
        return [list(bucket.filled) for bucket in self.buckets]

    def rewind(self, mark: list[list[int]], tokens: int = 0) -> None:
        """Forget what was appended since `mark`, except the first `tokens` tokens."""
        for bucket, filled in zip(self.buckets, mark, strict=True):
            bucket.filled = [length + tokens for length in filled]

    def locate(self, row: int) -> tuple[Bucket, int]:
        """The bucket of a row and the row's index in it."""
        for bucket in self.buckets:
            if row in bucket.rows:
                return bucket, row - bucket.rows.start
        raise IndexError(row)

    def compact(self, kept: Sequence[Kept], room: int) -> tuple[Cache, list[int]]:
        """A new cache whose row i holds only kept[i]; `room` more slots are preallocated.

        Rows are reordered so that equally long ones are neighbours. Returns the cache and, for each
        kept set, its row. This cache is not touched.
        """
        sizes = [tuple(slots.shape[-1] for slots in item.slots) for item in kept]
        order = sorted(range(len(kept)), key=lambda i: (sizes[i], self._bucket_index(kept[i].source), i))
        buckets: list[Bucket] = []
        place = [0] * len(kept)
        start = 0
        while start < len(order):
            stop = start
            while stop < len(order) and sizes[order[stop]] == sizes[order[start]]:
                place[order[stop]] = stop
                stop += 1
            buckets.append(self._gathered(range(start, stop), [kept[i] for i in order[start:stop]], room))
            start = stop
        return Cache(buckets, self.layers), place

    def _bucket_index(self, row: int) -> int:
        return next(i for i, bucket in enumerate(self.buckets) if row in bucket.rows)

    def _gathered(self, rows: range, kept: list[Kept], room: int) -> Bucket:
        """One new bucket; consecutive rows from one source bucket are gathered in one indexing."""
        bucket = Bucket(rows, self.layers)
        runs: list[tuple[Bucket, list[int]]] = []
        for i, item in enumerate(kept):
            source, _ = self.locate(item.source)
            if runs and runs[-1][0] is source:
                runs[-1][1].append(i)
            else:
                runs.append((source, [i]))
        for layer in range(self.layers):
            size = kept[0].slots[layer].shape[-1]
            for source, members in runs:
                keys, values, positions = source.view(layer)
                if bucket.keys[layer] is None:
                    bucket.allocate(layer, size + room, keys, values)
                    bucket.filled[layer] = size
                slots = torch.stack([kept[i].slots[layer] for i in members]).to(keys.device)
                row = torch.tensor([kept[i].source - source.rows.start for i in members], device=keys.device)
                head = torch.arange(keys.shape[1], device=keys.device)
                index = (row[:, None, None], head[None, :, None], slots)
                part = slice(members[0], members[-1] + 1)
                for target, origin in zip(bucket.view(layer), (keys, values, positions), strict=True):
                    target[part] = origin[index]
        return bucket

    def take_rows(self, rows: Sequence[int]) -> Cache:
        """A new cache with these rows only, in this order, which must be ascending."""
        buckets = []
        start = 0
        for bucket in self.buckets:
            inside = [row - bucket.rows.start for row in rows if row in bucket.rows]
            if not inside:
                continue
            part = Bucket(range(start, start + len(inside)), self.layers)
            start += len(inside)
            part.filled = list(bucket.filled)
            part.capacity = list(bucket.capacity)
            for layer in range(self.layers):
                for name in ("keys", "values", "positions"):
                    tensor = getattr(bucket, name)[layer]
                    index = torch.tensor(inside, device=tensor.device)
                    getattr(part, name)[layer] = tensor.index_select(0, index)
            buckets.append(part)
        return Cache(buckets, self.layers)
