"""Hidden states that attention modules receive, recorded for one forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def recorded_hidden(model: Any, into: dict[int, Tensor]) -> Iterator[None]:
    """Record what each attention module receives, for the duration of one forward."""

    def hook(module: Any, args: Any, kwargs: Any) -> None:
        into[module.layer_idx] = args[0] if args else kwargs["hidden_states"]

    handles = [
        module.register_forward_pre_hook(hook, with_kwargs=True)
        for module in model.modules()
        if hasattr(module, "layer_idx") and type(module).__name__.endswith("Attention")
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
