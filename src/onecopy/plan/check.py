"""``check(plan, facts)``: one pure function that refuses what cannot be, and says why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from difflib import get_close_matches

from onecopy.errors import PlanError
from onecopy.plan.layout import Axis, Layout, UnitFact, itemsize
from onecopy.plan.plan import Plan, Row

__all__ = ["check", "legal_triple"]

_DEGREE: dict[frozenset[Axis], int] = {frozenset(): 0, frozenset({"within"}): 1, frozenset({"within", "across"}): 2}
_DEGREE_NAME = ("nobody", "the ranks of a group", "all ranks")


def legal_triple(parameter: Layout, gradient: Layout, optimizer: Layout) -> bool:
    """True when the three states are cut ever finer: a state cut over fewer ranks than the one it is made from could
    not be rebuilt without a second collective. 10 of the 27 triples over none/group/world pass."""
    degrees = [_DEGREE[frozenset(layout.shards)] for layout in (parameter, gradient, optimizer)]
    return degrees == sorted(degrees)


def check(plan: Plan, units: Sequence[UnitFact], world: int) -> None:
    """Raise :class:`PlanError` unless ``plan`` can train ``units`` on ``world`` ranks."""
    _check_numbers(plan)
    _check_mesh(plan, world)
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
    }
    for state, layout in layouts.items():
        if frozenset(layout.shards) not in _DEGREE:
            raise PlanError(f"{state} of {name!r} is cut over {layout.shards}; legal: (), ('within',), all axes")
        if layout.tier != "device":
            raise PlanError(f"{state} of {name!r} is on tier {layout.tier!r}; this version trains on tier 'device' only")
        if layout.grain != "element":
            raise PlanError(f"{state} of {name!r} has grain {layout.grain!r}; this version cuts at 'element' only")
        if layout.codec is not None:
            itemsize(layout.codec)
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


def _check_mesh(plan: Plan, world: int) -> None:
    if world < 1:
        raise PlanError(f"world size {world} is not a number of ranks; it is 1 or more")
    if plan.group is None:
        return
    if plan.group < 1 or world % plan.group:
        divisors = [d for d in range(1, world + 1) if world % d == 0]
        near = min(divisors, key=lambda d: abs(d - plan.group)) if plan.group else 1
        raise PlanError(f"groups of {plan.group} ranks do not divide {world} ranks; the nearest that does is {near}")


def _check_numbers(plan: Plan) -> None:
    if plan.step.on != "device":
        raise PlanError(f"StepPolicy(on={plan.step.on!r}): this version steps on 'device' only")
    if plan.batch.accumulation < 1:
        raise PlanError(f"accumulation is {plan.batch.accumulation}; it is a whole number from 1")
    clip = plan.clip
    if clip.max_norm is not None and not (clip.max_norm > 0 and math.isfinite(clip.max_norm)):
        raise PlanError(f"clip to norm {clip.max_norm}; it is a finite number above 0, or None for no clipping")
    if not clip.norm_type > 0:
        raise PlanError(f"norm type {clip.norm_type}; it is a number above 0, or inf for the largest element")
    for what in ("prefetch", "min_numel", "reduce_ahead"):
        count = getattr(plan.units, what)
        if count < 0:
            raise PlanError(f"units {what} is {count}; it is a count from 0")
    for what, codec in (("dtype", plan.precision.dtype), ("master", plan.precision.master)):
        if codec is not None:
            try:
                itemsize(codec)
            except ValueError:
                near = get_close_matches(codec, ("float32", "bfloat16", "float16"), n=1, cutoff=0.0)[0]
                raise PlanError(f"precision {what} {codec!r} is no dtype; did you mean {near!r}?") from None
    scale = plan.precision.loss_scale
    if scale is not None:
        numbers = {"initial": scale.initial, "minimum": scale.minimum}
        for what, value in numbers.items():
            if not (value > 0 and math.isfinite(value)):
                raise PlanError(f"loss scale {what} is {value}; it is a finite number above 0")
        if scale.window < 1 or scale.hysteresis < 1:
            raise PlanError(f"loss scale window {scale.window}, hysteresis {scale.hysteresis}; both count from 1")
