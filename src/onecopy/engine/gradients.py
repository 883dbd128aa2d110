"""The gradient side of one buffer: what this micro-batch fills in, and what is reduced so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from onecopy.comm.collectives import Edge, Message, Pending, land
from onecopy.engine.ballot import PART, in_parts
from onecopy.engine.sums import Sums
from onecopy.plan.layout import Slot
from onecopy.schedule.lower import Buffer
from onecopy.tiers.held import Held
from onecopy.tiers.tiers import Tiers

__all__ = ["Gradients", "Marks"]


class Marks:
    """By slot: got a gradient in the open window (``used``), has one in the fill buffer (``filled``), got one in the
    pass that is running (``arrived``). ``cleared``: names of parameters whose gradient was set to None since."""

    __slots__ = ("arrived", "cleared", "filled", "used")

    def __init__(self, slots: int) -> None:
        self.cleared: set[str] = set()
        self.used, self.filled, self.arrived = [False] * slots, [False] * slots, [False] * slots


class Gradients:
    """Gradient buffers of one trainable :class:`~onecopy.schedule.lower.Buffer`.

    ========  ==========================================================================================
    fill      the whole buffer that autograd's gradients are copied into, each scaled to its share of the
              mean. Not yet summed over ranks. Lives from the first gradient of a unit to its reduction, or,
              where the plan keeps gradients whole on the device, to the step.
    sums      ``current``, where gradients are away: this rank's shard of what is reduced but not settled, on
              their tier. ``total``, what the optimizer steps with: summed over all ranks and micro-batches,
              over the range that this rank steps; a view of ``fill`` where gradients are whole, else what
              was ``current``.
    ========  ==========================================================================================
    """

    def __init__(
        self, spec: Buffer, piece: int, edge: Edge | None, tiers: Tiers, messages: tuple[Message, Message]
    ) -> None:
        self.spec = spec
        self.piece = piece
        self.edge = edge
        self._tiers = tiers
        self.fill: torch.Tensor | None = None
        self.sums = Sums(spec, tiers)
        self.pending: Pending | None = None
        self._messages = messages
        self.filling = False
        self._transit = 0
        self.marks = Marks(len(spec.layout.slots))
        # One buffer object with its views per dtype, kept without memory between steps.
        self._buffers: dict[torch.dtype, tuple[torch.Tensor, list[torch.Tensor]]] = {}

    @property
    def away(self) -> bool:
        """Does less than the whole gradient stay on the device between micro-batches?"""
        return self.spec.gradient_away

    @property
    def wire(self) -> torch.dtype:
        """What a reduction sends."""
        dtype: torch.dtype = getattr(torch, self.spec.reduce_codec)
        return dtype

    @property
    def total(self) -> Held | None:
        """See :class:`~onecopy.engine.sums.Sums`."""
        return self.sums.total

    # Filling

    def open(self, accumulates: bool) -> None:
        """Give the fill buffer memory, in the wire's dtype or, where several gradients add up in it, a wider one."""
        if self.total is not None and self._views_fill(self.total):
            # A second backward after this step's reduction: what is summed already leaves the buffer.
            self.sums.copy_total()
            self._release_fill()
        dtype = self.sums.wide if accumulates else self.wire
        if dtype not in self._buffers:
            flat = torch.empty(self.spec.layout.padded, dtype=dtype, device=self._tiers.device.device)
            views = [flat[slot.start : slot.stop].view(slot.param.shape) for slot in self.spec.layout.slots]
            flat.untyped_storage().resize_(0)
            self._buffers[dtype] = (flat, views)
        self.fill = self._buffers[dtype][0]
        self._tiers.device.materialise(self._kind, self.fill)
        self.filling = True
        self.marks.filled = [False] * len(self.marks.filled)

    def put(self, at: int, gradient: torch.Tensor, scale: float) -> None:
        """Add ``scale * gradient`` of the parameter in slot ``at``: at most one copy."""
        assert self.fill is not None
        view = self._buffers[self.fill.dtype][1][at]
        self.marks.used[at] = True
        if self.marks.cleared:
            self.marks.cleared.discard(self.spec.layout.slots[at].param.name)
        if self.marks.filled[at]:
            view.add_(gradient, alpha=scale)
            return
        self.marks.filled[at] = True
        if scale == 1.0:
            view.copy_(gradient)
        elif view.dtype == gradient.dtype:
            torch.mul(gradient, scale, out=view)
        else:
            view.copy_(gradient).mul_(scale)

    def complete(self) -> None:
        """Nothing more will be filled in: parameters that got no gradient count zero, and so does the padding."""
        assert self.fill is not None
        self.filling = False
        for at, slot in enumerate(self.spec.layout.slots):
            if not self.marks.filled[at]:
                self.fill[slot.start : slot.stop].zero_()
                self.marks.filled[at] = True
        self.fill[self.spec.layout.numel :].zero_()

    def clear(self, at: int) -> None:
        """The parameter in slot ``at`` has no gradient in this window, as far as it is summed."""
        assert self.total is not None
        slot = self.spec.layout.slots[at]
        self.change(self.total, slot, torch.Tensor.zero_)
        if self.filling and self.fill is not None:  # what came late
            self.fill[slot.start : slot.stop].zero_()
        self.marks.used[at] = False
        self.marks.cleared.add(slot.param.name)

    def part(self, held: Held, slot: Slot) -> tuple[int, int, int]:
        """Elements ``[low, high)`` of ``held``, one of the sums, that are the parameter's in ``slot``, and where they start
        in the flattened parameter."""
        base = self.piece * self.spec.layout.shard if held.grid.numel < self.spec.layout.padded else 0
        low, high = slot.local(base, base + held.grid.numel) or (base, base)
        return low - base, high - base, max(low - slot.start, 0)

    def change(self, held: Held, slot: Slot, how: Callable[[torch.Tensor], object]) -> None:
        """Let ``how`` change, in place and in parts, what ``held``, one of the sums, has of the parameter in ``slot``."""
        low, high, _ = self.part(held, slot)
        self.sums.change(held, low, high, how)

    def not_finite(self) -> list[str]:
        """Names of the parameters whose gradient in the fill buffer is not finite."""
        assert self.fill is not None
        views = self._buffers[self.fill.dtype][1]
        slots = zip(self.spec.layout.slots, views, strict=True)
        return [slot.param.name for slot, view in slots if not bool(torch.isfinite(view).all())]

    # Reducing

    def start_reduce(self, accumulates: bool) -> None:
        """Set the reduce-scatter of the fill buffer off. ``accumulates``: other micro-batches add to the same sum."""
        assert self.fill is not None
        source = self.fill if self.fill.dtype == self.wire else self.fill.to(self.wire)
        if self.away:
            add = self.sums.current is not None
            # What added up in a wider buffer is not rounded again by the sum, whether or not it is cut.
            out = self.sums.land(self.sums.wide if accumulates or source is not self.fill else self.wire)
        else:
            add, out = False, self._own(self.fill)
        # What the reduction holds beside the fill buffer: the peers' pieces, and a copy in the wire's dtype.
        staged = self.spec.layout.padded - self.spec.layout.shard if self.edge is not None and self.edge.staging else 0
        encoded = 0 if source is self.fill else self.spec.layout.padded
        self._transit = (staged + encoded) * self.wire.itemsize
        self._tiers.device.count("reduce buffer", self._transit)
        if self.spec.row.gradient.rest.tier != "device":
            self._tiers.moved("to_host", self.spec.layout.shard * self.wire.itemsize)
        if self.edge is not None:
            self.pending = self.edge.reduce(source, out, self._messages[0], add)
        else:  # one rank: the gradient goes to its tier
            self.pending = Pending([], None, partial(land, out, source, add))

    def finish_reduce(self) -> None:
        """Wait for the reduction; where gradients are cut the fill buffer's memory goes back."""
        assert self.pending is not None
        self.sums.bring()
        self.pending.wait()
        self.pending = None
        self._tiers.device.count("reduce buffer", -self._transit)
        if self.away:
            self._release_fill()

    def start_spread(self) -> None:
        """Set the all-gather off that makes the reduced pieces of the fill buffer whole, in place."""
        assert self.edge is not None and self.fill is not None
        self.pending = self.edge.gather(self.fill, self._own(self.fill), self._messages[1])

    def finish_spread(self) -> None:
        assert self.pending is not None
        self.pending.wait()
        self.pending = None

    def reduced(self) -> torch.Tensor:
        """This rank's piece of what has just been reduced inside its group."""
        if self.away:
            assert self.sums.current is not None and self.sums.current.plain is not None
            return self.sums.current.plain
        assert self.fill is not None
        return self._own(self.fill)

    def settle(self) -> None:
        """What is reduced now is final: it joins what earlier backward passes of this step settled."""
        if self.away:
            summed, self.sums.current = self.sums.current, None
        else:
            assert self.fill is not None
            summed = self.sums.show(self._own(self.fill) if self.spec.cut(self.spec.row.optimizer) else self.fill)
        assert summed is not None
        if self.sums.settle(summed):
            if self.away:
                self.sums.free(summed)
            else:
                self._release_fill()

    # Stepping

    def mine(self, low: int = 0, high: int | None = None) -> torch.Tensor:
        """Of the settled elements that this rank answers for in norms (its piece, padding left out) those in ``[low,
        high)``: a view in memory, a copy of what is on disk."""
        assert self.total is not None
        first, last = self.spec.layout.bounds(self.piece)
        start = self.piece * self.spec.layout.shard if self.total.grid.numel > self.spec.layout.shard else 0
        stop = last - first if high is None else high
        return self.sums.read(self.total, start + low, start + stop)

    def parts(self) -> Iterator[torch.Tensor]:
        """All of :meth:`mine`, as a norm is best taken; what is on disk comes a part at a time."""
        assert self.total is not None
        first, last = self.spec.layout.bounds(self.piece)
        if first == last:
            return
        if self.total.plain is not None:
            yield from in_parts(self.mine())
            return
        for low in range(0, last - first, PART):
            yield self.mine(low, min(low + PART, last - first))

    @property
    def any(self) -> bool:
        """Is there a gradient of the open window?"""
        return self.fill is not None or self.sums.current is not None or self.total is not None

    def drop(self) -> None:
        """The step is over: nothing of the gradient is kept."""
        for held in (self.sums.current, self.total):
            if held is not None and not self._views_fill(held):
                self.sums.free(held)
        self.sums.forget()
        self.filling = False
        if self.fill is not None:
            self._release_fill()
        self.marks.used = [False] * len(self.marks.used)
        self.marks.cleared.clear()

    def hand_over(self) -> Held:
        """The window is over, and its sum, which stays on the account, is the caller's."""
        total, self.sums.total = self.total, None
        assert total is not None
        self.drop()
        return total

    # Details

    @property
    def _kind(self) -> str:
        return "reduce buffer" if self.away else "gradient"

    def _own(self, whole: torch.Tensor) -> torch.Tensor:
        shard = self.spec.layout.shard
        return whole[self.piece * shard : (self.piece + 1) * shard]

    def _views_fill(self, held: Held) -> bool:
        if self.fill is None or held.plain is None:
            return False
        return bool(held.plain.untyped_storage()._cdata == self.fill.untyped_storage()._cdata)

    def _release_fill(self) -> None:
        assert self.fill is not None
        self._tiers.device.vacate(self._kind, self.fill)
        self.fill = None
