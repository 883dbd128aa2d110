"""``p.grad`` and ``p.data`` of parameters that an engine trains.

Between backward and step the gradients are in the engine's buffers, summed over the ranks and cut. What a training loop
does with ``p.grad`` there either has the right result (norms, clipping, scaling, ``= None``) or is refused with the
call to use instead; it never finds None where plain PyTorch has a gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from onecopy.comm import meeting
from onecopy.engine.parameter import (
    ELEMENTWISE,
    HOME,
    METADATA_METHODS,
    METADATA_PROPERTIES,
    engine_last,
    hollow,
    property_name,
)
from onecopy.errors import EngineError, RankMismatchError

if TYPE_CHECKING:
    from onecopy.engine.build import Core
    from onecopy.engine.gradients import Gradients
    from onecopy.engine.home import ParameterHome

__all__ = [
    "PendingGradient",
    "get_grad",
    "make_plain",
    "pending_of",
    "read_grad",
    "set_grad",
    "shown_class",
    "write_grad",
]

# The property below the one that is put on managed parameters: what autograd writes.
_GRAD: Any = torch.Tensor.grad
get_grad: Callable[[torch.Tensor], torch.Tensor | None] = _GRAD.__get__
set_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = _GRAD.__set__
_get_data = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]

_NORMS = frozenset("vector_norm linalg_vector_norm norm _foreach_norm".split())
# What ``zero_grad`` does to a gradient that it keeps.
_IGNORED = frozenset("detach_ requires_grad_".split())
_ZEROES = frozenset("zero_ _foreach_zero_".split())


class PendingGradient(torch.Tensor):
    """Stands for the reduced gradient of one parameter. Shape and dtype are true; there are no values in it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, prop = getattr(func, "__name__", str(func)), property_name(func)
        first = args[0] if args else next(iter(kwargs.values()))
        if prop in METADATA_PROPERTIES or name in METADATA_METHODS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in ("__repr__", "__format__", "__str__"):
            return f"<gradient of {_of(first)[0].name!r}, in pieces on the ranks; onecopy.full_grad reads it>"
        pending = [item for item in (first if isinstance(first, list | tuple) else [first]) if isinstance(item, cls)]
        if name in _IGNORED:
            return first
        if name in _ZEROES and pending and _by_zero_grad():
            _warn_of_zeroing(pending[0])
            return first
        if name in _NORMS and pending:
            return _norms(first, pending, args[1:], kwargs)
        inplace = name.removeprefix("_foreach_")
        known = inplace in ELEMENTWISE or name in _ZEROES
        if known and pending and not _has_elements(args[1:], kwargs):
            # Where a number is a tensor every rank must have the same; it is on the host by now, or nearly.
            numbers = tuple(float(v) if isinstance(v, torch.Tensor) else v for v in (*args[1:], *kwargs.values()))
            with torch.no_grad():
                for gradient in pending:
                    _edit(gradient, lambda part: getattr(part, inplace)(*args[1:], **kwargs))
                    _note(gradient, inplace, *numbers)
            return None if name.startswith("_foreach_") else first
        raise EngineError(
            f"{name}() reads p.grad of parameter {_of(pending[0] if pending else first)[0].name!r}, which is summed over "
            "the ranks and kept in pieces; read it with onecopy.full_grad(p) and replace it with "
            "onecopy.set_full_grad(p, value), on all ranks. Norms, clipping and scaling by a number work on p.grad itself"
        )


def _warn_of_zeroing(gradient: PendingGradient | None) -> None:
    if gradient is not None:
        _of(gradient)[1].rounds.warn_of_zeroing()


def _by_zero_grad() -> bool:
    """Does this happen in a ``zero_grad``: torch's of a module or an optimizer, or one of the user's by that name?"""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(12):
        if frame is None:
            return False
        if frame.f_code.co_name == "zero_grad":
            return True
        frame = frame.f_back
    return False


def _note(gradient: PendingGradient, *what: object) -> None:
    """The step asks whether all ranks did the same."""
    home, core, _ = _of(gradient)
    assert core.stepper is not None
    core.stepper.edits.append((home.name, *what))


def _of(gradient: Any) -> tuple[ParameterHome, Core, Gradients]:
    found: tuple[ParameterHome, Core, Gradients] = gradient.__dict__["_onecopy_of"]
    return found


def _has_elements(rest: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Are there other tensors than single numbers among the arguments?"""
    for value in (*rest, *kwargs.values()):
        if isinstance(value, list | tuple) or (isinstance(value, torch.Tensor) and value.numel() != 1):
            return True
    return False


def _norms(first: Any, pending: list[Any], rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    order = rest[0] if rest else kwargs.get("ord", kwargs.get("p", 2.0))
    order = 2.0 if order in (None, "fro") else float(order)
    if not order > 0:
        raise EngineError(f"norm of order {order} of p.grad: orders above 0 and inf are supported")
    found = []
    for gradient in pending:
        home, core, gradients = _of(gradient)
        assert core.stepper is not None
        _refuse_when_partial(core)
        core.rounds.gather_late()
        if not core.stepper.knows_norms(order):
            meeting.same("the norm asked of p.grad", order, RankMismatchError)
        norms = core.stepper.norms_by_parameter(order, core.hooks.output_scale())
        found.append(norms[home.name].to(core.ranks.device, torch.promote_types(gradients.wire, torch.float32)))
    return found if isinstance(first, list | tuple) else found[0]


def _refuse_when_partial(core: Core) -> None:
    """In ``engine.uneven`` ranks without data do not run the loop's body, so they cannot do their part."""
    if core.gathering.others.partial:
        raise EngineError(
            "p.grad inside engine.uneven() while some ranks have no more batches: they do not run this line, and norms and "
            "changes of gradients need all ranks; clip with the plan, onecopy.stage(..., clip=1.0)"
        )


def _edit(gradient: Any, change: Callable[[torch.Tensor], Any]) -> None:
    """Apply an elementwise ``change`` to this rank's part of the unscaled gradient."""
    home, core, gradients = _of(gradient)
    _refuse_when_partial(core)
    core.rounds.gather_late()
    total = gradients.total
    if total is None:
        raise _not_complete(home, core)
    assert core.stepper is not None
    core.stepper.forget_norms()
    scale = core.hooks.output_scale()

    def unscaled(part: torch.Tensor) -> None:
        if scale != 1.0:
            part.div_(scale)
        change(part)
        if scale != 1.0:
            part.mul_(scale)

    gradients.change(total, home.slot, unscaled)


def _not_complete(home: ParameterHome, core: Core) -> EngineError:
    if core.rounds.open:
        return EngineError(
            f"p.grad of parameter {home.name!r} is not complete while backward runs: change it after, before engine.step()"
        )
    return EngineError(
        f"p.grad of parameter {home.name!r} is not complete before the last micro-batch of its window: change it there. "
        "Gradients need no zeroing by hand: engine.step() drops them, and engine.discard_gradients() drops a window's"
    )


def _clear(gradient: PendingGradient) -> None:
    """``p.grad = None``: the step leaves the parameter alone, as torch's optimizers do."""
    home, core, gradients = _of(gradient)
    _refuse_when_partial(core)
    if gradients.total is None:
        raise _not_complete(home, core)
    gradients.clear(gradients.spec.layout.slots.index(home.slot))
    assert core.stepper is not None
    core.stepper.forget_norms()
    _note(gradient, "= None")


def pending_of(param: torch.Tensor) -> PendingGradient | None:
    """What ``param.grad`` is: a stand-in when a window is open, None when there is nothing to step with."""
    home: Any = param.__dict__.get(HOME)
    core = home.weights.core() if home is not None and home.weights.core is not None else None
    if core is None or core.stepper is None:
        return None
    gradients = core.stepper.gradients_of(home.weights.spec.name)
    if gradients is None or not core.stepper.has_gradients() or home.name in gradients.marks.cleared:
        return None
    stand_in = hollow(home.shape, param.dtype, home.weights.full.device).as_subclass(PendingGradient)
    stand_in.__dict__["_onecopy_of"] = (home, core, gradients)
    return stand_in


def read_grad(param: torch.Tensor) -> torch.Tensor | None:
    """``param.grad``: what autograd or the user put there, else a stand-in for what the engine has."""
    own = get_grad(param)
    return own if own is not None else pending_of(param)


def write_grad(param: torch.Tensor, value: torch.Tensor | None) -> None:
    """``param.grad = value``. Raises :class:`EngineError` where the engine would step with something else."""
    if isinstance(value, PendingGradient):  # ``p.grad *= 2`` has changed it already
        return set_grad(param, None)
    if value is None:
        gradient = pending_of(param) if get_grad(param) is None else None
        if gradient is not None and _by_zero_grad():
            _warn_of_zeroing(gradient)
        elif gradient is not None:
            _clear(gradient)
        return set_grad(param, None)
    if pending_of(param) is not None:
        raise EngineError(
            f"setting p.grad of parameter {param.__dict__[HOME].name!r} has no effect on what the engine steps with; use "
            "onecopy.set_full_grad(p, value) on all ranks"
        )
    set_grad(param, value)


def _read_data(param: torch.Tensor) -> torch.Tensor:
    home = param.__dict__.get(HOME)
    if home is not None:
        home.weights.writes.unseen = home.weights.writes.touched = True  # through .data, which leaves no other sign
    data: torch.Tensor = _get_data(param)
    return data


def _write_data(param: torch.Tensor, value: torch.Tensor) -> None:
    """``param.data = value``, which is how modules move and cast their parameters."""
    home = param.__dict__.get(HOME)
    kinds = [(tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in (param, value)]
    if home is not None and home.weights.core is not None and kinds[0] != kinds[1]:
        one, other = (f"{dtype} of shape {shape} on {device}" for shape, dtype, device in kinds)
        raise EngineError(
            f"parameter {home.name!r} was to become {other}; the engine trains it as {one}. Say the dtype in the plan, "
            "onecopy.stage(..., dtype='bf16'), and the device in onecopy.initialize(device=); or engine.close() first"
        )
    _set_data(param, value)


def _register_hook(param: torch.Tensor, hook: Callable[..., Any]) -> Any:
    handle = torch.Tensor.register_post_accumulate_grad_hook(param, hook)  # type: ignore[no-untyped-call]
    engine_last(param)
    return handle


_SHOWN: dict[type, type] = {}


def shown_class(base: Any) -> type:
    """The class of a parameter of class ``base`` whose values an engine keeps whole between steps."""
    if base not in _SHOWN:
        members = {
            "grad": property(read_grad, write_grad, lambda param: write_grad(param, None)),
            "data": property(_read_data, _write_data),
            "register_post_accumulate_grad_hook": _register_hook,
            "__module__": __name__,
            "_onecopy_shown": True,
            "__torch_function__": base.__torch_function__,
        }
        _SHOWN[base] = type(base)("Parameter" if base is nn.Parameter else base.__name__, (base,), members)
    return _SHOWN[base]


def make_plain(param: torch.Tensor) -> None:
    """Give ``param`` the class back that it had before :func:`shown_class`."""
    if getattr(type(param), "_onecopy_shown", False):
        param.__class__ = type(param).__mro__[1]
