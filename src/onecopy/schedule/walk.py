"""One optimizer step, walked in order as the engine does it: what is live on every tier, and what is sent when."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onecopy.plan.layout import Tier, in_memory, itemsize
from onecopy.schedule.lower import Buffer, Schedule
from onecopy.schedule.ops import Event, Op
from onecopy.schedule.rest import TIERS, Bytes, gradient_codec, moment_codecs, scratch_bytes

__all__ = ["Peak", "Saved", "Stretch", "Walk"]


@dataclass(frozen=True)
class Stretch:
    """A part of a forward or backward pass in which ``unit`` is at work, and the bytes of activations in it: ``peak`` the
    most, in backward before any gradient of the unit's parameters is there; ``filled`` the most after that (0: none
    came); ``then`` what there is at its end."""

    unit: str
    peak: int
    then: int
    filled: int = 0


@dataclass(frozen=True)
class Saved:
    """Activations of one micro-batch, pass by pass."""

    forward: tuple[Stretch, ...] = ()
    backward: tuple[Stretch, ...] = ()

    @property
    def kept(self) -> Bytes:
        """By unit, what its forward leaves for backward."""
        found: Bytes = {}
        before = 0
        for stretch in self.forward:
            found[stretch.unit] = found.get(stretch.unit, 0) + stretch.then - before
            before = stretch.then
        return found


    @property
    def most(self) -> int:
        """The most bytes at a time."""
        return max((max(stretch.peak, stretch.filled) for stretch in (*self.forward, *self.backward)), default=0)


@dataclass(frozen=True)
class Peak:
    """The most that is live on one tier at a time, when that is, what is live then, and the most of each kind."""

    total: int
    at: str
    then: Bytes
    kinds: Bytes


class _Along:
    """Stretches of a pass, taken as its units come in ``order``."""

    def __init__(self, stretches: Sequence[Stretch], order: Sequence[str]) -> None:
        self._left = deque(stretches)
        self._order = order
        self._place = {unit: at for at, unit in enumerate(order)}
        self._later = [self._place.get(stretch.unit, -1) for stretch in stretches]
        for at in range(len(self._later) - 2, -1, -1):  # the last place that is still to come
            self._later[at] = max(self._later[at], self._later[at + 1])

    def of(self, at: int) -> Iterator[Stretch]:
        """Those of the unit at ``at`` that come now."""
        while self._left and self._left[0].unit == self._order[at]:
            yield self._left.popleft()

    def between(self, at: int) -> Iterator[Stretch]:
        """Those of units that were there before, until another unit comes."""
        while self._left and self._later[-len(self._left)] > at >= self._place.get(self._left[0].unit, -1):
            yield self._left.popleft()

    def rest(self) -> Iterator[Stretch]:
        """All others."""
        while self._left:
            yield self._left.popleft()


class Walk:
    """One optimizer step, unit by unit, counting bytes."""

    def __init__(self, schedule: Schedule, at_rest: dict[Tier, Bytes], saved: Saved) -> None:
        self._schedule = schedule
        self._saved = saved
        self._now = "rest"
        self._live: dict[Tier, Bytes] = {tier: defaultdict(int) for tier in TIERS}
        self._kinds: dict[Tier, Bytes] = {tier: {} for tier in TIERS}
        self._most: dict[Tier, tuple[int, str, Bytes]] = {tier: (0, "rest", {}) for tier in TIERS}
        for tier, kinds in at_rest.items():
            for kind, size in kinds.items():
                self._count(kind, 0 if kind == "gradient" and tier != "disk" else size, tier)
        self._count("exchange buffer", schedule.facts.exchange)
        self._count("staging", scratch_bytes(schedule), "host")
        if schedule.plan.step.when == "delayed":
            self._count("gradient", at_rest["host"]["gradient"] // 2, "host")
            self._count("workspace", self._beside(), "host")
        self._units = [unit.name for unit in schedule.facts.units]
        self._spans = [unit.name for unit in schedule.facts.units if unit.spans]
        self._gathered: set[str] = set()
        self._landed: set[str] = set()
        self._kept: set[str] = set()
        self._flying: deque[str] = deque()
        self._event: Event = "boundary"
        # Every op that sends something, in the order in which the engine starts them.
        self.sends: list[Op] = []

    def _count(self, kind: str, size: int, tier: Tier = "device") -> None:
        live, kinds = self._live[tier], self._kinds[tier]
        live[kind] += size
        kinds[kind] = max(kinds.get(kind, 0), live[kind])
        if (total := sum(live.values())) > self._most[tier][0]:
            self._most[tier] = total, self._now, {kind: size for kind, size in live.items() if size}

    def _activate(self, stretches: Iterator[Stretch]) -> None:
        """Activations come and go as in ``stretches``."""
        for stretch in stretches:
            self._activations(max(stretch.peak, stretch.filled))
            self._activations(stretch.then)

    def _activations(self, size: int) -> None:
        if size != self._live["device"]["activations"]:
            self._count("activations", size - self._live["device"]["activations"])

    def _sends(self, unit: str, event: Event, *kinds: str) -> None:
        self.sends += [op for op in self._schedule.at(unit, event) if op.kind in kinds and op.group != "none"]

    def peaks(self) -> dict[Tier, Peak]:
        return {tier: Peak(*self._most[tier], self._kinds[tier]) for tier in TIERS}

    def step(self) -> None:
        micro = self._schedule.plan.batch.accumulation
        for batch in range(micro):
            self._pass(self._units, "pre_forward", "post_forward")
            self._event = "boundary" if batch == micro - 1 else "grads_ready"
            self._backward(self._event)
        if self._schedule.plan.step.when != "boundary":
            if self._schedule.plan.step.when == "backward":
                self._count("workspace", self._beside(), "host")
            return
        self.sends += self._schedule.vote
        for unit in self._units:
            self._now = f"the step of {unit}"
            self._step_unit([buffer for buffer in self._schedule.of(unit) if buffer.trainable])
            self._sends(unit, "step", "spread")

    def _beside(self) -> int:
        """A tile's gradients as they are stepped, and its moments decoded: what a step on a thread works with, until it is
        joined."""
        trained = [buffer for buffer in self._schedule.buffers if buffer.trainable]
        return max((self._tile(buffer) * (1 + self._decoded(buffer)) for buffer in trained), default=0)

    def _tile(self, buffer: Buffer) -> int:
        """Bytes of a tile of what is stepped."""
        grid = buffer.grid()
        return min(grid.tile, grid.numel) * itemsize(buffer.weight)

    def _decoded(self, buffer: Buffer) -> int:
        """How many moments rest in a codec."""
        moments = moment_codecs(self._schedule.facts.moments_of(buffer), buffer.row.moment)
        return sum(coded is not None for _, _, coded in moments)

    # Parameters

    def _gather(self, unit: str, event: Event) -> None:
        gathers = [op for op in self._schedule.at(unit, event) if op.kind == "gather"]
        if gathers and unit not in self._gathered:
            self._gathered.add(unit)
            self._sends(unit, event, "gather")
            for op in gathers:
                self._count("gather buffer", op.bytes)

    def _free(self, unit: str, event: Event) -> None:
        frees = [op for op in self._schedule.at(unit, event) if op.kind == "free"]
        if frees and unit in self._gathered:
            self._gathered.discard(unit)
            self._landed.discard(unit)
            for op in frees:
                self._count("gather buffer", -op.bytes)

    def _ahead(self, order: list[str], at: int, event: Event) -> None:
        """Gather the unit at ``at``, unless it is in use already, and those the prefetch window looks ahead to."""
        if order[at] in self._landed:
            return
        self._landed.add(order[at])
        for unit in order[at : at + 1 + self._schedule.plan.units.prefetch]:
            self._gather(unit, event)

    def _cut(self, order: list[str]) -> list[str]:
        return [unit for unit in order if any(op.kind == "gather" for op in self._schedule.at(unit, "pre_forward"))]

    def _pass(self, units: list[str], before: Event, after: Event) -> None:
        order = self._cut(units)
        place = {unit: at for at, unit in enumerate(order)}
        along = _Along(self._saved.forward, units)
        for at, unit in enumerate(units):
            self._now = f"the forward of {unit}"
            if unit in place:
                self._ahead(order, place[unit], before)
            self._activate(along.of(at))
            if unit in place and unit not in self._spans:
                self._free(unit, after)
            self._now = f"the forward after {unit}"
            self._activate(along.between(at))
        self._activate(along.rest())
        for unit in order:
            self._free(unit, after)

    # Gradients

    def _backward(self, event: Event) -> None:
        backward = list(reversed(self._units))
        late = [unit for unit in backward if unit in self._spans]
        order = [*late, *(unit for unit in backward if unit not in self._spans)]
        cut = self._cut(order)
        along = _Along(self._saved.backward, order)
        for at, unit in enumerate(order):
            self._now = f"the backward of {unit}"
            if unit in cut:
                self._ahead(cut, cut.index(unit), "pre_backward")
            filled = self._fill_among(unit, along.of(at))
            if unit not in late:
                self._ready(unit, event, filled)
            self._now = f"the backward after {unit}"
            self._activate(along.between(at))
        for unit in late:
            self._now = f"the end of the backward of {unit}"
            self._ready(unit, event, self._fill_among(unit, along.of(order.index(unit))))
        self._activate(along.rest())
        while self._flying:
            self._land(event)

    def _fill_among(self, unit: str, stretches: Iterator[Stretch]) -> bool:
        """Run the ``stretches`` of ``unit``; its gradients get their memory when the first is there. True: it was."""
        filled = False
        for stretch in stretches:
            self._activations(stretch.peak)
            if stretch.filled and not filled:
                filled = True
                self._fill_unit(unit)
            self._activations(max(stretch.filled, stretch.then))
            self._activations(stretch.then)
        return filled

    def _fill_unit(self, unit: str) -> None:
        ahead = self._schedule.plan.units.reduce_ahead
        for buffer in self._trained(unit):
            if buffer.gradient_away or buffer.name not in self._kept:
                # A new buffer waits for the one before it; one that micro-batches added up in is there already.
                while len(self._flying) > ahead:
                    self._land(self._event)
            self._fill(buffer)

    def _trained(self, unit: str) -> list[Buffer]:
        return [buffer for buffer in self._schedule.of(unit) if buffer.trainable]

    def _ready(self, unit: str, event: Event, filled: bool) -> None:
        """The gradients of ``unit`` are complete; ``filled``: they have their memory."""
        if not filled:
            self._fill_unit(unit)
        reduces = {op.buffer for op in self._schedule.at(unit, event) if op.kind == "reduce"}
        self._sends(unit, event, "reduce")
        for buffer in self._trained(unit):
            if buffer.name in reduces:
                self._hold(buffer)
                self._count("reduce buffer", self._transit(buffer))
        if reduces:
            self._flying.append(unit)
        while len(self._flying) > self._schedule.plan.units.reduce_ahead + 1:
            self._land(event)
        self._free(unit, event)

    def _fill(self, buffer: Buffer) -> None:
        away = buffer.gradient_away
        codec = buffer.reduce_codec if away else gradient_codec(self._schedule, buffer)
        if not away:
            if buffer.name in self._kept:
                return
            self._kept.add(buffer.name)
        self._count("reduce buffer" if away else "gradient", buffer.layout.padded * itemsize(codec))

    def _hold(self, buffer: Buffer) -> None:
        """The shard that a gradient which is away is summed in, from its first reduction to the step."""
        if not buffer.gradient_away:
            return
        size = buffer.layout.shard * itemsize(gradient_codec(self._schedule, buffer))
        if buffer.row.gradient.rest.tier == "disk":  # it lands in host memory, where what was there joins it
            self._count("reduce buffer", size, "host")
        elif buffer.name not in self._kept:
            self._kept.add(buffer.name)
            self._count("gradient", size, buffer.row.gradient.rest.tier)

    def _transit(self, buffer: Buffer) -> int:
        """What a reduction holds beside the fill buffer: the peers' pieces, and a copy in the wire's codec."""
        wire = itemsize(buffer.reduce_codec)
        narrow = buffer.gradient_away or gradient_codec(self._schedule, buffer) == buffer.reduce_codec
        encoded = 0 if narrow else buffer.layout.padded
        staged = buffer.layout.padded - buffer.layout.shard if self._schedule.facts.staging else 0
        return (encoded + staged) * wire

    def _land(self, event: Event) -> None:
        unit = self._flying.popleft()
        if event == "boundary":
            self._sends(unit, event, "sum", "spread")
        reduces = {op.buffer for op in self._schedule.at(unit, event) if op.kind == "reduce"}
        for buffer in self._schedule.of(unit):
            if buffer.name in reduces:
                filled = buffer.layout.padded * itemsize(buffer.reduce_codec)
                self._count("reduce buffer", -self._transit(buffer))
                if buffer.gradient_away:
                    self._count("reduce buffer", -filled)
                if buffer.row.gradient.rest.tier == "disk":
                    landed = buffer.layout.shard * itemsize(gradient_codec(self._schedule, buffer))
                    self._count("reduce buffer", -landed, "host")

    # Step

    def _step_unit(self, buffers: list[Buffer]) -> None:
        codecs = {buffer.name: gradient_codec(self._schedule, buffer) for buffer in buffers}
        together = [buffer for buffer in buffers if not buffer.tiled]
        cast = sum(
            buffer.elements(buffer.row.optimizer) * itemsize(buffer.weight)
            for buffer in together
            if codecs[buffer.name] != buffer.weight
        )
        self._count("workspace", cast)
        self._count("workspace", -cast)
        for buffer in (*together, *(buffer for buffer in buffers if buffer.tiled)):
            if buffer.tiled:
                self._step_tiles(buffer, codecs[buffer.name])
            size = buffer.elements(buffer.row.gradient.rest) * itemsize(codecs[buffer.name])
            if buffer.row.gradient.rest.tier != "disk":  # there its room stays
                self._count("gradient", -size, buffer.row.gradient.rest.tier)

    def _step_tiles(self, buffer: Buffer, codec: str) -> None:
        """A tile's gradient in the weights' dtype, and its states decoded."""
        tier = in_memory(buffer.row.optimizer.tier)
        same = codec == buffer.weight and in_memory(buffer.row.gradient.rest.tier) == tier
        work = self._tile(buffer) * ((not same) + self._decoded(buffer) + buffer.steps_encoded)
        self._count("workspace", work, tier)
        self._count("workspace", -work, tier)
