"""The parameter side of one buffer: full values, this rank's shard, master weights, and how they follow each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from onecopy.comm.collectives import Pending
from onecopy.engine.parameter import HOME, hidden_class, show
from onecopy.plan.layout import Slot
from onecopy.schedule.lower import Buffer
from onecopy.tiers.memory import DeviceMemory

__all__ = ["ParameterHome", "Weights"]

# An all-gather of the second tensor, this rank's shard, into the first.
Gather = Callable[[torch.Tensor, torch.Tensor], Pending]


class Weights:
    """Buffers of the parameters of one :class:`~onecopy.schedule.lower.Buffer`.

    ========  ==========================================================================================
    full      all elements and padding, one storage; the parameters are views of it for life. Where the
              parameter rests cut, the storage is freed between uses and filled again in place.
    shard     this rank's elements, padding included. A view of ``full`` where the parameter rests whole.
    master    what the optimizer steps, in higher precision, over the optimizer's range; None when the
              parameter is stepped itself.
    ========  ==========================================================================================
    """

    def __init__(
        self, spec: Buffer, params: list[nn.Parameter], piece: int, gather: Gather | None, memory: DeviceMemory
    ) -> None:
        self.spec = spec
        self.params = params
        self.piece = piece
        self._gather = gather
        self.memory = memory
        self.present = True
        self.pins = 0
        self.pending: Pending | None = None
        dtype = getattr(torch, spec.dtype)
        self.full = memory.alloc("gather buffer" if self.cut else "parameter", spec.layout.padded, dtype)
        own = self.full[piece * spec.layout.shard : (piece + 1) * spec.layout.shard]
        self.shard = memory.alloc("parameter", spec.layout.shard, dtype) if self.cut else own
        self.master: torch.Tensor | None = None
        self._versions = 0
        self._classes: list[tuple[nn.Parameter, type, type]] = []
        # The engine this buffer belongs to, set when it is complete; weak, so that engines can be collected.
        self.core: Callable[[], Any] | None = None

    @property
    def cut(self) -> bool:
        """Is this rank left with a shard between uses?"""
        return self.spec.cut(self.spec.row.parameter.rest)

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
            earlier = param.__dict__.pop(HOME, None)
            if earlier is not None and not earlier.present:
                show(param)
            param.data = self.full[slot.start : slot.stop].view(slot.param.shape)
            param.__dict__[HOME] = ParameterHome(self, slot, demand)
        self._classes = [(param, type(param), hidden_class(type(param))) for param in self.params]
        self._versions = self._version_sum()
        if self.cut:
            self.shard.copy_(self.own())
            self.free()

    def notice_writes(self) -> None:
        """Parameters that rest whole can be written by anyone at any time: make the master weights follow.

        The engine writes through ``full``, which does not touch the parameters' own version counters.
        """
        if self.master is None or self.cut:
            return
        versions = self._version_sum()
        if versions != self._versions:
            self._versions = versions
            for slot in self.spec.layout.slots:
                self.follow(slot)

    def _version_sum(self) -> int:
        return sum(param._version for param in self.params)

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

    def start_gather(self) -> None:
        """Give the full buffer memory and set the all-gather off."""
        assert self._gather is not None
        self.memory.materialise("gather buffer", self.full)
        self.pending = self._gather(self.full, self.shard)

    def finish_gather(self) -> None:
        """Wait for the all-gather; from here on the parameters are ordinary ones."""
        assert self.pending is not None
        self.pending.wait()
        self.pending = None
        for param, shown, _ in self._classes:
            param.__class__ = shown
        self.present = True

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
        """Give the full buffer's memory back; the parameters keep their shapes and refuse to be read."""
        for param, _, hidden in self._classes:
            param.__class__ = hidden
        self.present = False
        self.memory.vacate("gather buffer", self.full)

    # After the optimizer, or after somebody else wrote

    def encode(self) -> None:
        """Write the master weights into this rank's part of the parameter, rounding to its dtype."""
        if self.master is not None:
            target = self.shard if self.spec.cut(self.spec.row.optimizer) else self.full
            target.copy_(self.master)

    def start_spread(self) -> None:
        """Set the all-gather off that makes every rank's stepped piece whole again, in place."""
        assert self._gather is not None
        self.pending = self._gather(self.full, self.own())

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
        elif self.cut:
            kept.copy_(self.shard[local[0] - low : local[1] - low])
        else:
            kept.copy_(self.full[local[0] : local[1]])


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

    def written(self) -> None:
        self.weights.follow(self.slot)

    def demand(self) -> bool:
        return self._demand(self.weights)
