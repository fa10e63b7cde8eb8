"""The attention function that transformers calls: it hands each layer to the pass in work.

It is registered under its own name with transformers, and a model uses it only when loaded with
attn_implementation="kvbench": no class is patched and no other model in the process notices. The
function sees queries, keys and values after RoPE and QK-norm on every architecture.
"""

from __future__ import annotations

from typing import Any

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
            f"{type(module).__name__} ran without kvbench's engine: load the model with another "
            f"attn_implementation to use it on its own"
        )
    if attention_mask is not None or dropout or extra:
        what = "a mask of its own" if attention_mask is not None else ", ".join(extra) or "dropout"
        raise UnsupportedModel(f"{type(module).__name__} uses {what}, which the engine would ignore")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = kv_pass.attend(module, query, key, value, scale, sliding_window)
    return out.transpose(1, 2).contiguous(), None


def install() -> None:
    """Make the name known to transformers. Other models are not affected."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
