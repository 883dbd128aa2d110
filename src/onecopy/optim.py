"""Any elementwise torch optimizer, rebuilt over flat shards, stepped one unit at a time.

The user's optimizer object stays the one that steps, so LR schedulers attached to it keep working; only the tensors in its
groups are exchanged, each parameter for the part of it that this rank steps. A unit is stepped by showing the optimizer
just that unit's tensors, which is right for every optimizer whose update of an element depends on nothing but that
element's own history; :func:`probe` finds out by trying.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from onecopy.engine.weights import ParameterHome, Weights
from onecopy.errors import EngineError, PlanError

__all__ = ["Piece", "Tiles", "build", "probe"]

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


def _sibling(optimizer: Optimizer, params: list[torch.Tensor]) -> Optimizer | None:
    """A fresh optimizer of the same class and options over ``params``; None when its class cannot be made that way."""
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
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


def probe(optimizer: Optimizer, device: torch.device) -> tuple[str | None, ...]:
    """Codecs of the optimizer's per-element states (None: the weight's own), found by stepping small tensors.

    Two matrices are stepped whole and together, their copies cut flat at odd places and one after the other. Raises
    :class:`PlanError` when the results differ: the optimizer looks at more than one element at a time, or at more than
    one tensor, and cannot be sharded. An optimizer that cannot be made afresh is trusted, with no states known.
    """
    start = [torch.linspace(-1, 1, 12, device=device).view(4, 3), torch.linspace(1, 2, 6, device=device).view(2, 3)]
    whole = [nn.Parameter(tensor.clone()) for tensor in start]
    cut = [nn.Parameter(piece.clone()) for tensor in start for piece in tensor.view(-1).split(5)]
    one, other = _sibling(optimizer, list(whole)), _sibling(optimizer, list(cut))
    if one is None or other is None:
        return ()
    try:
        for step in range(3):
            for param, grad in zip(whole, _grads(whole, step), strict=True):
                param.grad = grad
            flat = [piece for grad in _grads(whole, step) for piece in grad.view(-1).split(5)]
            one.step()
            for param, piece in zip(cut, flat, strict=True):
                param.grad = piece.clone()
                with _showing(other, [[param]]):
                    other.step()
                param.grad = None
    except (RuntimeError, TypeError, ValueError) as error:
        raise _not_elementwise(optimizer, f"it fails on flat pieces of tensors: {error}") from error
    together = torch.cat([param.detach().view(-1) for param in whole])
    apart = torch.cat([param.detach() for param in cut])
    if not torch.allclose(together, apart, rtol=1e-5, atol=1e-6):
        raise _not_elementwise(optimizer, "cut tensors get other updates than whole ones")
    states = one.state[whole[0]].values()
    return tuple(
        None if value.dtype == whole[0].dtype else str(value.dtype).removeprefix("torch.")
        for value in states
        if isinstance(value, torch.Tensor) and value.shape == whole[0].shape
    )


def _not_elementwise(optimizer: Optimizer, why: str) -> PlanError:
    return PlanError(
        f"{type(optimizer).__name__} cannot be sharded by elements: {why}. Use an elementwise optimizer such as AdamW, "
        "Adam, SGD, Adagrad or RMSprop"
    )


class _showing:
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


# Stepping


@dataclass(frozen=True, eq=False)
class Piece:
    """The part of one parameter that this rank's optimizer steps: ``param`` is a view of elements ``[start, stop)`` of
    the tensor its :class:`Weights` is stepped in, from element ``offset`` of the flattened parameter on."""

    home: ParameterHome
    group: int
    param: nn.Parameter
    start: int
    stop: int
    offset: int


class Tiles:
    """``optimizer`` over the pieces of ``weights``, steppable one unit at a time."""

    def __init__(self, optimizer: Optimizer, weights: Iterable[Weights]) -> None:
        self.optimizer = optimizer
        self._groups = len(optimizer.param_groups)
        self.pieces: dict[Weights, list[Piece]] = {held: [] for held in weights}
        homes = {
            param: home
            for held in self.pieces
            for param in held.params
            if isinstance(home := param.__dict__.get("_onecopy_home"), ParameterHome)
        }
        for index, group in enumerate(optimizer.param_groups):
            mine = []
            for param in group["params"]:
                state = optimizer.state.pop(param, {})
                if param in homes and param.requires_grad:
                    piece = self._piece(homes[param], index)
                    if piece is not None:
                        self.pieces[homes[param].weights].append(piece)
                        optimizer.state.update({piece.param: _cut_state(state, piece)} if state else {})
                        mine.append(piece.param)
            group["params"] = mine
        self._stepping = False
        optimizer.register_step_pre_hook(_only_by_the_engine(weakref.ref(self)))
        self.of_param = {piece.home.name: piece for pieces in self.pieces.values() for piece in pieces}

    @staticmethod
    def _piece(home: ParameterHome, group: int) -> Piece | None:
        low, high = home.weights.stepped()
        part = home.slot.local(low, high)
        if part is None:
            return None
        start, stop = part[0] - low, part[1] - low
        view = nn.Parameter(home.weights.target()[start:stop])
        return Piece(home, group, view, start, stop, part[0] - home.slot.start)

    def step(self, unit: list[tuple[Weights, torch.Tensor, list[bool]]]) -> None:
        """Step the pieces of one unit. For each buffer: its gradient over the stepped range in the weight's dtype, and
        which slots any rank used; a parameter nobody used is left alone, as torch leaves one whose grad is None."""
        if len(self.optimizer.param_groups) != self._groups:
            raise EngineError(
                f"the optimizer has {len(self.optimizer.param_groups)} groups and had {self._groups} when the engine was "
                "made; close the engine and initialize again with the new groups"
            )
        shown: list[list[nn.Parameter]] = [[] for _ in self.optimizer.param_groups]
        for weights, gradient, used in unit:
            place = {slot: at for at, slot in enumerate(weights.spec.layout.slots)}
            for piece in self.pieces[weights]:
                if used[place[piece.home.slot]]:
                    piece.param.grad = gradient[piece.start : piece.stop]
                    shown[piece.group].append(piece.param)
        if not any(shown):
            return
        self._stepping = True
        try:
            with _showing(self.optimizer, shown):
                self.optimizer.step()
        finally:
            self._stepping = False
        for params in shown:
            for param in params:
                param.grad = None

    @property
    def stepping(self) -> bool:
        """Is the engine stepping the optimizer just now?"""
        return self._stepping

    def options(self) -> list[dict[str, Any]]:
        """The numbers and flags of every group, as they are now."""
        return [
            {key: value for key, value in group.items() if isinstance(value, int | float | str | tuple)}
            for group in self.optimizer.param_groups
        ]

    def moments(self) -> int:
        """Bytes of the states that have one element per weight."""
        total = 0
        for param, state in self.optimizer.state.items():
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.shape == param.shape:
                    total += value.numel() * value.element_size()
        return total


def _only_by_the_engine(tiles: weakref.ref[Tiles]) -> Callable[..., None]:
    """A step hook: the optimizer's own ``step()`` would find no gradients and train nothing in silence."""

    def refuse(*_: Any) -> None:
        owner = tiles()
        if owner is not None and not owner.stepping:
            raise EngineError("optimizer.step() was called by hand; call engine.step(), which steps it at the boundary")

    return refuse


def _cut_state(state: dict[str, Any], piece: Piece) -> dict[str, Any]:
    """State that an optimizer made for a whole parameter, cut to the piece that this rank steps."""
    shape, stop = piece.home.shape, piece.offset + piece.stop - piece.start
    return {
        key: value.reshape(-1)[piece.offset : stop].clone()
        # Of a parameter without dimensions, torch's step counter has the shape too.
        if isinstance(value, torch.Tensor) and value.shape == shape and key != "step"
        else value
        for key, value in state.items()
    }
