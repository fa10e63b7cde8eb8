"""A model without weights: does its attention come through our function, in the shape that was read?

In: a configuration and the geometry that was read from it. Out: a refusal before weights are loaded. The
first layers are built from tensors that have shapes and no numbers, and read one empty token.
"""

from __future__ import annotations

import copy
from typing import Any

from ..errors import UnsupportedModel
from .geometry import Geometry
from .hook import NAME, Census, count_calls, install
from .rotation import Rotation

LAYERS = 8  # that are built; kinds of layers take turns within fewer
_FIT: set[tuple[type, str, Geometry]] = set()


def check_blueprint(config: Any, geometry: Geometry) -> None:
    """Refuse a model that the engine would read wrongly. Raises UnsupportedModel.

    Where numbers decide what is computed, the forward ends early: what came before has been checked, and the
    rest is when the weights are there. A model that chooses by numbers before any attention is refused. What
    was found fit is not looked at again in this process.
    """
    known = (type(config), config.to_json_string(use_diff=False), geometry)
    if known in _FIT:
        return
    told = f"model type '{config.model_type}' is not supported"
    census = Census()
    try:
        complete = _read_empty(config, geometry, census)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{told}: {error}") from error
    wanted = (geometry.query_heads, geometry.kv_heads, geometry.head_dim)
    for layer, shape in sorted(census.shapes.items()):
        if shape != wanted:
            raise UnsupportedModel(
                f"{told}: layer {layer} attends with (query heads, KV heads, head size) {shape}, its "
                f"configuration says {wanted}"
            )
    layers = min(LAYERS, geometry.layers)
    if complete and len(census.modules) < layers:
        raise UnsupportedModel(
            f"{told}: {len(census.modules)} of {layers} layers use the attention interface; the others keep "
            "a state that cannot be evicted"
        )
    if complete is False and not census.modules:
        raise UnsupportedModel(
            f"{told}: no attention can be checked before its first layer chooses by numbers (a mixture "
            "of heads)"
        )
    _FIT.add(known)


def _read_empty(config: Any, geometry: Geometry, census: Census) -> bool | None:
    """Whether the forward came to its end; None where the model cannot even be built without numbers."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoModelForCausalLM

    install()
    asked = copy.deepcopy(config)  # building a model writes into its configuration
    text = asked.get_text_config(decoder=True)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:LAYERS]
    text.num_hidden_layers = min(LAYERS, geometry.layers)
    with FakeTensorMode():
        try:
            model = AutoModelForCausalLM.from_config(
                asked, attn_implementation=NAME, dtype=torch.bfloat16
            ).eval()
        except Exception:  # a part that is no decoder, such as an encoder of images
            return None
        Rotation(model, geometry.rotation_border)
        try:
            count_calls(model, torch.device("cpu"), torch.bfloat16, census)
        except UnsupportedModel:
            raise
        except Exception:  # each operation that needs numbers says so in its own way
            return False
    return True
