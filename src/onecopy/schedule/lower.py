"""``lower(plan, facts)``: a plan's layouts become ops per unit and event.

Read it as the answer to "why does this collective happen here": each op below stands beside the pair of layouts
that makes it necessary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from onecopy import codecs
from onecopy.plan.layout import FlatLayout, Grid, Layout, Mesh, ParamFact, Tier, UnitFact, flatten, in_memory
from onecopy.plan.plan import Plan, Precision, Row, State, StepPolicy
from onecopy.schedule.ops import Event, Group, Kind, Op

__all__ = ["TILE", "Buffer", "Facts", "Schedule", "lower"]

_LOW = ("bfloat16", "float16")
# Elements stepped at a time where the plan does not say. In memory a tile takes long beside the Python calls that step it
# (0.1 ms; a core steps 2**20 elements in 2 ms, and many cores share a tile), and the gradients that are cast for it are small
# enough to be still in a shared cache when the kernel reads them; a tile on disk is a request per state worth its seek.
TILE: dict[Tier, int] = {"device": 1 << 22, "host": 1 << 20, "disk": 1 << 20}
# Tiles are multiples of this many elements, so that they begin on the blocks of disks and of every codec.
_TILE_UNIT = 2048


@dataclass(frozen=True)
class Facts:
    """What lowering must know beside the plan.

    ``moments``: by parameter, name and codec of each optimizer state tensor that has one element per weight (None: that
    of the weight it steps). ``staging``: the backend receives a reduce's peers into a buffer of its own before it sums
    them (point to point exchange) instead of inside the collective. ``exchange``: bytes of buffers that the backend keeps
    for its messages.
    """

    units: tuple[UnitFact, ...]
    mesh: Mesh
    moments: Mapping[str, tuple[tuple[str, str | None], ...]] = field(default_factory=dict)
    staging: bool = False
    exchange: int = 0

    def moments_of(self, buffer: Buffer) -> tuple[tuple[str, str | None], ...]:
        """Every state that the optimizer keeps of some parameter in ``buffer``."""
        found = {state: None for slot in buffer.layout.slots for state in self.moments.get(slot.param.name, ())}
        return tuple(found)


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
    step: StepPolicy
    accumulates: bool

    @property
    def name(self) -> str:
        return f"{self.unit}/{self.index}"

    def cut(self, layout: Layout) -> bool:
        """Does ``layout`` leave this rank with less than the whole on this mesh?"""
        return self.mesh.size(layout.shards) > 1

    def away(self, layout: Layout) -> bool:
        """Does ``layout`` leave less than the whole on the device?"""
        return self.cut(layout) or layout.tier != "device"

    # Asked for every unit in every pass, so kept.
    @cached_property
    def parameter_away(self) -> bool:
        """Does less than the whole parameter rest on the device, so that it is gathered for use and freed after?"""
        return self.away(self.row.parameter.rest)

    @cached_property
    def gradient_away(self) -> bool:
        """Does less than the whole gradient stay on the device between micro-batches?"""
        return self.away(self.row.gradient.rest)

    @cached_property
    def master(self) -> str | None:
        """Codec of the master weights; None when the optimizer steps the parameter where it rests: it is precise enough
        (or rounded with care, see ``Row.optimizer.codec``), and on the optimizer's tier."""
        if not self.trainable or self.steps_encoded:
            return None
        if self.dtype in _LOW and self.precision.master is not None:
            return self.precision.master
        return self.dtype if self.row.optimizer.tier != self.row.parameter.rest.tier else None

    @property
    def weight(self) -> str:
        """Dtype in which the optimizer steps."""
        return "float32" if self.steps_encoded else self.master or self.dtype

    @property
    def reduce_codec(self) -> str:
        return self.row.wire.reduce or self.dtype

    @property
    def accumulate_codec(self) -> str:
        """Codec of a gradient that something is added to."""
        return (self.precision.accumulate or self.dtype) if self.dtype in _LOW else self.dtype

    @cached_property
    def tiled(self) -> bool:
        """Is the buffer stepped tile by tile, rather than with its unit?"""
        row = self.row
        off_device = {row.optimizer.tier, row.gradient.rest.tier} != {"device"}
        return off_device or self.moments_away or self.steps_encoded or self.step.tile is not None

    @property
    def moments_away(self) -> bool:
        """Do the moments rest where, or as, the optimizer cannot compute with them?"""
        return self.row.moment.tier == "disk" or self.row.moment.codec is not None

    @property
    def steps_encoded(self) -> bool:
        """Is the parameter itself the master, decoded for the step and rounded stochastically after it? That is for
        bfloat16; others have masters, or need none."""
        return self.trainable and self.row.optimizer.codec is not None and self.dtype == "bfloat16"

    def tile(self) -> int:
        """Elements of a tile."""
        tiers = (self.row.optimizer.tier, self.row.moment.tier, self.row.gradient.rest.tier)
        tier: Tier = "disk" if "disk" in tiers else "host" if "host" in tiers else "device"
        wanted = self.step.tile if self.step.tile is not None else TILE[tier]
        return -(-wanted // _TILE_UNIT) * _TILE_UNIT

    def grid(self) -> Grid:
        """The tiles of what this rank steps; one where it is stepped with its unit."""
        elements = self.elements(self.row.optimizer)
        return Grid(elements, self.tile() if self.tiled else max(elements, 1))

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
    stays = _staying(plan, facts.units)
    buffers = tuple(buffer for unit in facts.units for buffer in _buffers(unit, plan, facts.mesh, unit.name in stays))
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


def _staying(plan: Plan, units: Sequence[UnitFact]) -> frozenset[str]:
    """Units whose optimizer stays on the device under ``plan.step.ratio``: the first ones, as the last have their
    gradients first and the host can begin with them."""
    sizes = {unit.name: sum(param.numel for param in unit.params if param.trainable) for unit in units}
    goes, wanted = 0, plan.step.ratio * sum(sizes.values())
    stays = set(sizes)
    for name in reversed(sizes):
        if goes >= wanted:
            break
        goes += sizes[name]
        stays.discard(name)
    return frozenset(stays)


def _on_device(row: Row) -> Row:
    """``row`` with the optimizer's states and the gradient on the device."""
    gradient = State(replace(row.gradient.rest, tier="device"), replace(row.gradient.held, tier="device"))
    moments = replace(row.moments, tier="device") if row.moments is not None else None
    return replace(row, gradient=gradient, optimizer=replace(row.optimizer, tier="device"), moments=moments)


def _buffers(unit: UnitFact, plan: Plan, mesh: Mesh, stays: bool) -> list[Buffer]:
    kinds: dict[tuple[str, bool, Row], list[ParamFact]] = {}
    for param in unit.params:
        if param.numel == 0:
            continue  # nothing to keep, send or step
        row = plan.row(param.name)
        kinds.setdefault((param.dtype, param.trainable, _on_device(row) if stays else row), []).append(param)
    return [
        Buffer(
            unit.name,
            index,
            dtype,
            trainable,
            row,
            flatten(params, mesh.within),
            mesh,
            plan.precision,
            plan.step,
            plan.batch.accumulation > 1,
        )
        for index, ((dtype, trainable, row), params) in enumerate(kinds.items())
    ]


def _peers(buffer: Buffer, elements: int) -> int:
    """Elements a rank sends when each of ``within`` ranks must get or give its ``1 / within`` of ``elements``."""
    return elements // buffer.mesh.within * (buffer.mesh.within - 1)


def _lower_parameter(buffer: Buffer, events: dict[Event, list[Op]]) -> None:
    states = buffer.row.parameter
    if not buffer.parameter_away:
        return
    elements, codec = buffer.layout.padded, buffer.row.wire.gather or buffer.dtype
    group: Group = "within" if buffer.mesh.within > 1 else "none"
    # What rests off the device comes from its tier first, this rank's shard of it.
    gather = Op("gather", "parameter", buffer.name, elements, codec, _peers(buffer, elements), group, states.rest.tier)
    free = Op("free", "parameter", buffer.name, elements, codec)
    # Less than whole at rest, whole in use: gathered before the first use of the step.
    fetches = _fetch_shard(buffer)
    events.setdefault("pre_forward", []).extend((*fetches, gather))
    if buffer.away(states.held):
        # Between uses too: given back after forward, gathered once more for backward.
        events.setdefault("post_forward", []).append(free)
        events.setdefault("pre_backward", []).extend((*fetches, gather))
    for event in ("grads_ready", "boundary"):
        events.setdefault(event, []).append(free)


def _fetch_shard(buffer: Buffer) -> list[Op]:
    """This rank's shard of the parameter comes from its tier."""
    tier, ops = buffer.row.parameter.rest.tier, []
    if tier == "disk":
        padded = codecs.blocks(buffer.layout.shard, buffer.tile(), buffer.dtype)
        ops.append(Op("fetch", "parameter", buffer.name, padded, "uint8", tier="disk"))
    if tier != "device":
        ops.append(Op("fetch", "parameter", buffer.name, buffer.layout.shard, buffer.dtype, tier="host"))
    return ops


def _lower_gradient(buffer: Buffer, plan: Plan, events: dict[Event, list[Op]]) -> None:
    rest, mesh = buffer.row.gradient.rest, buffer.mesh
    whole, codec = buffer.layout.padded, buffer.reduce_codec
    # What sums are kept in once they are reduced: micro-batches add up in the accumulation codec.
    held = codec if plan.batch.accumulation == 1 else buffer.accumulate_codec
    alone = plan.batch.accumulation == 1 or buffer.gradient_away
    # A whole gradient that several micro-batches add to is held in the accumulation codec, one that is reduced at
    # once in the codec it is sent in.
    fill = Op("fill", "gradient", buffer.name, whole, codec if alone else buffer.accumulate_codec)
    events.setdefault("grads_arrive", []).append(fill)
    if mesh.world == 1 and not buffer.gradient_away:
        return
    group: Group = "within" if mesh.within > 1 else "none"
    reduce = Op("reduce", "gradient", buffer.name, whole, codec, _peers(buffer, whole), group, rest.tier)
    if mesh.within > 1 or buffer.gradient_away:
        if buffer.gradient_away:
            # Away between micro-batches: every backward reduces, and the sum is kept as a shard on its tier.
            _before_free(events, "grads_ready", reduce)
        # Whole between micro-batches: they add up locally and one reduce at the boundary serves them all.
        _before_free(events, "boundary", reduce)
    if rest.tier != "device":
        moves = [Op("evict", "gradient", buffer.name, buffer.layout.shard, codec, tier="host")]
        if rest.tier == "disk":
            padded = codecs.blocks(buffer.layout.shard, buffer.tile(), held)
            if plan.batch.accumulation > 1:  # the sum so far, where there is one
                moves.append(Op("fetch", "gradient", buffer.name, padded, "uint8", tier="disk"))
            moves.append(Op("evict", "gradient", buffer.name, padded, "uint8", tier="disk"))
        for event in ("grads_ready", "boundary"):
            for op in moves:
                _before_free(events, event, op)
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
    listed.append(Op("step", "master", buffer.name, piece, buffer.weight, tier=optimizer.tier))
    _lower_states(buffer, listed)
    if buffer.master is not None:
        listed.append(Op("encode", "parameter", buffer.name, piece, buffer.dtype, tier=buffer.row.parameter.rest.tier))
    if buffer.cut(optimizer) and not buffer.cut(parameter):
        # Stepped in pieces but whole at rest: each rank's piece goes to all.
        whole, codec = buffer.layout.padded, buffer.row.wire.gather or buffer.dtype
        listed.append(Op("spread", "parameter", buffer.name, whole, codec, _peers(buffer, whole), "within"))


def _lower_states(buffer: Buffer, listed: list[Op]) -> None:
    """What a step moves beside the moments, which are known to :mod:`onecopy.schedule.predict`: the gradient to where it is
    computed with, master weights from the disk and back, new weights to where the parameter rests."""
    row, grid, name = buffer.row, buffer.grid(), buffer.name
    codec = buffer.accumulate_codec if buffer.accumulates else buffer.reduce_codec
    computes = in_memory(row.optimizer.tier)

    def moves(kind: Kind, state: str, codec: str) -> None:
        padded = codecs.blocks(grid.numel, grid.tile, codec)
        listed.append(Op(kind, state, name, padded, "uint8", tier="disk"))

    if row.gradient.rest.tier == "disk":
        moves("fetch", "gradient", codec)
    if in_memory(row.gradient.rest.tier) != computes:
        kind: Kind = "evict" if computes == "host" else "fetch"
        listed.append(Op(kind, "gradient", name, grid.numel, codec, tier="host"))
    if row.optimizer.tier == "disk":
        moves("fetch", "master", buffer.weight)
        moves("evict", "master", buffer.weight)
        if buffer.step.when != "boundary":  # the parameter follows when the thread is done
            moves("fetch", "master", buffer.weight)
    if in_memory(row.parameter.rest.tier) != computes:
        kind = "fetch" if computes == "host" else "evict"
        listed.append(Op(kind, "parameter", name, grid.numel, buffer.dtype, tier="host"))
    if row.parameter.rest.tier == "disk" and buffer.master is not None:
        moves("evict", "parameter", buffer.dtype)


def _lower_vote(buffers: Sequence[Buffer], units: int, mesh: Mesh) -> tuple[Op, ...]:
    """Norm and overflow, two numbers that are equal where ranks are, whether a rank has step hooks, per unit whether one has
    gradients left, and per trainable parameter whether any rank used it; see :mod:`onecopy.engine.step`."""
    if mesh.world == 1:
        return ()
    elements = 4 + units + sum(len(buffer.layout.slots) for buffer in buffers if buffer.trainable)
    sent = 2 * elements * (mesh.world - 1) // mesh.world
    group: Group = "world"
    return (Op("vote", "norm", "*", elements, "float64", sent, group),)
