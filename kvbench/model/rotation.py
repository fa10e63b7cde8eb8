"""Rotations that depend on the length of the input, made the same in all forwards of a sample.

LongRoPE rotates an input longer than the original length by other factors. transformers looks at the tokens
of the present forward, so keys that were cached before the border would not fit queries behind it. In: how
long a sample may become. Out: every rotation chosen for that length, as the plain model's forward over the
whole sample chooses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import UnsupportedModel

BY_LENGTH = "longrope"  # the rope type whose factors change within what the model reads


def rope_settings(text: Any) -> list[dict[str, Any]]:
    """The rotations of a text configuration: one for all layers, or one for each type of layer."""
    found = getattr(text, "rope_parameters", None) or {}
    nested = [value for value in found.values() if isinstance(value, dict)]
    return nested or [found]


class Rotation:
    """The rotation of a loaded model. border: the length from which on the factors are others, or None."""

    def __init__(self, model: Any, border: int | None) -> None:
        self.border = border
        self.length: int | None = None
        self._modules = [module for module in model.modules() if _depends_on_length(module)] if border else []
        if border and not self._modules:
            raise UnsupportedModel(
                f"model type '{model.config.model_type}' is not supported: its rotation changes beyond "
                f"{border} tokens, and none of its modules can be told the length of a sample"
            )

    @contextmanager
    def whole(self, length: int) -> Iterator[None]:
        """All forwards inside rotate as one of `length` tokens does."""
        before, self.length = self.length, length
        handles = []
        for module in self._modules:
            handles.append(module.register_forward_pre_hook(self._add_last, with_kwargs=True))
            handles.append(module.register_forward_hook(_drop_last))
        try:
            yield
        finally:
            self.length = before
            for handle in handles:
                handle.remove()

    def fits(self, tokens: int) -> bool:
        """Whether a forward that ends at so many tokens is rotated as the sample in work."""
        if self.border is None or self.length is None:
            return True
        return tokens <= max(self.length, self.border) or self.length > self.border

    def _add_last(self, module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The sample's last position beside those that are asked for: factors follow from the largest."""
        assert self.length is not None
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": _longer(kwargs["position_ids"], self.length - 1)}
        return (args[0], _longer(args[1], self.length - 1), *args[2:]), kwargs


def _longer(positions: torch.Tensor, last: int) -> torch.Tensor:
    return torch.cat([positions, torch.full_like(positions[..., :1], last)], -1)


def _drop_last(module: Any, args: Any, output: Any) -> Any:
    """Cosines and sines (..., token, dim) without those of the position that was added."""
    return tuple(part[..., :-1, :] for part in output)


def _depends_on_length(module: Any) -> bool:
    kind = getattr(module, "rope_type", None)
    kinds = kind.values() if isinstance(kind, dict) else [kind]
    return BY_LENGTH in kinds and hasattr(module, "inv_freq")
