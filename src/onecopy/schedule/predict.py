"""Folds over a schedule: what is resident, what the peak is, what one step sends.

The peak is found by walking one optimizer step in order, as the engine does it: each op that gives a buffer memory or
takes it away changes what is live.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onecopy import codecs
from onecopy.errors import PlanError
from onecopy.plan.layout import Tier
from onecopy.schedule.lower import Schedule
from onecopy.schedule.ops import Op
from onecopy.schedule.rest import moment_codecs, moments, resident
from onecopy.schedule.walk import Peak, Saved, Walk

__all__ = ["check_needs", "each_op", "link", "moved", "peaks", "predict", "sends", "traffic"]

def least_staging(schedule: Schedule) -> int:
    """Bytes of staging that a step needs at least: one tile that is stepped and the next, of all its states and gradients on
    disk, and a tile of the parameter."""
    least = 0
    for buffer in schedule.buffers:
        row, tile = buffer.row, buffer.tile()
        states = 0
        if buffer.trainable and row.optimizer.tier == "disk":
            states += codecs.blocks(tile, tile, buffer.weight)
        if buffer.trainable and row.gradient.rest.tier == "disk":
            states += codecs.blocks(tile, tile, buffer.accumulate_codec)
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
            # The first micro-batch of a window finds no sum to add to.
            first = (op.kind, op.state, event) == ("fetch", "gradient", "grads_ready")
            yield op, repeats.get(event, 0) - first


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


def peaks(schedule: Schedule, piece: int = 0, saved: Saved | None = None) -> dict[Tier, Peak]:
    """The peak of every tier that is used in one optimizer step, with the activations ``saved``."""
    at_rest = resident(schedule, piece)
    walk = Walk(schedule, at_rest, saved or Saved())
    walk.step()
    return {tier: peak for tier, peak in walk.peaks().items() if tier in at_rest or peak.total}


def sends(schedule: Schedule) -> list[Op]:
    """The collectives of one optimizer step in the order in which a rank starts them, where it steps at the boundary."""
    walk = Walk(schedule, resident(schedule, 0), Saved())
    walk.step()
    return walk.sends


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
