"""``engine.full_state_dict``: the model's own state dict, made whole one unit at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onecopy.checkpoint.modules import persistent_buffers
from onecopy.comm import assembly
from onecopy.comm.meeting import my_rank

if TYPE_CHECKING:
    from onecopy.engine.engine import Engine

__all__ = ["full_state_dict"]


def full_state_dict(engine: Engine, rank0_only: bool) -> dict[str, Tensor]:
    """See :meth:`onecopy.Engine.full_state_dict`."""
    core = engine._core
    assembly.settle()
    keeps = my_rank() == 0 or not rank0_only
    found: dict[Tensor, Tensor] = {}
    for unit in core.run.units:
        opened = [weights for weights in unit.weights if not weights.present]
        for weights in opened:
            weights.start_gather()
        for weights in opened:
            weights.finish_gather()
        if keeps:
            for weights in unit.weights:
                found.update((param, _copy(param)) for param in weights.params)
        for weights in opened:
            weights.free()
    if not keeps:
        return {}
    for param in core.names:
        if param not in found:
            found[param] = _copy(param)  # of no elements, so in no unit
    state = {name: found[param] for param, names in core.names.items() for name in names}
    return state | {name: _copy(buffer) for name, buffer in persistent_buffers(engine.module).items()}


def _copy(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
