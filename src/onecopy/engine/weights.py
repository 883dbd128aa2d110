"""The parameter side of one buffer: full values, this rank's shard, master weights, and how they follow each other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import nn

from onecopy import codecs
from onecopy.comm.collectives import Pending
from onecopy.comm.shared import Shelf
from onecopy.engine.home import ParameterHome
from onecopy.engine.parameter import HOME, Face
from onecopy.engine.pending import make_plain, shown_class
from onecopy.engine.quantised import shown
from onecopy.errors import EngineError
from onecopy.plan.layout import Grid, Slot, in_memory
from onecopy.schedule.lower import Buffer
from onecopy.tiers.held import Held
from onecopy.tiers.tiers import Tiers

__all__ = ["Source", "Weights"]

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
    ``unseen``: somebody has had a ``.data``, through which writes leave no sign, so values are looked at instead.
    ``touched``: somebody had one since the last step. ``busy``: the master weights are stepped on a thread just now.
    ``early``: they were stepped before all of this window was known; ``overtaken``: and written after that."""

    versions: int = 0
    unseen: bool = False
    touched: bool = False
    busy: bool = False
    early: bool = False
    overtaken: bool = False


class Weights:
    """Buffers of the parameters of one :class:`~onecopy.schedule.lower.Buffer`.

    ========  ==========================================================================================
    full      all elements and padding, one storage; the parameters are views of it for life. Where less than
              the whole rests on the device, the storage is freed between uses and filled again in place.
    rest      this rank's elements where they rest, padding included: a view of ``full`` where the parameter
              rests whole on the device, else on its tier; on a shelf where other ranks can read it there.
    state     what the optimizer steps: master weights, in higher precision or on the optimizer's tier; or, where
              the parameter is stepped where it rests, ``rest`` or all of ``full``.
    ========  ==========================================================================================
    """

    def __init__(self, spec: Buffer, params: list[nn.Parameter], piece: int, source: Source, tiers: Tiers) -> None:
        self.spec = spec
        self.params = params
        self.piece = piece
        self._source = source
        self._tiers = tiers
        self.present = True
        self.pins = 0
        self.pending: Pending | None = None
        dtype = getattr(torch, spec.dtype)
        self.full = self._tiers.device.alloc("gather buffer" if self.away else "parameter", spec.layout.padded, dtype)
        if self.away:  # or all units' would be there at once until their turn in adopt()
            self._tiers.device.vacate("gather buffer", self.full)
        self.rest = self._make_rest(tiers, dtype)
        self.state = self._make_state(tiers)
        self.writes = Writes()
        self._faces: list[Face] = []
        # The engine this buffer belongs to, set when it is complete; weak, so that engines can be collected.
        self.core: Callable[[], Any] | None = None

    def _make_rest(self, tiers: Tiers, dtype: torch.dtype) -> Held:
        spec, tier = self.spec, self.spec.row.parameter.rest.tier
        grid = Grid(spec.layout.shard, spec.tile())
        if not self.away:
            return tiers.show(self.own(), grid.tile)
        if self._source.shard is not None:
            tiers.memory(tier).count("parameter", self._source.shard.numel() * dtype.itemsize)
            return tiers.show(self._source.shard, grid.tile)
        return tiers.hold("parameter", "parameter", tier, grid, dtype)

    def _make_state(self, tiers: Tiers) -> Held:
        """Master weights, or the parameter itself."""
        spec = self.spec
        if spec.master is not None:
            dtype = getattr(torch, spec.master)
            return tiers.hold("master", "master", spec.row.optimizer.tier, spec.grid(), dtype)
        rests = self.away or spec.cut(spec.row.optimizer)
        if spec.steps_encoded:
            assert spec.row.optimizer.codec is not None
            held = self.rest.plain if rests else self.full
            assert held is not None
            codec = codecs.codec(spec.row.optimizer.codec, seed=crc32(self.piece_name.encode()))
            return tiers.decode(held, spec.grid().tile, codec, spec.row.optimizer.tier)
        if not rests:
            return tiers.show(self.full, spec.grid().tile)
        return self.rest if self.rest.plain is None else tiers.show(self.rest.plain, spec.grid().tile)

    @property
    def piece_name(self) -> str:
        """A name that ranks with copies of what this one steps have too, and no others."""
        return f"{self.spec.name}[{self.stepped()[0]}]"

    @property
    def master(self) -> Held | None:
        """The master weights, where there are some beside the parameter."""
        return self.state if self.spec.master is not None else None

    def writing(self) -> AbstractContextManager[None]:
        """Around every change of the shard: on a shelf, other ranks read it."""
        return self._source.shelf.writing() if self._source.shelf is not None else nullcontext()

    @property
    def away(self) -> bool:
        """Does less than the whole rest on the device, so that it is gathered for use?"""
        return self.spec.parameter_away

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
        if self.away:
            self._tiers.device.materialise("gather buffer", self.full)
        self.full.copy_(whole)
        if self.master is not None:
            low, high = self.stepped()
            self.master.write(0, high - low, whole[low:high])
        for slot, param in zip(layout.slots, self.params, strict=True):
            param.__dict__[HOME] = ParameterHome(self, slot, demand)
        self._make_faces()
        self.writes.versions = self._version_sum()
        if self.away:
            self.write_rest(0, layout.shard, self.own())
            self.free()

    def _make_faces(self) -> None:
        slots = self.spec.layout.slots
        views = [self.full[slot.start : slot.stop].view(slot.param.shape) for slot in slots]
        lasts = self.spec.trainable and (not self.away or not self.spec.away(self.spec.row.parameter.held))
        lasting = shown_class if lasts else shown
        self._faces = [Face(param, view, lasting) for param, view in zip(self.params, views, strict=True)]
        for face in self._faces:
            face.show()

    def notice_writes(self) -> bool:
        """Was anything written? Parameters that rest whole can be written by anyone at any time: make the master weights
        follow.

        The engine writes through ``full``, which does not touch the parameters' own version counters.
        """
        if self.away:
            return False
        taken = self._take_back()
        versions = self._version_sum()
        seen, self.writes.versions = versions != self.writes.versions, versions
        if self.master is not None and (seen or self.writes.unseen):
            for slot in self.spec.layout.slots:
                self.follow(slot)
        return seen or taken

    def was_written(self) -> bool:
        """Were parameters that rest whole written since they were last looked at, or may they have been? Of others: were they
        after an early step?"""
        if self.away:
            return self.writes.overtaken
        return self.writes.overtaken or self.writes.unseen or self._version_sum() != self.writes.versions

    def _take_back(self) -> bool:
        """Were there any? Parameters whose ``.data`` was exchanged for another tensor: its values count, its memory does
        not."""
        taken = False
        if self.full.device.type == "meta":
            return False  # a simulation: there are no addresses to tell one tensor from another by
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
        return self._own_of(self.full)

    def _own_of(self, whole: torch.Tensor) -> torch.Tensor:
        shard = self.spec.layout.shard
        return whole[self.piece * shard : (self.piece + 1) * shard]

    def stepped(self) -> tuple[int, int]:
        """Elements ``[low, high)`` of the full buffer that this rank's optimizer steps, padding included."""
        layout = self.spec.layout
        if self.spec.cut(self.spec.row.optimizer):
            return self.piece * layout.shard, (self.piece + 1) * layout.shard
        return 0, layout.padded

    # Gathering

    def _outlived(self) -> bool:
        """The parameters are hidden: does anybody still hold a view of the full buffer?

        If so the memory is left to them and the buffer starts anew without any. True when that was necessary.
        """
        storage = self.full.untyped_storage()
        users = torch._C._storage_Use_Count(storage._cdata)
        if users <= len(self._faces) + 2 and storage.resizable():  # the views, ``full``, ``storage``; not a numpy array
            return False
        self._tiers.device.count("gather buffer", -storage.nbytes())
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
        scratch = self._tiers.device.alloc("gather buffer", self.full.numel(), self.full.dtype)
        self._tiers.fetch(self.rest, self._own_of(scratch))
        self._source.gather(scratch, self._own_of(scratch)).wait()
        self._tiers.device.drop("gather buffer", scratch)

    def quiet(self, what: str | None = None) -> None:
        """The master weights are not stepped on a thread just now. Collective where steps are delayed. ``what`` is to be
        done that must not meet a step that is half done."""
        core = self.core() if self.core is not None else None
        if core is not None and core.stepper is not None:
            core.stepper.quiet()
            if what is not None:
                core.stepper.refuse_between(what)

    def detach(self) -> None:
        """The engine lets go: parameters that rest whole are ordinary ones."""
        self.core = None
        for param in self.params:
            make_plain(param)

    def start_gather(self) -> None:
        """Give the full buffer memory and begin to fill it: fetch this rank's shard, and gather the others'."""
        self._tiers.device.materialise("gather buffer", self.full)
        if self.spec.row.parameter.rest.tier != "device":
            self._tiers.moved("to_device", self.spec.layout.shard * self.full.element_size())
        gather, rests = self._source.gather, self.rest.plain
        if rests is not None and rests.device == self.full.device and gather is not None:
            self.pending = gather(self.full, rests)
        elif rests is not None:
            self.own().copy_(rests, non_blocking=True)
            self.pending = gather(self.full, self.own()) if gather is not None else Pending([], None)
        elif gather is not None:
            # Collectives go out in the order of starts on every rank, so this one cannot wait for its turn to be used.
            self._tiers.fetch(self.rest, self.own())
            self.pending = gather(self.full, self.own())
        else:
            self.pending = Pending([], None, partial(self._tiers.fetch, self.rest, self.own()))

    def forget_read_ahead(self) -> None:
        """The values are about to change."""
        self._tiers.forget(self.rest)

    def read_ahead(self) -> None:
        """The shard will be fetched soon: let the disk begin."""
        if self.rest.plain is None and not self.present and self.pending is None:
            self._tiers.read_ahead(self.rest)

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

    def free(self, keep: bool = True) -> None:
        """Give the full buffer's memory back; the parameters keep their shapes and refuse to be read.

        What was written to them meanwhile goes to the shard first, where it is to be ``keep``t. A view that somebody kept
        keeps its memory.
        """
        if keep and (self._version_sum() != self.writes.versions or (self.writes.unseen and self._differs())):
            with self.writing():
                for slot in self.spec.layout.slots:
                    self.follow(slot)
        for face in self._faces:  # Face.hide, without a call for each
            face.param.data = face.hollow
            face.param.__class__ = face.hidden_class
        self.present = False
        if not self._outlived():
            self._tiers.device.vacate("gather buffer", self.full)

    def accept_writes(self) -> None:
        """What was written to the parameters so far is dealt with, or is to be forgotten."""
        self.writes.versions = self._version_sum()

    def _differs(self) -> bool:
        """Is this rank's piece of the full buffer not what rests? Changing that is for all ranks together, so the rank
        that has only looked must not begin to."""
        rests, own = self.rest.plain, self.own()
        return rests is None or not torch.equal(own.view(torch.uint8), rests.to(own.device).view(torch.uint8))

    def changed(self) -> None:
        """The optimizer has changed the values: graphs that saved the old ones must notice, as with any in-place
        update."""
        if not self.away and self.spec.trainable:
            torch.autograd.graph.increment_version(self.params)
            self.writes.versions = self._version_sum()

    # After the optimizer, or after somebody else wrote

    def encode(self) -> None:
        """Write the master weights into this rank's part of the parameter, rounding to its dtype."""
        if self.master is None:
            return
        for tile in range(self.master.grid.count):
            lent = self.master.lend(tile)
            self.write_back(self.master.grid.bounds(tile)[0], lent.wait())
            lent.drop()

    def write_rest(self, low: int, high: int, values: torch.Tensor) -> None:
        """``values`` become elements ``[low, high)`` of what rests."""
        self._tiers.forget(self.rest)
        self.rest.write(low, high, values)

    def write_back(self, low: int, values: torch.Tensor) -> None:
        """``values`` of the master weights from element ``low`` of :meth:`stepped` on become the parameter's."""
        row = self.spec.row
        if in_memory(row.parameter.rest.tier) != in_memory(row.optimizer.tier):
            link = "to_device" if row.optimizer.tier != "device" else "to_host"
            self._tiers.moved(link, values.numel() * self.full.element_size())
        if self.away:
            self.write_rest(low, low + values.numel(), values)
        else:
            start = self.stepped()[0] + low
            part = self.full[start : start + values.numel()]
            if values.device != part.device:
                # Rounded before it crosses, in pinned memory that torch keeps from reuse until the copy is done.
                values = torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(values)
            part.copy_(values, non_blocking=True)

    def start_spread(self) -> None:
        """Set the all-gather off that makes every rank's stepped piece whole again, in place."""
        assert self._source.gather is not None
        self.pending = self._source.gather(self.full, self.own())

    def finish_spread(self) -> None:
        assert self.pending is not None
        self.pending.wait()
        self.pending = None

    def piece_of(self, slot: Slot) -> tuple[int, int] | None:
        """The elements ``[low, high)`` of this rank's shard that are the parameter's in ``slot``; None when it has none."""
        low = self.piece * self.spec.layout.shard
        part = slot.local(low, low + self.spec.layout.shard)
        return (part[0] - low, part[1] - low) if part is not None else None

    def follow(self, slot: Slot, source: torch.Tensor | None = None) -> None:
        """The parameter in ``slot`` was written where it is read: make what rests and the master weights follow.

        ``source``: the whole new values, flat, when they are more precise than the parameter. Raises :class:`EngineError`
        while the master weights are stepped on a thread. After an early step it is noted and no more: the step says so on
        every rank.
        """
        if self.writes.early:
            self.writes.overtaken = True
            return
        if self.writes.busy:
            raise EngineError(
                f"parameter {slot.param.name!r} was written, or its .data was taken, while its step runs beside training "
                f"(StepPolicy.when); call engine.finish_step() on all ranks before"
            )
        if self.away and self.present and (part := self.piece_of(slot)) is not None:
            self.write_rest(*part, self.own()[part[0] : part[1]])
        if self.master is None:
            return
        low, high = self.stepped()
        local = slot.local(low, high)
        if local is None:
            return
        start, stop = local[0] - low, local[1] - low
        if source is not None:
            self.master.write(start, stop, source[local[0] - slot.start : local[1] - slot.start])
            return
        if self.away:
            rounded = torch.empty(stop - start, dtype=self.full.dtype, device=self.full.device)
            self.rest.read(start, stop, rounded)
        else:
            rounded = self.full[local[0] : local[1]]
        kept = torch.empty(stop - start, dtype=self.master.dtype, device=rounded.device)
        self.master.read(start, stop, kept)
        # Elements that still say what the master rounds to were not written: they keep their precision.
        same = kept.to(rounded.dtype) == rounded
        self.master.write(start, stop, torch.where(same, kept, rounded.to(kept.dtype)))
