"""Folds over a schedule: what is resident, what the peak is, what one step sends.

The peak is found by walking one optimizer step in order, as the engine does it: each op that gives a buffer memory or
takes it away changes what is live.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

from onecopy.plan.layout import itemsize
from onecopy.schedule.lower import Buffer, Schedule
from onecopy.schedule.ops import Event, Op

__all__ = ["predict", "resident", "traffic"]

Bytes = dict[str, int]


def resident(schedule: Schedule, piece: int) -> Bytes:
    """Bytes that rank ``piece`` of a group holds at the end of a window's last backward pass, by kind."""
    kinds: Bytes = {"parameter": 0, "gradient": 0, "master": 0, "moments": 0}
    for buffer in schedule.buffers:
        row = buffer.row
        kinds["parameter"] += buffer.elements(row.parameter.rest) * itemsize(buffer.dtype)
        if not buffer.trainable:
            continue
        kinds["gradient"] += buffer.elements(row.gradient.rest) * itemsize(gradient_codec(schedule, buffer))
        if buffer.master is not None:
            kinds["master"] += buffer.elements(row.optimizer) * itemsize(buffer.master)
        kinds["moments"] += moments(schedule, buffer, piece)
    return kinds


def moments(schedule: Schedule, buffer: Buffer, piece: int) -> int:
    """Bytes of the optimizer's per-element states; padding has none."""
    low, high = buffer.layout.bounds(piece) if buffer.cut(buffer.row.optimizer) else (0, buffer.layout.numel)
    return sum((high - low) * itemsize(codec or buffer.weight) for codec in schedule.facts.moments)


def gradient_codec(schedule: Schedule, buffer: Buffer) -> str:
    """What a complete gradient is held in: the wire's codec, or a wider one where micro-batches added up in it."""
    return buffer.accumulate_codec if schedule.plan.batch.accumulation > 1 else buffer.reduce_codec


def traffic(schedule: Schedule) -> dict[str, dict[str, Any]]:
    """Collectives of one optimizer step by kind: how many, and what this rank sends."""
    steps: dict[Event, int] = {"pre_forward": 1, "pre_backward": 1, "grads_ready": 0, "boundary": 0, "step": 1}
    micro = schedule.plan.batch.accumulation
    total: dict[str, dict[str, Any]] = {}
    repeats = {**steps, "pre_forward": micro, "pre_backward": micro, "grads_ready": micro - 1, "boundary": 1}
    for (_, event), ops in schedule.ops.items():
        for op in ops:
            _add(total, op, repeats.get(event, 0))
    for op in schedule.vote:
        _add(total, op, 1)
    return total


def _add(total: dict[str, dict[str, Any]], op: Op, times: int) -> None:
    if op.group == "none" or times == 0:
        return
    entry = total.setdefault(op.kind, {"count": 0, "elements": 0, "bytes": 0, "group": op.group})
    entry["count"] += times
    entry["elements"] += op.sent * times
    entry["bytes"] += op.wire_bytes * times


def predict(schedule: Schedule, piece: int = 0) -> dict[str, Any]:
    """``{"resident": {"device": {kind: bytes}}, "peak": {"device": {"total": bytes, kind: bytes}},
    "collectives": {kind: {"count", "elements", "bytes", "group"}}}`` for one rank and one optimizer step."""
    at_rest = resident(schedule, piece)
    walk = _Walk(schedule, {**at_rest, "gradient": 0, "exchange buffer": schedule.facts.exchange})
    walk.step()
    return {
        "resident": {"device": at_rest},
        "peak": {"device": {"total": walk.peak_total, **{k: v for k, v in walk.peak.items() if v}}},
        "collectives": traffic(schedule),
    }


class _Walk:
    """One optimizer step, unit by unit, counting bytes."""

    def __init__(self, schedule: Schedule, live: Bytes) -> None:
        self._schedule = schedule
        self._live: Bytes = defaultdict(int, live)
        self.peak: Bytes = dict(live)
        self.peak_total = sum(live.values())
        self._units = [unit.name for unit in schedule.facts.units]
        self._spans = [unit.name for unit in schedule.facts.units if unit.spans]
        self._gathered: set[str] = set()
        self._landed: set[str] = set()
        self._kept: set[str] = set()
        self._flying: deque[str] = deque()

    def _count(self, kind: str, size: int) -> None:
        self._live[kind] += size
        self.peak[kind] = max(self.peak.get(kind, 0), self._live[kind])
        self.peak_total = max(self.peak_total, sum(self._live.values()))

    def step(self) -> None:
        micro = self._schedule.plan.batch.accumulation
        for batch in range(micro):
            self._pass(self._units, "pre_forward", "post_forward")
            self._backward("boundary" if batch == micro - 1 else "grads_ready")
        for unit in self._units:
            self._step_unit([buffer for buffer in self._schedule.of(unit) if buffer.trainable])

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
        for at, unit in enumerate(order):
            self._ahead(order, at, before)
            if unit not in self._spans:
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
            if unit in cut:
                self._ahead(cut, cut.index(unit), "pre_backward")
            if unit not in late:
                self._ready(unit, event)
        for unit in late:
            self._ready(unit, event)
        while self._flying:
            self._land(event)

    def _ready(self, unit: str, event: Event) -> None:
        buffers = [buffer for buffer in self._schedule.of(unit) if buffer.trainable]
        ahead = self._schedule.plan.units.reduce_ahead
        for buffer in buffers:
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
        cut = buffer.cut(buffer.row.gradient.rest)
        codec = buffer.reduce_codec if cut else gradient_codec(self._schedule, buffer)
        if not cut:
            if buffer.name in self._kept:
                return
            self._kept.add(buffer.name)
        self._count("reduce buffer" if cut else "gradient", buffer.layout.padded * itemsize(codec))

    def _hold(self, buffer: Buffer) -> None:
        """The shard that a cut gradient is summed in, from its first reduction to the step."""
        if buffer.cut(buffer.row.gradient.rest) and buffer.name not in self._kept:
            self._kept.add(buffer.name)
            self._count("gradient", buffer.layout.shard * itemsize(gradient_codec(self._schedule, buffer)))

    def _transit(self, buffer: Buffer) -> int:
        """What a reduction holds beside the fill buffer: the peers' pieces, and a copy in the wire's codec."""
        wire = itemsize(buffer.reduce_codec)
        cut = buffer.cut(buffer.row.gradient.rest)
        encoded = 0 if cut or gradient_codec(self._schedule, buffer) == buffer.reduce_codec else buffer.layout.padded
        staged = buffer.layout.padded - buffer.layout.shard if self._schedule.facts.staging else 0
        return (encoded + staged) * wire

    def _land(self, event: Event) -> None:
        unit = self._flying.popleft()
        reduces = {op.buffer for op in self._schedule.at(unit, event) if op.kind == "reduce"}
        for buffer in self._schedule.of(unit):
            if buffer.name in reduces:
                filled = buffer.layout.padded * itemsize(buffer.reduce_codec)
                self._count("reduce buffer", -self._transit(buffer))
                if buffer.cut(buffer.row.gradient.rest):
                    self._count("reduce buffer", -filled)

    # Step

    def _step_unit(self, buffers: list[Buffer]) -> None:
        codecs = {buffer.name: gradient_codec(self._schedule, buffer) for buffer in buffers}
        cast = sum(
            buffer.elements(buffer.row.optimizer) * itemsize(buffer.weight)
            for buffer in buffers
            if codecs[buffer.name] != buffer.weight
        )
        self._count("workspace", cast)
        self._count("workspace", -cast)
        for buffer in buffers:
            self._count("gradient", -buffer.elements(buffer.row.gradient.rest) * itemsize(codecs[buffer.name]))
