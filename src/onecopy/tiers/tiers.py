"""The tiers of one engine: what memory there is, and where a state with a given layout is put."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from onecopy.codecs import ALIGN, Codec, blocks
from onecopy.plan.layout import Grid, Tier, in_memory
from onecopy.plan.plan import Caps
from onecopy.tiers.disk import Disk, Region, Staged, Transfer
from onecopy.tiers.held import Clock, Held, Loan, Resident, Tile
from onecopy.tiers.memory import Memory

__all__ = ["Tiers"]


# Tiles that are read before the first is waited for.
_AHEAD = 4


def _nowhere(link: str, size: int) -> None:
    """Nobody counts."""



class Tiers:
    """``device`` and ``host`` allocate memory; ``disk`` holds files, and its :class:`Memory` is their account."""

    def __init__(
        self,
        device: torch.device,
        caps: Caps,
        disk: Disk | None = None,
        moved: Callable[[str, int], None] = _nowhere,
        beside: bool = False,
    ) -> None:
        self.device = Memory("device", device, caps.device)
        # Beside an accelerator that is simulated the host is too.
        host = device if device.type == "meta" else torch.device("cpu")
        self.host = Memory("host", host, caps.host, pinned=device.type not in ("cpu", "meta"))
        self.account = Memory("disk", torch.device("cpu"))
        self.disk = disk
        # Where what rests on host and disk is decoded. A step that runs ``beside`` training would show on the account at any
        # time; what it needs at most is counted for as long as it runs.
        self._decoded = Memory("host", host, pinned=self.host.pinned) if beside else self.host
        self._moved = moved
        self._apart = threading.local()
        self.clock = Clock()
        self._ahead: dict[Held, deque[Tile]] = {}
        # Bytes of the largest tile on disk.
        self._largest = 0

    def moved(self, link: str, size: int) -> None:
        """``size`` bytes cross ``link``, between two tiers."""
        moves: Counter[str] | None = getattr(self._apart, "moves", None)
        if moves is None:
            self._moved(link, size)
        else:
            moves[link] += size

    @contextmanager
    def apart(self) -> Iterator[Counter[str]]:
        """What this thread moves is added up here and told to nobody."""
        self._apart.moves = Counter()
        try:
            yield self._apart.moves
        finally:
            self._apart.moves = None

    def memory(self, tier: Tier) -> Memory:
        """What allocates on ``tier``, or keeps the account of it."""
        return {"device": self.device, "host": self.host, "disk": self.account}[tier]

    @property
    def all(self) -> tuple[Memory, Memory, Memory]:
        return self.device, self.host, self.account

    def show(self, tensor: torch.Tensor, tile: int) -> Held:
        """``tensor``, which is on somebody's account already, as a state that is lent in tiles."""
        held = Held(Grid(tensor.numel(), max(tile, 1)), tensor.dtype, Resident(tensor), None, self.host, self.clock)
        held.plain = tensor
        return held

    def decode(self, tensor: torch.Tensor, tile: int, codec: Codec, tier: Tier) -> Held:
        """``tensor``, whose numbers are in ``codec`` on ``tier``, as a state of float32 values."""
        return Held(Grid(tensor.numel(), tile), torch.float32, Resident(tensor), codec, self.computing(tier), self.clock)

    def computing(self, tier: Tier) -> Memory:
        """The memory in which states of ``tier`` are computed with."""
        return self.memory(in_memory(tier))

    def hold(self, kind: str, name: str, tier: Tier, grid: Grid, dtype: torch.dtype, codec: Codec | None = None) -> Held:
        """Room for a state of ``kind`` over ``grid``. On disk it is reserved, and there once the disk is open."""
        if tier == "disk":
            assert self.disk is not None
            size = blocks(grid.numel, grid.tile, _name(dtype), codec)
            self.account.count(kind, size)
            self._largest = max(self._largest, blocks(min(grid.tile, grid.numel), grid.tile, _name(dtype), codec))
            on_disk = OnDisk(self.disk, self.disk.reserve(name, size), self.moved)
            return Held(grid, dtype, on_disk, codec, self._decoded, self.clock, ALIGN)
        memory = self.memory(tier)
        if codec is None:
            return self.show(memory.alloc(kind, grid.numel, dtype), grid.tile)
        size = blocks(grid.numel, grid.tile, _name(dtype), codec)
        place = Resident(memory.alloc(kind, size, torch.uint8))
        return Held(grid, dtype, place, codec, self._decoded if tier == "host" else memory, self.clock, ALIGN)

    # What is read whole, such as the shard of a parameter

    def read_ahead(self, held: Held) -> None:
        """Begin to bring the first tiles of ``held``, as far as staging has room: :meth:`fetch` will want them."""
        tiles = self._ahead.setdefault(held, deque())
        for tile in range(len(tiles), min(_AHEAD, held.grid.count)):
            if self._room(held):
                tiles.append(held.lend(tile))

    def fetch(self, held: Held, out: torch.Tensor) -> None:
        """Copy all of ``held`` to ``out``."""
        tiles = self._ahead.pop(held, deque())
        coming = len(tiles)
        try:
            for index in range(held.grid.count):
                while coming < held.grid.count and (not tiles or (len(tiles) < _AHEAD and self._room(held))):
                    tiles.append(held.lend(coming))
                    coming += 1
                low, high = held.grid.bounds(index)
                out[low:high].copy_(tiles[0].wait())
                tiles.popleft().drop()
        finally:
            for tile in tiles:
                tile.drop()

    def forget(self, held: Held | None = None) -> None:
        """What was read ahead (of ``held``, or all of it) is going to be written: it would be out of date."""
        for each in [held] if held is not None else list(self._ahead):
            for tile in self._ahead.pop(each, ()):
                tile.drop()

    def _room(self, held: Held) -> bool:
        """Does staging hold a tile of ``held`` beside one more of any state, which whoever cannot wait may need?"""
        size = held.grid.tile * held.dtype.itemsize
        return self.disk is None or self.disk.has_room(-(-size // ALIGN) * ALIGN + self._largest)

    def close(self) -> None:
        """Remove what is on disk."""
        if self.disk is not None:
            self.disk.close()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class OnDisk:
    """A place in a file."""

    def __init__(self, disk: Disk, region: Region, moved: Callable[[str, int], None]) -> None:
        self._disk = disk
        self._region = region
        self._moved = moved

    def lend(self, low: int, high: int, fresh: bool) -> Loan:
        if fresh:
            staged: Transfer | Staged = self._disk.stage(high - low)
        else:
            self._moved("disk_read", high - low)
            staged = self._disk.fetch(self._region, low, high)
        return _Lent(self, low, staged)

    def write(self, low: int, staged: Transfer | Staged) -> None:
        """Begin to write what was lent, at byte ``low``."""
        self._moved("disk_write", staged.size)
        self._disk.put(self._region, low, staged)


class _Lent:
    """Bytes of a file in staging memory."""

    def __init__(self, place: OnDisk, low: int, staged: Transfer | Staged) -> None:
        self._place = place
        self._low = low
        self._staged = staged

    def wait(self) -> torch.Tensor:
        return self._staged.tensor if isinstance(self._staged, Staged) else self._staged.wait()

    def put(self) -> None:
        self._place.write(self._low, self._staged)

    def drop(self) -> None:
        self._staged.release()
