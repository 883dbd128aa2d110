"""``check(plan, facts)``: one pure function that refuses what cannot be, and says why."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from difflib import get_close_matches
from typing import get_args

import torch

from onecopy.errors import PlanError
from onecopy.plan.layout import Axis, Layout, Tier, UnitFact
from onecopy.plan.plan import (
    Batch,
    Caps,
    Clip,
    LossScale,
    Plan,
    Precision,
    Recipe,
    Row,
    Scratch,
    StepPolicy,
    Units,
    When,
)
from onecopy.plan.values import Number

__all__ = ["check", "legal_triple"]

# Formats in which states may rest; where none is named, they rest as they are computed with.
_CODECS = {"optimizer": ("bfloat16_sr",), "moments": ("bfloat16_sr", "int8", "int4")}
_DEGREE: dict[frozenset[Axis], int] = {frozenset(): 0, frozenset({"within"}): 1, frozenset({"within", "across"}): 2}
_DEGREE_NAME = ("nobody", "the ranks of a group", "all ranks")


def legal_triple(parameter: Layout, gradient: Layout, optimizer: Layout) -> bool:
    """True when the three states are cut ever finer: a state cut over fewer ranks than the one it is made from could
    not be rebuilt without a second collective. 10 of the 27 triples over none/group/world pass."""
    degrees = [_DEGREE[frozenset(layout.shards)] for layout in (parameter, gradient, optimizer)]
    return degrees == sorted(degrees)


def check(plan: Plan, units: Sequence[UnitFact], world: int) -> None:
    """Raise :class:`PlanError` unless ``plan`` can train ``units`` on ``world`` ranks."""
    _check_kinds(plan)
    _check_numbers(plan)
    _check_mesh(plan, world)
    _check_batch(plan, world)
    names = [param.name for unit in units for param in unit.params]
    for name in names:
        try:
            row = plan.row(name)
        except KeyError:
            patterns = [rule.pattern for rule in plan.rules]
            near = get_close_matches(name, patterns, n=1, cutoff=0.0)
            hint = f"; the nearest is {near[0]!r}" if near else ""
            raise PlanError(f"no rule of the plan matches parameter {name!r}{hint}; end the rules with '*'") from None
        _check_row(name, row)


def _check_row(name: str, row: Row) -> None:
    layouts = {
        "parameter": row.parameter.rest,
        "parameter while held": row.parameter.held,
        "gradient": row.gradient.rest,
        "optimizer": row.optimizer,
        "moments": row.moment,
    }
    for state, layout in layouts.items():
        if frozenset(layout.shards) not in _DEGREE:
            raise PlanError(f"{state} of {name!r} is cut over {layout.shards}; legal: (), ('within',), all axes")
        if layout.tier not in get_args(Tier):
            near = {"cpu": "host", "nvme": "disk", "gpu": "device", "cuda": "device"}.get(layout.tier)
            near = near or get_close_matches(layout.tier, get_args(Tier), n=1, cutoff=0.0)[0]
            raise PlanError(
                f"{state} of {name!r} is on tier {layout.tier!r}; did you mean {near!r}? Tiers are 'device', 'host' and "
                "'disk'"
            )
        if layout.grain != "element":
            raise PlanError(f"{state} of {name!r} has grain {layout.grain!r}; this version cuts at 'element' only")
        if layout.codec is not None and state not in _CODECS:
            raise PlanError(f"{state} of {name!r} has codec {layout.codec!r}; this version keeps it in its own dtype")
        if layout.codec is not None and layout.codec not in _CODECS[state]:
            near = get_close_matches(layout.codec, _CODECS[state], n=1, cutoff=0.0)[0]
            raise PlanError(f"{state} of {name!r} has codec {layout.codec!r}; did you mean {near!r}? Legal: {_CODECS[state]}")
    _check_tiers(name, row)
    for transition in ("gather", "reduce"):
        _floating(f"{transition} wire of {name!r}", getattr(row.wire, transition))
    if row.wire.gather is not None:
        raise PlanError(f"{name!r} is gathered as {row.wire.gather!r}; this version gathers in the parameter's own dtype")
    triple = (row.parameter.rest, row.gradient.rest, row.optimizer)
    if not legal_triple(*triple):
        said = ", ".join(
            f"{state} over {_DEGREE_NAME[_DEGREE[frozenset(layout.shards)]]}"
            for state, layout in zip(("parameter", "gradient", "optimizer"), triple, strict=True)
        )
        raise PlanError(f"{name!r} is cut {said}; each must be cut at least as finely as the one before it")
    cuts = {frozenset(layout.shards) for layout in triple}
    if frozenset({"within", "across"}) in cuts:
        raise PlanError(
            f"{name!r} is cut over all ranks beside groups; leave Plan.group unset and cut 'within', which is then all"
        )
    if not set(row.parameter.held.shards) <= set(row.parameter.rest.shards):
        raise PlanError(f"parameter {name!r} is held more finely cut than it rests; hold it like its rest or replicated")


def _check_tiers(name: str, row: Row) -> None:
    """Raise :class:`PlanError` for states on tiers that the engine cannot bring together."""
    rest, held = row.parameter.rest, row.parameter.held
    if rest.tier != "device" and not rest.shards:
        raise PlanError(
            f"parameter {name!r} rests on tier {rest.tier!r} and is not sharded; what is whole on every rank is in use all "
            "the time: shard it (stage 3, on one rank too), or leave it on 'device'"
        )
    if rest.tier == "device" and held.tier != "device":
        raise PlanError(f"parameter {name!r} rests on 'device' and is held on {held.tier!r}; hold it where it rests")
    gradient = row.gradient.rest
    if gradient.tier != "device" and not gradient.shards:
        raise PlanError(
            f"gradient of {name!r} is on tier {gradient.tier!r} and is not sharded: micro-batches add to it on the device. "
            "Shard it (stage 2 or 3), or leave it on 'device'"
        )
    optimizer, moments = row.optimizer, row.moment
    if moments.shards != optimizer.shards:
        raise PlanError(f"moments of {name!r} are cut over {moments.shards}, its master over {optimizer.shards}; cut alike")
    if (optimizer.tier == "device") != (moments.tier == "device"):
        raise PlanError(
            f"master of {name!r} is on {optimizer.tier!r} and its moments are on {moments.tier!r}; they are stepped together:"
            " both on 'device', or both off it"
        )
    if optimizer.codec is not None and (rest.tier == "disk" or optimizer.tier != rest.tier):
        raise PlanError(
            f"{name!r} has no master beside its parameter (codec {optimizer.codec!r}), so it is stepped where that rests: "
            f"put both on 'device' or both on 'host'; the parameter is on {rest.tier!r}, the optimizer on {optimizer.tier!r}"
        )


def _check_when(plan: Plan) -> None:
    """Raise :class:`PlanError` for a time of the step that something in the plan stands against."""
    when = plan.step.when
    if when not in get_args(When):
        near = get_close_matches(str(when), get_args(When), n=1, cutoff=0.0)[0]
        raise PlanError(f"step when is {when!r}; did you mean {near!r}? Legal: {get_args(When)}")
    if when == "boundary":
        return
    against = []
    if plan.step.ratio != 1.0:
        against.append(f"ratio is {plan.step.ratio:g}, which leaves units on the device")
    if when == "backward" and plan.clip.max_norm is not None:
        against.append(f"gradients are clipped to {plan.clip.max_norm:g}, by a norm that is known after the backward pass")
    if when == "backward" and plan.precision.loss_scale is not None:
        against.append("the loss is scaled, and whether gradients overflow is known after the backward pass")
    for rule in plan.rules:
        row = rule.row
        parameter, gradient, optimizer, _ = row.tiers
        if gradient != "host" or optimizer == "device":
            against.append(
                f"rule {rule.pattern!r} does not keep gradients on 'host' and master weights and moments off the device: "
                "offload(stage(2)) or offload(stage(3)) does"
            )
        if parameter == "disk":
            against.append(f"rule {rule.pattern!r} keeps parameters on 'disk', which two threads would read at a time")
        if row.optimizer.codec is not None:
            against.append(f"rule {rule.pattern!r} steps parameters where they rest ({row.optimizer.codec!r})")
    if against:
        raise PlanError(f"step when is {when!r}, and {'; '.join(against)}; use when='boundary'")


def _check_mesh(plan: Plan, world: int) -> None:
    if world < 1:
        raise PlanError(f"world size {world} is not a number of ranks; it is 1 or more")
    if plan.group is None:
        return
    _number("group", plan.group, Number(whole=True))
    if plan.group < 1 or world % plan.group:
        divisors = [d for d in range(1, world + 1) if world % d == 0]
        near = min(divisors, key=lambda d: abs(d - (plan.group or 0)))
        raise PlanError(f"groups of {plan.group} ranks do not divide {world} ranks; the nearest that does is {near}")


_COUNT, _FROM_ONE = Number(low=0, whole=True), Number(low=1, whole=True)
_POSITIVE = Number(low=0, above=True)


def _check_numbers(plan: Plan) -> None:
    if plan.step.tile is not None:
        _number("step tile", plan.step.tile, _FROM_ONE)
    _number("step ratio", plan.step.ratio, Number(0, 1))
    _check_when(plan)
    folder = plan.scratch.folder if plan.scratch is not None else "none"
    if not isinstance(folder, str | os.PathLike) or not str(folder).strip():
        raise PlanError(f"scratch folder is {folder!r}; it must be the name of a folder on a disk of this host")
    for what in ("staging", "block", "threads") if plan.scratch is not None else ():
        _number(f"scratch {what}", getattr(plan.scratch, what), _FROM_ONE)
    for what, cap in (("device", plan.caps.device), ("host", plan.caps.host)):
        if cap is not None:
            _number(f"cap of {what} memory in bytes", cap, _FROM_ONE)
    rows = [rule.row for rule in plan.rules]
    if plan.scratch is None and any("disk" in row.tiers for row in rows):
        raise PlanError("a state is on tier 'disk' and the plan names no folder for it; give scratch=onecopy.Scratch(folder)")
    _number("accumulation", plan.batch.accumulation, _FROM_ONE)
    if plan.clip.max_norm is not None:
        _number("clip to norm", plan.clip.max_norm, _POSITIVE)
    if plan.clip.norm_type != math.inf:
        _number("norm type", plan.clip.norm_type, _POSITIVE)
    for what in ("prefetch", "min_numel", "reduce_ahead"):
        _number(f"units {what}", getattr(plan.units, what), _COUNT)
    precision = plan.precision
    for what in ("dtype", "master", "accumulate"):
        _floating(f"precision {what}", getattr(precision, what))
    scale = precision.loss_scale
    if scale is not None:
        _number("loss scale initial", scale.initial, _POSITIVE)
        _number("loss scale minimum", scale.minimum, _POSITIVE)
        _number("loss scale window", scale.window, _FROM_ONE)
        _number("loss scale hysteresis", scale.hysteresis, _FROM_ONE)
        if scale.minimum > scale.initial:
            raise PlanError(f"loss scale minimum {scale.minimum} is above its initial {scale.initial}; lower the minimum")


_KINDS: dict[str, tuple[type, ...]] = {
    "precision": (Precision,),
    "batch": (Batch,),
    "clip": (Clip,),
    "step": (StepPolicy,),
    "scratch": (Scratch, type(None)),
    "caps": (Caps,),
    "units": (Units,),
    "optimizer": (Recipe, type(None)),
    "scheduler": (Recipe, type(None)),
}


def _check_kinds(plan: Plan) -> None:
    """A number or a dict where a policy object belongs would fail somewhere inside."""
    for name, kinds in _KINDS.items():
        value = getattr(plan, name)
        if not isinstance(value, kinds):
            hint = "; accumulation=, the number of micro-batches, may be given by itself" if name == "batch" else ""
            raise PlanError(f"{name} is {value!r:.60}; it must be a {kinds[0].__name__} object{hint}")
    scale = plan.precision.loss_scale
    if scale is not None and not isinstance(scale, LossScale):
        raise PlanError(f"loss_scale is {scale!r:.60}; it must be an onecopy.LossScale(...) or None")
    for what, flag in (("batch divide", plan.batch.divide), ("cast_inputs", plan.precision.cast_inputs)):
        if not isinstance(flag, bool):
            raise PlanError(f"{what} is {flag!r:.60}; it must be True or False")


def _number(what: str, value: object, kind: Number) -> None:
    try:
        kind.check(value)
    except ValueError:
        raise PlanError(f"{what} is {value!r}; it must be {kind.legal}") from None


def _floating(what: str, codec: str | None) -> None:
    """``codec`` must name a real floating-point dtype."""
    if codec is None:
        return
    dtype = getattr(torch, codec, None) if isinstance(codec, str) else None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        near = get_close_matches(str(codec), ("float32", "bfloat16", "float16"), n=1, cutoff=0.0)[0]
        raise PlanError(f"{what} {codec!r} is no floating-point dtype; did you mean {near!r}?")


def _check_batch(plan: Plan, world: int) -> None:
    """Raise :class:`PlanError` when the batch sizes a configuration gave do not fit the ranks that run."""
    batch = plan.batch
    if batch.total is None or batch.micro is None:
        return
    made = batch.micro * batch.accumulation * world
    if made != batch.total:
        raise PlanError(
            f"train batch size {batch.total} is not micro-batch {batch.micro} x accumulation {batch.accumulation} x "
            f"{world} ranks = {made}; load the configuration with world_size={world}, or set the batch size to {made}"
        )
