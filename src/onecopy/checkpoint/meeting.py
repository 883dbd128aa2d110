"""Ranks that act together: they meet first, and when one fails all do, with the same message."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from onecopy.comm.groups import world_size
from onecopy.errors import CheckpointError, OneCopyError

__all__ = ["collect", "from_rank0", "meet", "my_rank", "same", "tell", "together"]

T = TypeVar("T")


def my_rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if world_size() > 1 else 0


def meet(what: str, call: str, patience: float) -> None:
    """Wait until every rank is here. ``call`` is the same text on all of them, and that of no other call under way.

    Raises :class:`CheckpointError` that says who is here and who is not, after ``patience`` seconds. A collective would
    wait for the missing ranks until the process group gives up, and then not know who they were.
    """
    world = world_size()
    store = distributed_c10d._get_default_store() if world > 1 else None
    if store is None:
        return
    keys = [f"onecopy/{what}/{call}/{rank}" for rank in range(world)]
    own = keys[my_rank()]
    store.set(own, "here")
    deadline, pause = time.monotonic() + patience, 0.001
    while not store.check(keys):
        if time.monotonic() > deadline:
            here = [rank for rank, key in enumerate(keys) if store.check([key])]
            missing = [rank for rank in range(world) if rank not in here]
            store.delete_key(own)
            raise CheckpointError(
                f"collective {what} entered by ranks {here}, missing {missing} after {patience:g} s: every rank must "
                f"call {what}() at the same step (patience= waits longer)"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    tell(None)  # everybody is here, but only now has everybody seen it
    store.delete_key(own)


def tell(value: T) -> list[T]:
    """Every rank's ``value``, in rank order."""
    world = world_size()
    if world == 1:
        return [value]
    told: list[Any] = [None] * world
    dist.all_gather_object(told, value)
    return told


def collect(value: T) -> list[T]:
    """Every rank's ``value``, in rank order, on rank 0; elsewhere an empty list."""
    world = world_size()
    if world == 1:
        return [value]
    told: list[Any] | None = [None] * world if my_rank() == 0 else None
    dist.gather_object(value, told, 0)
    return told or []


def together(make: Callable[[], T]) -> T:
    """``make()`` on every rank; when it fails on one, every rank raises the same :class:`CheckpointError`."""
    result, problem = _attempt(make)
    texts = tell(None if problem is None else _text(problem))
    if any(text is not None for text in texts):
        raise CheckpointError(_summary(texts)) from problem
    return result  # type: ignore[return-value]


def from_rank0(make: Callable[[], T]) -> T:
    """``make()`` of rank 0, on every rank; when it fails there, every rank raises the same :class:`CheckpointError`."""
    result, problem = _attempt(make) if my_rank() == 0 else (None, None)
    told = [(result, None if problem is None else _text(problem))]
    if world_size() > 1:
        dist.broadcast_object_list(told, 0)
    value, text = told[0]
    if text is not None:
        raise CheckpointError(text) from problem
    return value  # type: ignore[return-value]


def same(what: str, value: Any) -> None:
    """Raise :class:`CheckpointError` on every rank unless all have an equal ``value``."""
    told = tell(value)
    for rank, theirs in enumerate(told):
        if theirs != told[0]:
            raise CheckpointError(f"ranks disagree about {what}: rank 0 has {told[0]!r}, rank {rank} has {theirs!r}")


def _attempt(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return make(), None
    except Exception as error:  # whatever it is, the other ranks must hear of it
        return None, error


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, OneCopyError | OSError) else f"{type(error).__name__}: {error}"


def _summary(texts: list[str | None]) -> str:
    """What the ranks that failed say, each thing once."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text is not None:
            ranks.setdefault(text, []).append(rank)
    if len(ranks) == 1:
        text, where = next(iter(ranks.items()))
        return text if len(where) == len(texts) else f"{text} (on rank{'s' * (len(where) > 1)} {_list(where)})"
    return "; ".join(f"rank{'s' * (len(where) > 1)} {_list(where)}: {text}" for text, where in list(ranks.items())[:5])


def _list(ranks: list[int]) -> str:
    return ", ".join(str(rank) for rank in ranks[:8]) + (", ..." if len(ranks) > 8 else "")
