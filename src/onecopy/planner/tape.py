"""One forward and backward pass on the meta device, with the bytes of activations that are alive in every stretch of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from onecopy.engine.unit import UnitModules
from onecopy.planner.fold import Fold, folded, unfold
from onecopy.schedule.walk import Saved, Stretch

__all__ = ["OnMeta", "checkpointed", "record", "roots", "run_backward"]


class _Attention(torch.autograd.Function):
    """What a flash kernel keeps of ``scaled_dot_product_attention``: its inputs, its output and a float32 per row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        # Kernels lay their output out by tokens, so that joining the heads after is no copy.
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        if out.dim() == 4:
            batch, heads, tokens, width = out.shape
            out = query.new_empty(batch, tokens, heads, width).transpose(1, 2)
        rows = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, mask, out, rows)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


class OnMeta(TorchFunctionMode):
    """What the meta device cannot do by itself.

    Attention is replaced by what a flash kernel keeps of it (``flash``): torch would take it apart. Questions about values,
    such as whether all of a mask is 1, are answered as for a batch without padding: everything is, nothing is not.
    """

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self._flash = flash
        self._no: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._flash and func is F.scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | kwargs
            parts = (named.get(name) for name in ("query", "key", "value", "attn_mask"))
            return _Attention.apply(*parts)  # type: ignore[no-untyped-call]
        if func is Tensor.__bool__ and args[0].device.type == "meta":
            return not any(args[0] is no for no in self._no)
        out = func(*args, **kwargs)
        if func in (Tensor.any, torch.any) and isinstance(out, Tensor):
            self._no.append(out)
        return out


class _Tape(TorchDispatchMode):
    """Counts the bytes of meta storages that are alive, those of ``known`` tensors left out, and cuts a pass into stretches
    by the unit that is at work."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, Any] = {tensor.untyped_storage()._cdata: tensor for tensor in known}
        self._live = self._peak = 0
        self._before: int | None = None
        self._unit = ""
        self.stretches: list[Stretch] = []
        self.backward = False
        self.marks: dict[nn.Module, tuple[Fold, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.device.type == "meta":
                self._note(tensor)
        # Autograd adds gradients that meet in place, but under a mode like this one: the sum is not there beside its terms.
        if not (self.backward and func is torch.ops.aten.add.Tensor):
            self._peak = max(self._peak, self._live)
        return out

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, int(storage.nbytes())
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, partial(self._gone, key, size))
            self._live += size

    def _gone(self, key: int, size: int, _: Any) -> None:
        self._live -= size
        del self._storages[key]

    def cut(self, unit: str) -> None:
        """A stretch ends, and one of ``unit`` begins."""
        if self._peak or self._live or self._before is not None:
            before, filled = (self._peak, 0) if self._before is None else (self._before, self._peak)
            self.stretches.append(Stretch(self._unit or unit, before, self._live, filled))
        self._unit, self._peak, self._before = unit, self._live, None

    def mark(self, entry: nn.Module) -> None:
        """``entry`` begins: where folds begin and end."""
        if entry in self.marks:
            fold, place = self.marks[entry]
            # Forward it comes before the last block, backward before the first.
            if self.backward and place < 2:
                fold.backward.append(len(self.stretches))
            elif not self.backward and place != 1:
                fold.forward.append(len(self.stretches))

    def arrived(self, unit: str) -> None:
        """A gradient of a parameter of ``unit`` is there."""
        if unit != self._unit:
            self.cut(unit)
        if self._before is None:
            self._before, self._peak = self._peak, self._live

    def turn(self) -> tuple[Stretch, ...]:
        """A pass is over: its stretches."""
        self.cut("")
        found, self.stretches = tuple(self.stretches), []
        return found


def record(
    model: nn.Module,
    units: list[UnitModules],
    given: Mapping[str, Any] | tuple[Any, ...],
    dtype: torch.dtype | None,
    *,
    flash: bool,
    recompute: bool,
) -> Saved:
    """See :func:`_record`; a long list of equal blocks is run as three of them where that comes out even."""
    how = {"flash": flash, "recompute": recompute}
    saved = _record(model, units, given, dtype, **how, fold=True)
    whole = saved if saved is not None else _record(model, units, given, dtype, **how, fold=False)
    assert whole is not None
    return whole


def _record(
    model: nn.Module,
    units: list[UnitModules],
    given: Mapping[str, Any] | tuple[Any, ...],
    dtype: torch.dtype | None,
    *,
    flash: bool,
    recompute: bool,
    fold: bool,
) -> Saved | None:
    """The activations of a forward and a backward pass of ``model`` with the arguments ``given``, parameters in ``dtype``.

    The gradient of a parameter lives until the engine's hook has taken it. Where the model returns no single number its
    outputs get gradients of their own size. ``recompute``: every child of a list of blocks is checkpointed. Errors of the
    model's own code on the meta device go through.
    """
    args, kwargs = ((), dict(given)) if isinstance(given, Mapping) else (given, {})
    home = {entry: unit.name for unit in units for entry in unit.entries}
    with ExitStack() as stack:
        folds = stack.enter_context(folded(model, home, fold))
        made = stack.enter_context(_in_dtype(model, dtype))
        tape = _Tape([*made.values(), *(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))])
        stack.enter_context(checkpointed(model, recompute))
        for unit in units:
            for entry in unit.entries:
                _follow(entry, unit.name, tape, stack)
            for cast in (made[id(param)] for param in unit.params if id(param) in made):
                if cast.requires_grad:
                    stack.callback(cast.register_post_accumulate_grad_hook(partial(_take, tape, unit.name)).remove)
        tape.marks = {block: (one, place) for one, *others in folds for place, block in enumerate((one.block, *others))}
        stack.enter_context(OnMeta(flash))
        stack.enter_context(tape)
        out = model(*args, **kwargs)
        forward = tape.turn()
        tape.backward = True
        run_backward(roots(out))
        saved = Saved(forward, tape.turn())
        return unfold(saved, [one for one, *_ in folds]) if folds else saved


def _take(tape: _Tape, unit: str, param: Tensor) -> None:
    tape.arrived(unit)
    param.grad = None


def _follow(entry: nn.Module, unit: str, tape: _Tape, stack: ExitStack) -> None:
    """Cut the tape where ``entry`` is entered and left, forward and backward."""
    outer: list[str] = []

    def reached(gradient: Tensor) -> None:
        tape.cut(unit)
        tape.mark(entry)

    def enter(*_: Any) -> None:
        if not tape.backward:
            outer.append(tape._unit)
            tape.cut(unit)
            tape.mark(entry)

    def leave(module: nn.Module, args: Any, out: Any) -> None:
        if tape.backward:
            return  # computed again
        tape.cut(outer.pop() or unit)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(reached)

    stack.callback(entry.register_forward_pre_hook(enter).remove)
    stack.callback(entry.register_forward_hook(leave).remove)


def roots(out: Any) -> list[Tensor]:
    """The tensors that backward starts from: the loss where there is one, else all outputs."""
    loss = getattr(out, "loss", None)
    found = [loss] if isinstance(loss, Tensor) else [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    found = [tensor for tensor in found if tensor.requires_grad]
    return [tensor for tensor in found if tensor.numel() == 1][:1] or found


def run_backward(tensors: list[Tensor]) -> None:
    """Backward from ``tensors``, whose gradients have their own size. ``torch.autograd.backward`` would switch the mode off
    that is to see what is computed again."""
    if tensors:
        grads = tuple(torch.empty_like(tensor) for tensor in tensors)
        engine = torch.autograd.Variable._execution_engine
        engine.run_backward(tuple(tensors), grads, False, False, (), allow_unreachable=True, accumulate_grad=True)


@contextmanager
def checkpointed(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Within the context the children of lists of blocks keep their inputs, and are computed again in backward; if
    ``wanted``."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and wanted]
    blocks = [block for blocks in lists for block in blocks]
    try:
        for block in blocks:
            again: Callable[..., Any] = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
            block.__dict__["forward"] = again
        yield
    finally:
        for block in blocks:
            block.__dict__.pop("forward", None)


@contextmanager
def _in_dtype(model: nn.Module, dtype: torch.dtype | None) -> Iterator[dict[int, Tensor]]:
    """Within the context parameters and buffers are on meta, floating-point ones in ``dtype``; gives them by the ``id`` of
    the original."""
    kept: dict[tuple[int, str], tuple[dict[str, Any], Tensor]] = {}
    for module in model.modules():
        stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for store in stores:
            for name, value in store.items():
                if value is not None:
                    kept[id(store), name] = store, value
    made: dict[int, Any] = {}
    for (_, name), (store, value) in kept.items():
        if id(value) not in made:
            wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
            cast: Any = torch.empty(value.shape, dtype=wanted, device="meta")
            made[id(value)] = nn.Parameter(cast, value.requires_grad) if isinstance(value, nn.Parameter) else cast
        store[name] = made[id(value)]
    try:
        yield made
    finally:
        for (_, name), (store, value) in kept.items():
            store[name] = value
