"""What the future attends to: the attention that question and reference pay to the context, on the full
cache.

In: the layers of the full cache's answer. Out: u of KVP per layer, for policies that may look at the future,
and for the metrics missed_mass and eviction_cost.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..contract.attention_sums import streamed_sums
from ..model.lm import LoadedModel
from ..model.prompt import Prompt
from .attention import Layer


class FutureAttention:
    """Observer of the full cache, while question and reference are read; what is read behind those does not
    count.

    utility: layer -> u, (1, kv_head, context) float32, summed over the future. scalings: layer -> factor on
    the logits.
    """

    def __init__(self, lm: LoadedModel, prompt: Prompt) -> None:
        self.utility: dict[int, Tensor] = {}
        self.scalings: dict[int, float] = {}
        self._lm = lm
        self._context = len(prompt.context)
        self._end = self._context + len(prompt.question) + len(prompt.reference.ids)

    def __call__(self, layer: Layer) -> None:
        if layer.index not in self._lm.geometry.full_layers:
            return
        keys = layer.bucket.view(layer.index)[0][:, :, : self._end]
        offset = layer.bucket.filled[layer.index] - layer.queries.shape[2]
        if offset >= keys.shape[2]:
            return
        queries = layer.queries[:, :, : keys.shape[2] - offset]
        u = streamed_sums(queries, keys, layer.scaling, offset, "max")[:, :, : self._context]
        known = self.utility.get(layer.index)
        self.utility[layer.index] = u if known is None else known + u
        self.scalings[layer.index] = layer.scaling

    def stack(self) -> Tensor:
        """u of every full-attention layer: (full_layer, kv_head, context), on the model's first device."""
        layers = [self.utility[layer] for layer in self._lm.geometry.full_layers]
        return torch.cat([layer.to(self._lm.device) for layer in layers])
