"""The attention function that transformers calls: it hands each layer to the pass in work.

It is registered under its own name with transformers, and a model uses it only when loaded with
attn_implementation="kvbench": no class is patched and no other model in the process notices. The
function sees queries, keys and values after RoPE and QK-norm on every architecture.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedModel

NAME = "kvbench"


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    kv_pass: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls; see its attention interface for the arguments.

    Raises UnsupportedModel for anything that would change the numbers and is not handled here.
    """
    extra = [name for name in ("softcap", "s_aux", "head_mask") if kwargs.get(name) is not None]
    if kv_pass is None:
        raise UnsupportedModel(
            "its attention ran without kvbench's engine, which the model does not hand on; to use the model "
            "on its own, load it with another attn_implementation"
        )
    if attention_mask is not None or dropout or extra:
        what = "a mask of its own" if attention_mask is not None else ", ".join(extra) or "dropout"
        raise UnsupportedModel(f"its attention uses {what}, which the engine would ignore")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = kv_pass.attend(module, query, key, value, scale, sliding_window)
    return out.transpose(1, 2).contiguous(), None


def install() -> None:
    """Make the name known to transformers. Other models are not affected."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


class Census:
    """A pass without attention: it only notes which modules come through the hook, by layer.

    shapes: of each layer (query heads, KV heads, head size).
    """

    def __init__(self) -> None:
        self.modules: dict[int, Any] = {}
        self.shapes: dict[int, tuple[int, int, int]] = {}

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        self.modules[module.layer_idx] = module
        self.shapes[module.layer_idx] = (query.shape[1], key.shape[1], key.shape[3])
        return value.new_zeros(*query.shape[:3], value.shape[-1])


@torch.inference_mode()
def count_calls(model: Any, device: Any, dtype: Any, census: Census) -> None:
    """Let a model read one empty token. No name of a class is trusted: what calls the hook is attention."""
    width = model.get_input_embeddings().weight.shape[1]
    model.base_model(
        inputs_embeds=torch.zeros(1, 1, width, device=device, dtype=dtype),
        position_ids=torch.tensor([[0]], device=device),  # a constant, also where tensors have no numbers
        use_cache=False,
        kv_pass=census,
    )


def find_attention(model: Any, device: Any, dtype: Any) -> dict[int, Any]:
    """Layer index -> the attention module that calls our function, whatever it is called."""
    census = Census()
    count_calls(model, device, dtype, census)
    return census.modules
