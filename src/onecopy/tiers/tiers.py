"""The tiers of one engine: what memory there is, and where a state with a given layout is put."""

from __future__ import annotations

import torch

from onecopy.codecs import Codec, stride
from onecopy.plan.layout import Grid, Tier
from onecopy.plan.plan import Caps
from onecopy.tiers.disk import Disk, Region, Staged, Transfer
from onecopy.tiers.held import Held, Loan, Resident
from onecopy.tiers.memory import Memory

__all__ = ["ALIGN", "Tiers"]

# Tiles of states that are not plain numbers in memory begin on the blocks of a disk.
ALIGN = 4096


class Tiers:
    """``device`` and ``host`` allocate memory; ``disk`` holds files, and its :class:`Memory` is their account."""

    def __init__(self, device: torch.device, caps: Caps, disk: Disk | None = None) -> None:
        self.device = Memory("device", device, caps.device)
        self.host = Memory("host", torch.device("cpu"), caps.host, pinned=device.type != "cpu")
        self.account = Memory("disk", torch.device("cpu"))
        self.disk = disk

    def memory(self, tier: Tier) -> Memory:
        """What allocates on ``tier``, or keeps the account of it."""
        return {"device": self.device, "host": self.host, "disk": self.account}[tier]

    @property
    def all(self) -> tuple[Memory, Memory, Memory]:
        return self.device, self.host, self.account

    def show(self, tensor: torch.Tensor, tile: int) -> Held:
        """``tensor``, which is on somebody's account already, as a state that is lent in tiles."""
        held = Held(Grid(tensor.numel(), max(tile, 1)), tensor.dtype, Resident(tensor), None, self.host)
        held.plain = tensor
        return held

    def decode(self, tensor: torch.Tensor, tile: int, codec: Codec, tier: Tier) -> Held:
        """``tensor``, whose numbers are in ``codec`` on ``tier``, as a state of float32 values."""
        return Held(Grid(tensor.numel(), tile), torch.float32, Resident(tensor), codec, self.computing(tier))

    def computing(self, tier: Tier) -> Memory:
        """The memory in which states of ``tier`` are computed with."""
        return self.device if tier == "device" else self.host

    def hold(self, kind: str, name: str, tier: Tier, grid: Grid, dtype: torch.dtype, codec: Codec | None = None) -> Held:
        """Room for a state of ``kind`` over ``grid``. On disk it is reserved, and there once the disk is open."""
        if tier == "disk":
            assert self.disk is not None
            apart = stride(grid.tile, dtype, codec, ALIGN)
            size = apart * grid.count
            self.account.count(kind, size)
            place = OnDisk(self.disk, self.disk.reserve(name, size))
            return Held(grid, dtype, place, codec, self.host, ALIGN)
        memory = self.memory(tier)
        if codec is None:
            return self.show(memory.alloc(kind, grid.numel, dtype), grid.tile)
        size = stride(grid.tile, dtype, codec, ALIGN) * grid.count
        return Held(grid, dtype, Resident(memory.alloc(kind, size, torch.uint8)), codec, memory, ALIGN)

    def close(self) -> None:
        """Remove what is on disk."""
        if self.disk is not None:
            self.disk.close()


class OnDisk:
    """A place in a file."""

    def __init__(self, disk: Disk, region: Region) -> None:
        self._disk = disk
        self._region = region

    def lend(self, low: int, high: int, fresh: bool) -> Loan:
        staged = self._disk.stage(high - low) if fresh else self._disk.fetch(self._region, low, high)
        return _Lent(self._disk, self._region, low, staged)


class _Lent:
    """Bytes of a file in staging memory."""

    def __init__(self, disk: Disk, region: Region, low: int, staged: Transfer | Staged) -> None:
        self._disk = disk
        self._region = region
        self._low = low
        self._staged = staged

    def wait(self) -> torch.Tensor:
        return self._staged.tensor if isinstance(self._staged, Staged) else self._staged.wait()

    def put(self) -> None:
        self._disk.put(self._region, self._low, self._staged)

    def drop(self) -> None:
        self._staged.release()
