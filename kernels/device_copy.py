"""Getting a step's arrays from the host to a device without waiting for it."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

_ALIGNMENT = 16
"""Bytes; of each array in the one copy."""


class PlanFence:
    """Keeps a plan from overwriting host memory that the device is still copying from."""

    __slots__ = ("_event",)

    def __init__(self, device: torch.device) -> None:
        self._event: torch.Event | None = torch.Event(device) if device.type == "cuda" else None

    def wait(self) -> None:
        """Wait for the copies of the last plan."""
        if self._event is not None:
            self._event.synchronize()

    def record(self) -> None:
        """Mark the end of a plan's copies on the current stream."""
        if self._event is not None:
            self._event.record()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU current, since FlashInfer launches on the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def stage(arrays: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Send host arrays to the device in one asynchronous copy out of pinned memory."""
    if device.type == "cpu":
        return dict(arrays)
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays.values()]
    # torch gives this memory out again only after the copy is done
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for array, part in zip(arrays.values(), torch.split(host, sizes), strict=True):
        part[: array.nbytes].copy_(array.contiguous().view(torch.uint8))
    there = torch.split(host.to(device, non_blocking=True), sizes)
    return {
        name: part[: array.nbytes].view(array.dtype)
        for (name, array), part in zip(arrays.items(), there, strict=True)
    }
