"""How the ranks of a group exchange what a schedule has them exchange: which edges there are, and what memory they take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from onecopy.comm.collectives import Edge, Exchange, Message, edge_for
from onecopy.comm.groups import Ranks
from onecopy.comm.shared import Shelf, open_shared, open_shelf
from onecopy.engine.ledger import Ledger
from onecopy.engine.weights import Source
from onecopy.schedule.lower import Buffer, Schedule
from onecopy.schedule.messages import message_slots, on_shelf

__all__ = ["Edges", "make_edges"]


@dataclass(frozen=True)
class Edges:
    """How buffers move inside a group: ``gather`` also spreads what was stepped; a ``shelf``, where there is one, has
    the shards of buffers that rest cut, and gathers them."""

    gather: Edge | None = None
    reduce: Edge | None = None
    shelf: Shelf | None = None
    places: tuple[Buffer, ...] = ()

    def source(self, buffer: Buffer, message: Message) -> Source:
        """Where ``buffer`` becomes whole from."""
        if self.shelf is not None and buffer in self.places:
            place = self.places.index(buffer)
            gather = partial(self.shelf.gather, message=message, index=place)
            return Source(gather, self.shelf, self.shelf.shards[place])
        return Source(partial(self.gather.gather, message=message) if self.gather is not None else None)


def make_edges(schedule: Schedule, ranks: Ranks, ledger: Ledger) -> tuple[Schedule, Edges]:
    """The edges inside a group, and ``schedule`` with what they need noted in its facts."""
    if ranks.gather is None or ranks.reduce is None:
        return schedule, Edges()
    shared = _shared_edges(schedule, ranks, ledger)
    if shared is not None:
        edges, size = shared
        return replace(schedule, facts=replace(schedule.facts, exchange=size)), edges
    gather, reduce = edge_for(ranks.gather, ledger.sent), edge_for(ranks.reduce, ledger.sent)
    staging = reduce is not None and reduce.staging
    return replace(schedule, facts=replace(schedule.facts, staging=staging)), Edges(gather, reduce)


def _shared_edges(schedule: Schedule, ranks: Ranks, ledger: Ledger) -> tuple[Edges, int] | None:
    """Edges through shared memory, and the bytes of their slots; None where ranks do not share any."""
    if ranks.device.type != "cpu" or dist.get_backend(ranks.gather) != "gloo" or not schedule.buffers:
        return None
    assert ranks.gather is not None and ranks.reduce is not None
    shelved = tuple(buffer for buffer in schedule.buffers if on_shelf(buffer))
    shelf = open_shelf(ranks.gather, ledger.sent, [(b.layout.shard, getattr(torch, b.dtype)) for b in shelved])
    if shelf is None:
        return None
    (spread, piece), size = message_slots(schedule), 0
    gather: Edge = Exchange(ranks.gather, ledger.sent)
    reduce: Edge = Exchange(ranks.reduce, ledger.sent)
    if spread.size:
        opened = open_shared(ranks.gather, ledger.sent, spread.size, spread.count)
        if opened is None:
            return None
        gather, size = opened, opened.bytes
    if piece.size:
        opened = open_shared(ranks.reduce, ledger.sent, piece.size, piece.count)
        if opened is None:
            return None
        reduce, size = opened, size + opened.bytes
    return Edges(gather, reduce, shelf if shelved else None, shelved), size
