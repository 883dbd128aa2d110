"""``deepspeed.accelerator``: the device that training runs on, asked through one object; torch answers."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

from onecopy.comm.groups import local_rank

__all__ = ["Accelerator", "get_accelerator", "is_current_accelerator_supported"]


class Accelerator:
    """The kind of device there is (``cuda``, ``xpu``, ..., else ``cpu``) under the names of DeepSpeed's accelerators.

    Whatever is not here is the function of that name in torch's module of the device (``torch.cuda``, ``torch.cpu``).
    """

    def __init__(self) -> None:
        kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        self._name: str = kind.type if kind is not None else "cpu"

    @property
    def _module(self) -> Any:
        return getattr(torch, self._name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._module, name)

    def is_synchronized_device(self) -> bool:
        """Does a call return only when its work is done?"""
        return self._name == "cpu"

    # which device

    def device_name(self, device_index: int | str | None = None) -> str:
        """``"cuda"``, or ``"cuda:1"`` with an index; the CPU has no numbers."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        """A context in which that device is the current one."""
        return nullcontext() if self._name == "cpu" else self._module.device(device_index)

    def current_device(self) -> int | str:
        """Number of this process's device; ``"cpu"`` on the CPU."""
        return "cpu" if self._name == "cpu" else int(torch.accelerator.current_device_index())

    def current_device_name(self) -> str:
        """Its name with its number."""
        return "cpu" if self._name == "cpu" else f"{self._name}:{self.current_device()}"

    def set_device(self, device_index: int) -> None:
        """Make that device this process's."""
        if self._name != "cpu":
            torch.accelerator.set_device_index(device_index)

    def device_count(self) -> int:
        """Devices of this machine; on the CPU the ranks that run on it."""
        if self._name == "cpu":
            return int(os.environ.get("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", local_rank() + 1)))
        return int(torch.accelerator.device_count())

    def is_available(self) -> bool:
        """There always is one: the CPU at least."""
        return True

    def communication_backend_name(self) -> str:
        """Backend of ``torch.distributed`` for tensors on it."""
        return torch.distributed.get_default_backend_for_device(self._name)

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Is ``tensor`` on a device of this kind?"""
        return tensor.device.type == self._name

    # work

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait until the device has done what it was given."""
        if self._name != "cpu":
            torch.accelerator.synchronize(device_index)

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """A context whose work goes to ``stream``."""
        return nullcontext() if self._name == "cpu" else self._module.stream(stream)

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """``tensor`` in memory that the device can copy from; as it is on the CPU."""
        return tensor if self._name == "cpu" else tensor.pin_memory()

    def empty_cache(self) -> None:
        """Give memory that is free back to the device."""
        if self._name != "cpu":
            self._module.empty_cache()

    def manual_seed_all(self, seed: int) -> None:
        """Seed the random numbers of every device."""
        torch.manual_seed(seed)

    def range_push(self, msg: str) -> Any:
        """Begin a named range for a profiler."""
        return self._module.nvtx.range_push(msg) if hasattr(self._module, "nvtx") else None

    def range_pop(self) -> Any:
        """End it."""
        return self._module.nvtx.range_pop() if hasattr(self._module, "nvtx") else None

    # memory, bytes

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of live tensors; of the whole process on the CPU."""
        return self._rss() if self._name == "cpu" else int(self._module.memory_allocated(device_index))

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most there were since the last reset; what there is now on the CPU, which keeps no record."""
        return self._rss() if self._name == "cpu" else int(self._module.max_memory_allocated(device_index))

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Begin a new record."""
        if self._name != "cpu":
            self._module.reset_peak_memory_stats(device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes that the allocator holds."""
        return self._rss() if self._name == "cpu" else int(self._module.memory_reserved(device_index))

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device."""
        if self._name == "cpu":
            return int(psutil.virtual_memory().total)
        return int(self._module.get_device_properties(device_index).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes that are free."""
        if self._name == "cpu":
            return int(psutil.virtual_memory().available)
        return self.total_memory(device_index) - self.memory_allocated(device_index)

    def _rss(self) -> int:
        return int(psutil.Process().memory_info().rss)

    # numbers it computes with

    def is_bf16_supported(self) -> bool:
        """Does it compute in bfloat16?"""
        return self._name == "cpu" or bool(self._module.is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        """Does it compute in float16?"""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Dtypes that models may have."""
        return [torch.float, torch.half] + ([torch.bfloat16] if self.is_bf16_supported() else [])


@cache
def get_accelerator() -> Accelerator:
    """The device there is."""
    return Accelerator()


def is_current_accelerator_supported() -> bool:
    """Does training work on it? It does wherever torch has collectives."""
    return torch.distributed.is_available()
