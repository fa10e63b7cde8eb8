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


def read_probe(lm: LoadedModel, cache: Cache, tokens: Tensor, start: int, observer: Observer) -> None:
    """Read embeddings (n, d_model) into every row, at positions start, start + 1, ..., and take them out."""
    rows, n = cache.rows, tokens.shape[0]
    positions = torch.arange(start, start + n, device=tokens.device)
    mark = cache.mark()
    lm.model.base_model(
        inputs_embeds=tokens.expand(rows, -1, -1),
        position_ids=positions.expand(rows, -1),
        use_cache=False,
        kv_pass=Pass(cache, positions, observer=observer),
    )
    cache.rewind(mark)
