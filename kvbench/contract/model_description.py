"""What a policy is told of the model that it will rank for: sizes and places, never the model itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ModelDescription:
    """A model as `Policy.bind` sees it.

    layers: of the whole model. evicted_layers: indices of those with full attention, which policies rank.
    devices: of each evicted layer, where its keys lie. device: where input embeddings lie. dtype: of weights
    and cache. width: of the input embeddings (d_model), None where only recorded keys and values are there.
    """

    name: str
    layers: int
    evicted_layers: tuple[int, ...]
    query_heads: int
    kv_heads: int
    head_dim: int
    width: int | None
    devices: tuple[torch.device, ...]
    device: torch.device
    dtype: torch.dtype
