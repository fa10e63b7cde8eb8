"""Counter-based random draws: a token keeps its draw in every chunk, on every device, in any company."""

from __future__ import annotations

import hashlib
from typing import Any

import torch


def draw_key(*parts: Any) -> int:
    """A 64-bit key for random draws, from (seed, sample, layer, ...)."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def scrambled(x: torch.Tensor) -> torch.Tensor:
    """64 well mixed bits for each whole number: the finaliser of splitmix64, int64."""
    x = x * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def uniform_at(key: int, positions: torch.Tensor) -> torch.Tensor:
    """One uniform draw in [0, 1) per (KV head, original position): (batch, kv_head, slot) float32.

    Counter-based (from key, KV head and position), so a token keeps its draw
    in every chunk, on every device and for any number of tokens.
    """
    heads = torch.arange(positions.shape[1], device=positions.device)[None, :, None]
    x = scrambled(positions * 2_654_435_761 + heads * 1_000_000_007_919 + key)
    return ((x >> 40) & 0xFFFFFF).to(torch.float32) / (1 << 24)
