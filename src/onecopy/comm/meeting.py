"""Ranks that act together: they meet first, and when one fails all do, with the same message."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from onecopy.comm import assembly, watch
from onecopy.comm.groups import control, world_size
from onecopy.errors import CheckpointError, HangError, OneCopyError, RankMismatchError

__all__ = [
    "alike",
    "all_or_none",
    "collect",
    "from_rank0",
    "meet",
    "my_rank",
    "on_any",
    "same",
    "summary",
    "tell",
    "text_of",
    "together",
    "world_size",
]

T = TypeVar("T")
# How often each thing was met for, under the default group that the store belongs to.
_COUNTS: dict[str, int] = {}
_COUNTED: list[object] = []


def my_rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if world_size() > 1 else 0


def meet(what: str, call: str | None = None, patience: float | None = None, error: type[OneCopyError] = HangError) -> None:
    """Wait until every rank is here. ``call`` is the same text on all of them, and that of no other call under way;
    by default the ranks' n-th calls belong together.

    Raises ``error`` that says who is here and who is not, and where, after ``patience`` seconds (default: the job's). A
    collective would wait for the missing ranks until the process group gives up, and break it.
    """
    world = world_size()
    store = distributed_c10d._get_default_store() if world > 1 else None
    if store is None:
        return
    assembly.settle()
    watch.start()
    patience = watch.patience() if patience is None else patience
    if call is None:
        call = str(_count(what, store))
    key = f"onecopy/{what}/{call}"
    missing = watch.arrive(store, key, my_rank(), world, patience)
    if missing:
        here = [rank for rank in range(world) if rank not in missing]
        raise error(
            f"collective {what} entered by ranks {here}, missing {missing} after {patience:g} s: every rank must call "
            + "\n".join([f"{what}() at the same step (patience= waits longer)", *watch.reports(missing)])
        )
    alike(None)  # everybody is here, but only now has everybody seen it
    watch.depart(store, key, my_rank())


def _count(what: str, store: object) -> int:
    if not _COUNTED or _COUNTED[0] is not store:
        _COUNTED[:] = [store]
        _COUNTS.clear()
    _COUNTS[what] = _COUNTS.get(what, 0) + 1
    return _COUNTS[what]


def tell(value: T) -> list[T]:
    """Every rank's ``value``, in rank order."""
    world = world_size()
    if world == 1:
        return [value]
    assembly.settle()
    told: list[Any] = [None] * world
    with watch.waiting("a word from every rank"):
        dist.all_gather_object(told, value, group=control())
    return told


def alike(value: Any) -> bool:
    """Has every rank a value with the same ``repr``? One small all-reduce, whatever its size."""
    group = control()
    if group is None:
        return True
    assembly.settle()
    digest = int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")
    extremes = torch.tensor([digest, -digest], device="cpu")
    with watch.waiting("a word from every rank"):
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes.tolist()
    return bool(largest == -smallest)


def on_any(flags: list[bool]) -> list[bool]:
    """Which of ``flags`` are set on some rank. One small all-reduce."""
    group = control()
    if group is None or not flags:
        return flags
    assembly.settle()
    told = torch.tensor(flags, dtype=torch.int32, device="cpu")
    with watch.waiting("a word from every rank"):
        dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in told.tolist()]


def collect(value: T) -> list[T]:
    """Every rank's ``value``, in rank order, on rank 0; elsewhere an empty list."""
    world = world_size()
    if world == 1:
        return [value]
    told: list[Any] | None = [None] * world if my_rank() == 0 else None
    with watch.waiting("a word from every rank"):
        dist.gather_object(value, told, 0, group=control())
    return told or []


def all_or_none(make: Callable[[], T]) -> T:
    """``make()``, or an error on every rank when it fails on any: there its own, elsewhere
    :class:`RankMismatchError`."""
    result, problem = _attempt(make)
    if alike(None if problem is None else "problem") and problem is None:
        return result  # type: ignore[return-value]
    texts = tell(None if problem is None else text_of(problem))
    if problem is not None:
        raise problem
    raise next(RankMismatchError(f"rank {rank} failed: {text}") for rank, text in enumerate(texts) if text is not None)


def together(make: Callable[[], T]) -> T:
    """``make()`` on every rank; when it fails on one, every rank raises the same :class:`CheckpointError`."""
    result, problem = _attempt(make)
    if alike(None if problem is None else "problem") and problem is None:
        return result  # type: ignore[return-value]
    raise CheckpointError(summary(tell(None if problem is None else text_of(problem)))) from problem


def from_rank0(make: Callable[[], T]) -> T:
    """``make()`` of rank 0, on every rank; when it fails there, every rank raises the same :class:`CheckpointError`."""
    result, problem = _attempt(make) if my_rank() == 0 else (None, None)
    told = [(result, None if problem is None else text_of(problem))]
    if world_size() > 1:
        assembly.settle()
        with watch.waiting("a word from rank 0"):
            dist.broadcast_object_list(told, 0, group=control())
    value, text = told[0]
    if text is not None:
        raise CheckpointError(text) from problem
    return value  # type: ignore[return-value]


def same(what: str, value: Any, error: type[OneCopyError] = CheckpointError) -> None:
    """Raise ``error`` on every rank unless all have an equal ``value``."""
    if alike(value):
        return
    told = tell(value)
    for rank, theirs in enumerate(told):
        if theirs != told[0]:
            raise error(f"ranks disagree about {what}: rank 0 has {told[0]!r}, rank {rank} has {theirs!r}")


def _attempt(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return make(), None
    except Exception as error:  # whatever it is, the other ranks must hear of it
        return None, error


def text_of(error: Exception) -> str:
    """``error`` as other ranks are told of it."""
    return str(error) if isinstance(error, OneCopyError | OSError) else f"{type(error).__name__}: {error}"


def summary(texts: list[str | None]) -> str:
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
