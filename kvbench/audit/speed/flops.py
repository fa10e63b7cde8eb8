"""Floating-point operations: what a prefill takes by its shapes, what a score takes by counting, what
the device can do by trying."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from ...engine.cache import Cache
from ...engine.forward import read
from ...model.lm import LoadedModel
from ...model.memory import synchronise

PROBE = 64  # tokens on which the products of the weights are counted


def prefill_flops(lm: LoadedModel, n: int) -> int:
    """Operations of reading n tokens into an empty cache: matrix products only, 2 per multiply-add.

    Products with weights are counted on a few tokens and scaled. Attention is computed from its
    shape: a query is multiplied with the tokens up to itself, or with those in its sliding window.
    The output head runs once, for the last token.
    """
    ids = torch.zeros(PROBE, dtype=torch.int64, device=lm.device)
    cache = Cache.empty(lm.geometry.layers, PROBE)
    with FlopCounterMode(display=False) as counter:
        read(lm, cache, ids, 0)
    counts = counter.get_flop_counts()["Global"]
    head = 2 * lm.model.get_output_embeddings().weight.numel()
    weights = sum(count for name, count in counts.items() if "attention" not in str(name)) - head
    geometry = lm.geometry
    full = len(geometry.full_layers)
    window = min(n, getattr(lm.model.config.get_text_config(decoder=True), "sliding_window", None) or n)
    pairs = full * _pairs(n, n) + (geometry.layers - full) * _pairs(n, window)
    return weights * n // PROBE + head + 4 * pairs * geometry.query_heads * geometry.head_dim


def _pairs(n: int, window: int) -> int:
    """(query, key) pairs of causal attention over n tokens in which a query sees `window` tokens."""
    return window * (window + 1) // 2 + (n - window) * window


def counted_flops(work: Callable[[], Any]) -> int:
    """Operations of the matrix products in `work`; everything elementwise (norms, sorts) counts 0."""
    with FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())


def matmul_rate(device: torch.device, dtype: torch.dtype, repeat: int = 5) -> float:
    """Operations per second of the best of a few square matrix products: what this device reaches."""
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in "ab")
    best = min(_seconds(left, right) for _ in range(repeat + 1))
    return 2 * size**3 / best


def _seconds(left: Tensor, right: Tensor) -> float:
    synchronise([left.device])
    started = time.perf_counter()
    left @ right
    synchronise([left.device])
    return time.perf_counter() - started
