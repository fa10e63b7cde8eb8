"""Extra tokens of a policy: read after the context, looked at, and forgotten.

They attend to the cache and to each other, as if they stood after the context. Their pass appends to the
cache and takes that back, so what is stored, and every later position, is as if they had never been there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..contract.need import Need
from ..contract.policy import Policy
from ..errors import KvbenchError, PluginError
from .attention import Observer, Pass
from .cache import Cache

if TYPE_CHECKING:
    from ..model.open import LoadedModel


def probe_tokens(policy: Policy) -> int:
    """How many extra tokens a policy reads."""
    tokens = policy.probe if Need.PROBE in policy.needs else None
    return tokens.shape[0] if isinstance(tokens, Tensor) and tokens.dim() == 2 else 0


def validated_probe(policy: Policy, lm: LoadedModel, start: int) -> Tensor:
    """A policy's extra tokens, checked, in the model's dtype and on its device: (n, d_model).

    start: the position of the first. Raises PluginError that names the policy.
    """
    try:
        tokens = policy.probe
    except KvbenchError:
        raise
    except Exception as error:
        raise PluginError(f"policy '{policy.name}', probe: {type(error).__name__}: {error}") from error
    width = lm.model.get_input_embeddings().weight.shape[1]
    if not isinstance(tokens, Tensor) or not tokens.is_floating_point() or tokens.dim() != 2:
        raise PluginError(f"policy '{policy.name}': probe must be floating point embeddings (n, d_model)")
    if tokens.shape[0] < 1 or tokens.shape[1] != width or not tokens.isfinite().all():
        raise PluginError(
            f"policy '{policy.name}': probe has shape {tuple(tokens.shape)}; it must be finite and "
            f"(n, {width}) with n from 1 on, as {lm.name} reads embeddings"
        )
    if start + len(tokens) > lm.geometry.max_length:
        raise PluginError(
            f"policy '{policy.name}': {start} tokens and its {len(tokens)} extra ones are more than the "
            f"{lm.geometry.max_length} that {lm.name} reads; use shorter samples"
        )
    return tokens.to(lm.device, lm.dtype)


def read_embedded(lm: LoadedModel, cache: Cache, tokens: Tensor, start: int, observer: Observer) -> None:
    """Read embeddings (n, d_model) into every row, at positions start, start + 1, ..."""
    rows, n = cache.rows, tokens.shape[0]
    positions = torch.arange(start, start + n, device=tokens.device)
    lm.model.base_model(
        inputs_embeds=tokens.expand(rows, -1, -1),
        position_ids=positions.expand(rows, -1),
        use_cache=False,
        kv_pass=Pass(cache, positions, observer=observer),
    )
