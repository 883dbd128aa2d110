"""``engine.full_state_dict``: the model's own state dict, made whole one unit at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from onecopy.checkpoint.modules import persistent_buffers
from onecopy.comm import assembly
from onecopy.comm.meeting import my_rank
from onecopy.engine.unit import named_modules

if TYPE_CHECKING:
    from onecopy.engine.build import Core
    from onecopy.engine.engine import Engine

__all__ = ["full_state_dict", "whole_units"]


def full_state_dict(engine: Engine, rank0_only: bool) -> dict[str, Tensor]:
    """See :meth:`onecopy.Engine.full_state_dict`."""
    core = engine._core
    assembly.settle()
    keeps = my_rank() == 0 or not rank0_only
    found: dict[Tensor, Tensor] = {}
    for params in whole_units(core):
        if keeps:
            found.update((param, _copy(param)) for param in params)
    if not keeps:
        return {}
    for param in core.names:
        if param not in found:
            found[param] = _copy(param)  # of no elements, so in no unit
    state = {name: found[param] for param, names in core.names.items() for name in names}
    state |= {name: _copy(buffer) for name, buffer in persistent_buffers(engine.module).items()}
    return {name: state[name] for name in _names_in_order(engine.module) if name in state} | state


def _names_in_order(model: nn.Module) -> Iterator[str]:
    """Bare names of parameters and buffers in the order of ``model.state_dict()``."""
    for path, module in named_modules(model):
        for name in (*module._parameters, *module._buffers):
            yield f"{path}.{name}" if path else name


def whole_units(core: Core, wanted: frozenset[nn.Parameter] | None = None) -> Iterator[list[nn.Parameter]]:
    """The parameters of each unit in turn, whole while it is theirs; with ``wanted``, of the units that have any of those.
    Collective: every rank takes all of them."""
    for unit in core.run.units:
        params = [param for weights in unit.weights for param in weights.params]
        if wanted is not None and wanted.isdisjoint(params):
            continue
        opened = [weights for weights in unit.weights if not weights.present]
        for weights in opened:
            weights.start_gather()
        for weights in opened:
            weights.finish_gather()
        yield params
        for weights in opened:
            weights.free()


def _copy(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
