"""Full values on demand: the context behind ``onecopy.gathered``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import nn

from onecopy.comm import assembly, meeting
from onecopy.comm.groups import everybody, world_size
from onecopy.comm.watch import waiting
from onecopy.engine.checksum import checksum
from onecopy.engine.deferred import BornHome
from onecopy.engine.home import ParameterHome
from onecopy.engine.parameter import Face, home_of, set_data
from onecopy.engine.weights import Weights
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
    for weights in held:
        weights.quiet("gathered(..., write_rank=)" if write_rank is not None else None)
    opened = [weights for weights in held if not weights.present]
    for weights in opened:
        weights.start_gather()
    for weights in opened:
        weights.finish_gather()
    for weights in held:
        weights.pins += 1
    for param in born:
        _open_born(param)
    before = _Look(listed) if write_rank is None else None
    try:
        with _saving(held):
            yield
        if before is not None:
            _refuse_writes(before)
        elif write_rank is not None:
            _share_writes(listed, write_rank)
    finally:
        for weights in held:
            weights.pins -= 1
            weights.accept_writes()
        for weights in opened:
            if weights.pins == 0 and weights.present:
                weights.free(keep=False)
                _outdate(weights.params)
        for param in born:
            _close_born(param, keep=write_rank is not None)


@contextmanager
def _saving(held: list[Weights]) -> Iterator[None]:
    """What autograd saves inside of parameters that go away after is found again in backward, as in a forward pass.

    Not where nothing is recorded anyway: torch.func's transforms refuse to run under any such hooks.
    """
    cores = [weights.core() for weights in held if weights.away and weights.core is not None]
    hooks = dict.fromkeys(core.hooks for core in cores if core is not None)
    with ExitStack() as stack:
        for each in hooks if torch.is_grad_enabled() else ():
            stack.enter_context(each.saving())
        yield


def _outdate(params: Iterable[nn.Parameter]) -> None:
    """A graph that has saved these parameters themselves, out of the sight of hooks, would read what is no value: torch
    notices when their version has changed."""
    with torch._C.DisableTorchFunctionSubclass():
        torch.autograd.graph.increment_version(list(params))


class _Look:
    """What parameters are when the context is entered: a write through ``.data`` or numpy leaves no other sign."""

    def __init__(self, listed: list[nn.Parameter]) -> None:
        self._params = [param for param in listed if home_of(param) is not None and param.numel()]
        self._was = [(param._version, checksum(param)) for param in self._params]

    def written(self) -> list[nn.Parameter]:
        """Those that this rank has written to since."""
        pairs = zip(self._params, self._was, strict=True)
        return [param for param, was in pairs if (param._version, checksum(param)) != was]

    def named(self, name: str) -> list[nn.Parameter]:
        return [param for param in self._params if _name(param) == name]


def _name(param: nn.Parameter) -> str:
    home = home_of(param)
    assert home is not None
    return home.name


def _refuse_writes(look: _Look) -> None:
    """Raise on every rank when any rank wrote; the replicas are made equal again first. Collective."""
    written = [_name(param) for param in look.written()]
    told = meeting.tell(written)
    if not any(told):
        return
    for name in dict.fromkeys(name for names in told for name in names):
        # A rank that did not write has the values that were there before.
        source = next((rank for rank, names in enumerate(told) if name not in names), 0)
        for param in look.named(name):
            _share_writes([param], source)
    rank, names = next((rank, names) for rank, names in enumerate(told) if names)
    raise EngineError(
        f"rank {rank} wrote parameter {names[0]!r} inside gathered(...) without write_rank, so the write is not kept; "
        "pass write_rank= to say whose values count"
    )


def _share_writes(listed: list[nn.Parameter], write_rank: int) -> None:
    for param in listed:
        home = home_of(param)
        if home is None or not param.numel():
            continue
        if isinstance(home, ParameterHome) and param.data_ptr() != home.values().data_ptr():
            # ``param.data = tensor``: its values count, its memory does not.
            home.values().copy_(param.detach())
            set_data(param, home.values())
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
    _outdate([param])
    Face(param, home.shard).hide()
