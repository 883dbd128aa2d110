"""Whole values of one parameter's states, read from the pieces and written back to them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from onecopy.comm import meeting
from onecopy.comm.watch import waiting
from onecopy.engine.build import Core
from onecopy.engine.gradients import Gradients
from onecopy.engine.home import ParameterHome
from onecopy.engine.parameter import home_of
from onecopy.errors import EngineError, RankMismatchError
from onecopy.tiers.held import Held

__all__ = [
    "at_rest", "gradients_of", "read_grad", "read_param", "read_state", "sum_of", "write_grad", "write_param", "write_state",
]  # fmt: skip


def _home(param: nn.Parameter) -> tuple[ParameterHome, Core]:
    home = home_of(param)
    if isinstance(home, ParameterHome) and home.weights.core is not None:
        core = home.weights.core()
        if core is not None:
            home.weights.quiet()
            return home, core
    raise EngineError(f"a parameter of shape {tuple(param.shape)} belongs to no engine; call onecopy.initialize first")


def at_rest(param: nn.Parameter, what: str) -> tuple[ParameterHome, Core]:
    """The home of ``param`` and what its engine runs on, where no step is half done, see
    :meth:`~onecopy.engine.step.Stepper.refuse_between`."""
    home, core = _home(param)
    if core.stepper is not None:
        core.stepper.refuse_between(f"{what}() of {home.name!r}")
    return home, core


def _agree(what: str, home: ParameterHome) -> None:
    """All ranks ask the same, or pieces of different parameters would be put together."""
    meeting.same(f"the parameter in {what}()", home.name, RankMismatchError)


def _sum_parts(whole: torch.Tensor, home: ParameterHome, core: Core, held: int) -> torch.Tensor:
    """``whole`` with every rank's part in it, where each holds ``held`` elements of the buffer and not all of them."""
    if held < home.weights.spec.layout.padded and core.ranks.gather is not None:
        _sum_bits(whole, home, core.ranks.gather)
    return whole.view(home.shape)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """float32 for what is no wider."""
    return dtype if dtype is torch.float64 or dtype.is_complex else torch.float32


def _sum_bits(whole: torch.Tensor, home: ParameterHome, group: dist.ProcessGroup) -> None:
    """Add up what is the number itself on one rank and 0 on all others, bit for bit."""
    with waiting(f"the pieces of {home.name!r}"):
        dist.all_reduce(whole.view(torch.int32), group=group)


def read_param(param: nn.Parameter) -> torch.Tensor:
    """See :func:`onecopy.full_param`."""
    if home_of(param) is None and not param.numel():
        return param.detach().float()
    home, core = at_rest(param, "full_param")
    _agree("full_param", home)
    home.weights.notice_writes()
    state, base = home.weights.state, home.weights.stepped()[0]
    low, high = home.slot.local(base, base + state.grid.numel) or (base, base)
    values = torch.empty(high - low, dtype=state.dtype, device=core.ranks.device)
    state.read(low - base, high - base, values)
    whole = torch.zeros(home.slot.param.numel, dtype=_wide(state.dtype), device=core.ranks.device)
    if values.numel():
        whole[low - home.slot.start : high - home.slot.start].copy_(values)
    return _sum_parts(whole, home, core, state.grid.numel)


def write_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """See :func:`onecopy.set_full_param`."""
    if home_of(param) is None and not param.numel():
        return
    home, _ = at_rest(param, "set_full_param")
    weights, flat = home.weights, _checked(home, value)
    with torch.no_grad(), weights.writing():
        if weights.present:
            weights.full[home.slot.start : home.slot.stop].copy_(flat)
        elif (part := weights.piece_of(home.slot)) is not None:
            low = weights.piece * weights.spec.layout.shard
            offset = low - home.slot.start
            weights.write_rest(*part, flat[part[0] + offset : part[1] + offset])
        weights.follow(home.slot, flat)


def gradients_of(home: ParameterHome, core: Core) -> Gradients:
    """The gradients of the buffer that the parameter lies in. Raises :class:`EngineError` where it is not trained."""
    for unit in core.run.units:
        for gradients in unit.gradients:
            if gradients.spec is home.weights.spec:
                return gradients
    raise EngineError(f"parameter {home.name!r} is not trained by this engine: it has no gradient")


def sum_of(gradients: Gradients) -> Held | None:
    """What of a buffer's gradient is there so far; None before a backward pass."""
    return gradients.total if gradients.total is not None else gradients.sums.current


def read_grad(param: nn.Parameter) -> torch.Tensor | None:
    """See :func:`onecopy.full_grad`."""
    if home_of(param) is None and not param.numel():
        return None
    home, core = _home(param)
    _agree("full_grad", home)
    core.rounds.gather_late()
    gradients = gradients_of(home, core)
    held = sum_of(gradients)
    if held is None or home.name in gradients.marks.cleared:
        return None
    low, high, start = gradients.part(held, home.slot)
    whole = torch.zeros(home.slot.param.numel, dtype=_wide(held.dtype), device=core.ranks.device)
    held.read(low, high, whole[start : start + high - low])
    return _sum_parts(whole, home, core, held.grid.numel) / core.hooks.output_scale()


def write_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """See :func:`onecopy.set_full_grad`. Raises :class:`EngineError` when there is no gradient to replace."""
    home, core = at_rest(param, "set_full_grad")
    core.rounds.gather_late()
    replace_grad(home, core, lambda start, numel: _checked(home, value)[start : start + numel])


def replace_grad(home: ParameterHome, core: Core, values: Callable[[int, int], torch.Tensor]) -> None:
    """This rank's part of a gradient becomes ``values(start, numel)``: so many elements of the parameter, from its element
    ``start`` on. Raises :class:`EngineError` when there is no gradient to replace."""
    gradients = gradients_of(home, core)
    held = sum_of(gradients)
    if held is None:
        raise EngineError(f"parameter {home.name!r} has no gradient yet in this window: run backward first")
    if core.stepper is not None:
        core.stepper.forget_norms()
    low, high, start = gradients.part(held, home.slot)
    gradients.sums.write(held, low, high, values(start, high - low) * core.hooks.output_scale())
    gradients.marks.used[home.weights.spec.layout.slots.index(home.slot)] = True
    gradients.marks.cleared.discard(home.name)


def read_state(param: nn.Parameter, name: str) -> torch.Tensor | None:
    """See :func:`onecopy.full_state`."""
    home, core = at_rest(param, "full_state")
    _agree("full_state", home)
    if core.tiles is None:
        raise EngineError("this engine has no optimizer, so it has no optimizer states")
    pieces, tiles = core.tiles.of_param.get(home.name, []), core.tiles
    whole: torch.Tensor | None = None
    value, known = None, {}
    for piece in pieces:
        with tiles.states(piece) as state:
            value, known = state.get(name), state
            if not isinstance(value, torch.Tensor):
                continue
            if whole is None:
                whole = torch.zeros(home.slot.param.numel, dtype=_wide(value.dtype), device=core.ranks.device)
            if piece.elementwise(value):
                whole[piece.offset : piece.offset + piece.numel].copy_(value)
            elif piece is pieces[0]:
                whole[piece.offset] = value  # one number per parameter, such as the step: the first element has it
    if whole is None:
        whole = torch.zeros(home.slot.param.numel, dtype=_wide(home.weights.state.dtype), device=core.ranks.device)
    # How many ranks have states at all, and this one.
    have = torch.tensor([float(bool(known)), float(isinstance(value, torch.Tensor))], device=core.ranks.device)
    if core.ranks.gather is not None and home.weights.spec.cut(home.weights.spec.row.optimizer):
        _sum_bits(whole, home, core.ranks.gather)
        with waiting(f"the pieces of {home.name!r}"):
            dist.all_reduce(have, group=core.ranks.gather)
    if have[0] > 0 and have[1] == 0:
        raise EngineError(f"the optimizer keeps no state {name!r} of {home.name!r}; {_known_states(known)}")
    return whole.view(home.shape) if have[1] > 0 else None


def _known_states(state: dict[str, object]) -> str:
    have = sorted(key for key, kept in state.items() if isinstance(kept, torch.Tensor) and kept.dim())
    return f"it has {have}" if have else "this rank steps none of it"


def write_state(param: nn.Parameter, name: str, value: torch.Tensor) -> None:
    """See :func:`onecopy.set_full_state`. Raises :class:`EngineError` for a state the optimizer does not have."""
    home, core = at_rest(param, "set_full_state")
    if core.tiles is None:
        raise EngineError("this engine has no optimizer, so it has no optimizer states")
    flat = _checked(home, value)
    for piece in core.tiles.of_param.get(home.name, []):
        with core.tiles.states(piece, write=True) as state:
            held = state.get(name)
            if not isinstance(held, torch.Tensor) or not piece.elementwise(held):
                raise EngineError(f"the optimizer keeps no state {name!r} of {home.name!r}; {_known_states(state)}")
            held.copy_(flat[piece.offset : piece.offset + piece.numel])


def _checked(home: ParameterHome, value: torch.Tensor) -> torch.Tensor:
    if value.shape != home.shape:
        raise EngineError(f"{home.name!r} has shape {tuple(home.shape)}; got a value of shape {tuple(value.shape)}")
    return value.detach().reshape(-1)
