"""Attention of one forward: it appends to our cache, attends, and lets an observer look.

In: queries, keys and values of every layer, after RoPE and QK-norm, from `model.hook`. Out: attention's
output; the new keys and values are in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .cache import Bucket, Cache

BLOCK = 512  # queries that a sliding-window layer reads at once, when there are more


MASK_LIMIT = 2**24  # bytes; a smaller mask is kept from one layer to the next


Observer = Callable[["Layer"], None]


class Layer:
    """What happens in one layer for the rows of one bucket; handed to the observer.

    index: layer index. bucket: the rows' cache, new tokens already in it. queries: (row, query_head,
    new, dim) after RoPE. scaling: factor on the logits.
    """

    def __init__(self, index: int, bucket: Bucket, queries: Tensor, scaling: float) -> None:
        self.index = index
        self.bucket = bucket
        self.queries = queries
        self.scaling = scaling

    @classmethod
    def stored(cls, index: int, bucket: Bucket, scaling: float) -> Layer:
        """A layer that has been read: its cache, and no queries."""
        keys = bucket.view(index)[0]
        return cls(index, bucket, keys.new_empty(keys.shape[0], keys.shape[1], 0, keys.shape[3]), scaling)


class Pass:
    """One forward of new tokens against a cache; the model hands it to every attention layer.

    positions: (new,) original positions of the new tokens. visible: (new, last) bool, which of the last
    slots, the new ones included, each new token sees; None where it sees all that come before it. All older
    slots are visible.
    """

    def __init__(
        self, cache: Cache, positions: Tensor, visible: Tensor | None = None, observer: Observer | None = None
    ) -> None:
        self.cache = cache
        self.positions = positions
        self.visible = visible
        self.observer = observer
        self.layers_seen = 0
        self._masks: dict[Any, Tensor] = {}

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """(row, query_head, new, dim) -> (row, query_head, new, value_dim)."""
        index = module.layer_idx
        self.layers_seen += 1
        outputs = []
        for bucket in self.cache.buckets:
            rows = slice(bucket.rows.start, bucket.rows.stop)
            old = bucket.append(index, key[rows], value[rows], self.positions)
            outputs.append(self._attend_bucket(query[rows], bucket, index, old, scaling, window))
            if self.observer is not None:
                self.observer(Layer(index, bucket, query[rows], scaling))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_bucket(
        self, query: Tensor, bucket: Bucket, layer: int, old: int, scaling: float, window: int | None
    ) -> Tensor:
        """Attention of the newest tokens over all slots of a bucket, exact and without repeated K/V.

        `old` slots were there before. The group of query heads is folded into the query axis, so K/V stay at
        one copy per KV head.
        """
        keys, values, positions = bucket.view(layer)
        batch, heads, new, dim = query.shape
        group = heads // keys.shape[1]
        if window is not None and window >= old + new:
            window = None  # every slot is inside the window
        if old == 0 and window is None and self.visible is None:
            if group > 1:  # is_causal cannot be combined with folding; K/V are repeated for this call only
                keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
            return scaled_dot_product_attention(query, keys, values, is_causal=new > 1, scale=scaling)
        if window is not None and self.visible is None and new > BLOCK:
            return self._attend_in_blocks(query, bucket, layer, old, scaling, window)
        folded = query.reshape(batch, keys.shape[1], group * new, dim)
        mask = (
            self._mask(old, group, query)
            if window is None
            else self._window_mask(positions, new, window).repeat(1, 1, group, 1)
        )
        out = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scaling)
        return out.view(batch, heads, new, values.shape[-1])

    def _attend_in_blocks(
        self, query: Tensor, bucket: Bucket, layer: int, old: int, scaling: float, window: int
    ) -> Tensor:
        """`_attend_bucket` for many tokens in a sliding-window layer: no mask of all pairs.

        Such a layer is never evicted, so slots are positions: a block of queries needs those of its window.
        """
        keys, values, positions = bucket.view(layer)
        batch, heads, new, dim = query.shape
        group = heads // keys.shape[1]
        parts = []
        for begin in range(0, new, BLOCK):
            size = min(BLOCK, new - begin)
            seen = slice(max(0, old + begin - window + 1), old + begin + size)
            folded = query[:, :, begin : begin + size].reshape(batch, keys.shape[1], group * size, dim)
            mask = self._window_mask(positions[:, :, seen], size, window).repeat(1, 1, group, 1)
            out = scaled_dot_product_attention(
                folded, keys[:, :, seen], values[:, :, seen], attn_mask=mask, scale=scaling
            )
            parts.append(out.view(batch, heads, size, values.shape[-1]))
        return torch.cat(parts, 2)

    def _mask(self, old: int, group: int, query: Tensor) -> Tensor | None:
        """What is added to the logits of full attention: (group * new, slot), the same for all layers."""
        new = query.shape[2]
        if new == 1 and self.visible is None:
            return None
        key = (old, group, query.device, query.dtype)
        if key in self._masks:
            return self._masks[key]
        seen = self._visible(old, new, query.device).repeat(group, 1)
        mask = torch.zeros(seen.shape, device=query.device, dtype=query.dtype)
        mask.masked_fill_(~seen, float("-inf"))
        if mask.nbytes < MASK_LIMIT:
            self._masks[key] = mask
        return mask

    def _visible(self, old: int, new: int, device: torch.device) -> Tensor:
        """(new, old + new) bool"""
        every = torch.ones(new, old + new, dtype=torch.bool, device=device)
        if self.visible is None:
            return every.tril(old)
        every[:, old + new - self.visible.shape[1] :] = self.visible.to(device, non_blocking=True)
        return every

    def _window_mask(self, positions: Tensor, new: int, window: int) -> Tensor:
        """Visible slots of a sliding-window layer: (row, 1, new, slot) bool."""
        slot = positions[:, :1, None, :]  # sliding layers hold the same positions in every KV head
        query = positions[:, :1, -new:, None]
        inside = (slot <= query) & (slot > query - window)
        if self.visible is None:
            return inside
        return inside & self._visible(positions.shape[2] - new, new, positions.device)
