"""What several policies look at in one layer: computed by whoever asks first, and watched for writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written in place, also through views of it; -1 where torch does not count."""
    return -1 if tensor.is_inference() else tensor._version


class SharedWork(dict[Any, Any]):
    """Shared work by name. versions: those when the tensors were stored."""

    def __init__(self) -> None:
        super().__init__()
        self.versions: dict[Any, int] = {}

    def __setitem__(self, name: Any, value: Any) -> None:
        super().__setitem__(name, value)
        self.versions[name] = version_of(value) if isinstance(value, torch.Tensor) else 0

    def written(self) -> list[str]:
        """What was written in place since it was stored."""
        return [
            f"shared {name}"
            for name, tensor in self.items()
            if isinstance(tensor, torch.Tensor) and version_of(tensor) != self.versions[name]
        ]


def compute_once(shared: SharedWork, name: Any, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Shared work, computed by whoever asks first."""
    if name not in shared:
        shared[name] = compute()
    found: torch.Tensor = shared[name]
    return found
