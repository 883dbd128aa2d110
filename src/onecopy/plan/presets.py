"""What people call the stages, as functions that return a :class:`~onecopy.plan.plan.Plan`."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from onecopy.errors import PlanError
from onecopy.plan.layout import WITHIN, Layout, Tier, in_memory
from onecopy.plan.plan import Batch, Clip, LossScale, Plan, Precision, Row, Rule, Scratch, State, Units

__all__ = ["DTYPES", "hsdp", "infinity", "low_precision", "mics", "offload", "stage"]

_FULL, _CUT = Layout(), Layout(shards=WITHIN)
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _row(parameter: Layout, held: Layout, gradient: Layout, optimizer: Layout) -> Row:
    return Row(State(parameter, held), State(gradient, gradient), optimizer)


_ROWS = {
    0: _row(_FULL, _FULL, _FULL, _FULL),
    1: _row(_FULL, _FULL, _FULL, _CUT),
    2: _row(_FULL, _FULL, _CUT, _CUT),
    3: _row(_CUT, _CUT, _CUT, _CUT),
}


def stage(
    number: int,
    *,
    reshard_after_forward: bool = True,
    dtype: str | None = None,
    accumulation: int = 1,
    clip: float | Clip | None = None,
    norm_type: float | None = None,
    **policies: Any,
) -> Plan:
    """ZeRO stage ``number`` (Rajbhandari et al. 2020, section 5): 0 replicates everything, 1 shards the optimizer
    states, 2 the gradients too, 3 the parameters too.

    ``reshard_after_forward=False`` keeps stage 3's gathered parameters from forward to backward. ``dtype``: "bf16",
    "fp16" (with dynamic loss scaling), "fp32", a torch dtype name, or None to keep the model's own. ``norm_type``: of the
    norm that is measured and clipped, 2 unless said. ``policies`` are other :class:`Plan` fields. Raises
    :class:`PlanError` for a number that is not 0, 1, 2 or 3.
    """
    if isinstance(number, bool) or number not in _ROWS:
        raise PlanError(f"stage {number!r} does not exist; choose 0, 1, 2 or 3")
    if not reshard_after_forward and _ROWS[number].parameter.rest.replicated:
        raise PlanError(f"reshard_after_forward=False is for stage 3; stage {number} never shards parameters")
    known = [field.name for field in fields(Plan)]
    for option in policies:
        if option not in known:
            near = difflib.get_close_matches(option, [*known, "accumulation", "clip", "dtype", "reshard_after_forward"], 1)
            raise PlanError(f"stage() has no option {option!r}" + (f"; did you mean {near[0]!r}?" if near else f"; {known}"))
    _refuse_both(policies, precision=dtype is not None, batch=accumulation != 1)
    if isinstance(clip, Clip) and norm_type is not None:
        raise PlanError(f"norm_type={norm_type!r} and clip={clip} were both given; give one of them")
    row = _ROWS[number] if reshard_after_forward else _row(_ROWS[number].parameter.rest, _FULL, *_tail(_ROWS[number]))
    name = DTYPES.get(dtype, dtype) if dtype else None
    scale = LossScale() if name == "float16" else None
    policies.setdefault("precision", Precision(dtype=name, loss_scale=scale))
    policies.setdefault("batch", Batch(accumulation=accumulation))
    policies.setdefault("clip", clip if isinstance(clip, Clip) else Clip(clip, 2.0 if norm_type is None else norm_type))
    policies.setdefault("units", Units())
    return Plan(rules=(Rule("*", row),), **policies)


def _refuse_both(policies: dict[str, Any], **short: bool) -> None:
    """A policy object and the short option that it holds would contradict each other."""
    names = {"precision": "dtype", "batch": "accumulation"}
    for policy, given in short.items():
        if given and policy in policies:
            raise PlanError(f"{names[policy]}= and {policy}={policies[policy]} were both given; give one of them")


def _tail(row: Row) -> tuple[Layout, Layout]:
    return row.gradient.rest, row.optimizer


def hsdp(*, shard: int, number: int = 3, **options: Any) -> Plan:
    """Hybrid sharding: every state of ``stage(number)`` is cut inside groups of ``shard`` consecutive ranks and
    gradients are summed over the groups."""
    return stage(number, **options).with_(group=shard)


def mics(*, shard: int, **options: Any) -> Plan:
    """MiCS (Zhang et al. 2022): :func:`hsdp` at stage 3 under its other name."""
    return hsdp(shard=shard, **options)


def _each_row(plan: Plan, change: Callable[[Row], Row]) -> Plan:
    return plan.with_(rules=tuple(Rule(rule.pattern, change(rule.row)) for rule in plan.rules))


def offload(
    plan: Plan,
    optimizer: Tier = "host",
    parameter: Tier = "device",
    *,
    gradient: Tier | None = None,
    ratio: float = 1.0,
    scratch: Scratch | str | None = None,
) -> Plan:
    """ZeRO-Offload (Ren et al. 2021) and ZeRO-Infinity (Rajbhandari et al. 2021): ``plan`` with the optimizer's states
    and the step on the host, or the states on disk; sharded gradients go to the host as they are reduced, or to the tier
    ``gradient``. ``parameter``: where sharded parameters (stage 3) rest. ``ratio``: the share of the elements that this
    holds for (Offload++), the rest is stepped on the device. ``scratch``: folder of the disk tier.

    Raises :class:`PlanError` for a ``gradient`` off the device where gradients are whole on every rank.
    """
    if gradient not in (None, "device") and not any(rule.row.gradient.rest.shards for rule in plan.rules):
        raise PlanError(
            f"gradient={gradient!r} beside gradients that every rank has whole: they leave the device from stage 2 on; use "
            "stage(2), or leave gradient= out"
        )
    sums_on = gradient if gradient is not None else in_memory(optimizer)

    def change(row: Row) -> Row:
        sums = replace(row.gradient.rest, tier=sums_on if row.gradient.rest.shards else "device")
        rest, held = replace(row.parameter.rest, tier=parameter), row.parameter.held
        held = replace(held, tier=parameter if held.shards else "device")
        moments = replace(row.moments, tier=optimizer) if row.moments is not None else None
        states = replace(row.optimizer, tier=optimizer)
        return replace(row, parameter=State(rest, held), gradient=State(sums, sums), optimizer=states, moments=moments)

    where = Scratch(scratch) if isinstance(scratch, str) else scratch
    return _each_row(plan, change).with_(step=replace(plan.step, ratio=ratio), scratch=where or plan.scratch)


def infinity(scratch: Scratch | str, **options: Any) -> Plan:
    """ZeRO-Infinity with everything on disk: ``stage(3)`` whose parameters and optimizer states are in files."""
    return offload(stage(3, **options), "disk", "disk", scratch=scratch)


def low_precision(plan: Plan, moments: str = "int8", master: str | None = None) -> Plan:
    """``plan`` with moments that rest in ``"bfloat16_sr"`` (rounded stochastically), ``"int8"`` (Dettmers et al. 2022) or
    ``"int4"`` (Li et al. 2023), computed with in float32. ``master="bfloat16_sr"``: parameters in bfloat16 are stepped
    where they rest, rounded stochastically, without master weights beside them.
    """

    def change(row: Row) -> Row:
        layout = replace(row.optimizer, codec=master)
        return replace(row, optimizer=layout, moments=replace(row.moment, codec=moments))

    return _each_row(plan, change)
