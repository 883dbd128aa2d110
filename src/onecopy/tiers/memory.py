"""Memory tiers: the device that computes and the host, each with every owned byte on one account."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import defaultdict
from collections.abc import Callable

import torch

from onecopy.errors import MemoryCapError

__all__ = ["Memory", "give_back_freed_memory", "keep_freed_memory"]

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def keep_freed_memory(keep: bool = True) -> bool:
    """Tell glibc to keep freed blocks of the process instead of handing them back to the system; False elsewhere.

    ``keep=False``: hand them back at once, as construction wants it, whose buffers do not come again.

    Buffers are freed and filled again in every unit. By default glibc unmaps large ones and trims the heap, and each
    page that comes back is cleared by the kernel at its first touch: about 0.4 ms per MB, more than sending it costs.
    An accelerator's caching allocator does the same thing for device memory.
    """
    set_option = _libc("mallopt")
    if set_option is None:
        return False
    if keep:
        options = ((_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, (1 << 31) - 1), (_M_TOP_PAD, 64 << 20))
    else:
        options = ((_M_MMAP_THRESHOLD, 1 << 20), (_M_TRIM_THRESHOLD, 1 << 20), (_M_TOP_PAD, 1 << 17))
    return all(set_option(option, value) == 1 for option, value in options)


def give_back_freed_memory() -> None:
    """Hand freed heap pages back to the system, where glibc can: after construction, whose buffers do not come again."""
    trim = _libc("malloc_trim")
    if trim is not None:
        trim(0)


def _libc(name: str) -> Callable[..., int] | None:
    """A function of the C library; None on systems and libraries without it (musl)."""
    if not sys.platform.startswith("linux"):
        return None
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    return found


class Memory:
    """Allocates the engine's buffers on one tier and keeps the account of them by kind: bytes live now and at their peak.

    Kinds are those of ``Engine.predicted()``: parameter, gradient, master, moments, gather buffer, reduce buffer,
    workspace, staging. ``cap``: bytes that may be live at a time. Host memory beside an accelerator is pinned, so that
    copies run beside computation.
    """

    def __init__(self, tier: str, device: torch.device, cap: int | None = None, pinned: bool = False) -> None:
        self.tier = tier
        self.device = device
        self.cap = cap
        self.pinned = pinned
        self.live: dict[str, int] = defaultdict(int)
        self.peak: dict[str, int] = defaultdict(int)
        self.total = 0
        self.peak_total = 0
        self._lock = threading.Lock()

    def count(self, kind: str, size: int) -> None:
        """``size`` bytes of ``kind`` come to life (negative: go). Raises :class:`MemoryCapError` above the cap, with
        nothing counted."""
        if self.cap is not None and size > 0 and self.total + size > self.cap:
            raise MemoryCapError(
                f"{kind} needs {size:,} bytes of {self.tier} memory beside the {self.total:,} in use, and the cap is "
                f"{self.cap:,}; raise the cap of the {self.tier}, or move more to the next tier (see docs/offload.md)"
            )
        with self._lock:  # a step may run on a thread
            self.live[kind] += size
            self.total += size
            if size > 0:
                self.peak[kind] = max(self.peak[kind], self.live[kind])
                self.peak_total = max(self.peak_total, self.total)

    def alloc(self, kind: str, elements: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised flat tensor on the account of ``kind``."""
        self.count(kind, elements * dtype.itemsize)
        return torch.empty(elements, dtype=dtype, device=self.device, pin_memory=self.pinned)

    def drop(self, kind: str, tensor: torch.Tensor) -> None:
        """Take ``tensor`` off the account; its memory goes with the caller's last reference."""
        self.count(kind, -tensor.numel() * tensor.element_size())

    def materialise(self, kind: str, tensor: torch.Tensor) -> None:
        """Give a freed tensor's storage its memory back, contents undefined. Views of it stay valid."""
        size = tensor.numel() * tensor.element_size()
        self.count(kind, size)
        tensor.untyped_storage().resize_(size)

    def vacate(self, kind: str, tensor: torch.Tensor) -> None:
        """Free the memory of ``tensor``'s storage in place; the tensor and its views keep their shapes."""
        self.count(kind, -tensor.numel() * tensor.element_size())
        tensor.untyped_storage().resize_(0)

    def reset_peak(self) -> None:
        """Start a new peak from what is live now."""
        self.peak = defaultdict(int, self.live)
        self.peak_total = self.total
