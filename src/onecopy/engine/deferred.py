"""Construction without the memory: parameters that are born sharded, and models on the meta device.

Inside :func:`deferred` every parameter is cut as soon as a module registers it. Initialisers then run on the sharded
parameter (see :mod:`onecopy.engine.parameter`) and give the bits they give on the whole tensor; at most one parameter is
whole at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from onecopy.comm import meeting
from onecopy.comm.groups import ensure_process_group, everybody, world_size
from onecopy.comm.watch import waiting
from onecopy.engine.home import ParameterHome
from onecopy.engine.parameter import HOME, Face, hollow, home_of
from onecopy.engine.pending import get_grad, set_grad
from onecopy.errors import EngineError
from onecopy.tiers.memory import give_back_freed_memory, keep_freed_memory

__all__ = ["BornHome", "Materialise", "deferred", "whole_values"]


class BornHome:
    """Home of a parameter that is sharded before an engine exists: equal pieces over all ranks."""

    def __init__(self, param: nn.Parameter, name: str, device: torch.device) -> None:
        self.name = name
        self.shape = param.shape
        self.present = False
        rank, world = (dist.get_rank(), world_size()) if world_size() > 1 else (0, 1)
        self.piece = -(-param.numel() // world)
        self.start = min(rank * self.piece, param.numel())
        stop = min(self.start + self.piece, param.numel())
        self.shard = torch.zeros(stop - self.start, dtype=param.dtype, device=device)
        if param.device.type != "meta":
            self.shard.copy_(param.detach().reshape(-1)[self.start : stop])

    def local(self) -> tuple[torch.Tensor, int]:
        return self.shard, self.start

    def writing(self) -> AbstractContextManager[None]:
        """Nobody else reads the shard."""
        return nullcontext()

    def written(self) -> None:
        """Nothing is derived from the shard yet."""

    def grad(self, param: torch.Tensor) -> torch.Tensor | None:
        """There is no engine yet that would reduce one."""
        return get_grad(param)

    def set_grad(self, param: torch.Tensor, value: torch.Tensor | None) -> None:
        """There is nothing that it could be mistaken for."""
        set_grad(param, value)

    def demand(self) -> bool:
        return False

    def values(self) -> torch.Tensor:
        """Not while it is sharded; see :meth:`whole`."""
        raise EngineError(f"parameter {self.name!r} is sharded and has no whole values here")

    def whole(self) -> torch.Tensor:
        """The full values; collective over all ranks."""
        world = world_size()
        if world == 1:
            return self.shard.view(self.shape)
        mine = torch.zeros(self.piece, dtype=self.shard.dtype, device=self.shard.device)
        mine[: self.shard.numel()].copy_(self.shard)
        parts = [torch.empty_like(mine).view(torch.uint8) for _ in range(world)]
        with waiting(f"the pieces of {self.name!r}"):
            dist.all_gather(parts, mine.view(torch.uint8), group=everybody(mine.device))
        flat = torch.cat([part.view(mine.dtype) for part in parts])
        return flat[: self.shape.numel()].view(self.shape)


def _cut(param: nn.Parameter, name: str, device: torch.device) -> None:
    """Keep this rank's piece of ``param`` and free the rest; the object stays."""
    if home_of(param) is not None or param.numel() == 0:
        return
    home = BornHome(param, name, device)
    param.__dict__[HOME] = home
    Face(param, hollow(param.shape, param.dtype, device)).hide()


@contextmanager
def deferred(device: torch.device | str | None = None) -> Iterator[None]:
    """Modules built inside keep only this rank's share of every parameter, initialised as the whole model would be.

    Collective when several ranks run. All ranks draw from rank 0's random state inside; a rank whose state differed on
    entry gets it back on exit. ``device``: where the shards are kept (default: where the module puts them). On one rank
    it does nothing. Raises :class:`EngineError` when ranks are expected but cannot meet.
    """
    ensure_process_group(torch.device(device) if device is not None else torch.device("cpu"))
    if world_size() == 1:
        yield
        return
    keep_freed_memory(False)
    own = torch.get_rng_state()
    meeting.meet("deferred")
    shared = meeting.from_rank0(lambda: own)
    torch.set_rng_state(shared)
    register = nn.Module.register_parameter

    def register_and_cut(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None:
            where = torch.device(device) if device is not None else param.device
            _cut(param, f"{type(module).__name__}.{name}", where if where.type != "meta" else torch.device("cpu"))

    nn.Module.register_parameter = register_and_cut  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
        give_back_freed_memory()
        if not torch.equal(own, shared):
            torch.set_rng_state(own)


class Materialise:
    """Gives a model on the meta device real, sharded, initialised parameters, called with those of one unit at a time.

    Each module's ``reset_parameters`` runs in the order in which the modules were built, once its parameters are asked
    for: at most one unit is whole in memory. Where modules of different units share a parameter all are made at once, as
    a later module initialises it again. Raises :class:`EngineError` for modules with parameters or buffers on meta and no
    such method.
    """

    def __init__(self, model: nn.Module, device: torch.device, names: dict[nn.Parameter, list[str]]) -> None:
        lacking = [
            f"{type(module).__name__} {name!r} ({', '.join(meta)})"
            for name, module in model.named_modules()
            if (meta := _on_meta(module)) and not callable(getattr(module, "reset_parameters", None))
        ]
        if lacking:
            raise EngineError(
                f"on the meta device in modules without a reset_parameters() that would initialise them: "
                f"{'; '.join(lacking[:5])}. Add one, build the model inside onecopy.deferred(), or load it on rank 0"
            )
        self._device = device
        self._names = names
        self._modules = list(model.modules())
        self._together = any(len(known) > 1 for known in names.values())
        for module in self._modules:
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.device.type == "meta":
                    setattr(module, name, torch.empty_like(buffer, device=device))

    def __call__(self, params: Iterable[nn.Parameter]) -> None:
        """Make ``params``, which come in the order in which modules register them."""
        wanted = set(self._names if self._together else params)
        ready = [param for param in wanted if param.device.type == "meta" and home_of(param) is None]
        for param in ready:
            _cut(param, self._names[param][0], self._device)
        remaining = []
        for module in self._modules:
            own = [param for param in module.parameters(recurse=False) if param.numel()]
            if not own or not wanted.issuperset(own):
                remaining.append(module)
                continue
            reset: Any = getattr(module, "reset_parameters", None)
            if callable(reset) and any(home_of(param) for param in own):
                with torch.no_grad():
                    reset()
        self._modules = remaining


def _on_meta(module: nn.Module) -> list[str]:
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return [name for name, tensor in own if tensor.device.type == "meta"]


def whole_values(param: nn.Parameter) -> torch.Tensor | None:
    """All values of a parameter wherever it is: here, spread over the ranks (collective), or on rank 0 only (None)."""
    home = home_of(param)
    if isinstance(home, BornHome):
        return home.whole()
    if isinstance(home, ParameterHome):
        if home.weights.core is not None and home.weights.core() is not None:
            raise EngineError(f"parameter {home.name!r} belongs to another engine; close() that one first")
        return home.weights.read(home.slot)
    return None if param.device.type == "meta" else param.detach()
