"""Hidden states that attention modules receive, recorded for one forward.

In: a model and a place to write to. Out: while a layer is read, its hidden states (row, new, d_model).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..errors import UnsupportedModel
from ..model.lm import LoadedModel


@contextmanager
def recorded_hidden(lm: LoadedModel, into: dict[int, Tensor]) -> Iterator[None]:
    """Record what the attention module of the layer in work receives, for the duration of one forward.

    into: layer index -> hidden states; holds one layer at a time.
    """

    def hook(module: Any, args: Any, kwargs: Any) -> None:
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        if not isinstance(hidden, Tensor):
            raise UnsupportedModel(f"{lm.name}: {type(module).__name__} does not receive hidden states")
        into.clear()
        into[module.layer_idx] = hidden

    modules = lm.attention_modules.values()
    handles = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
