"""Say what a policy is without torch, which takes longer to load than everything else together."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from ..errors import PluginError

Found = TypeVar("Found")


class _Later(ModuleType):
    """Stands for torch until something of it is used.

    failed: a module asked for a part ("from torch.nn import ..."): its import fails, and works when repeated.
    """

    failed = False

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        torch = importlib.import_module(self.__name__)
        if name == "__path__":
            self.failed = True
            raise AttributeError(name)
        return getattr(torch, name)


def without_torch(call: Callable[[], Found]) -> Found:
    """What a function returns that imports policies. Torch is loaded only where one of them uses it."""
    later = _Later("torch")
    if sys.modules.setdefault("torch", later) is not later:
        return call()
    try:
        found = call()
    except PluginError:
        if not later.failed:
            raise
    finally:
        if sys.modules["torch"] is later:
            del sys.modules["torch"]
    if later.failed:
        return call()
    return found
