"""The ranks of a run as process groups, one per mesh axis and use."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from onecopy.errors import EngineError
from onecopy.plan.layout import Mesh

__all__ = ["Ranks", "ensure_process_group", "form_groups", "world_size"]

_LAUNCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def ensure_process_group(device: torch.device) -> None:
    """Start the default process group from the launcher's environment unless it runs already.

    With ``WORLD_SIZE`` unset this is a run of one process and needs none. Raises :class:`EngineError` when the
    environment names some of the launcher's variables and not others, rather than training each rank alone.
    """
    if not dist.is_available() or dist.is_initialized():
        return
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    missing = [name for name in _LAUNCH if name not in os.environ]
    if missing:
        raise EngineError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but {', '.join(missing)} not set, so the ranks cannot meet; "
            "start the script with `onecopy launch` or torchrun, or call torch.distributed.init_process_group first"
        )
    if device.type == "cpu":
        dist.init_process_group("gloo")
    else:
        dist.init_process_group(dist.get_default_backend_for_device(device), device_id=device)
    _started.append(dist.group.WORLD)


# Default groups that were started here, not by the caller.
_started: list[object] = []


@atexit.register
def _leave() -> None:
    """Take down what was made here before the interpreter does: a group's threads must not outlive its owner."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    for world, ranks in _FORMED.values():
        if world is dist.group.WORLD:
            for group in (ranks.gather, ranks.reduce, ranks.across):
                if group is not None:
                    dist.destroy_process_group(group)
    _FORMED.clear()
    if dist.group.WORLD in _started:
        dist.destroy_process_group()


def world_size() -> int:
    """Ranks of the default process group; 1 when there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


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
_FORMED: dict[Mesh, tuple[object, Ranks]] = {}


def form_groups(mesh: Mesh, device: torch.device) -> Ranks:
    """The groups of ``mesh``, made at its first use; collective over all ranks, which must call it with the same mesh."""
    if mesh.world == 1:
        return Ranks(0, mesh, device)
    world, ranks = _FORMED.get(mesh, (None, None))
    if world is not dist.group.WORLD or ranks is None or ranks.device != device:
        ranks = _form(mesh, device)
        _FORMED[mesh] = (dist.group.WORLD, ranks)
    return ranks


def _form(mesh: Mesh, device: torch.device) -> Ranks:
    rank = dist.get_rank()
    rows = [[group * mesh.within + member for member in range(mesh.within)] for group in range(mesh.across)]
    columns = [list(column) for column in zip(*rows, strict=True)]
    gather = reduce = across = None
    if mesh.within > 1:
        gather, reduce = _mine(rows, rank), _mine(rows, rank)
    if mesh.across > 1:
        across = _mine(columns, rank)
    return Ranks(rank, mesh, device, gather, reduce, across)


def _mine(groups: list[list[int]], rank: int) -> dist.ProcessGroup | None:
    """Every rank takes part in making every group; each keeps the one it is in."""
    mine = None
    for members in groups:
        group = dist.new_group(members)
        if rank in members:
            mine = group
    return mine
