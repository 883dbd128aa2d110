"""The parameter side of one buffer: full values, this rank's shard, master weights, and how they follow each other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onecopy.comm.collectives import Pending
from onecopy.comm.shared import Shelf
from onecopy.engine.parameter import HOME, Face
from onecopy.engine.pending import make_plain, read_grad, shown_class, write_grad
from onecopy.plan.layout import Slot
from onecopy.schedule.lower import Buffer
from onecopy.tiers.memory import DeviceMemory

__all__ = ["ParameterHome", "Source", "Weights"]

# An all-gather of the second tensor, this rank's shard, into the first.
Gather = Callable[[torch.Tensor, torch.Tensor], Pending]


@dataclass(frozen=True)
class Source:
    """Where a whole buffer comes from: ``gather`` fills it; ``shard``, where given, lies on ``shelf``, readable by all."""

    gather: Gather | None = None
    shelf: Shelf | None = None
    shard: torch.Tensor | None = None


@dataclass
class Writes:
    """How writes to the parameters show: ``versions`` is the sum of their version counters when last looked at;
    ``unseen``: somebody has had a ``.data``, through which writes leave no sign, so values are looked at instead."""

    versions: int = 0
    unseen: bool = False


class Weights:
    """Buffers of the parameters of one :class:`~onecopy.schedule.lower.Buffer`.

    ========  ==========================================================================================
    full      all elements and padding, one storage; the parameters are views of it for life. Where the
              parameter rests cut, the storage is freed between uses and filled again in place.
    shard     this rank's elements, padding included. A view of ``full`` where the parameter rests whole; on a
              shelf where other ranks can read it there.
    master    what the optimizer steps, in higher precision, over the optimizer's range; None when the
              parameter is stepped itself.
    ========  ==========================================================================================
    """

    def __init__(
        self, spec: Buffer, params: list[nn.Parameter], piece: int, source: Source, memory: DeviceMemory
    ) -> None:
        self.spec = spec
        self.params = params
        self.piece = piece
        self._source = source
        self.memory = memory
        self.present = True
        self.pins = 0
        self.pending: Pending | None = None
        dtype = getattr(torch, spec.dtype)
        self.full = memory.alloc("gather buffer" if self.cut else "parameter", spec.layout.padded, dtype)
        own = self.full[piece * spec.layout.shard : (piece + 1) * spec.layout.shard]
        if source.shard is not None:
            self.shard = source.shard
            memory.count("parameter", self.shard.numel() * dtype.itemsize)
        else:
            self.shard = memory.alloc("parameter", spec.layout.shard, dtype) if self.cut else own
        self.master: torch.Tensor | None = None
        self.writes = Writes()
        self._faces: list[Face] = []
        # The engine this buffer belongs to, set when it is complete; weak, so that engines can be collected.
        self.core: Callable[[], Any] | None = None

    def writing(self) -> AbstractContextManager[None]:
        """Around every change of the shard: on a shelf, other ranks read it."""
        return self._source.shelf.writing() if self._source.shelf is not None else nullcontext()

    @property
    def cut(self) -> bool:
        """Is this rank left with a shard between uses?"""
        return self.spec.parameter_cut

    def adopt(
        self,
        values: Callable[[nn.Parameter], torch.Tensor | None],
        agree: Callable[[torch.Tensor], None],
        demand: Callable[[Weights], bool],
    ) -> None:
        """Take ``values(param)`` (whole tensors; None where another rank has them) as the weights, let ``agree`` make
        them the same on every rank, and make the parameters views of the full buffer.

        Master weights start from the values before they are rounded. ``demand`` is asked when a freed parameter is
        read inside a forward pass.
        """
        layout, spec = self.spec.layout, self.spec
        whole = torch.zeros(layout.padded, dtype=getattr(torch, spec.weight), device=self.full.device)
        for slot, param in zip(layout.slots, self.params, strict=True):
            value = values(param)
            if value is not None:
                whole[slot.start : slot.stop].copy_(value.reshape(-1))
        agree(whole)
        self.full.copy_(whole)
        if spec.master is not None:
            low, high = self.stepped()
            self.master = self.memory.alloc("master", high - low, whole.dtype)
            self.master.copy_(whole[low:high])
        for slot, param in zip(layout.slots, self.params, strict=True):
            param.__dict__[HOME] = ParameterHome(self, slot, demand)
        self._make_faces()
        self.writes.versions = self._version_sum()
        if self.cut:
            self.shard.copy_(self.own())
            self.free()

    def _make_faces(self) -> None:
        slots = self.spec.layout.slots
        views = [self.full[slot.start : slot.stop].view(slot.param.shape) for slot in slots]
        lasts = self.spec.trainable and (not self.cut or not self.spec.cut(self.spec.row.parameter.held))
        lasting = (shown_class,) if lasts else ()
        self._faces = [Face(param, view, *lasting) for param, view in zip(self.params, views, strict=True)]
        for face in self._faces:
            face.show()

    def notice_writes(self) -> bool:
        """Was anything written? Parameters that rest whole can be written by anyone at any time: make the master weights
        follow.

        The engine writes through ``full``, which does not touch the parameters' own version counters.
        """
        if self.cut:
            return False
        taken = self._take_back()
        versions = self._version_sum()
        seen, self.writes.versions = versions != self.writes.versions, versions
        if self.master is not None and (seen or self.writes.unseen):
            for slot in self.spec.layout.slots:
                self.follow(slot)
        return seen or taken

    def unfrozen(self) -> list[str]:
        """Names of parameters that were frozen when the engine was made and require gradients now."""
        if self.spec.trainable:
            return []
        with torch._C.DisableTorchFunctionSubclass():
            pairs = zip(self.spec.layout.slots, self.params, strict=True)
            return [slot.param.name for slot, param in pairs if param.requires_grad]

    def _take_back(self) -> bool:
        """Were there any? Parameters whose ``.data`` was exchanged for another tensor: its values count, its memory does
        not."""
        taken = False
        base, size = self.full.data_ptr(), self.full.element_size()
        for slot, param in zip(self.spec.layout.slots, self.params, strict=True):
            if param.data_ptr() != base + slot.start * size:
                view = self.full[slot.start : slot.stop].view(slot.param.shape)
                view.copy_(param.data)
                param.data = view
                self.follow(slot)
                taken = True
        return taken

    def _version_sum(self) -> int:
        return sum([param._version for param in self.params])

    def own(self) -> torch.Tensor:
        """This rank's piece of the full buffer."""
        shard = self.spec.layout.shard
        return self.full[self.piece * shard : (self.piece + 1) * shard]

    def stepped(self) -> tuple[int, int]:
        """Elements ``[low, high)`` of the full buffer that this rank's optimizer steps, padding included."""
        layout = self.spec.layout
        if self.spec.cut(self.spec.row.optimizer):
            return self.piece * layout.shard, (self.piece + 1) * layout.shard
        return 0, layout.padded

    def target(self) -> torch.Tensor:
        """The flat tensor over :meth:`stepped` that the optimizer updates."""
        if self.master is not None:
            return self.master
        return self.shard if self.spec.cut(self.spec.row.optimizer) else self.full

    # Gathering

    def _outlived(self) -> bool:
        """The parameters are hidden: does anybody still hold a view of the full buffer?

        If so the memory is left to them and the buffer starts anew without any. True when that was necessary.
        """
        storage = self.full.untyped_storage()
        users = torch._C._storage_Use_Count(storage._cdata)
        if users <= len(self._faces) + 2 and storage.resizable():  # the views, ``full``, ``storage``; not a numpy array
            return False
        self.memory.count("gather buffer", -storage.nbytes())
        self.full = torch.empty_like(self.full)
        self._make_faces()
        for face in self._faces:
            face.hide()
        self.full.untyped_storage().resize_(0)
        core = self.core() if self.core is not None else None
        if core is not None:
            core.gathering.index_storages()
        return True

    @property
    def alone(self) -> bool:
        """Can this rank gather without the others?"""
        return self._source.shelf is not None or self._source.gather is None

    def attend(self) -> None:
        """Take part in a gather that other ranks need, and forget what comes."""
        assert self._source.gather is not None
        scratch = self.memory.alloc("gather buffer", self.full.numel(), self.full.dtype)
        self._source.gather(scratch, self.shard).wait()
        self.memory.drop("gather buffer", scratch)

    def detach(self) -> None:
        """The engine lets go: parameters that rest whole are ordinary ones."""
        self.core = None
        for param in self.params:
            make_plain(param)

    def start_gather(self) -> None:
        """Give the full buffer memory and set the all-gather off."""
        assert self._source.gather is not None
        self.memory.materialise("gather buffer", self.full)
        self.pending = self._source.gather(self.full, self.shard)

    def finish_gather(self) -> None:
        """Wait for the all-gather; from here on the parameters are ordinary ones."""
        assert self.pending is not None
        self.pending.wait()
        self.pending = None
        for face in self._faces:  # Face.show, without a call for each
            face.param.__class__ = face.shown_class
            face.param.data = face.view
        self.present = True
        self.writes.versions = self._version_sum()

    def read(self, slot: Slot) -> torch.Tensor:
        """A copy of the whole parameter in ``slot``; collective where it is cut."""
        was_present = self.present
        if not was_present:
            self.start_gather()
            self.finish_gather()
        value = self.full[slot.start : slot.stop].view(slot.param.shape).clone()
        if not was_present:
            self.free()
        return value

    def free(self) -> None:
        """Give the full buffer's memory back; the parameters keep their shapes and refuse to be read.

        What was written to them meanwhile goes to the shard first. A view that somebody kept keeps its memory.
        """
        if self._version_sum() != self.writes.versions or self.writes.unseen:
            with self.writing():
                for slot in self.spec.layout.slots:
                    self.follow(slot)
        for face in self._faces:  # Face.hide, without a call for each
            face.param.data = face.hollow
            face.param.__class__ = face.hidden_class
        self.present = False
        if not self._outlived():
            self.memory.vacate("gather buffer", self.full)

    def accept_writes(self) -> None:
        """What was written to the parameters so far is dealt with, or is to be forgotten."""
        self.writes.versions = self._version_sum()

    def changed(self) -> None:
        """The optimizer has changed the values: graphs that saved the old ones must notice, as with any in-place
        update."""
        if not self.cut and self.spec.trainable:
            torch.autograd.graph.increment_version(self.params)
            self.writes.versions = self._version_sum()

    # After the optimizer, or after somebody else wrote

    def encode(self) -> None:
        """Write the master weights into this rank's part of the parameter, rounding to its dtype."""
        if self.master is not None:
            target = self.shard if self.spec.cut(self.spec.row.optimizer) else self.full
            target.copy_(self.master)

    def start_spread(self) -> None:
        """Set the all-gather off that makes every rank's stepped piece whole again, in place."""
        assert self._source.gather is not None
        self.pending = self._source.gather(self.full, self.own())

    def finish_spread(self) -> None:
        assert self.pending is not None
        self.pending.wait()
        self.pending = None

    def follow(self, slot: Slot, source: torch.Tensor | None = None) -> None:
        """The parameter in ``slot`` was written where it is read: make shard and master follow.

        ``source``: the whole new values, flat, when they are more precise than the parameter.
        """
        if self.cut and self.present:
            low = self.piece * self.spec.layout.shard
            local = slot.local(low, low + self.spec.layout.shard)
            if local is not None:
                self.shard[local[0] - low : local[1] - low].copy_(self.full[local[0] : local[1]])
        if self.master is None:
            return
        low, high = self.stepped()
        local = slot.local(low, high)
        if local is None:
            return
        kept = self.master[local[0] - low : local[1] - low]
        if source is not None:
            kept.copy_(source[local[0] - slot.start : local[1] - slot.start])
            return
        rounded = self.shard[local[0] - low : local[1] - low] if self.cut else self.full[local[0] : local[1]]
        # Elements that still say what the master rounds to were not written: they keep their precision.
        kept.copy_(torch.where(kept.to(rounded.dtype) == rounded, kept, rounded.to(kept.dtype)))


def _nothing() -> None:
    return None


class ParameterHome:
    """One parameter of a :class:`Weights` as :class:`~onecopy.engine.parameter.Home` sees it."""

    def __init__(self, weights: Weights, slot: Slot, demand: Callable[[Weights], bool]) -> None:
        self.weights = weights
        self.slot = slot
        self._demand = demand

    @property
    def name(self) -> str:
        return self.slot.param.name

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.slot.param.shape)

    @property
    def present(self) -> bool:
        return self.weights.present

    def local(self) -> tuple[torch.Tensor, int]:
        shard = self.weights.spec.layout.shard
        low = self.weights.piece * shard
        part = self.slot.local(low, low + shard)
        if part is None:
            return self.weights.shard[:0], 0
        return self.weights.shard[part[0] - low : part[1] - low], part[0] - self.slot.start

    def values(self) -> torch.Tensor:
        """The full values, which must be present."""
        return self.weights.full[self.slot.start : self.slot.stop].view(self.shape)

    def __reduce__(self) -> Any:
        """A parameter is copied or pickled without its home: the copy belongs to no engine."""
        return _nothing, ()

    def writing(self) -> AbstractContextManager[None]:
        return self.weights.writing()

    def written(self) -> None:
        self.weights.follow(self.slot)

    def grad(self, param: torch.Tensor) -> torch.Tensor | None:
        return read_grad(param)

    def set_grad(self, param: torch.Tensor, value: torch.Tensor | None) -> None:
        write_grad(param, value)

    def demand(self) -> bool:
        return self._demand(self.weights)
