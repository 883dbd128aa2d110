"""Frozen weights that bitsandbytes has quantised: what belongs to such a parameter beside its elements, and what the library
does behind its back.

The packed elements are a tensor of integers like any other: it is cut, gathered and put on any tier as it is. Beside it lie
the scales, small tensors that every rank keeps whole. Nothing of bitsandbytes is imported here; it is known by its names.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from onecopy.errors import PlanError

__all__ = ["described", "packed", "refuse_opaque", "scales", "settle", "shown"]

Names = dict[nn.Parameter, list[str]]


def _is(thing: object, name: str) -> bool:
    """Is ``thing`` of the class ``name`` of bitsandbytes, or one below it?"""
    return any(kind.__name__ == name and kind.__module__.startswith("bitsandbytes.") for kind in type(thing).__mro__)


def packed(param: nn.Parameter) -> bool:
    """Are the elements of ``param`` the bits of others, whatever its dtype says? (``bnb_4bit_quant_storage`` may be a
    floating-point dtype.)"""
    return _is(param, "Params4bit")


def refuse_opaque(names: Names) -> None:
    """Raise :class:`PlanError` for parameters whose elements do not lie in one storage, and for 4-bit ones that have no
    scales yet or whose elements are reordered."""
    for param, known in names.items():
        if is_traceable_wrapper_subclass(param):
            raise PlanError(
                f"parameter {known[0]!r} is a {type(param).__name__}: its elements are spread over tensors that its library "
                "keeps together, so they cannot lie in a unit's buffer. Quantise the base with bitsandbytes (Linear4bit, "
                "Linear8bitLt), or leave it in bf16"
            )
        if not packed(param):
            continue
        state = getattr(param, "quant_state", None)
        if state is None:
            raise PlanError(
                f"parameter {known[0]!r} is a Params4bit that is not quantised yet, which happens when it is moved: call "
                "model.to(device) before initialize, 'cpu' being one"
            )
        if getattr(state, "packing_format_for_cpu", False):
            raise PlanError(
                f"parameter {known[0]!r} is a Params4bit whose elements are reordered for inference on the CPU, as after a "
                "forward pass in eval mode; model.state_dict() brings them back in order"
            )


def _owners(param: nn.Parameter, module: nn.Module) -> Iterator[tuple[Any, str]]:
    """Where tensors beside ``param`` of ``module`` are: objects and the names of their attributes."""
    if _is(param, "Params4bit"):
        state = getattr(param, "quant_state", None)
        while state is not None:
            yield from ((state, key) for key, value in vars(state).items() if isinstance(value, torch.Tensor))
            state = getattr(state, "state2", None)
    elif _is(module, "Linear8bitLt"):
        yield from ((owner, "SCB") for owner in (param, module.state) if isinstance(owner.SCB, torch.Tensor))  # type: ignore[union-attr]


def _places(model: nn.Module) -> Iterator[tuple[str, Any, str]]:
    """``(parameter's name, object, attribute)`` of every scale of ``model``, once."""
    seen: set[tuple[int, str]] = set()
    for path, module in model.named_modules():
        for key, param in module._parameters.items():
            for owner, attribute in _owners(param, module) if param is not None else ():
                if (id(owner), attribute) not in seen:
                    seen.add((id(owner), attribute))
                    yield f"{path}.{key}", owner, attribute


def scales(model: nn.Module) -> list[torch.Tensor]:
    """The tensors beside the quantised parameters of ``model``."""
    return [getattr(owner, attribute) for _, owner, attribute in _places(model)]


def described(model: nn.Module) -> dict[str, str]:
    """What ranks must agree about before they take rank 0's scales for theirs."""
    told: dict[str, str] = {}
    for name, owner, attribute in _places(model):
        value = getattr(owner, attribute)
        kind = {key: said for key, said in vars(owner).items() if isinstance(said, int | str | torch.dtype | torch.Size)}
        plain = {key: said for key, said in kind.items() if not key.startswith("_")}
        told[f"{attribute} of quantised parameter {name!r} ({type(owner).__name__})"] = (
            f"{tuple(value.shape)} {value.dtype} {plain}"
        )
    return told


def settle(model: nn.Module, agree: Callable[[torch.Tensor], None], device: torch.device) -> None:
    """Rank 0's scales become everybody's, by ``agree(flat tensor of bytes)``, and go to ``device``; the modules keep nothing
    whole and reorder nothing."""
    for _, owner, attribute in _places(model):
        moved = getattr(owner, attribute).to(device).contiguous()
        agree(moved.reshape(-1).view(torch.uint8))
        setattr(owner, attribute, moved)
    for module in model.modules():
        if _is(module, "Linear4bit"):
            # In eval mode on a CPU it would exchange the weight for a reordered copy, which a gather then overwrites.
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
        elif _is(module, "Linear8bitLt"):
            _share(module)


def _share(module: Any) -> None:
    """The state of a Linear8bitLt keeps its weight in ``CB``, whole: let that be the parameter itself, gathered or not."""
    state, weight = module.state, module.weight
    if weight.dtype is not torch.int8:
        return
    if state.SCB is None:
        state.SCB = weight.SCB
    weight.CB = weight.SCB = None
    plain = type(state)
    members = {"CB": property(_weight_of, _ignore), "__deepcopy__": _whole_copy, "__module__": __name__, "_plain": plain}
    vars(state).pop("CB", None)
    state.__class__ = type(plain.__name__, (plain,), members)
    state._module = weakref.ref(module)


def _weight_of(state: Any) -> torch.Tensor | None:
    module = state._module()
    return module.weight.data if module is not None and module.weight.dtype is torch.int8 else None


def _ignore(state: Any, value: object) -> None:
    """The weight is where it is."""


def _whole_copy(state: Any, memo: dict[int, Any]) -> Any:
    """A plain state with a copy of the weight: the copied module belongs to no engine."""
    made = state._plain()
    vars(made).update({key: copy.deepcopy(value, memo) for key, value in vars(state).items() if key != "_module"})
    made.CB = copy.deepcopy(state.CB, memo)
    return made


_SHOWN: dict[type, type] = {}


def shown(base: Any) -> type:
    """The class of a frozen parameter of class ``base`` while it is gathered.

    The product with a 4-bit weight keeps ``weight.view(-1, 1)`` until backward. The weight has that shape; it answers with
    itself, or the view would keep the gathered values of every unit in memory from forward to backward.
    """
    if not any(kind.__name__ == "Params4bit" for kind in base.__mro__):
        return base  # type: ignore[no-any-return]
    if base not in _SHOWN:

        def torch_function(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.view and args[1:] == (-1, 1) and args[0].shape[1:] == (1,):
                return args[0]
            plain: Any = super(_SHOWN[base], cls)
            return plain.__torch_function__(func, types, args, kwargs or {})

        members = {"__torch_function__": classmethod(torch_function), "_onecopy_shown": True, "__module__": __name__}
        _SHOWN[base] = type(base)(base.__name__, (base,), members)
    return _SHOWN[base]

