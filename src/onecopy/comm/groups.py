"""The ranks of a run as process groups, one per mesh axis and use."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from onecopy.comm import watch
from onecopy.errors import EngineError, HangError
from onecopy.plan.layout import Mesh

__all__ = [
    "Ranks",
    "control",
    "ensure_process_group",
    "everybody",
    "form_groups",
    "local_rank",
    "speaks_for_all",
    "world_size",
]

_LAUNCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def ensure_process_group(device: torch.device) -> None:
    """Start the default process group from the launcher's environment unless it runs already.

    With ``WORLD_SIZE`` unset this is a run of one process and needs none. Raises :class:`EngineError` when the
    environment names some of the launcher's variables and not others, rather than training each rank alone, and for
    values of them that cannot be.
    """
    if not dist.is_available() or dist.is_initialized():
        return
    if "WORLD_SIZE" not in os.environ:
        return
    world = _number("WORLD_SIZE", 1)
    if world == 1:
        return
    missing = [name for name in _LAUNCH if name not in os.environ]
    if missing:
        raise EngineError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but {', '.join(missing)} not set, so the ranks cannot meet; "
            "start the script with `onecopy launch` or torchrun, or call torch.distributed.init_process_group first"
        )
    _number("RANK", 0, world - 1)
    _number("MASTER_PORT", 1, 65535)
    store, rank, world = _find_store()
    # The caller's own collectives have torch's patience: a rank may prepare data while the others wait at a barrier.
    how: dict[str, Any] = {"store": store, "rank": rank, "world_size": world}
    if device.type == "cpu":
        dist.init_process_group("gloo", **how)
    else:
        dist.init_process_group(dist.get_default_backend_for_device(device), device_id=device, **how)
    _started.append(dist.group.WORLD)


def local_rank() -> int:
    """This process's number on its machine: ``LOCAL_RANK``, 0 when it is not set."""
    return _number("LOCAL_RANK", 0) if "LOCAL_RANK" in os.environ else 0


def _number(name: str, low: int, high: int | None = None) -> int:
    """The launcher's variable ``name`` as a whole number from ``low`` to ``high`` (None: without end)."""
    text = os.environ[name]
    if not text.strip().isdecimal() or int(text) < low or (high is not None and int(text) > high):
        legal = f"a whole number from {low}" + (f" to {high}" if high is not None else "")
        raise EngineError(
            f"{name} is {text!r} in the environment; it must be {legal}. `onecopy launch` and torchrun set it for every rank"
        )
    return int(text)


def _find_store() -> tuple[Any, int, int]:
    """The launcher's store with this rank's place in it, when all ranks have come to it.

    Ranks start apart: each imports its script, and one may build a file cache for all. They get ten times the patience.
    """
    seconds = 10 * watch.patience()
    store, rank, world = next(rendezvous("env://", timeout=timedelta(seconds=seconds)))
    missing = watch.arrive(store, "onecopy/start", rank, world, seconds)
    if missing:
        raise HangError(
            f"ranks {missing} of {world} did not reach onecopy within {seconds:g} s of rank {rank}; do all start?"
        )
    return store, rank, world


# Default groups that were started here, not by the caller.
_started: list[object] = []


@atexit.register
def _leave() -> None:
    """Take down what was made here before the interpreter does: a group's threads must not outlive its owner."""
    watch.tell_end()
    if not (dist.is_available() and dist.is_initialized()):
        return
    made = [group for world, group in _CONTROL if world is dist.group.WORLD]
    made += [g for world, r in _FORMED.values() if world is dist.group.WORLD for g in (r.gather, r.reduce, r.across) if g]
    for group in made:
        dist.destroy_process_group(group)
    _FORMED.clear()
    _CONTROL.clear()
    if dist.group.WORLD in _started:
        dist.destroy_process_group()


def world_size() -> int:
    """Ranks of the default process group; 1 when there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def speaks_for_all() -> bool:
    """Is this process the only one, or one whose other ranks are simulated (:mod:`onecopy.comm.simulated`)? What all are
    asked, it answers alone."""
    return world_size() == 1 or dist.get_backend() == "fake"


# The groups of all ranks that were made under a default group.
_CONTROL: list[tuple[object, dist.ProcessGroup]] = []


def control(use: int = 0) -> dist.ProcessGroup | None:
    """A gloo group of all ranks for what is agreed on the host, with the job's patience; None on one rank.

    ``use`` 0: what callers ask for; 1: the votes of steps. Gloo ends the process when two ranks meet in messages of
    different sizes, so a rank that asks while another steps must not meet it.

    Made at its first use, which is collective; all ranks are known to be there by then (``meeting.meet``).
    """
    if speaks_for_all():
        return dist.group.WORLD if world_size() > 1 else None
    if not _CONTROL or _CONTROL[0][0] is not dist.group.WORLD:
        _CONTROL.clear()
        with watch.waiting("the groups of all ranks"):
            for _ in range(2):
                group = dist.new_group(backend="gloo", timeout=watch.group_timeout())
                _CONTROL.append((dist.group.WORLD, group))
    return _CONTROL[use][1]


@dataclass(frozen=True)
class Ranks:
    """This rank's place in the mesh and its groups.

    Gathers and reduces run on groups of their own, so that a rank which prefetches a gather earlier than its peer
    finishes a reduce never pairs one with the other. Groups are None on one rank, and ``across`` where there is one
    group.
    """

    rank: int
    mesh: Mesh
    device: torch.device
    gather: dist.ProcessGroup | None = None
    reduce: dist.ProcessGroup | None = None
    across: dist.ProcessGroup | None = None

    @property
    def piece(self) -> int:
        """Index of the shard that this rank keeps."""
        return self.rank % self.mesh.within

    @property
    def first_replica(self) -> bool:
        """Is this rank in the group whose shards stand for everybody's when something is counted once?"""
        return self.rank < self.mesh.within


# Groups by mesh, for the default group they were made under: engines of one process share them.
_FORMED: dict[tuple[Mesh, torch.device, float], tuple[object, Ranks]] = {}


def form_groups(mesh: Mesh, device: torch.device) -> Ranks:
    """The groups of ``mesh``, made at its first use; collective over all ranks, which must call it with the same mesh."""
    if mesh.world == 1:
        return Ranks(0, mesh, device)
    key = mesh, device, watch.patience()
    world, ranks = _FORMED.get(key, (None, None))
    if world is not dist.group.WORLD or ranks is None:
        ranks = _form(mesh, device)
        _FORMED[key] = (dist.group.WORLD, ranks)
    return ranks


def _form(mesh: Mesh, device: torch.device) -> Ranks:
    rank, timeout = dist.get_rank(), watch.group_timeout()
    rows = [[group * mesh.within + member for member in range(mesh.within)] for group in range(mesh.across)]
    columns = [list(column) for column in zip(*rows, strict=True)]
    gather = reduce = across = None
    if mesh.within > 1:
        gather, reduce = _mine(rows, rank, timeout), _mine(rows, rank, timeout)
    if mesh.across > 1:
        across = _mine(columns, rank, timeout)
    return Ranks(rank, mesh, device, gather, reduce, across)


def everybody(device: torch.device) -> dist.ProcessGroup | None:
    """The group of all ranks for tensors on ``device``; None on one rank."""
    if device.type == "cpu" or world_size() == 1:
        return control()
    return dist.group.WORLD


def _mine(groups: list[list[int]], rank: int, timeout: timedelta) -> dist.ProcessGroup | None:
    """Every rank takes part in making every group; each keeps the one it is in."""
    mine = None
    for members in groups:
        with watch.waiting(f"the group of ranks {members}"):
            group = dist.new_group(members, timeout=timeout)
        if rank in members:
            mine = group
    return mine
