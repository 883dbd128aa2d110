"""Where a training state lives: layouts, the device mesh, and the flat cut of a unit's parameters.

Everything here is plain data about elements and bytes; nothing is allocated and no process group exists.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

Axis = Literal["within", "across"]
Tier = Literal["device", "host", "disk"]
Grain = Literal["element", "row", "block", "tensor"]

WITHIN: tuple[Axis, ...] = ("within",)
WORLD: tuple[Axis, ...] = ("within", "across")


def itemsize(codec: str) -> int:
    """Bytes of one element of ``codec``, the name of a torch dtype such as ``"bfloat16"``."""
    dtype = getattr(torch, codec, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"codec {codec!r} is not the name of a torch dtype")
    return dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """Placement of one state: the mesh axes that cut it, the memory that holds it, the format it is held in.

    ``shards=()`` is a full copy on every rank; ``codec=None`` is the parameter's own dtype.
    """

    shards: tuple[Axis, ...] = ()
    tier: Tier = "device"
    codec: str | None = None
    grain: Grain = "element"

    @property
    def replicated(self) -> bool:
        return not self.shards


@dataclass(frozen=True)
class Mesh:
    """The data-parallel ranks as ``across`` groups of ``within`` consecutive ranks.

    States are cut ``within`` a group and summed ``across`` groups. Plain ZeRO is one group of all ranks.
    Rank ``r`` is member ``r % within`` of group ``r // within``.
    """

    within: int = 1
    across: int = 1

    @property
    def world(self) -> int:
        return self.within * self.across

    def size(self, axes: Iterable[Axis]) -> int:
        """Number of pieces a state is cut into along ``axes``."""
        pieces = 1
        for axis in axes:
            pieces *= self.within if axis == "within" else self.across
        return pieces


@dataclass(frozen=True)
class ParamFact:
    """What the plan must know of one parameter. ``names`` are all its names; tied weights have several."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True

    @property
    def name(self) -> str:
        return self.names[0]

    @cached_property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class UnitFact:
    """Parameters that are gathered together, in the order in which the model registers them.

    ``spans``: modules further on use the unit again (a tied head, parameters of the root module), so it is needed from
    its first use to the end of the forward pass, and all through backward.
    """

    name: str
    params: tuple[ParamFact, ...]
    spans: bool = False


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a flat buffer: elements ``[start, start + param.numel)``."""

    param: ParamFact
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.param.numel

    def local(self, low: int, high: int) -> tuple[int, int] | None:
        """The part of this slot inside ``[low, high)``, in elements of the flat buffer; None when they do not meet."""
        start, stop = max(self.start, low), min(self.stop, high)
        return (start, stop) if start < stop else None


@dataclass(frozen=True)
class FlatLayout:
    """Slots side by side in one buffer that is cut into ``pieces`` equal contiguous shards.

    Padding is at the end only and smaller than ``pieces`` elements.
    """

    slots: tuple[Slot, ...]
    pieces: int

    @cached_property
    def numel(self) -> int:
        """Elements without padding."""
        return sum(slot.param.numel for slot in self.slots)

    @cached_property
    def shard(self) -> int:
        """Elements of one shard, padding included."""
        return -(-self.numel // self.pieces)

    @property
    def padded(self) -> int:
        return self.shard * self.pieces

    def bounds(self, piece: int) -> tuple[int, int]:
        """Elements ``[low, high)`` of shard ``piece``, padding left out (so the last ones may be short or empty)."""
        return min(piece * self.shard, self.numel), min((piece + 1) * self.shard, self.numel)


@dataclass(frozen=True)
class Grid:
    """``numel`` elements of a flat state in tiles of ``tile`` elements (the last may be short), lent one at a time."""

    numel: int
    tile: int

    @cached_property
    def count(self) -> int:
        return -(-self.numel // self.tile)

    def bounds(self, index: int) -> tuple[int, int]:
        """Elements ``[low, high)`` of tile ``index``."""
        return index * self.tile, min((index + 1) * self.tile, self.numel)

    def meets(self, low: int, high: int) -> range:
        """The tiles that ``[low, high)`` lies in."""
        return range(low // self.tile, -(-high // self.tile)) if low < high else range(0)


def in_memory(tier: Tier) -> Tier:
    """The memory in which one computes with what rests on ``tier``."""
    return "device" if tier == "device" else "host"


def flatten(params: Sequence[ParamFact], pieces: int) -> FlatLayout:
    """Lay ``params`` side by side.

    Parameters whose byte size is a multiple of 16 come first, each kind in registration order: their views then start
    on 16-byte boundaries, which vector loads want, without padding between parameters.
    """
    aligned = [p for p in params if p.numel * itemsize(p.dtype) % 16 == 0]
    ragged = [p for p in params if p.numel * itemsize(p.dtype) % 16 != 0]
    slots, start = [], 0
    for param in (*aligned, *ragged):
        slots.append(Slot(param, start))
        start += param.numel
    return FlatLayout(tuple(slots), pieces)
