"""What one training step looks at: a recorded context as a constant cache, and the attention to match.

Context tokens never see soft tokens, so their keys and values do not depend on what is learned. The
forward and the gradient pass through the soft tokens alone, and are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from kvbench.contract.attention_sums import attention_rows
from kvbench.errors import BadInput, UnsupportedModel
from kvbench.learn.ranked import open_recorder
from kvbench.learn.trace import Trace, TraceSet
from kvbench.model.open import LoadedModel


@dataclass(frozen=True)
class Lesson:
    """One trace up to a split point n.

    keys, values: per layer (kv_head, n, dim) float32. wanted: per layer (query_head, n) float32, the mean
    attention of all tokens from n on (the response) to each token before. total: tokens of the trace.
    """

    keys: list[Tensor]
    values: list[Tensor]
    wanted: list[Tensor]
    total: int

    @classmethod
    def of(cls, trace: Trace, layers: int, n: int, device: Any) -> Lesson:
        lesson = cls([], [], [], trace.info.tokens)
        for layer in range(layers):
            q, k, v = trace.layer(layer)
            q, k, v = (part.to(device).float() for part in (q[:, n:], k, v[:, :n]))
            rows = attention_rows(q[None], k[None], trace.info.scaling, n)
            lesson.keys.append(k[:, :n])
            lesson.values.append(v)
            lesson.wanted.append(rows[0, :, :, :n].mean(1))
        return lesson

    @property
    def length(self) -> int:
        return self.keys[0].shape[1]


class SoftPass:
    """The pass that the model hands to every layer: soft tokens attend to the context and to each other.

    shown: layer -> their mean attention to the context, (query_head, n), differentiable.
    """

    def __init__(self, lesson: Lesson) -> None:
        self.lesson = lesson
        self.shown: dict[int, Tensor] = {}

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """(1, query_head, soft, dim) -> (1, query_head, soft, value_dim)."""
        context = self.lesson.length
        keys = torch.cat([self.lesson.keys[module.layer_idx], key[0]], 1)[None]
        values = torch.cat([self.lesson.values[module.layer_idx], value[0]], 1)
        rows = attention_rows(query, keys, scaling, context)[0]  # (query_head, soft, context + soft)
        self.shown[module.layer_idx] = rows[:, :, :context].mean(1)
        group = rows.shape[0] // values.shape[0]
        return torch.matmul(rows, values.repeat_interleave(group, 0))[None]

    def loss(self) -> Tensor:
        """Squared error to the response's attention: summed over the context, mean over heads and layers.

        The sum is the paper's mean times the context's length, so long contexts count as much as short
        ones, and the number is of readable size.
        """
        errors = [
            (self.shown[layer] - wanted).square().sum(1).mean()
            for layer, wanted in enumerate(self.lesson.wanted)
        ]
        return torch.stack(errors).mean()


def read_soft(lm: LoadedModel, lesson: Lesson, tokens: Tensor) -> SoftPass:
    """Read soft tokens (n, d_model) after a lesson's context, with gradient where it is enabled."""
    seen = SoftPass(lesson)
    start = lesson.length
    positions = torch.arange(start, start + tokens.shape[0], device=tokens.device)[None]
    with lm.rotation.whole(max(lesson.total, start + tokens.shape[0])):
        lm.model.base_model(inputs_embeds=tokens[None], position_ids=positions, use_cache=False, kv_pass=seen)
    if len(seen.shown) < lm.geometry.layers:
        raise UnsupportedModel(f"{lm.name}: {len(seen.shown)} of {lm.geometry.layers} layers were seen")
    return seen


def save_memory(lm: LoadedModel) -> None:
    """From now on decoder layers compute their activations again in the backward pass.

    Only the layers themselves count as training, so no dropout inside them wakes up.
    """
    lm.model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in lm.model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


def model_of(traces: TraceSet) -> LoadedModel:
    """The model that recorded the traces, in float32.

    Raises BadInput when it is another one now, or when traces lack layers (sliding windows).
    """
    opened = open_recorder(traces)
    if traces.layers < opened.geometry.layers:
        raise BadInput(
            f"{opened.name} has layers with a sliding window, which traces lack; soft tokens read them all"
        )
    return opened.load()
