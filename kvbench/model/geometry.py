"""The shape of a model's cache, and a refusal of everything the engine would get wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import UnsupportedModel
from .rotation import BY_LENGTH, rope_settings


@dataclass(frozen=True)
class Geometry:
    """The shape of the cache. full_layers: layers with full attention; sliding ones are never evicted.

    max_length: the longest input the model was made for (tokens). rotation_border: inputs that are longer
    are rotated by other factors (LongRoPE).
    """

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    full_layers: tuple[int, ...]
    max_length: int
    rotation_border: int | None = None


def read_geometry(config: Any) -> Geometry:
    """The cache's shape from a configuration; a window that no input fills counts as full attention.

    Raises UnsupportedModel for anything the engine would get wrong.
    """
    text = config.get_text_config(decoder=True)
    reason = _unsupported(config, text)
    if reason:
        raise UnsupportedModel(f"model type '{config.model_type}' is not supported: {reason}")
    layers, heads = text.num_hidden_layers, text.num_attention_heads
    types, window = _layer_types(text)
    other = sorted(set(types) - {"full_attention", "sliding_attention"})
    if other:
        raise UnsupportedModel(
            f"model type '{config.model_type}' is not supported: it has layers of type {', '.join(other)}; "
            "kvbench evicts from full attention and leaves sliding windows alone, nothing else"
        )
    full = tuple(index for index, kind in enumerate(types) if kind == "full_attention")
    if not full:
        raise UnsupportedModel(
            f"model type '{config.model_type}': every layer has a sliding window of {window} tokens, so "
            "there is nothing to evict; choose a model with full attention"
        )
    return Geometry(
        layers=layers,
        query_heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        full_layers=full,
        max_length=_read_length(text),
        rotation_border=_read_border(text),
    )


def _read_length(text: Any) -> int:
    """Tokens that the model reads: YaRN stretches what it was first trained for."""
    lengths = [text.max_position_embeddings]
    for rope in rope_settings(text):
        if rope.get("rope_type") == "yarn":
            first = rope.get("original_max_position_embeddings") or text.max_position_embeddings
            lengths.append(int(rope["factor"] * first))
    return max(lengths)


def _read_border(text: Any) -> int | None:
    """The length beyond which factors of the rotation change, where the model reads more than that."""
    borders = [
        rope["original_max_position_embeddings"]
        for rope in rope_settings(text)
        if rope.get("rope_type") == BY_LENGTH
    ]
    return min((border for border in borders if border < text.max_position_embeddings), default=None)


def drop_idle_window(config: Any) -> None:
    """Make a configuration say what `read_geometry` found: a window that no input fills is removed.

    For a configuration that a model will be built from; it is changed in place.
    """
    text = config.get_text_config(decoder=True)
    types, window = _layer_types(text)
    if window is None and getattr(text, "sliding_window", None) is not None:
        text.sliding_window = None
        if getattr(text, "layer_types", None):
            text.layer_types = types


def _layer_types(text: Any) -> tuple[list[str], int | None]:
    """The type of every layer, and the window that some of them have; None for one that is never filled."""
    layers = text.num_hidden_layers
    types = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None)
    if window is not None and window >= _read_length(text):
        window = None
        types = types and ["full_attention" if kind == "sliding_attention" else kind for kind in types]
    if types is None:
        types = ["full_attention" if window is None else "sliding_attention"] * layers
    return list(types), window


def _unsupported(config: Any, text: Any) -> str | None:
    """Why the engine would get this architecture wrong, or None."""
    from transformers import AutoModelForCausalLM

    if getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder models have no decoder-only cache; choose a causal language model"
    if type(config) not in AutoModelForCausalLM._model_mapping:
        return "transformers has no causal language model for it"
    # rope_parameters: every rotary architecture of transformers 5 has it, absolute positions do not
    if getattr(text, "rope_parameters", None) is None:
        return "it has no rotary positions; choose a rotary causal decoder such as Llama, Qwen or Mistral"
    if getattr(text, "attn_logit_softcapping", None):
        return "it caps attention logits (attn_logit_softcapping), which our attention does not do"
    if getattr(text, "num_kv_shared_layers", 0) or getattr(text, "kv_lora_rank", None):
        return "its layers share or compress keys and values, so a budget per layer means nothing"
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    if not getattr(model_class, "_supports_attention_backend", False):
        return "its attention is its own code, which cannot be replaced by ours"
    return None
