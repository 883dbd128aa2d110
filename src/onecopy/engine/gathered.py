"""Full values on demand: the context behind ``onecopy.gathered``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from onecopy.comm import assembly, meeting
from onecopy.comm.groups import everybody, world_size
from onecopy.comm.watch import waiting
from onecopy.engine.deferred import BornHome
from onecopy.engine.home import ParameterHome
from onecopy.engine.parameter import Face, home_of
from onecopy.errors import EngineError

__all__ = ["gather_for_reading"]


def _parameters(params: nn.Module | nn.Parameter | Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Distinct parameters in the order given."""
    if isinstance(params, nn.Module):
        listed: Iterable[nn.Parameter] = params.parameters()
    elif isinstance(params, nn.Parameter):
        listed = [params]
    else:
        listed = params
    return list(dict.fromkeys(listed))


@contextmanager
def gather_for_reading(params: nn.Module | nn.Parameter | Iterable[nn.Parameter], write_rank: int | None) -> Iterator[None]:
    """See :func:`onecopy.gathered`."""
    listed = _parameters(params)
    born = [param for param in listed if isinstance(home_of(param), BornHome)]
    homes = [home for param in listed if isinstance(home := home_of(param), ParameterHome)]
    held = list(dict.fromkeys(home.weights for home in homes))
    if write_rank is not None and not 0 <= write_rank < world_size():
        raise EngineError(f"write_rank {write_rank} is not a rank; there are {world_size()}, counted from 0")
    assembly.settle()
    opened = [weights for weights in held if not weights.present]
    for weights in opened:
        weights.start_gather()
    for weights in opened:
        weights.finish_gather()
    for weights in held:
        weights.pins += 1
    for param in born:
        _open_born(param)
    versions = [param._version for param in listed]
    try:
        yield
        if write_rank is None:
            _refuse_writes(listed, versions)
        else:
            _share_writes(listed, write_rank)
    finally:
        for weights in held:
            weights.pins -= 1
        for weights in held:
            weights.accept_writes()
        for weights in opened:
            if weights.pins == 0 and weights.present:
                weights.free()
        for param in born:
            _close_born(param, keep=write_rank is not None)


def _refuse_writes(listed: list[nn.Parameter], versions: list[int]) -> None:
    """Raise on every rank when any rank wrote; collective."""
    written = [
        home.name
        for param, version in zip(listed, versions, strict=True)
        if (home := home_of(param)) is not None and (param._version != version or _differs(home))
    ]
    for rank, names in enumerate(meeting.tell(written)):
        if names:
            raise EngineError(
                f"rank {rank} wrote parameter {names[0]!r} inside gathered(...), and the write would be lost; "
                "pass write_rank= to say whose values count"
            )


def _differs(home: object) -> bool:
    """Is this rank's part of a gathered parameter not what its shard says? A write through ``.data`` leaves no other sign."""
    if not isinstance(home, ParameterHome) or not home.weights.away:
        return False
    local, start = home.local()
    read = home.values().reshape(-1)[start : start + local.numel()]
    return not torch.equal(read.view(torch.uint8), local.view(torch.uint8))


def _share_writes(listed: list[nn.Parameter], write_rank: int) -> None:
    for param in listed:
        home = home_of(param)
        if home is None or not param.numel():
            continue
        if world_size() > 1:
            flat = param.detach().reshape(-1)
            with waiting(f"rank {write_rank}'s values of {home.name!r}"):
                dist.broadcast(flat.view(torch.uint8), write_rank, group=everybody(flat.device))
        if isinstance(home, ParameterHome):
            with home.writing():
                home.weights.follow(home.slot)


def _open_born(param: nn.Parameter) -> None:
    home = home_of(param)
    assert isinstance(home, BornHome)
    whole = home.whole()
    home.present = True
    Face(param, whole).show()


def _close_born(param: nn.Parameter, keep: bool) -> None:
    home = home_of(param)
    assert isinstance(home, BornHome)
    if keep:
        home.shard.copy_(param.detach().reshape(-1)[home.start : home.start + home.shard.numel()])
    home.present = False
    Face(param, home.shard).hide()
