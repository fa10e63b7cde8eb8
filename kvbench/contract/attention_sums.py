"""Attention of recorded queries over cached keys, in blocks: memory linear in the slots, never n x n."""

from __future__ import annotations

import torch

from ..errors import PluginError

BLOCK = 256  # queries per block when attention is streamed: memory O(BLOCK x slots), never n x n


def attention_rows(
    queries: torch.Tensor, keys: torch.Tensor, scaling: float, offset: int,
    absent: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Causal attention probabilities of a block of queries over all slots.

    queries: (batch, query_head, t, dim), the block's first query sitting at slot `offset`;
    keys: (batch, kv_head, slot, dim). Returns (batch, query_head, t, slot) float32, rows sum to 1;
    slots after the query get 0, and so do those that are absent: (batch, kv_head, slot) bool. Query head h
    reads KV head h // group.
    """
    batch, heads, t, dim = queries.shape
    kv_heads, slots = keys.shape[1], keys.shape[2]
    folded = queries.reshape(batch, kv_heads, -1, dim).float()  # (batch, kv_head, group*t, dim)
    logits = torch.matmul(folded, keys.float().transpose(-1, -2)).mul_(scaling)
    logits = logits.view(batch, heads, t, slots)
    if t > 1 or offset + t < slots:
        slot = torch.arange(slots, device=keys.device)
        query = torch.arange(offset, offset + t, device=keys.device)
        logits = logits.masked_fill(slot > query[:, None], float("-inf"))
    if absent is not None:
        logits = logits.masked_fill(absent.repeat_interleave(heads // kv_heads, 1)[:, :, None], float("-inf"))
    return logits.softmax(-1)


def streamed_sums(
    queries: torch.Tensor, keys: torch.Tensor, scaling: float, offset: int, reduce: str
) -> torch.Tensor:
    """Column sums of attention over all queries, in blocks.

    reduce "sum": (batch, query_head, slot), the sum over queries of each query head.
    reduce "max": (batch, kv_head, slot), per query the max over the group's heads, then summed
    (the utility u of KVP, arXiv:2602.10238, with A maxed over the group).
    """
    kv_heads, slots = keys.shape[1], keys.shape[2]
    total: torch.Tensor | None = None
    for start in range(0, queries.shape[2], BLOCK):
        rows = attention_rows(queries[:, :, start : start + BLOCK], keys, scaling, offset + start)
        if reduce == "max":
            rows = rows.view(rows.shape[0], kv_heads, -1, rows.shape[2], slots).amax(2)
        part = rows.sum(2)
        total = part if total is None else total + part
    if total is None:
        raise PluginError("attention sums were asked for a chunk without queries")
    return total
