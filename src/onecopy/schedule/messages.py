"""Slots of memory through which ranks of one host exchange their messages: how large, and how many.

There are slots for the messages that are on their way at a time and one more, as ranks are not in step.
"""

from __future__ import annotations

from dataclasses import dataclass

from onecopy.plan.layout import itemsize
from onecopy.schedule.lower import Buffer, Schedule

__all__ = ["WORD", "Slots", "exchange_bytes", "message_slots", "on_shelf"]

# Slots are whole numbers of this many bytes.
WORD = 8


@dataclass(frozen=True)
class Slots:
    """``count`` slots of ``size`` bytes, the largest message; size 0: there are no such messages."""

    size: int
    count: int

    @property
    def bytes(self) -> int:
        """What one rank's slots take."""
        return -(-self.size // WORD) * WORD * self.count


def on_shelf(buffer: Buffer) -> bool:
    """Does the parameter rest in memory, cut, where the other ranks may read it, so that it needs no slots?"""
    return buffer.cut(buffer.row.parameter.rest) and buffer.row.parameter.rest.tier != "disk"


def message_slots(schedule: Schedule) -> tuple[Slots, Slots]:
    """Slots of what is gathered or spread, and of what is reduced."""
    units, buffers, spread, piece = schedule.plan.units, schedule.buffers, 0, 0
    for buffer in buffers:
        elements, wire, kept = buffer.layout.shard, itemsize(buffer.reduce_codec), itemsize(buffer.accumulate_codec)
        if not on_shelf(buffer) and (buffer.parameter_away or buffer.cut(buffer.row.optimizer)):
            spread = max(spread, elements * itemsize(buffer.dtype))
        if buffer.trainable:
            piece = max(piece, elements * wire * (buffer.mesh.within - 1))
            if not buffer.cut(buffer.row.optimizer):
                # What is reduced is spread after, in the codec that sums are kept in.
                piece = max(piece, elements * kept)
    return Slots(spread, min(units.prefetch + 2, len(buffers))), Slots(piece, min(units.reduce_ahead + 2, len(buffers)))


def exchange_bytes(schedule: Schedule) -> int:
    """Bytes of all slots of one rank; 0 where a group has one rank."""
    return sum(slots.bytes for slots in message_slots(schedule)) if schedule.facts.mesh.within > 1 else 0
