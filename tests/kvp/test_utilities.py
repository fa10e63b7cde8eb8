"""The utility u of a cached token against float64 loops over every query, head and key."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kvbench.learn.trace import utilities

SCALING = 0.37


def by_loops(queries: Tensor, keys: Tensor, split: int) -> Tensor:
    """u_i = sum over queries j >= split of the max over the group of the attention of j to i <= j."""
    q, k = queries.double().tolist(), keys.double().tolist()
    group, tokens = len(q) // len(k), len(q[0])
    found = [[0.0] * split for _ in k]
    for head, of_head in enumerate(k):
        for j in range(split, tokens):
            rows = []
            for member in range(head * group, (head + 1) * group):
                logits = [
                    SCALING * sum(a * b for a, b in zip(q[member][j], of_head[i], strict=True))
                    for i in range(j + 1)
                ]
                weights = [math.exp(logit - max(logits)) for logit in logits]
                rows.append([weight / sum(weights) for weight in weights])
            for i in range(split):
                found[head][i] += max(row[i] for row in rows)
    return torch.tensor(found)


def random_layer(heads: int, kv_heads: int, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(heads * tokens)
    queries = 2 * torch.randn(heads, tokens, 5, generator=draw)
    return queries.to(dtype), torch.randn(kv_heads, tokens, 5, generator=draw).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1), (2, 2)])
@pytest.mark.parametrize("splits", [[9], [1, 2, 11, 16]])
def test_every_query_head_and_key(
    heads: int, kv_heads: int, splits: Sequence[int], dtype: torch.dtype
) -> None:
    queries, keys = random_layer(heads, kv_heads, 17, dtype)
    found = utilities(queries, keys, SCALING, splits)
    assert [tuple(u.shape) for u in found] == [(kv_heads, split) for split in splits]
    for u, split in zip(found, splits, strict=True):
        assert u.dtype == torch.float32
        assert torch.allclose(u, by_loops(queries, keys, split), rtol=1e-5, atol=1e-6)


def test_more_queries_than_a_block_holds() -> None:
    """Over 256 queries the sum is streamed; the reference makes the whole matrix."""
    queries, keys = random_layer(4, 2, 700, torch.float16)
    q = queries.double().view(2, 2, 700, 5)
    logits = SCALING * q @ keys.double()[:, None].transpose(-1, -2)
    hidden = torch.ones(700, 700, dtype=torch.bool).triu(1)
    attention = logits.masked_fill(hidden, -torch.inf).softmax(-1).amax(1)  # (kv_head, query, key)
    splits = [3, 256, 257, 600]
    for u, split in zip(utilities(queries, keys, SCALING, splits), splits, strict=True):
        wanted = attention[:, split:, :split].sum(1).float()
        assert torch.allclose(u, wanted, rtol=1e-4, atol=1e-6)


def test_the_max_is_taken_before_the_sum() -> None:
    """Two query heads that look at two tokens in turn: together they look at each one all the time."""
    keys = torch.eye(2).repeat(1, 4, 1) * 20  # one KV head
    queries = torch.stack([torch.eye(2).repeat(4, 1), torch.eye(2).flip(0).repeat(4, 1)])
    together = utilities(queries, keys, 1.0, [2])[0]
    alone = torch.stack([utilities(queries[[head]], keys, 1.0, [2])[0] for head in range(2)])
    assert (together > 1.5 * alone.amax(0)).all()
