"""One rank of a job that is not there: torch's fake process group, and every other rank does what this one does.

Collectives go to the fake group, which moves nothing; each is written down in the :class:`Journal` of the simulation. What
is agreed on the host is what this rank says, and a sum over ranks is this rank's number times theirs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from onecopy.comm.collectives import BACKENDS, Edge, Message, Native, Pending, Sent
from onecopy.errors import EngineError

__all__ = ["Journal", "Sending", "Simulated", "pretend"]


@dataclass(frozen=True)
class Sending:
    """One collective: what this rank sends in it, to a group of how many ranks, and the bytes held on the device then.
    ``unit`` is "" for what is no unit's."""

    kind: str
    unit: str
    elements: int
    dtype: str
    ranks: int
    held: int

    @property
    def bytes(self) -> int:
        """Bytes this rank sends."""
        return self.elements * int(getattr(torch, self.dtype).itemsize)


@dataclass
class Journal:
    """The collectives of a simulation in order. ``held`` is asked for the bytes on the device; ``seconds`` is what the fake
    group took, whose work grows with the ranks."""

    sent: list[Sending] = field(default_factory=list)
    held: Callable[[], int] = lambda: 0
    seconds: float = 0.0

    def note(self, kind: str, unit: str, elements: int, dtype: torch.dtype, ranks: int) -> None:
        """One more collective."""
        self.sent.append(Sending(kind, unit, elements, str(dtype).removeprefix("torch."), ranks, self.held()))


class Simulated:
    """The edge of a simulated group: as :class:`~onecopy.comm.collectives.Native`, and noted."""

    staging = False

    def __init__(self, group: dist.ProcessGroup, sent: Sent) -> None:
        self._group = group
        self._sent = sent
        self._native: Edge = Native(group, sent)

    def gather(self, full: torch.Tensor, shard: torch.Tensor, message: Message) -> Pending:
        """See :class:`~onecopy.comm.collectives.Edge`."""
        self._note(message, shard.numel(), shard.dtype)
        began = time.process_time()
        pending = self._native.gather(full, shard, message)
        journal().seconds += time.process_time() - began
        return pending

    def reduce(self, full: torch.Tensor, out: torch.Tensor, message: Message, add: bool = False) -> Pending:
        """See :class:`~onecopy.comm.collectives.Edge`."""
        self._note(message, full.numel() // self._group.size(), full.dtype)
        began = time.process_time()
        pending = self._native.reduce(full, out, message, add)
        journal().seconds += time.process_time() - began
        return pending

    def all_reduce(self, tensor: torch.Tensor, kind: str, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """See :class:`~onecopy.comm.collectives.Edge`."""
        ranks = self._group.size()
        journal().note(kind, "", 2 * tensor.numel() * (ranks - 1) // ranks, tensor.dtype, ranks)
        self._native.all_reduce(tensor, kind, op)
        if op == dist.ReduceOp.SUM:
            tensor.mul_(ranks)

    def flush(self) -> None:
        """See :class:`~onecopy.comm.collectives.Edge`."""

    def _note(self, message: Message, piece: int, dtype: torch.dtype) -> None:
        ranks = self._group.size()
        journal().note(message.kind, message.unit, piece * (ranks - 1), dtype, ranks)


BACKENDS["fake"] = Simulated
_journals: list[Journal] = []


def journal() -> Journal:
    """That of the simulation which runs."""
    return _journals[-1]


@contextmanager
def pretend(ranks: int) -> Iterator[Journal]:
    """Within the context this process is rank 0 of ``ranks``. Raises :class:`EngineError` in a process that has a process
    group already."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise EngineError("a simulation needs a process without a process group; this one is a rank already")
    _journals.append(Journal())
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield _journals[-1]
    finally:
        dist.destroy_process_group()
        _journals.pop()

