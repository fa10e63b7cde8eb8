"""The KV cache of many rows at once: preallocated, written in place, compacted by gathering.

In: new keys and values, and the slots that stay. Out: views of what is held, and compacted caches.
Rows (kept sets under comparison) that hold equally many slots share a bucket, so nothing is padded:
a step reads exactly the pairs that are kept. Layers are independent tensors on their own devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeptSet:
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

    def append(self, layer: int, keys: Tensor, values: Tensor, positions: Tensor) -> int:
        """Write new tokens (row, kv_head, new, dim) at original positions (new,).

        Returns how many slots were there before.
        """
        old, new = self.filled[layer], keys.shape[2]
        if self.keys[layer] is None:
            self.allocate(layer, self.capacity[layer], keys, values)
        if old + new > self.capacity[layer]:
            self._grow(layer, max(old + new, self.capacity[layer] * 3 // 2))
        self.filled[layer] = old + new
        new_keys, new_values, new_positions = self.view(layer)
        new_keys[:, :, old:] = keys
        new_values[:, :, old:] = values
        new_positions[:, :, old:] = positions.to(keys.device, non_blocking=True)
        return old

    def _grow(self, layer: int, capacity: int) -> None:
        """Move a layer into larger tensors; the room asked for at creation makes this rare."""
        old, length = self.whole(layer), self.capacity[layer]
        self.allocate(layer, capacity, old[0], old[1])
        for source, target in zip(old, self.whole(layer), strict=True):
            target[:, :, :length] = source

    def reserve(self, tokens: int) -> None:
        """Make room for so many tokens behind those in use."""
        for layer, filled in enumerate(self.filled):
            if self.keys[layer] is None:
                self.capacity[layer] = max(self.capacity[layer], tokens)
            elif filled + tokens > self.capacity[layer]:
                self._grow(layer, filled + tokens)

    def move(self, paths: Sequence[Sequence[int]], to: int) -> None:
        """Bring tokens that were read behind the end into one piece.

        paths: per row the places of its tokens behind the end. They come to stand from `to` on, in order.
        """
        longest = max(map(len, paths))
        inside = list(range(to, to + longest))
        if all(list(path) == inside[: len(path)] for path in paths):
            return
        slots = torch.tensor([[*path, *inside[len(path) :]] for path in paths])
        for layer, filled in enumerate(self.filled):
            for tensor in self.whole(layer):
                row = torch.arange(len(self.rows), device=tensor.device)[:, None]
                taken = tensor.transpose(1, 2)[
                    row, filled + slots.to(tensor.device)
                ]  # (row, token, kv_head, .)
                tensor[:, :, filled + to : filled + to + longest] = taken.transpose(1, 2)

    def take(self, offsets: Sequence[int], first: int) -> Bucket:
        """These rows, copied; the copy's first row is row `first` of its batch."""
        return self._derived(
            first, len(offsets), lambda tensor: tensor[torch.tensor(offsets).to(tensor.device)]
        )

    def part(self, start: int, stop: int, first: int) -> Bucket:
        """The rows start..stop-1, sharing this bucket's tensors, with lengths of their own."""
        return self._derived(first, stop - start, lambda tensor: tensor[start:stop])

    def _derived(self, first: int, count: int, part: Callable[[Tensor], Tensor]) -> Bucket:
        derived = Bucket(range(first, first + count), len(self.filled))
        derived.filled, derived.capacity = list(self.filled), list(self.capacity)
        for layer in range(len(self.filled)):
            keys, values, positions = self.whole(layer)
            derived.keys[layer], derived.values[layer] = part(keys), part(values)
            derived.positions[layer] = part(positions)
        return derived

    def whole(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and positions up to the capacity."""
        keys, values, positions = self.keys[layer], self.values[layer], self.positions[layer]
        assert keys is not None
        assert values is not None
        assert positions is not None
        return keys, values, positions

    def view(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and positions in use: (row, kv_head, slot, dim), same, (row, kv_head, slot)."""
        filled = self.filled[layer]
        keys, values, positions = self.whole(layer)
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

    def compact(self, kept: Sequence[KeptSet], room: int) -> tuple[Cache, list[int]]:
        """A new cache whose row i holds only kept[i]; `room` more slots are preallocated.

        Rows are reordered so that equally long ones are neighbours. Returns the cache and, for each
        kept set, its row. This cache is not touched.
        """
        sizes = [tuple(slots.shape[-1] for slots in item.slots) for item in kept]
        order = sorted(range(len(kept)), key=lambda i: (sizes[i], self.bucket_index(kept[i].source), i))
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

    def bucket_index(self, row: int) -> int:
        """Which bucket holds a row."""
        return next(i for i, bucket in enumerate(self.buckets) if row in bucket.rows)

    def _gathered(self, rows: range, kept: list[KeptSet], room: int) -> Bucket:
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
                keys, values, _ = source.view(layer)
                if bucket.keys[layer] is None:
                    bucket.allocate(layer, size + room, keys, values)
                    bucket.filled[layer] = size
                slots = torch.stack([kept[i].slots[layer] for i in members]).to(keys.device)
                row = torch.tensor([kept[i].source - source.rows.start for i in members], device=keys.device)
                head = torch.arange(keys.shape[1], device=keys.device)
                heads = row[:, None, None] * len(head) + head[None, :, None]
                index = (heads * source.capacity[layer] + slots).flatten()
                part = slice(members[0], members[-1] + 1)
                for target, origin in zip(bucket.view(layer), source.whole(layer), strict=True):
                    found = origin.flatten(0, 2).index_select(0, index)  # whole vectors: faster than indexing
                    target[part] = found.view(slots.shape + origin.shape[3:])
        return bucket

    def take_rows(self, rows: Sequence[int]) -> Cache:
        """A copy of these rows, in this order, with what stands behind their end.

        Rows of one bucket must be neighbours, and buckets in the order that they have here.
        """
        buckets: list[Bucket] = []
        start = 0
        for bucket in self.buckets:
            inside = [row - bucket.rows.start for row in rows if row in bucket.rows]
            if inside:
                buckets.append(bucket.take(inside, start))
                start += len(inside)
        return Cache(buckets, self.layers)

    def first_rows(self, counts: Sequence[int], tokens: int) -> Cache:
        """The first rows of every bucket, with `tokens` tokens behind their end; the tensors are shared."""
        parts = [(bucket, 0, count) for bucket, count in zip(self.buckets, counts, strict=True) if count]
        cache = self._sharing(parts)
        cache.rewind(cache.mark(), tokens)
        return cache

    def pieces(self, most: int) -> Iterator[Cache]:
        """This cache, or pieces of at most `most` rows that share its tensors, which must have room."""
        if self.rows <= most:
            yield self
            return
        piece: list[tuple[Bucket, int, int]] = []
        free = most
        for bucket in self.buckets:
            start = 0
            while start < len(bucket.rows):
                stop = min(len(bucket.rows), start + free)
                piece.append((bucket, start, stop))
                free -= stop - start
                start = stop
                if free == 0:
                    yield self._sharing(piece)
                    piece, free = [], most
        if piece:
            yield self._sharing(piece)

    def _sharing(self, parts: list[tuple[Bucket, int, int]]) -> Cache:
        """A cache of these (bucket, first row, end), in this order."""
        buckets: list[Bucket] = []
        first = 0
        for bucket, start, stop in parts:
            buckets.append(bucket.part(start, stop, first))
            first += stop - start
        return Cache(buckets, self.layers)

    def reserve(self, tokens: int) -> None:
        """Make room for so many tokens behind the end of every row."""
        for bucket in self.buckets:
            bucket.reserve(tokens)

    def move(self, paths: Sequence[Sequence[int]], to: int) -> None:
        """`Bucket.move` for all rows: paths in the order of the batch."""
        for bucket in self.buckets:
            bucket.move(paths[bucket.rows.start : bucket.rows.stop], to)
