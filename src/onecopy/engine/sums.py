"""This rank's sums of the gradients of one buffer: in memory, or on disk between the reductions that add to them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from onecopy.errors import DiskError
from onecopy.schedule.lower import Buffer
from onecopy.tiers.held import Held
from onecopy.tiers.memory import Memory
from onecopy.tiers.tiers import Tiers

__all__ = ["Sums"]


class Sums:
    """The sums of one trainable :class:`~onecopy.schedule.lower.Buffer`, flat.

    ========  ==========================================================================================
    current   what is reduced in this window and not final, where gradients are away: a shard
    total     what is final, which the optimizer steps with, over the range that this rank steps
    settled   how often something became final in this window; the same number on every rank
    norms     those of the parts of ``total``, taken before it went to disk and while nobody changes it
    problem   what went wrong with the disk in this window: a backward pass goes on, so that the other ranks
              are not left waiting, and the step is refused on all of them
    ========  ==========================================================================================
    """

    def __init__(self, spec: Buffer, tiers: Tiers) -> None:
        self._spec = spec
        self._tiers = tiers
        self._grid = spec.grid()
        self.wide: torch.dtype = getattr(torch, spec.accumulate_codec)
        self.current: Held | None = None
        self.total: Held | None = None
        self.settled = 0
        self.norms: list[torch.Tensor] | None = None
        self.problem: DiskError | None = None
        # Room on disk for one sum, as what was sent once or as something wider that several are added up in.
        self._rooms: dict[torch.dtype, Held] = {}
        if spec.row.gradient.rest.tier == "disk":
            room = tiers.hold("gradient", "gradient", "disk", self._grid, self.wide)
            wire: torch.dtype = getattr(torch, spec.reduce_codec)
            self._rooms = {dtype: room.seen_as(dtype) for dtype in (self.wide, wire)}
        # On disk, and to be there when the reduction that is under way adds to it.
        self._coming: Held | None = None

    @property
    def on_disk(self) -> bool:
        """Do sums rest on disk?"""
        return bool(self._rooms)

    def show(self, tensor: torch.Tensor) -> Held:
        """``tensor``, on somebody's account, in the tiles that are stepped."""
        return self._tiers.show(tensor, self._grid.tile)

    # Adding

    def land(self, dtype: torch.dtype) -> torch.Tensor:
        """Memory that a reduction ends in: a new :attr:`current` in ``dtype``, or the one there is, in the dtype that sums
        are kept in. One that is on disk is there after :meth:`bring`."""
        if self.current is None:
            self.current = self._make(dtype)
        elif self.current.plain is None:
            self._coming, self.current = self.current, self._make(self.wide)
            self._tiers.read_ahead(self._coming)
        else:
            self.current = self._widened(self.current)
        assert self.current.plain is not None
        return self.current.plain

    def bring(self) -> None:
        """What the reduction adds to is in memory."""
        coming, self._coming = self._coming, None
        if coming is not None:
            assert self.current is not None
            self._fetch(coming, self.current)

    def settle(self, summed: Held) -> bool:
        """``summed`` is final: it becomes :attr:`total`, or joins it and may go. Was it added?"""
        self.settled += 1
        self.norms = None
        if self.total is None:
            self.total = summed
            return False
        before, self.total = self.total, self._widened(self.total)
        assert self.total.plain is not None
        if before.plain is None:
            self._fetch(before, self.total)
        assert summed.plain is not None
        self.total.plain.add_(summed.plain)
        return True

    def copy_total(self) -> None:
        """:attr:`total` leaves the memory that it is a view of, in the dtype that sums are kept in."""
        assert self.total is not None and self.total.plain is not None
        kept = self._make(self.wide, self.total.grid.numel)
        assert kept.plain is not None
        kept.plain.copy_(self.total.plain)
        self.total = kept

    def put_away(self) -> None:
        """What is in memory goes to disk where that is its place. There is room for one: a sum that is begun while the
        total of the window is there already, since somebody moved the boundary, stays in memory."""
        if not self._rooms:
            return
        if self._tiers.device.device.type not in ("cpu", "meta"):
            torch.accelerator.current_stream().synchronize()  # it may be on its way to the host
        if self.total is not None:
            self.total = self._written(self.total)
        elif self.current is not None:
            self.current = self._written(self.current)

    # Looking and changing

    def read(self, held: Held, low: int, high: int) -> torch.Tensor:
        """Elements ``[low, high)`` of ``held``: a view in memory, a copy of what is on disk."""
        if held.plain is not None:
            return held.plain[low:high]
        values = torch.empty(high - low, dtype=held.dtype, device=held.device)
        held.read(low, high, values)
        return values

    def change(self, held: Held, low: int, high: int, how: Callable[[torch.Tensor], object]) -> None:
        """Let ``how`` change elements ``[low, high)`` of ``held`` in place, a part at a time."""
        self.norms = None
        held.change(low, high, lambda part, _: how(part))

    def write(self, held: Held, low: int, high: int, values: torch.Tensor) -> None:
        """Make elements ``[low, high)`` of ``held`` those of ``values``."""
        self.norms = None
        held.write(low, high, values)

    # Letting go

    def free(self, held: Held) -> None:
        """``held`` is not wanted any more."""
        if held.plain is not None:
            memory, kind = self._memory()
            memory.drop(kind, held.plain)
        else:
            self._tiers.forget(held)

    def forget(self) -> None:
        """The window is over, and what it summed is freed."""
        if self._coming is not None:
            self.free(self._coming)
        self.current = self.total = self._coming = self.norms = self.problem = None
        self.settled = 0

    # Details

    def _memory(self) -> tuple[Memory, str]:
        """What sums in memory are on the account of: those on disk pass through it."""
        if self._rooms:
            return self._tiers.host, "reduce buffer"
        return self._tiers.memory(self._spec.row.gradient.rest.tier), "gradient"

    def _make(self, dtype: torch.dtype, elements: int | None = None) -> Held:
        memory, kind = self._memory()
        return self.show(memory.alloc(kind, self._grid.numel if elements is None else elements, dtype))

    def _widened(self, narrow: Held) -> Held:
        """``narrow`` in the dtype that sums are kept in. From the disk it comes with undefined values."""
        if narrow.plain is None:
            return self._make(self.wide)
        if narrow.dtype == self.wide:
            return narrow
        wide = self._make(self.wide, narrow.grid.numel)
        assert wide.plain is not None
        wide.plain.copy_(narrow.plain)
        self.free(narrow)
        return wide

    def _fetch(self, room: Held, into: Held) -> None:
        assert into.plain is not None
        try:
            self._tiers.fetch(room, into.plain)
        except DiskError as error:
            self.problem = self.problem or error

    def _written(self, held: Held) -> Held:
        """``held``, on its way to the disk."""
        if held.plain is None:
            return held
        room = self._rooms[held.dtype]
        try:
            room.write(0, room.grid.numel, held.plain)
        except DiskError as error:
            self.problem = self.problem or error
        self.free(held)
        return room
