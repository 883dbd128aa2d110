"""A flat training state at rest: lent tile by tile to whoever computes with it, wherever it rests and in what format.

``lend(tile)`` starts to bring a tile, ``wait()`` gives its values, ``put()`` takes back what was changed. For plain
memory all three do nothing but show it; a codec decodes and encodes between; the disk reads ahead and writes behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from onecopy.codecs import Codec, draw, stored, stride
from onecopy.plan.layout import Grid
from onecopy.tiers.memory import Memory

__all__ = ["Clock", "Held", "Loan", "Place", "Resident"]


class Loan(Protocol):
    """Bytes of a place on their way to or from a computation."""

    def wait(self) -> torch.Tensor:
        """The bytes, uint8, to be read and changed; blocks until they are there."""

    def put(self) -> None:
        """They were changed: keep them. Returns before they are where they rest."""

    def drop(self) -> None:
        """They were only read."""


class Place(Protocol):
    """Where the bytes of one state rest."""

    def lend(self, low: int, high: int, fresh: bool) -> Loan:
        """Bytes ``[low, high)``; ``fresh``: their contents do not matter, all of them will be written."""


class Resident:
    """A place in memory: what is lent is the memory itself."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._bytes = memory.view(torch.uint8)

    def lend(self, low: int, high: int, fresh: bool) -> Loan:
        return _InPlace(self._bytes[low:high])


class _InPlace:
    """Lent memory needs no way back."""

    def __init__(self, lent: torch.Tensor) -> None:
        self._lent = lent

    def wait(self) -> torch.Tensor:
        return self._lent

    def put(self) -> None:
        """It is where it rests."""

    def drop(self) -> None:
        """Nothing was taken."""


class Clock:
    """The optimizer step that is running, or the last one."""

    def __init__(self) -> None:
        self.step = 0
        self._own = threading.local()

    @contextmanager
    def at(self, step: int) -> Iterator[None]:
        """This thread is in ``step``, whatever the others go on to."""
        self._own.step = step
        try:
            yield
        finally:
            del self._own.step

    @property
    def now(self) -> int:
        """The step that the calling thread is in."""
        step: int = getattr(self._own, "step", self.step)
        return step


class Held:
    """One flat state over ``grid``, in ``place``, whose values are ``dtype`` when lent and rest in ``codec`` (None: as
    they are). ``plain``: the values themselves where they rest in memory unencoded. Tiles lie ``align`` bytes apart or a
    multiple of that."""

    def __init__(
        self,
        grid: Grid,
        dtype: torch.dtype,
        place: Place,
        codec: Codec | None,
        workspace: Memory,
        clock: Clock,
        align: int = 1,
    ) -> None:
        self.grid = grid
        self.dtype = dtype
        self.codec = codec
        self.clock = clock
        self.plain: torch.Tensor | None = None
        self._place = place
        self._workspace = workspace
        self._align = align
        self._stride = stride(grid.tile, dtype, codec, align)

    @property
    def device(self) -> torch.device:
        """Where values are when they are lent."""
        return self.plain.device if self.plain is not None else self._workspace.device

    def lend(self, tile: int, fresh: bool = False, zero: bool = False) -> Tile:
        """Start to bring tile ``tile``. ``fresh``: its contents do not matter; ``zero``: they are 0 then."""
        low, high = self.grid.bounds(tile)
        start = tile * self._stride
        stop = start + stride(high - low, self.dtype, self.codec, self._align)
        return Tile(self._place.lend(start, stop, fresh), tile, self, (fresh, zero))

    def read(self, low: int, high: int, out: torch.Tensor) -> None:
        """Copy elements ``[low, high)`` to ``out``."""
        for tile in self.grid.meets(low, high):
            lent = self.lend(tile)
            start, stop = self.grid.bounds(tile)
            first, last = max(low, start), min(high, stop)
            out[first - low : last - low].copy_(lent.wait()[first - start : last - start])
            lent.drop()

    def write(self, low: int, high: int, values: torch.Tensor) -> None:
        """Make elements ``[low, high)`` those of ``values``."""
        self.change(low, high, lambda part, at: part.copy_(values[at : at + part.numel()]), fresh=True)

    def change(self, low: int, high: int, how: Callable[[torch.Tensor, int], object], fresh: bool = False) -> None:
        """Let ``how(part, at)`` change elements ``[low, high)`` in place, a part of them at a time, which begins ``at``
        elements after ``low``. ``fresh``: it does not look at what was there."""
        for tile in self.grid.meets(low, high):
            start, stop = self.grid.bounds(tile)
            first, last = max(low, start), min(high, stop)
            lent = self.lend(tile, fresh=fresh and (first, last) == (start, stop))
            try:
                how(lent.wait()[first - start : last - start], first - low)
                lent.put()
            finally:
                lent.drop()  # where it was not given back

    def seen_as(self, dtype: torch.dtype) -> Held:
        """The same place for values of ``dtype``, which is no wider. What was written as one is not to be read as the
        other."""
        return Held(self.grid, dtype, self._place, self.codec, self._workspace, self.clock, self._align)


class Tile:
    """One tile on loan from a :class:`Held`."""

    __slots__ = ("_elements", "_fresh", "_held", "_loan", "_raw", "_tile", "_values", "_zero")

    def __init__(self, loan: Loan, tile: int, held: Held, new: tuple[bool, bool]) -> None:
        self._loan: Loan | None = loan
        self._tile = tile
        low, high = held.grid.bounds(tile)
        self._elements = high - low
        self._held = held
        self._fresh, self._zero = new
        self._raw: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        """The values, flat, in the computation's dtype."""
        if self._values is not None:
            return self._values
        assert self._loan is not None  # not given back yet
        self._raw = self._loan.wait()[: stored(self._elements, self._held.dtype, self._held.codec)]
        codec, dtype = self._held.codec, self._held.dtype
        if codec is None:
            self._values = self._raw.view(dtype)
        else:
            self._values = self._held._workspace.alloc("workspace", self._elements, dtype)
            if not self._fresh:
                codec.decode(self._raw, self._values)
        if self._zero:
            self._values.zero_()
        return self._values

    def put(self) -> None:
        """The values were changed: they go back, encoded where they rest so."""
        assert self._raw is not None and self._values is not None and self._loan is not None
        if self._held.codec is not None:
            draw(self._held.codec, self._number())
            self._held.codec.encode(self._values, self._raw)
            self._held._workspace.drop("workspace", self._values)
        self._loan.put()
        self._loan = self._values = self._raw = None

    def _number(self) -> int:
        """What no other encoding of this state has: a run that resumes at the same step rounds alike."""
        return (self._held.clock.now << 32) + self._tile

    def drop(self) -> None:
        """The values were only read. Does nothing when the tile is back already."""
        if self._held.codec is not None and self._values is not None:
            self._held._workspace.drop("workspace", self._values)
        if self._loan is not None:
            self._loan.drop()
        self._loan = self._values = self._raw = None

