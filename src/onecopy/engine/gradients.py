"""The gradient side of one buffer: what this micro-batch fills in, and what is reduced so far."""

from __future__ import annotations

from functools import partial

import torch

from onecopy.comm.collectives import Edge, Message, Pending, land
from onecopy.schedule.lower import Buffer
from onecopy.tiers.memory import Memory
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
    current   where gradients are away: this rank's shard of what is reduced but not settled, on their tier.
    total     what the optimizer steps with: summed over all ranks and micro-batches, over the range that
              this rank steps. A view of ``fill`` where gradients are whole, else what was ``current``.
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
        self.current: torch.Tensor | None = None
        self.total: torch.Tensor | None = None
        self.pending: Pending | None = None
        self._messages = messages
        self.filling = False
        self._transit = 0
        self.marks = Marks(len(spec.layout.slots))
        # How often something became final in this window; the same number on every rank.
        self.settled = 0
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
    def wide(self) -> torch.dtype:
        """What gradients add up in."""
        dtype: torch.dtype = getattr(torch, self.spec.accumulate_codec)
        return dtype

    def _home(self) -> Memory:
        """Where sums are kept: the tier of what is away."""
        return self._tiers.memory(self.spec.row.gradient.rest.tier)

    # Filling

    def open(self, accumulates: bool) -> None:
        """Give the fill buffer memory, in the wire's dtype or, where several gradients add up in it, a wider one."""
        if self.total is not None and self._views_fill(self.total):
            # A second backward after this step's reduction: what is summed already leaves the buffer.
            kept = self._home().alloc("gradient", self.total.numel(), self.wide)
            kept.copy_(self.total)
            self._release_fill()
            self.total = kept
        dtype = self.wide if accumulates else self.wire
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
        slot, low = self.spec.layout.slots[at], 0
        if self.total.numel() < self.spec.layout.padded:
            low = self.piece * self.spec.layout.shard
        part = slot.local(low, low + self.total.numel())
        if part is not None:
            self.total[part[0] - low : part[1] - low].zero_()
        if self.filling and self.fill is not None:  # what came late
            self.fill[slot.start : slot.stop].zero_()
        self.marks.used[at] = False
        self.marks.cleared.add(slot.param.name)

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
            add = self.current is not None
            # What added up in a wider buffer is not rounded again by the sum, whether or not it is cut.
            out = self._hold_shard(accumulates or source is not self.fill)
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
            assert self.current is not None
            return self.current
        assert self.fill is not None
        return self._own(self.fill)

    def settle(self) -> None:
        """What is reduced now is final: it joins what earlier backward passes of this step settled."""
        self.settled += 1
        if self.away:
            summed, self.current = self.current, None
        else:
            assert self.fill is not None
            summed = self._own(self.fill) if self.spec.cut(self.spec.row.optimizer) else self.fill
        assert summed is not None
        if self.total is None:
            self.total = summed
            return
        self.total = self._widened(self.total)
        self.total.add_(summed)
        if self.away:
            self._home().drop("gradient", summed)
        else:
            self._release_fill()

    # Stepping

    def mine(self) -> torch.Tensor:
        """The settled elements that this rank answers for in norms: its piece, padding left out."""
        assert self.total is not None
        low, high = self.spec.layout.bounds(self.piece)
        piece = self.total if self.total.numel() == self.spec.layout.shard else self._own(self.total)
        return piece[: high - low]

    @property
    def any(self) -> bool:
        """Is there a gradient of the open window?"""
        return self.fill is not None or self.current is not None or self.total is not None

    def drop(self) -> None:
        """The step is over: nothing of the gradient is kept."""
        for held in (self.current, self.total):
            if held is not None and not self._views_fill(held):
                self._home().drop("gradient", held)
        self.current = self.total = None
        self.settled = 0
        self.filling = False
        if self.fill is not None:
            self._release_fill()
        self.marks.used = [False] * len(self.marks.used)
        self.marks.cleared.clear()

    def hand_over(self) -> torch.Tensor:
        """The window is over, and its sum, which stays on the account, is the caller's."""
        total, self.total = self.total, None
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

    def _views_fill(self, tensor: torch.Tensor) -> bool:
        return self.fill is not None and tensor.untyped_storage()._cdata == self.fill.untyped_storage()._cdata

    def _hold_shard(self, accumulates: bool) -> torch.Tensor:
        """The shard that sums are kept in: in the wire's dtype while there is one, wider once something is added."""
        if self.current is None:
            dtype = self.wide if accumulates else self.wire
            self.current = self._home().alloc("gradient", self.spec.layout.shard, dtype)
        else:
            self.current = self._widened(self.current)
        return self.current

    def _widened(self, narrow: torch.Tensor) -> torch.Tensor:
        if narrow.dtype == self.wide:
            return narrow
        wide = self._home().alloc("gradient", narrow.numel(), self.wide)
        wide.copy_(narrow)
        self._home().drop("gradient", narrow)
        return wide

    def _release_fill(self) -> None:
        assert self.fill is not None
        self._tiers.device.vacate(self._kind, self.fill)
        self.fill = None
