"""One forward of new tokens against a cache.

In: tokens and a cache. Out: their logits; the cache holds them, and an observer has seen every layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import UnsupportedModel
from ..model.lm import LoadedModel
from .attention import Observer, Pass
from .cache import Cache


@dataclass(frozen=True)
class Tokens:
    """New tokens that do not simply follow one another.

    positions: (new,) original positions. visible: see `Pass`. wanted: (logits,) which tokens' logits to
    compute.
    """

    positions: Tensor
    visible: Tensor | None
    wanted: Tensor


def read(
    lm: LoadedModel, cache: Cache, ids: Tensor, start: int, keep_logits: int = 1,
    observer: Observer | None = None,
) -> Tensor:  # fmt: skip
    """Read new tokens into every row of the cache, at positions start, start + 1, ...

    ids: (new,) the same for all rows, or (row, new). Returns logits (row, keep_logits, vocabulary) of
    the last tokens. Raises UnsupportedModel when a layer's attention did not come through us.
    """
    new = ids.shape[-1]
    positions = torch.arange(start, start + new, device=lm.device)
    wanted = torch.arange(new - keep_logits, new, device=lm.device)
    return read_tokens(lm, cache, ids, Tokens(positions, None, wanted), observer)


def read_tokens(
    lm: LoadedModel, cache: Cache, ids: Tensor, tokens: Tokens, observer: Observer | None = None
) -> Tensor:
    """`read` for tokens with positions of their own: logits (row, wanted, vocabulary)."""
    rows = cache.rows
    kv_pass = Pass(cache, tokens.positions, tokens.visible, observer)
    output = lm.model(
        input_ids=ids.expand(rows, -1),
        position_ids=tokens.positions.expand(rows, -1),
        use_cache=False,
        logits_to_keep=tokens.wanted,  # by index: a slice of the end would not be contiguous
        kv_pass=kv_pass,
    )
    if kv_pass.layers_seen != lm.geometry.layers:
        raise UnsupportedModel(
            f"{lm.name}: {kv_pass.layers_seen} of {lm.geometry.layers} layers use the attention interface; "
            "the others keep a state that cannot be evicted"
        )
    return output.logits
