"""Training on data that some ranks have less of: :meth:`onecopy.Engine.uneven`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from onecopy.comm.groups import control, world_size
from onecopy.comm.watch import waiting

if TYPE_CHECKING:
    from onecopy.engine.engine import Engine

__all__ = ["Shares", "uneven"]

T = TypeVar("T")


class Shares:
    """How many of a window's micro-batches, over all ranks, had data. Without :func:`uneven` all of them have."""

    def __init__(self, full: int) -> None:
        self._full = full
        self._had: int | None = None

    def add(self, ranks: int) -> None:
        """One more micro-batch, of which ``ranks`` ranks had data."""
        self._had = (self._had or 0) + ranks

    @property
    def open(self) -> bool:
        """Is there a window with data that was not stepped? The same on every rank."""
        return self._had is not None

    def take(self) -> float:
        """What to multiply a mean over all micro-batches with, to make it one over those with data; starts anew."""
        had, self._had = self._had, None
        return 1.0 if not had else self._full / had


def uneven(engine: Engine, batches: Iterable[T], shares: Shares) -> Iterator[T]:
    """See :meth:`onecopy.Engine.uneven`."""
    source, others = iter(batches), engine._core.gathering.others
    left = True
    while True:
        ahead = list(islice(source, 1)) if left else []
        left = bool(ahead)
        ranks = _count(left)
        if not ranks:
            break
        shares.add(ranks)
        others.partial = ranks < world_size()
        before = engine.micro_steps
        yield from ahead
        if engine.micro_steps == before:
            engine.step()
    others.partial = False
    while shares.open:
        engine.step()


def _count(mine: bool) -> int:
    """On how many ranks ``mine`` is true; collective."""
    group = control()
    if group is None:
        return int(mine)
    own = torch.tensor([int(mine)], device="cpu")
    told = [torch.empty_like(own) for _ in range(world_size())]
    with waiting("every rank's word on whether it has another batch"):
        dist.all_gather(told, own, group=group)
    return sum(int(each) for each in told)
