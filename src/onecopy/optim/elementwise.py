"""The user's optimizer: made, and found out about by trying it on small tensors.

Sharding is right for every optimizer whose update of an element depends on nothing but that element's own history.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from onecopy.errors import PlanError

__all__ = ["Factory", "States", "build", "prefer_fused", "probe", "showing", "sibling"]

Factory = Callable[[list[nn.Parameter]], Optimizer]


def build(optimizer: Optimizer | Factory, model: nn.Module) -> Optimizer:
    """The user's optimizer: as given, or made by calling it with the model's trainable parameters."""
    if isinstance(optimizer, Optimizer):
        _refuse_strangers(optimizer, model)
        return optimizer
    if not callable(optimizer):
        raise PlanError(
            f"optimizer is {type(optimizer).__name__}; give a torch Optimizer, or a function that takes the list of "
            "parameters and returns one"
        )
    try:
        made = optimizer([param for param in model.parameters() if param.requires_grad])
    except (TypeError, ValueError) as error:
        raise PlanError(f"the optimizer cannot be made for this model's parameters: {error}") from error
    if not isinstance(made, Optimizer):
        raise PlanError(f"the optimizer function returned {type(made).__name__}, not a torch Optimizer")
    return made


# Finding out whether an optimizer is elementwise


def sibling(optimizer: Optimizer, group: dict[str, Any], params: list[torch.Tensor]) -> Optimizer | None:
    """A fresh optimizer of the same class over ``params`` with the options of ``group``; None when its class cannot be
    made that way."""
    options = {key: value for key, value in group.items() if key != "params"}
    known = inspect.signature(type(optimizer).__init__).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    keywords = {key: value for key, value in options.items() if key in known or takes_all}
    try:
        return type(optimizer)(params, **keywords)
    except TypeError:
        return None
    except ValueError as error:
        raise _not_elementwise(optimizer, f"it does not take flat pieces of tensors: {error}") from error


def _refuse_strangers(optimizer: Optimizer, model: nn.Module) -> None:
    """An optimizer over other tensors than the model's would train nothing, in silence."""
    known = {id(param) for param in model.parameters()}
    held = [param for group in optimizer.param_groups for param in group["params"]]
    strangers = [param for param in held if id(param) not in known and param.requires_grad and param.numel()]
    if strangers:
        shapes = ", ".join(str(tuple(param.shape)) for param in strangers[:3])
        raise PlanError(
            f"the optimizer holds {len(strangers)} tensors that are not parameters of this model (shapes {shapes}"
            f"{', ...' if len(strangers) > 3 else ''}); build it on the model given to onecopy.initialize"
        )


def _grads(shapes: Iterable[torch.Tensor], step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(tensor.shape, generator=generator).to(tensor) for tensor in shapes]


States = tuple[tuple[str, str | None], ...]
# Options that no optimizer's states depend on: groups that differ in these alone are tried once.
_STATELESS = ("params", "lr", "initial_lr", "weight_decay")


def probe(optimizer: Optimizer, device: torch.device) -> list[States | None]:
    """For each group, name and codec (None: the weight's own) of the per-element states that the optimizer will keep, found
    by stepping small tensors on ``device``; None for an optimizer that cannot be made afresh, which is trusted.

    Raises :class:`PlanError` when the optimizer cannot be sharded.
    """
    known: dict[str, States | None] = {}
    found = []
    for group in optimizer.param_groups:
        options = repr({key: value for key, value in group.items() if key not in _STATELESS})
        if options not in known:
            known[options] = _try(optimizer, group, device)
        found.append(known[options])
    return found


def _try(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> States | None:
    """Step small tensors with the options of ``group``.

    Two matrices are stepped whole and together, their copies cut flat at odd places and one after the other. Raises
    :class:`PlanError` when the results differ: the optimizer looks at more than one element at a time, or at more than
    one tensor, and cannot be sharded.
    """
    start = [torch.linspace(-1, 1, 12, device=device).view(4, 3), torch.linspace(1, 2, 6, device=device).view(2, 3)]
    whole = [nn.Parameter(tensor.clone()) for tensor in start]
    cut = [nn.Parameter(piece.clone()) for tensor in start for piece in tensor.view(-1).split(5)]
    one, other = sibling(optimizer, group, list(whole)), sibling(optimizer, group, list(cut))
    if one is None or other is None:
        return None
    try:
        for step in range(3):
            for param, grad in zip(whole, _grads(whole, step), strict=True):
                param.grad = grad
            flat = [piece for grad in _grads(whole, step) for piece in grad.view(-1).split(5)]
            _step_whole(one, device)
            for param, piece in zip(cut, flat, strict=True):
                param.grad = piece.clone()
                with showing(other, [[param]]):
                    other.step()
                param.grad = None
    except (RuntimeError, TypeError, ValueError) as error:
        raise _not_elementwise(optimizer, f"it fails on flat pieces of tensors: {error}") from error
    together = torch.cat([param.detach().view(-1) for param in whole])
    apart = torch.cat([param.detach() for param in cut])
    if not torch.allclose(together, apart, rtol=1e-5, atol=1e-6):
        raise _not_elementwise(optimizer, "cut tensors get other updates than whole ones")
    return tuple(
        (key, None if value.dtype == whole[0].dtype else str(value.dtype).removeprefix("torch."))
        for key, value in one.state[whole[0]].items()
        if isinstance(value, torch.Tensor) and value.shape == whole[0].shape
    )


def _step_whole(optimizer: Optimizer, device: torch.device) -> None:
    """A step of whole tensors on ``device``. Raises :class:`PlanError` when the optimizer cannot do that at all."""
    try:
        optimizer.step()
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        chosen = [key for key in ("capturable", "differentiable") if any(group.get(key) for group in optimizer.param_groups)]
        hint = f"; make it without {' and '.join(chosen)}" if chosen else ""
        name = type(optimizer).__name__
        raise PlanError(f"{name} fails on {device}, where its states are stepped: {error}{hint}") from error


def _not_elementwise(optimizer: Optimizer, why: str) -> PlanError:
    return PlanError(
        f"{type(optimizer).__name__} cannot be sharded by elements: {why}. Use an elementwise optimizer such as AdamW, "
        "Adam, SGD, Adagrad or RMSprop"
    )


class showing:
    """Within the context the optimizer sees only ``tensors``, one list per group; groups without any are left out."""

    def __init__(self, optimizer: Optimizer, tensors: list[list[nn.Parameter]]) -> None:
        self._optimizer = optimizer
        self._tensors = tensors

    def __enter__(self) -> None:
        self._groups = self._optimizer.param_groups
        self._kept = [group["params"] for group in self._groups]
        for group, shown in zip(self._groups, self._tensors, strict=True):
            group["params"] = shown
        self._optimizer.param_groups = [group for group in self._groups if group["params"]]

    def __exit__(self, *error: Any) -> None:
        self._optimizer.param_groups = self._groups
        for group, kept in zip(self._groups, self._kept, strict=True):
            group["params"] = kept


def prefer_fused(optimizer: Optimizer) -> None:
    """Use torch's fused kernel where its class has one and the caller has not chosen: on the host every other
    implementation goes over memory several times."""
    if "fused" not in inspect.signature(type(optimizer).__init__).parameters:
        return
    for group in optimizer.param_groups:
        chosen = group.get("fused") is not None or group.get("foreach") or group.get("differentiable")
        if not chosen and not group.get("capturable") and not isinstance(group.get("lr"), torch.Tensor):
            group["fused"] = True
