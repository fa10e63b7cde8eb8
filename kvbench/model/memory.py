"""Peak memory, measured: bytes allocated on CUDA devices, resident bytes of the process elsewhere."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # proc(5): the high-water mark becomes the present size


def devices_of(model: Any) -> list[torch.device]:
    """The devices that hold a model's weights."""
    return sorted({parameter.device for parameter in model.parameters()}, key=str)


def synchronise(devices: Iterable[torch.device]) -> None:
    """Wait until all work handed to the devices is done, so that a clock read after it is true."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def peak_bytes(devices: Iterable[torch.device] | None = None) -> int:
    """The most memory in use since the start of the process, or since `reset_peak`.

    devices: None is every CUDA device, if this process has used one. Sum over the CUDA devices of what
    torch had allocated; without one, the resident size of this process, libraries and weights included.
    """
    if devices is None:
        count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
        devices = [torch.device("cuda", index) for index in range(count)]
    cuda = [device for device in devices if device.type == "cuda"]
    if cuda:
        return sum(torch.cuda.max_memory_allocated(device) for device in cuda)
    if STATUS.exists():  # getrusage would count what the program that started us used before
        lines = STATUS.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def can_reset(devices: Iterable[torch.device] = ()) -> bool:
    """Whether the peak of a part of the process can be told from that of the whole."""
    return any(device.type == "cuda" for device in devices) or RESET.exists()


def release() -> None:
    """Give back what is free but still held by the allocators, so that a peak is not that of before."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # of glibc
        trim(0)


def reset_peak(devices: Iterable[torch.device] = ()) -> None:
    """Start a new peak at what is in use now; only where `can_reset`."""
    cuda = [device for device in devices if device.type == "cuda"]
    for device in cuda:
        torch.cuda.reset_peak_memory_stats(device)
    if not cuda:
        RESET.write_text(RESET_PEAK)


def format_size(count: int) -> str:
    """Bytes in words: 512 MiB, 2.31 GiB."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
