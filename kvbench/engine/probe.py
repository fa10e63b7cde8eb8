"""Extra tokens of a policy: read after the context, looked at, and forgotten.

In: a cache and embeddings. Out: what an observer saw; the cache is as if they had never been there. They
attend to the cache and to each other, as if they stood after the context.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..model.lm import LoadedModel
from .attention import Observer, Pass
from .cache import Cache


def read_probe(
    lm: LoadedModel, cache: Cache, tokens: Tensor, start: int, observer: Observer, block: int | None = None
) -> None:  # fmt: skip
    """Read embeddings (n, d_model) into every row, at positions start, start + 1, ..., and take them out.

    block: read so many at once, so that memory does not grow with n times the context; None: all of them.
    """
    rows, mark = cache.rows, cache.mark()
    for part in tokens.split(block or len(tokens)):
        positions = torch.arange(start, start + len(part), device=tokens.device)
        lm.model.base_model(
            inputs_embeds=part.expand(rows, -1, -1),
            position_ids=positions.expand(rows, -1),
            use_cache=False,
            kv_pass=Pass(cache, positions, observer=observer),
        )
        start += len(part)
    cache.rewind(mark)
