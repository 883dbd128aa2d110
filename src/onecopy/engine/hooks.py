"""Where the model tells the engine what it does: module hooks, gradient hooks and saved-tensor hooks.

Hooks are only put where the schedule has something to do: a plan that keeps parameters whole gets none on its units.
What autograd saves of gathered parameters is recognised by its storage when it is packed, and makes its unit present
when it is unpacked; so backward finds its parameters whatever the model returned, however it is checkpointed and
whoever else uses a weight.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from onecopy.engine.gathering import Gathering
from onecopy.engine.gradients import Gradients
from onecopy.engine.pending import get_grad, set_grad
from onecopy.engine.rounds import Rounds
from onecopy.engine.run import Run, UnitRun
from onecopy.engine.weights import Weights
from onecopy.errors import EngineError

__all__ = ["Hooks", "scaled_loss"]

_saved = torch._C._autograd
_F = TypeVar("_F", bound=Callable[..., Any])


def _quiet(function: _F) -> _F:
    """Keep torch.compile from looking into ``function``: it breaks the graph there and calls it as it is.

    Where nothing has imported the compiler yet (torch's optimizers do), the mark alone is set rather than doing so.
    """
    if "torch._dynamo" in sys.modules:
        return torch._dynamo.disable(function)  # type: ignore[no-any-return]
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "onecopy gathers and frees parameters here"  # type: ignore[attr-defined]
    return function


def _no_hook(*_: Any, **__: Any) -> None:
    """What the copies and pickles of a model have in the place of the engine's hooks."""


class _ModuleHook:
    """A hook on a module of this model, and on no copy of it."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    @_quiet
    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __reduce__(self) -> Any:
        return _reduced, ()


def _reduced() -> Callable[..., None]:
    return _no_hook


# What the loss that is running backward was multiplied with, by the engine whose ``backward`` runs.
_loss_factor: list[float] = []


@contextmanager
def scaled_loss(factor: float) -> Iterator[None]:
    """Around a backward pass that starts from a loss times ``factor``."""
    _loss_factor.append(factor)
    try:
        yield
    finally:
        _loss_factor.pop()


class Hooks:
    """Attaches the engine to ``root`` and passes events on to :class:`Gathering` and :class:`Rounds`."""

    def __init__(self, root: nn.Module, run: Run, gathering: Gathering, rounds: Rounds, cast: torch.dtype | None) -> None:
        self._gathering = gathering
        self.rounds = rounds
        self._cast = cast
        # Multiplies the gradients that enter the model at its outputs: the loss scale.
        self.output_scale: Callable[[], float] = lambda: 1.0
        self.scales = False
        self.gradient_scale = 1.0
        self.scaled = False
        # What the last pass gave, single numbers kept and others if the caller does: asked whether it was finite when
        # gradients are not.
        self._outputs: list[Callable[[], torch.Tensor | None]] = []
        self._handles: list[Any] = []
        self._targets: list[_Target] = []
        self._pushed: list[bool] = []
        self._trains = any(unit.gradients for unit in run.units)
        self._attach_root(root)
        gathered = {weights.spec.unit for unit in run.units for weights in unit.weights if weights.away}
        for unit in run.units:
            if unit.name in gathered:
                self._attach_unit(unit)
            for gradients in unit.gradients:
                self._attach_gradients(unit, gradients)
            for weights in unit.weights:
                if not weights.spec.trainable:
                    self._refuse_gradients(weights)
        rounds.watch = self._watch

    def remove(self) -> None:
        """Detach from the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # The root module

    def _attach_root(self, root: nn.Module) -> None:
        @_quiet
        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            # A shallow copy of the model carries these hooks along; they are for the model they were made for.
            return self._enter_root(args, kwargs) if module is root else None

        @_quiet
        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            return self._leave_root(output) if module is root else None

        self._handles.append(root.register_forward_pre_hook(_ModuleHook(enter), prepend=True, with_kwargs=True))
        self._handles.append(root.register_forward_hook(_ModuleHook(leave), always_call=True))

    def _enter_root(self, args: Any, kwargs: Any) -> Any:
        gathering, rounds = self._gathering, self.rounds
        recomputing = torch._C._current_graph_task_id() != -1
        if gathering.depth == 0 and not recomputing:
            if rounds.open:
                rounds.abandon()
            gathering.begin(backward=False, alone=not (torch.is_grad_enabled() and self._trains))
            self.scaled = False
        gathering.depth += 1
        self._push()
        if self._cast is not None:
            args, kwargs = tree_map_only(torch.Tensor, self._to_compute_dtype, (args, kwargs))
        return args, kwargs

    def _to_compute_dtype(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._cast) if tensor.is_floating_point() else tensor

    def _leave_root(self, output: Any) -> Any:
        gathering = self._gathering
        self._pop()
        gathering.depth -= 1
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        outputs = outputs or _attribute_tensors(output)
        if gathering.depth == 0 and torch._C._current_graph_task_id() == -1:
            gathering.end()
        if not torch.is_grad_enabled():
            return output
        if self.scales and gathering.depth == 0:
            floats = [tensor for tensor in outputs if tensor.is_floating_point()]
            self._outputs = [
                partial(_same, tensor.detach()) if tensor.numel() == 1 else weakref.ref(tensor) for tensor in floats
            ]
            return tree_map_only(torch.Tensor, self._scaled_output, output)
        for tensor in outputs:
            if tensor.requires_grad:
                tensor.register_hook(self._backward_begins)
        return output

    def outputs_finite(self) -> bool | None:
        """Were the outputs of this rank's last pass finite? None when the caller has let go of them."""
        kept = [tensor for ref in self._outputs if (tensor := ref()) is not None]
        return all(bool(torch.isfinite(tensor).all()) for tensor in kept) if kept else None

    def _backward_begins(self, gradient: torch.Tensor) -> None:
        self.rounds.begin()

    def _scaled_output(self, output: torch.Tensor) -> torch.Tensor:
        """A view of ``output`` whose gradient is multiplied by the loss scale on its way in.

        A view, because one output may be computed from another: each path from the caller's loss must be scaled once.
        """
        if not output.requires_grad:
            return output
        view = output.view_as(output)

        def scale(gradient: torch.Tensor) -> torch.Tensor:
            self.rounds.begin()
            self.scaled = True
            return gradient if _loss_factor else gradient * self.output_scale()

        view.register_hook(scale)
        return view

    # Units

    def _attach_unit(self, unit: UnitRun) -> None:
        gathering = self._gathering

        @_quiet
        def enter(module: nn.Module, args: Any) -> None:
            if module in unit.entries:
                gathering.use(unit)
                self._push()

        @_quiet
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if module in unit.entries:
                self._pop()
                gathering.used(unit)

        for entry in unit.entries:
            self._handles.append(entry.register_forward_pre_hook(_ModuleHook(enter)))
            self._handles.append(entry.register_forward_hook(_ModuleHook(leave), always_call=True))
        if unit.waits_for_input:
            self._watch(unit)

    def _watch(self, unit: UnitRun) -> None:
        """Report ``unit`` ready when the gradients of all its inputs are there."""

        def reached(gradient: torch.Tensor) -> None:
            unit.watched -= 1
            if unit.watched == 0:
                self.rounds.begin()
                self.rounds.ready(unit)

        @_quiet
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            if unit.watching or not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
                return
            # The first call of the pass: in backward its inputs get their gradient last, and nothing comes after.
            unit.watching = True
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    unit.watched += 1
                    tensor.register_hook(reached)

        for entry in unit.entries:
            self._handles.append(entry.register_forward_pre_hook(_ModuleHook(enter), with_kwargs=True))

    # Gradients

    def _attach_gradients(self, unit: UnitRun, gradients: Gradients) -> None:
        params = next(weights.params for weights in unit.weights if weights.spec is gradients.spec)
        for at, param in enumerate(params):
            target = _Target(self, unit, gradients, at)
            self._targets.append(target)
            # What a parameter's hook holds strongly is out of the garbage collector's sight: only a weak reference.
            self._handles.append(param.register_post_accumulate_grad_hook(_Arrival(weakref.ref(target))))

    def _refuse_gradients(self, weights: Weights) -> None:
        """Parameters that would get gradients in an engine without an optimizer: nobody would reduce or use them."""

        def refuse(param: torch.Tensor) -> None:
            set_grad(param, None)
            raise EngineError(
                "backward reached parameters of an engine without an optimizer; pass optimizer= to onecopy.initialize, "
                "or run this model under torch.no_grad()"
            )

        for param in weights.params:
            if param.requires_grad:
                self._handles.append(param.register_post_accumulate_grad_hook(refuse))

    # What autograd saves

    def _push(self) -> None:
        """From here on autograd's saved tensors go through :meth:`_pack`, unless they do already."""
        ours = not self._gathering.storages or not torch.is_grad_enabled()
        if not ours:
            top = _saved._top_saved_tensors_default_hooks(True)
            ours = top is not None and getattr(top[0], "hooks", None) is self
            if not ours:
                pack, unpack = _Pack(self, top), _Unpack(self, top)
                _saved._push_saved_tensors_default_hooks(pack, unpack)
        self._pushed.append(not ours)

    def _pop(self) -> None:
        # The hook after a forward runs even when the one before it raised (a gather that failed) and pushed nothing.
        if self._pushed and self._pushed.pop():
            _saved._pop_saved_tensors_default_hooks()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around code outside a forward pass that computes with gathered parameters."""
        self._push()
        try:
            yield
        finally:
            self._pop()

    def unpacked(self, weights: Weights, steps: int) -> None:
        """Backward is about to read a parameter of ``weights`` that was saved when ``steps`` steps were done."""
        if steps != self._gathering.steps:
            raise RuntimeError(
                f"a parameter of unit {weights.spec.unit!r} needed for the gradient was changed by engine.step() after the "
                "forward pass that saved it; run backward before the step"
            )
        if self._gathering.depth == 0 and torch._C._current_graph_task_id() != -1:
            self.rounds.begin()  # a loss from parameters alone has no output of the model that would say so
        self._gathering.use(self._gathering.unit_of(weights))
        if torch.is_grad_enabled() and self._gathering.depth == 0:
            self._gathering.keep_all()

    @property
    def gathering(self) -> Gathering:
        """What knows which storages are gathered buffers."""
        return self._gathering


@dataclass(frozen=True, eq=False)
class _Target:
    """Where the gradient of one parameter goes."""

    hooks: Hooks
    unit: UnitRun
    gradients: Gradients
    at: int


class _Arrival:
    """The hook on one parameter."""

    __slots__ = ("_target",)
    takes_gradient = True

    def __init__(self, target: weakref.ref[_Target]) -> None:
        self._target = target

    def __call__(self, param: torch.Tensor) -> None:
        """Autograd has written ``param.grad``: take it."""
        target = self._target()
        if target is None:
            return
        with torch._C.DisableTorchFunctionSubclass():  # what autograd left, whoever asks a freed parameter sees more
            gradient = get_grad(param)
            if gradient is None:  # a hook of the user's has dropped it
                return
            set_grad(param, None)
        hooks, scale = target.hooks, target.hooks.gradient_scale
        if _loss_factor:
            # The loss is multiplied already, by this engine or another that has a part in it.
            scale *= hooks.output_scale() / _loss_factor[-1]
        elif hooks.scales and not hooks.scaled:
            raise EngineError(
                "a backward pass with loss scaling did not go through the model's outputs, so it is not scaled; return "
                "the tensors that the loss is computed from in a tuple, list or dict"
            )
        hooks.rounds.arrive(target.unit, target.gradients, target.at, gradient, scale)


class _Saved(NamedTuple):
    """A tensor that autograd saved. Of a gathered buffer only where in it the tensor is, so that nothing holds its memory;
    ``kept`` is the tensor itself, or what the hooks active before (checkpointing's) made of it."""

    kept: Any
    weights: Weights | None
    steps: int = 0
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    offset: int = 0


class _Pack:
    """Autograd saves a tensor."""

    __slots__ = ("_gathering", "_outer", "hooks")

    def __init__(self, hooks: Hooks, outer: Any) -> None:
        self.hooks = hooks
        self._gathering = hooks.gathering
        self._outer = outer[0] if outer is not None else None

    def __call__(self, tensor: torch.Tensor) -> Any:
        weights = None
        if tensor.layout is torch.strided:
            weights = self._gathering.storages.get(tensor.untyped_storage()._cdata)
        if weights is None:
            return (tensor, tensor._version) if self._outer is None else _Saved(self._outer(tensor), None)
        if self._outer is not None:
            return _Saved(self._outer(tensor), weights, self._gathering.steps)
        if tensor.dtype != weights.full.dtype:
            return _Saved(tensor, weights, self._gathering.steps)
        shape, strides = tuple(tensor.shape), tensor.stride()
        return _Saved(None, weights, self._gathering.steps, shape, strides, int(tensor.storage_offset()))


class _Unpack:
    """Autograd wants it back."""

    __slots__ = ("_hooks", "_outer")

    def __init__(self, hooks: Hooks, outer: Any) -> None:
        self._hooks = hooks
        self._outer = outer[1] if outer is not None else None

    def __call__(self, packed: Any) -> torch.Tensor:
        if type(packed) is tuple:
            plain, version = packed
            if plain._version != version:
                # Autograd leaves this check out where saved tensors go through hooks.
                raise RuntimeError(
                    f"a tensor of shape {tuple(plain.shape)} needed for the gradient was modified by an inplace operation "
                    f"after it was saved: it is at version {plain._version}, expected {version}"
                )
            return plain  # type: ignore[no-any-return]
        saved: _Saved = packed
        tensor: torch.Tensor | None = saved.kept if self._outer is None else self._outer(saved.kept)
        if saved.weights is not None:
            self._hooks.unpacked(saved.weights, saved.steps)
            if tensor is None:
                return torch.as_strided(saved.weights.full, saved.shape, saved.strides, saved.offset)
        assert tensor is not None
        return tensor


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _attribute_tensors(output: Any) -> list[torch.Tensor]:
    """Tensors in the attributes of an output object that is no container known to torch."""
    return [value for value in getattr(output, "__dict__", {}).values() if isinstance(value, torch.Tensor)]
