"""Folds over a schedule: what is resident, what the peak is, what one step sends.

The peak is found by walking one optimizer step in order, as the engine does it: each op that gives a buffer memory or
takes it away changes what is live.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from onecopy import codecs
from onecopy.errors import PlanError
from onecopy.plan.layout import Layout, Tier, itemsize
from onecopy.schedule.lower import Buffer, Schedule
from onecopy.schedule.ops import Event, Op

__all__ = [
    "Peak",
    "Saved",
    "check_needs",
    "each_op",
    "gradient_codec",
    "link",
    "moment_codecs",
    "moved",
    "peaks",
    "predict",
    "resident",
    "scratch_bytes",
    "traffic",
    "uses_disk",
]

Bytes = dict[str, int]
TIERS: tuple[Tier, ...] = ("device", "host", "disk")


@dataclass(frozen=True)
class Saved:
    """Bytes of activations of a micro-batch, by unit: ``kept`` from the unit's forward to its backward, and ``again`` what
    its backward computes once more and needs while it runs."""

    kept: Mapping[str, int] = field(default_factory=dict)
    again: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Peak:
    """The most that is live on one tier at a time, when that is, what is live then, and the most of each kind."""

    total: int
    at: str
    then: Bytes
    kinds: Bytes


def resident(schedule: Schedule, piece: int) -> dict[Tier, Bytes]:
    """Bytes that rank ``piece`` of a group holds at the end of a window's last backward pass, by tier and kind."""
    tiers: dict[Tier, Bytes] = {
        tier: {"parameter": 0, "gradient": 0, "master": 0, "moments": 0} for tier in TIERS
    }
    for buffer in schedule.buffers:
        row = buffer.row
        tiers[row.parameter.rest.tier]["parameter"] += _parameter(buffer)
        if not buffer.trainable:
            continue
        gradient = buffer.elements(row.gradient.rest) * itemsize(gradient_codec(schedule, buffer))
        # A step that is delayed keeps the gradients of its window through the next.
        tiers[row.gradient.rest.tier]["gradient"] += gradient * (2 if buffer.step.when == "delayed" else 1)
        if buffer.master is not None:
            tiers[row.optimizer.tier]["master"] += _held(buffer, row.optimizer.tier, buffer.master, None)
        tiers[row.moment.tier]["moments"] += moments(schedule, buffer, piece)
    used = {tier for tier in TIERS if tier == "device" or any(tiers[tier].values())}
    return {tier: kinds for tier, kinds in tiers.items() if tier in used}


def _parameter(buffer: Buffer) -> int:
    rest = buffer.row.parameter.rest
    if rest.tier != "disk":
        return buffer.elements(rest) * itemsize(buffer.dtype)
    return codecs.blocks(buffer.layout.shard, buffer.tile(), buffer.dtype)


def _held(buffer: Buffer, tier: Tier, codec: str, encoded: codecs.Codec | None) -> int:
    """Bytes of a state over what the optimizer steps."""
    if tier != "disk" and encoded is None:
        return buffer.elements(buffer.row.optimizer) * itemsize(codec)
    grid = buffer.grid()
    return codecs.blocks(grid.numel, grid.tile, codec, encoded)


def moment_codecs(
    facts: Sequence[tuple[str, str | None]], layout: Layout, buffer: str = ""
) -> Iterator[tuple[str, str | None, codecs.Codec | None]]:
    """Of every moment of ``buffer``: its name, its dtype in computation (None: the weight's), and the codec it rests in
    (None: as it is), which rounds alike on ranks that hold copies."""
    for name, own in facts:
        if layout.codec is None:
            yield name, own, None
        else:
            seed = crc32(f"{buffer}.{name}".encode())
            yield name, own, codecs.resolve(layout.codec, name in codecs.NONNEGATIVE, seed)


def moments(schedule: Schedule, buffer: Buffer, piece: int) -> int:
    """Bytes of the optimizer's per-element states. Those that the optimizer keeps itself have no padding."""
    layout = buffer.row.moment
    if buffer.moments_away:
        found = moment_codecs(schedule.facts.moments_of(buffer), layout)
        return sum(_held(buffer, layout.tier, own or buffer.weight, coded) for _, own, coded in found)
    low, high = buffer.layout.bounds(piece) if buffer.cut(buffer.row.optimizer) else (0, buffer.layout.numel)
    total = 0
    for slot in buffer.layout.slots:
        if (part := slot.local(low, high)) is not None:
            widths = [itemsize(own or buffer.weight) for _, own in schedule.facts.moments.get(slot.param.name, ())]
            total += (part[1] - part[0]) * sum(widths)
    return total


def uses_disk(schedule: Schedule) -> bool:
    """Does anything rest on disk?"""
    rows = [buffer.row for buffer in schedule.buffers]
    return any("disk" in (row.parameter.rest.tier, row.optimizer.tier, row.moment.tier) for row in rows)


def scratch_bytes(schedule: Schedule) -> int:
    """Bytes of host memory that the disk's reads and writes pass through."""
    scratch = schedule.plan.scratch
    return scratch.staging if scratch is not None and uses_disk(schedule) else 0


def least_staging(schedule: Schedule) -> int:
    """Bytes of staging that a step needs at least: one tile that is stepped and the next, of all its states on disk, and a
    tile of the parameter."""
    least = 0
    for buffer in schedule.buffers:
        row, tile = buffer.row, buffer.tile()
        states = 0
        if buffer.trainable and row.optimizer.tier == "disk":
            states += codecs.blocks(tile, tile, buffer.weight)
        if buffer.trainable and row.moment.tier == "disk":
            for _, own, coded in moment_codecs(schedule.facts.moments_of(buffer), row.moment):
                states += codecs.blocks(tile, tile, own or buffer.weight, coded)
        parameter = codecs.blocks(tile, tile, buffer.dtype) if row.parameter.rest.tier == "disk" else 0
        least = max(least, 2 * states + 2 * parameter)
    return least


def check_needs(schedule: Schedule, piece: int) -> None:
    """Raise :class:`PlanError` when the predicted peak of a tier is above its cap, with what takes the memory, when staging
    is too small for a step, and when moments are not what their codec holds."""
    predicted, plan = predict(schedule, piece), schedule.plan
    problems = []
    if plan.scratch is not None and (least := least_staging(schedule)) > plan.scratch.staging:
        tile = max(buffer.tile() for buffer in schedule.buffers)
        problems.append(
            f"staging of {plan.scratch.staging:,} bytes does not hold two tiles of {tile:,} elements; the least is {least:,},"
            " or take a smaller StepPolicy(tile=...)"
        )
    for tier, cap in (("device", plan.caps.device), ("host", plan.caps.host)):
        peak = predicted["peak"].get(tier, {})
        total = peak.get("total", 0)
        if cap is None or total <= cap:
            continue
        kinds = sorted(((size, kind) for kind, size in peak.items() if kind != "total"), reverse=True)
        largest = ", ".join(f"{kind} {size:,}" for size, kind in kinds[:4])
        problems.append(
            f"the plan needs {total:,} bytes of {tier} memory on this rank and the cap is {cap:,}; largest: {largest}. "
            f"{_ADVICE[tier]}, or raise the cap"
        )
    if plan.step.when != "boundary":
        alone = [buffer.unit for buffer in schedule.buffers if buffer.trainable and buffer.master is None]
        if alone:
            problems.append(
                f"step when is {plan.step.when!r}, and unit {alone[0]!r} has no master weights beside its parameters, which "
                "would change while they are in use: train in bf16, leave parameters on 'device', or use when='boundary'"
            )
    for buffer in schedule.buffers:
        other = {own or buffer.weight for _, own in schedule.facts.moments_of(buffer)} - {"float32"}
        if buffer.trainable and buffer.row.moment.codec is not None and other:
            problems.append(
                f"moments of unit {buffer.unit!r} are {other.pop()}, and their codec {buffer.row.moment.codec!r} holds "
                "float32; keep float32 master weights (Precision.master), or leave the codec out for these parameters"
            )
            break
    if problems:
        raise PlanError("; ".join(problems))


_ADVICE = {
    "device": "Move the optimizer's states and gradients to the host, or at stage 3 the parameters too",
    "host": "Move the optimizer's states to disk, use more ranks at a sharded stage, or a smaller staging memory",
}


def gradient_codec(schedule: Schedule, buffer: Buffer) -> str:
    """What a complete gradient is held in: the wire's codec, or a wider one where micro-batches added up in it."""
    return buffer.accumulate_codec if schedule.plan.batch.accumulation > 1 else buffer.reduce_codec


def traffic(schedule: Schedule) -> dict[str, dict[str, Any]]:
    """Collectives of one optimizer step by kind: how many, and what this rank sends."""
    total: dict[str, dict[str, Any]] = {}
    for op, times in each_op(schedule):
        _add(total, op, times)
    for op in schedule.vote:
        _add(total, op, 1)
    return total


def each_op(schedule: Schedule) -> Iterator[tuple[Op, int]]:
    """Every op of the units, and how often it runs in one optimizer step."""
    micro = schedule.plan.batch.accumulation
    repeats = {"pre_forward": micro, "pre_backward": micro, "grads_ready": micro - 1, "boundary": 1, "step": 1}
    for (_, event), ops in schedule.ops.items():
        for op in ops:
            yield op, repeats.get(event, 0)


def _add(total: dict[str, dict[str, Any]], op: Op, times: int) -> None:
    if op.group == "none" or times == 0:
        return
    entry = total.setdefault(op.kind, {"count": 0, "elements": 0, "bytes": 0, "group": op.group})
    entry["count"] += times
    entry["elements"] += op.sent * times
    entry["bytes"] += op.wire_bytes * times


def predict(schedule: Schedule, piece: int = 0) -> dict[str, Any]:
    """``{"resident": {tier: {kind: bytes}}, "peak": {tier: {"total": bytes, kind: bytes}},
    "collectives": {kind: {"count", "elements", "bytes", "group"}}, "moved": {link: bytes}}`` for one rank and one optimizer
    step."""
    found = peaks(schedule, piece)
    return {
        "resident": resident(schedule, piece),
        "peak": {
            tier: {"total": peak.total, **{kind: size for kind, size in peak.kinds.items() if size}}
            for tier, peak in found.items()
        },
        "collectives": traffic(schedule),
        "moved": moved(schedule, piece),
    }


def peaks(schedule: Schedule, piece: int = 0, saved: Saved = Saved()) -> dict[Tier, Peak]:
    """The peak of every tier that is used in one optimizer step, with the activations ``saved``."""
    at_rest = resident(schedule, piece)
    walk = _Walk(schedule, at_rest, saved)
    walk.step()
    return {tier: peak for tier, peak in walk.peaks().items() if tier in at_rest or peak.total}


def moved(schedule: Schedule, piece: int = 0) -> dict[str, int]:
    """Bytes that one optimizer step moves between the tiers of this rank: ``to_device`` and ``to_host`` (across PCIe where
    there is an accelerator), ``disk_read`` and ``disk_write`` with the padding of tiles. The first step reads no moments.
    """
    total: dict[str, int] = dict.fromkeys(LINKS, 0)
    for op, times in each_op(schedule):
        if op.kind in ("fetch", "evict"):
            total[link(op)] += op.bytes * times
    for buffer in schedule.buffers:
        if buffer.trainable and buffer.row.moment.tier == "disk":
            size = moments(schedule, buffer, piece)
            total["disk_read"] += size
            total["disk_write"] += size
    return {name: size for name, size in total.items() if size}


LINKS = ("to_device", "to_host", "disk_read", "disk_write")


def link(op: Op) -> str:
    """What a fetch or an evict crosses."""
    if op.tier == "disk":
        return "disk_read" if op.kind == "fetch" else "disk_write"
    return "to_device" if op.kind == "fetch" else "to_host"


class _Walk:
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
                self._count(kind, 0 if kind == "gradient" else size, tier)
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

    def _count(self, kind: str, size: int, tier: Tier = "device") -> None:
        live, kinds = self._live[tier], self._kinds[tier]
        live[kind] += size
        kinds[kind] = max(kinds.get(kind, 0), live[kind])
        if (total := sum(live.values())) > self._most[tier][0]:
            self._most[tier] = total, self._now, {kind: size for kind, size in live.items() if size}

    def peaks(self) -> dict[Tier, Peak]:
        return {tier: Peak(*self._most[tier], self._kinds[tier]) for tier in TIERS}

    def step(self) -> None:
        micro = self._schedule.plan.batch.accumulation
        for batch in range(micro):
            self._pass(self._units, "pre_forward", "post_forward")
            self._backward("boundary" if batch == micro - 1 else "grads_ready")
        if self._schedule.plan.step.when != "boundary":
            if self._schedule.plan.step.when == "backward":
                self._count("workspace", self._beside(), "host")
            return
        for unit in self._units:
            self._now = f"the step of {unit}"
            self._step_unit([buffer for buffer in self._schedule.of(unit) if buffer.trainable])

    def _beside(self) -> int:
        """A tile's gradients as they are stepped: what a step on a thread works with, until it is joined."""
        grids = [(buffer.grid(), buffer.weight) for buffer in self._schedule.buffers if buffer.trainable]
        return max((min(grid.tile, grid.numel) * itemsize(weight) for grid, weight in grids), default=0)

    # Parameters

    def _gather(self, unit: str, event: Event) -> None:
        gathers = [op for op in self._schedule.at(unit, event) if op.kind == "gather"]
        if gathers and unit not in self._gathered:
            self._gathered.add(unit)
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
        for unit in units:
            self._now = f"the forward of {unit}"
            if unit in place:
                self._ahead(order, place[unit], before)
            self._count("activations", self._saved.kept.get(unit, 0))
            if unit in place and unit not in self._spans:
                self._free(unit, after)
        for unit in order:
            self._free(unit, after)

    # Gradients

    def _backward(self, event: Event) -> None:
        backward = list(reversed(self._units))
        order = [u for u in backward if u in self._spans] + [u for u in backward if u not in self._spans]
        cut = self._cut(order)
        late = [unit for unit in backward if unit in self._spans]
        for unit in order:
            self._now = f"the backward of {unit}"
            if unit in cut:
                self._ahead(cut, cut.index(unit), "pre_backward")
            again = self._saved.again.get(unit, 0)
            self._count("activations", again)
            if unit not in late:
                self._ready(unit, event)
            self._count("activations", -again - self._saved.kept.get(unit, 0))
        for unit in late:
            self._ready(unit, event)
        while self._flying:
            self._land(event)

    def _ready(self, unit: str, event: Event) -> None:
        buffers = [buffer for buffer in self._schedule.of(unit) if buffer.trainable]
        ahead = self._schedule.plan.units.reduce_ahead
        for buffer in buffers:
            if buffer.gradient_away or buffer.name not in self._kept:
                # A new buffer waits for the one before it; one that micro-batches added up in is there already.
                while len(self._flying) > ahead:
                    self._land(event)
            self._fill(buffer)
        reduces = {op.buffer for op in self._schedule.at(unit, event) if op.kind == "reduce"}
        for buffer in buffers:
            if buffer.name in reduces:
                self._hold(buffer)
                self._count("reduce buffer", self._transit(buffer))
        if reduces:
            self._flying.append(unit)
        while len(self._flying) > ahead + 1:
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
        if buffer.gradient_away and buffer.name not in self._kept:
            self._kept.add(buffer.name)
            size = buffer.layout.shard * itemsize(gradient_codec(self._schedule, buffer))
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
        reduces = {op.buffer for op in self._schedule.at(unit, event) if op.kind == "reduce"}
        for buffer in self._schedule.of(unit):
            if buffer.name in reduces:
                filled = buffer.layout.padded * itemsize(buffer.reduce_codec)
                self._count("reduce buffer", -self._transit(buffer))
                if buffer.gradient_away:
                    self._count("reduce buffer", -filled)

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
            self._count("gradient", -size, buffer.row.gradient.rest.tier)

    def _step_tiles(self, buffer: Buffer, codec: str) -> None:
        """A tile's gradient in the weights' dtype, and its states decoded."""
        tier: Tier = "device" if buffer.row.optimizer.tier == "device" else "host"
        grid = buffer.grid()
        values = min(grid.tile, grid.numel) * itemsize(buffer.weight)
        same = codec == buffer.weight and (buffer.row.gradient.rest.tier == tier)
        moments = moment_codecs(self._schedule.facts.moments_of(buffer), buffer.row.moment)
        decoded = sum(coded is not None for _, _, coded in moments)
        work = values * ((not same) + decoded + buffer.steps_encoded)
        self._count("workspace", work, tier)
        self._count("workspace", -work, tier)
