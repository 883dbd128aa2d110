"""This rank's elements of one parameter's states, read and written without the other ranks."""

from __future__ import annotations

import torch
from torch import nn

from onecopy.engine.build import Core
from onecopy.engine.home import ParameterHome
from onecopy.engine.inspect import at_rest, gradients_of, replace_grad, sum_of
from onecopy.errors import EngineError

__all__ = ["read_grad", "read_param", "read_state", "write_grad", "write_param", "write_state"]


def _cut(param: nn.Parameter, what: str) -> tuple[ParameterHome, Core]:
    home, core = at_rest(param, what)
    if home.weights.spec.row.parameter.rest.replicated:
        raise EngineError(f"{what}() of {home.name!r}, which is whole on every rank (stage 3 cuts it): ask for the full one")
    return home, core


def _checked(home: ParameterHome, value: torch.Tensor, numel: int) -> torch.Tensor:
    if value.numel() != numel:
        raise EngineError(f"this rank keeps {numel} elements of {home.name!r}; got a value of {value.numel()}")
    return value.detach().reshape(-1)


def read_param(param: nn.Parameter) -> torch.Tensor:
    """This rank's elements from the master weights where there are some; flat, fp32."""
    home, core = _cut(param, "safe_get_local_fp32_param")
    weights = home.weights
    base = weights.stepped()[0]
    low, high = home.slot.local(base, base + weights.state.grid.numel) or (base, base)
    values = torch.empty(high - low, dtype=weights.state.dtype, device=core.ranks.device)
    weights.state.read(low - base, high - base, values)
    return values.float()


def write_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Overwrite them, and the master weights. Raises :class:`EngineError` while the parameter is gathered."""
    home, _ = _cut(param, "safe_set_local_fp32_param")
    weights = home.weights
    if weights.present:
        raise EngineError(f"{home.name!r} is gathered: write to it inside the gather, or its part after it")
    part = weights.piece_of(home.slot)
    low, high = part if part is not None else (0, 0)
    flat = _checked(home, value, high - low)
    if part is None:
        return
    start = low + weights.piece * weights.spec.layout.shard - home.slot.start
    whole = torch.zeros(home.slot.param.numel, dtype=flat.dtype, device=flat.device)
    whole[start : start + flat.numel()].copy_(flat)
    with torch.no_grad(), weights.writing():
        weights.write_rest(low, high, flat)
        weights.follow(home.slot, whole)


def read_grad(param: nn.Parameter) -> torch.Tensor | None:
    """This rank's elements of the gradient, averaged over ranks; flat, fp32. None where there is none."""
    home, core = _cut(param, "safe_get_local_grad")
    gradients = gradients_of(home, core)
    held = sum_of(gradients)
    if held is None or home.name in gradients.marks.cleared:
        return None
    low, high, _ = gradients.part(held, home.slot)
    values = torch.empty(high - low, dtype=held.dtype, device=core.ranks.device)
    held.read(low, high, values)
    return values.float() / core.hooks.output_scale()


def write_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Overwrite them; norms, clipping and the step then use them. Raises :class:`EngineError` where there are none."""
    home, core = _cut(param, "safe_set_local_grad")
    replace_grad(home, core, lambda _, numel: _checked(home, value, numel))


def read_state(param: nn.Parameter, name: str) -> torch.Tensor | None:
    """This rank's elements of an optimizer state; flat, fp32. None before the optimizer has made it, and no
    elements where this rank keeps none."""
    home, core = _cut(param, "safe_get_local_optimizer_state")
    if core.tiles is None:
        raise EngineError("this engine has no optimizer, so it has no optimizer states")
    parts = []
    for piece in core.tiles.of_param.get(home.name, []):
        with core.tiles.states(piece) as state:
            value = state.get(name)
            if state and (not isinstance(value, torch.Tensor) or not piece.elementwise(value)):
                raise EngineError(f"the optimizer keeps no state {name!r} of every element of {home.name!r}: {sorted(state)}")
            parts += [value.detach().float().clone().reshape(-1)] if isinstance(value, torch.Tensor) else []
    if parts or core.tiles.of_param.get(home.name):
        return torch.cat(parts) if parts else None
    return torch.empty(0, device=core.ranks.device)  # this rank steps none of it


def write_state(param: nn.Parameter, name: str, value: torch.Tensor) -> None:
    """Overwrite them. Raises :class:`EngineError` for a state that the optimizer does not have."""
    home, core = _cut(param, "safe_set_local_optimizer_state")
    if core.tiles is None:
        raise EngineError("this engine has no optimizer, so it has no optimizer states")
    pieces = core.tiles.of_param.get(home.name, [])
    flat, at = _checked(home, value, sum(piece.numel for piece in pieces)), 0
    for piece in pieces:
        with core.tiles.states(piece, write=True) as state:
            held = state.get(name)
            if not isinstance(held, torch.Tensor) or not piece.elementwise(held):
                raise EngineError(f"the optimizer keeps no state {name!r} of {home.name!r}: it has {sorted(state)}")
            held.copy_(flat[at : at + piece.numel].view(held.shape))
        at += piece.numel
