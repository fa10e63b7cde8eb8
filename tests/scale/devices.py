"""Devices that are not there: tensors that say they lie on one, compute on the CPU, and refuse to mix.

    with pretended():
        model = split(tiny_model("llama"), [one, one, other, other])

An operation on tensors of two devices fails as it would on GPUs; scalars, copies and indices on the CPU
are allowed to meet a device, as there. The device type is torch's place for a backend written in Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

aten = torch.ops.aten
TYPE = "pretend"
MATH = 0  # the choice of attention kernel that is made of ordinary operations
COPIES = {aten._to_copy.default, aten.copy_.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


class Mixed(Exception):
    """Tensors of two devices met."""


class Asked(Exception):
    """A number was asked for, which waits for the device."""


class _Backend:
    """What torch wants to know about a device type."""

    def __getattr__(self, name: str) -> Any:
        answers = {"is_available": False, "device_count": 0, "current_device": 0, "_is_in_bad_fork": False}
        answers |= {
            "is_initialized": True,
            "manual_seed_all": None,
            "get_amp_supported_dtype": [torch.bfloat16],
        }
        if name not in answers:
            raise AttributeError(name)
        return lambda *args: answers[name]


def register() -> None:
    """Make the device type known, once per process; to all others it is not available."""
    if torch._C._get_privateuse1_backend_name() == TYPE:
        return
    from torch._C import _acc
    from torch.utils import backend_registration as torch_side

    class Hook(_acc.PrivateUse1Hooks):  # type: ignore[misc]
        def is_available(self) -> bool:
            return False

        def has_primary_context(self, index: int) -> bool:
            return True

        def is_built(self) -> bool:
            return True

    torch_side._setup_privateuseone_for_python_backend(TYPE, _Backend(), Hook())


class Placed(Tensor):
    """A tensor on a pretended device. held: its numbers, on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, real: Tensor, device: torch.device) -> Placed:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, real.size(), strides=real.stride(), storage_offset=real.storage_offset(),
            dtype=real.dtype, device=device,
        )  # fmt: skip

    def __init__(self, real: Tensor, device: torch.device) -> None:
        self.held = real

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(function, args, kwargs or {})


class Pretended(TorchDispatchMode):
    """Also operations that only name a device, such as torch.arange, are taken to it."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(function, args, kwargs or {})


class Literals(TorchFunctionMode):
    """torch.tensor builds on the CPU what it is told, then moves it; a list is read on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is Tensor.tolist:
            return args[0].to("cpu").tolist()
        if function is not torch.tensor:
            return function(*args, **kwargs)
        device = torch.device(kwargs.pop("device", None) or "cpu")
        return function(*args, **kwargs).to(device)


class Unasked(Pretended):
    """And nobody may ask for a number."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        home = function is aten._to_copy.default and str(kwargs.get("device", "")) == "cpu"
        if function is aten._local_scalar_dense.default or home:
            raise Asked(str(function))
        return compute(function, args, kwargs)


def compute(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operation: where it happens, on which numbers, and where its results lie."""
    if function is aten._fused_sdp_choice.default:
        return MATH
    asked = kwargs.get("device")
    device = torch.device(asked) if asked is not None else where(function, args, kwargs)
    result = function(*tree_map(real, args), **tree_map(real, kwargs))
    if device.type != TYPE:
        return result
    return tree_map(lambda part: Placed(part, device) if isinstance(part, Tensor) else part, result)


def where(function: Any, args: Any, kwargs: dict[str, Any]) -> torch.device:
    """The device that all tensors share. Raises Mixed."""
    if function in COPIES or function in INDEXING:
        return args[0].device
    tensors = [part for part in tree_iter([args, kwargs]) if isinstance(part, Tensor)]
    full = {part.device for part in tensors if part.dim() or part.device.type != "cpu"}
    if len(full) > 1:
        raise Mixed(f"{function} on {', '.join(sorted(map(str, full)))}")
    return full.pop() if full else torch.device("cpu")


def real(part: Any) -> Any:
    """The same on the CPU."""
    if isinstance(part, Placed):
        return part.held
    return torch.device("cpu") if isinstance(part, torch.device) and part.type == TYPE else part


@contextmanager
def pretended(asking: bool = True) -> Iterator[None]:
    """asking: whether numbers may be asked for."""
    register()
    with Literals(), Pretended() if asking else Unasked():
        yield


def place(module: Any, device: torch.device) -> None:
    """All numbers of a module and its parts onto one device."""
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is not None and not isinstance(tensor, Placed):
                    held[name] = Placed(tensor.detach(), device)


def split(model: Any, devices: Sequence[torch.device]) -> Any:
    """Layer i on devices[i], all else on the first, with the hooks that accelerate's device_map sets."""
    for layer, device in zip(model.model.layers, devices, strict=True):
        place(layer, device)
        add_hook_to_module(layer, AlignDevicesHook(execution_device=device))
    place(model, devices[0])
    for part in (model.model.norm, model.lm_head):
        add_hook_to_module(part, AlignDevicesHook(execution_device=devices[0]))
    return model
