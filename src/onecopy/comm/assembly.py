"""Gathers that ranks need at different times: forward passes without gradients, of which each rank may run its own number.

Where a rank cannot read the others' shards (:class:`onecopy.comm.shared.Shelf`), a gather needs everybody. In training
all ranks run the same units, but validation sets and generated texts differ in length. So before a gather of such a pass
all ranks say which units they need next, and all take part in gathering all of them. A rank that has finished its
passes keeps attending, with no wish of its own, when it next comes to a point where ranks must meet; once nobody has a
wish they go on together.

A round is one small all-gather over the control group. Training passes need none.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from onecopy.comm.groups import control
from onecopy.comm.watch import waiting

__all__ = ["ask", "expect", "join", "settle"]

# Units that one rank can ask for in a round: the one it needs and those it prefetches.
_MOST = 8
# By an engine's number, what takes part in the gather of one of its units, weakly held: ``attend()(unit, wanted)``.
Attend = Callable[[], Callable[[int, bool], None] | None]
_engines: dict[int, Attend] = {}
# The default group under which ranks may be at different passes.
_open: list[object] = []


def join(engine: int, attend: Attend | None) -> None:
    """Gathers of ``engine`` are carried out by ``attend`` from here on; None: it is gone."""
    if attend is None:
        _engines.pop(engine, None)
    else:
        _engines[engine] = attend


def expect() -> None:
    """Other ranks may run passes from here on, whether or not this one does."""
    _open[:] = [dist.group.WORLD]


def ask(engine: int, units: list[int]) -> None:
    """Gather ``units`` of ``engine``, and what the other ranks ask for. Collective with their ``ask`` or ``settle``."""
    expect()
    _serve(_exchange(units[:_MOST], engine), engine, units)
    if units[_MOST:]:
        ask(engine, units[_MOST:])


def settle() -> None:
    """Attend until no rank needs a gather any more. Nothing to do unless there were passes since the last time."""
    if not _open or _open[0] is not dist.group.WORLD:
        return
    while True:
        wishes = _exchange([], -1)
        if not any(units for _, units in wishes):
            break
        _serve(wishes, -1, [])
    _open.clear()


def _exchange(units: list[int], engine: int) -> list[tuple[int, list[int]]]:
    """Every rank's engine and units."""
    mine = torch.full((_MOST + 1,), -1, dtype=torch.int64, device="cpu")
    mine[0] = engine
    mine[1 : 1 + len(units)] = torch.tensor(units, dtype=torch.int64, device="cpu")
    told = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    with waiting("the others in a forward pass without gradients" if units else "the others to end such passes"):
        dist.all_gather(told, mine, group=control())
    rows = [row.tolist() for row in told]
    return [(int(row[0]), [int(unit) for unit in row[1:] if unit >= 0]) for row in rows]


def _serve(wishes: list[tuple[int, list[int]]], engine: int, own: list[int]) -> None:
    """Take part in what is asked for, everything once, in an order that all ranks have."""
    asked = dict.fromkeys((number, unit) for number, units in wishes for unit in units)
    for number, unit in asked:
        attend = _engines[number]()
        assert attend is not None
        attend(unit, number == engine and unit in own)
