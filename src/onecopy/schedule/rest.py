"""What rests where: bytes of every state between steps, by tier and kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from zlib import crc32

from onecopy import codecs
from onecopy.plan.layout import Layout, Tier, itemsize
from onecopy.schedule.lower import Buffer, Schedule

__all__ = [
    "TIERS",
    "Bytes",
    "gradient_codec",
    "moment_codecs",
    "moments",
    "resident",
    "scratch_bytes",
    "uses_disk",
]

Bytes = dict[str, int]
TIERS: tuple[Tier, ...] = ("device", "host", "disk")


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
        if row.gradient.rest.tier == "disk":  # room for a sum, even where nothing is added
            gradient = codecs.blocks(buffer.layout.shard, buffer.tile(), buffer.accumulate_codec)
        else:
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
    return any("disk" in row.tiers for row in rows)


def scratch_bytes(schedule: Schedule) -> int:
    """Bytes of host memory that the disk's reads and writes pass through."""
    scratch = schedule.plan.scratch
    return scratch.staging if scratch is not None and uses_disk(schedule) else 0


def gradient_codec(schedule: Schedule, buffer: Buffer) -> str:
    """What a complete gradient is held in: the wire's codec, or a wider one where micro-batches added up in it."""
    return buffer.accumulate_codec if schedule.plan.batch.accumulation > 1 else buffer.reduce_codec


