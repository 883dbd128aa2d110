"""``lower(plan, facts)``: a plan's layouts become ops per unit and event.

Read it as the answer to "why does this collective happen here": each op below stands beside the pair of layouts
that makes it necessary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from onecopy.plan.layout import FlatLayout, Layout, Mesh, ParamFact, UnitFact, flatten
from onecopy.plan.plan import Plan, Precision, Row
from onecopy.schedule.ops import Event, Group, Op

__all__ = ["Buffer", "Facts", "Schedule", "lower"]

_LOW = ("bfloat16", "float16")


@dataclass(frozen=True)
class Facts:
    """What lowering must know beside the plan.

    ``moments``: the codec of each optimizer state tensor that has one element per weight (None: that of the weight it
    steps). ``staging``: the backend receives a reduce's peers into a buffer of its own before it sums them (point to
    point exchange) instead of inside the collective. ``exchange``: bytes of buffers that the backend keeps for its
    messages.
    """

    units: tuple[UnitFact, ...]
    mesh: Mesh
    moments: tuple[str | None, ...] = ()
    staging: bool = False
    exchange: int = 0


@dataclass(frozen=True)
class Buffer:
    """Parameters of one unit that share dtype, trainability and row, laid side by side."""

    unit: str
    index: int
    dtype: str
    trainable: bool
    row: Row
    layout: FlatLayout
    mesh: Mesh
    precision: Precision

    @property
    def name(self) -> str:
        return f"{self.unit}/{self.index}"

    def cut(self, layout: Layout) -> bool:
        """Does ``layout`` leave this rank with less than the whole on this mesh?"""
        return self.mesh.size(layout.shards) > 1

    # Asked for every unit in every pass, so kept.
    @cached_property
    def parameter_cut(self) -> bool:
        """Does this rank keep less than the whole parameter between uses?"""
        return self.cut(self.row.parameter.rest)

    @cached_property
    def gradient_cut(self) -> bool:
        """Does this rank keep less than the whole gradient between micro-batches?"""
        return self.cut(self.row.gradient.rest)

    @cached_property
    def master(self) -> str | None:
        """Codec of the master weights; None when the parameter is precise enough to be its own."""
        return self.precision.master if self.trainable and self.dtype in _LOW else None

    @property
    def weight(self) -> str:
        """Codec of the tensor the optimizer steps."""
        return self.master or self.dtype

    @property
    def reduce_codec(self) -> str:
        return self.row.wire.reduce or self.dtype

    @property
    def accumulate_codec(self) -> str:
        """Codec of a gradient that something is added to."""
        return (self.precision.accumulate or self.dtype) if self.dtype in _LOW else self.dtype

    def elements(self, layout: Layout) -> int:
        """Elements this rank holds of a state with ``layout``, padding included."""
        return self.layout.shard if self.cut(layout) else self.layout.padded


@dataclass(frozen=True)
class Schedule:
    """Buffers in unit order, and the ops of every (unit, event)."""

    plan: Plan
    facts: Facts
    buffers: tuple[Buffer, ...]
    ops: dict[tuple[str, Event], tuple[Op, ...]]
    vote: tuple[Op, ...]

    def at(self, unit: str, event: Event) -> tuple[Op, ...]:
        return self.ops.get((unit, event), ())

    def of(self, unit: str) -> tuple[Buffer, ...]:
        return tuple(buffer for buffer in self.buffers if buffer.unit == unit)


def lower(plan: Plan, facts: Facts) -> Schedule:
    """Ops for one optimizer step of ``plan`` on ``facts.mesh``.

    ``grads_ready`` holds what happens when a unit's gradients are complete in a micro-batch that does not end in a
    step, ``boundary`` the same for the one that does.
    """
    buffers = tuple(buffer for unit in facts.units for buffer in _buffers(unit, plan, facts.mesh))
    ops: dict[tuple[str, Event], tuple[Op, ...]] = {}
    for unit in facts.units:
        events: dict[Event, list[Op]] = {}
        for buffer in buffers:
            if buffer.unit == unit.name:
                _lower_parameter(buffer, events)
                if buffer.trainable:
                    _lower_gradient(buffer, plan, events)
                    _lower_step(buffer, events)
        ops.update({(unit.name, event): tuple(listed) for event, listed in events.items()})
    return Schedule(plan, facts, buffers, ops, _lower_vote(buffers, len(facts.units), facts.mesh))


def _buffers(unit: UnitFact, plan: Plan, mesh: Mesh) -> list[Buffer]:
    kinds: dict[tuple[str, bool, Row], list[ParamFact]] = {}
    for param in unit.params:
        if param.numel == 0:
            continue  # nothing to keep, send or step
        kinds.setdefault((param.dtype, param.trainable, plan.row(param.name)), []).append(param)
    return [
        Buffer(unit.name, index, dtype, trainable, row, flatten(params, mesh.within), mesh, plan.precision)
        for index, ((dtype, trainable, row), params) in enumerate(kinds.items())
    ]


def _peers(buffer: Buffer, elements: int) -> int:
    """Elements a rank sends when each of ``within`` ranks must get or give its ``1 / within`` of ``elements``."""
    return elements // buffer.mesh.within * (buffer.mesh.within - 1)


def _lower_parameter(buffer: Buffer, events: dict[Event, list[Op]]) -> None:
    states = buffer.row.parameter
    if not buffer.cut(states.rest):
        return
    elements, codec = buffer.layout.padded, buffer.row.wire.gather or buffer.dtype
    gather = Op("gather", "parameter", buffer.name, elements, codec, _peers(buffer, elements), "within")
    free = Op("free", "parameter", buffer.name, elements, codec)
    # Cut at rest, whole in use: gathered before the first use of the step.
    events.setdefault("pre_forward", []).append(gather)
    if buffer.cut(states.held):
        # Cut between uses too: given back after forward, gathered once more for backward.
        events.setdefault("post_forward", []).append(free)
        events.setdefault("pre_backward", []).append(gather)
    for event in ("grads_ready", "boundary"):
        events.setdefault(event, []).append(free)


def _lower_gradient(buffer: Buffer, plan: Plan, events: dict[Event, list[Op]]) -> None:
    rest, mesh = buffer.row.gradient.rest, buffer.mesh
    whole, codec = buffer.layout.padded, buffer.reduce_codec
    # What sums are kept in once they are reduced: micro-batches add up in the accumulation codec.
    held = codec if plan.batch.accumulation == 1 else buffer.accumulate_codec
    alone = plan.batch.accumulation == 1 or buffer.cut(rest)
    # A whole gradient that several micro-batches add to is held in the accumulation codec, one that is reduced at
    # once in the codec it is sent in.
    fill = Op("fill", "gradient", buffer.name, whole, codec if alone else buffer.accumulate_codec)
    events.setdefault("grads_arrive", []).append(fill)
    if mesh.world == 1:
        return
    reduce = Op("reduce", "gradient", buffer.name, whole, codec, _peers(buffer, whole), "within")
    if mesh.within > 1:
        if buffer.cut(rest):
            # Cut between micro-batches: every backward reduces, the sum is kept as a shard.
            _before_free(events, "grads_ready", reduce)
        # Whole between micro-batches: they add up locally and one reduce at the boundary serves them all.
        _before_free(events, "boundary", reduce)
    if mesh.across > 1:
        piece = buffer.layout.shard
        sent = 2 * piece * (mesh.across - 1) // mesh.across
        _before_free(events, "boundary", Op("sum", "gradient", buffer.name, piece, held, sent, "across"))
    if mesh.within > 1 and not buffer.cut(buffer.row.optimizer):
        # Every rank steps the whole: the reduced pieces are spread (reduce-scatter + all-gather = all-reduce).
        _before_free(events, "boundary", Op("spread", "gradient", buffer.name, whole, held, _peers(buffer, whole), "within"))


def _before_free(events: dict[Event, list[Op]], event: Event, op: Op) -> None:
    """Communication goes out before the parameters are given back, so that it overlaps with the next unit."""
    listed = events.setdefault(event, [])
    first_free = next((at for at, other in enumerate(listed) if other.kind == "free"), len(listed))
    listed.insert(first_free, op)


def _lower_step(buffer: Buffer, events: dict[Event, list[Op]]) -> None:
    optimizer, parameter = buffer.row.optimizer, buffer.row.parameter.rest
    piece = buffer.elements(optimizer)
    listed = events.setdefault("step", [])
    listed.append(Op("step", "master", buffer.name, piece, buffer.weight))
    if buffer.master is not None:
        listed.append(Op("encode", "parameter", buffer.name, piece, buffer.dtype))
    if buffer.cut(optimizer) and not buffer.cut(parameter):
        # Stepped in pieces but whole at rest: each rank's piece goes to all.
        whole, codec = buffer.layout.padded, buffer.row.wire.gather or buffer.dtype
        listed.append(Op("spread", "parameter", buffer.name, whole, codec, _peers(buffer, whole), "within"))


def _lower_vote(buffers: Sequence[Buffer], units: int, mesh: Mesh) -> tuple[Op, ...]:
    """Norm and overflow, two numbers that are equal where ranks are, per unit whether a rank has gradients left, and per
    trainable parameter whether any rank used it; see :mod:`onecopy.engine.step`."""
    if mesh.world == 1:
        return ()
    elements = 3 + units + sum(len(buffer.layout.slots) for buffer in buffers if buffer.trainable)
    sent = 2 * elements * (mesh.world - 1) // mesh.world
    group: Group = "world"
    return (Op("vote", "norm", "*", elements, "float64", sent, group),)
