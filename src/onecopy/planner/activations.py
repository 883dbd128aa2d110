"""Bytes that forward keeps for backward: traced on the meta device for a model, by a closed formula for numbers.

The trace runs the model's own forward on meta tensors, where nothing is allocated, and counts the distinct storages that
autograd saves while each unit runs; parameters are not counted, they are there anyway. Temporaries that live only inside one
operation are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from onecopy.engine.unit import find_units
from onecopy.errors import PlanError
from onecopy.plan.layout import itemsize
from onecopy.plan.plan import Plan
from onecopy.planner.subject import Built, Shape
from onecopy.schedule.predict import Saved

__all__ = ["ATTENTION", "Activations", "by_formula", "layer_bytes", "trace"]

ATTENTION = ("flash", "eager")


@dataclass(frozen=True)
class Activations:
    """Bytes of one sample by unit, ``kept`` for backward as they come, of which ``inside`` its blocks; ``inputs`` of those
    blocks, which is what checkpointing keeps instead; ``blocks``: what one block of the unit keeps at most. ``how``:
    "traced" or "formula"."""

    kept: Mapping[str, int]
    inside: Mapping[str, int] = field(default_factory=dict)
    inputs: Mapping[str, int] = field(default_factory=dict)
    blocks: Mapping[str, int] = field(default_factory=dict)
    how: str = "traced"

    def saved(self, batch: int, recompute: bool) -> Saved:
        """What a micro-batch of ``batch`` samples leaves, with every block computed again in backward or not."""
        if not recompute:
            return Saved({unit: size * batch for unit, size in self.kept.items()})
        kept = {
            unit: (size - self.inside.get(unit, 0) + self.inputs.get(unit, 0)) * batch for unit, size in self.kept.items()
        }
        return Saved(kept, {unit: size * batch for unit, size in self.blocks.items()})


# Closed formulas


def layer_bytes(shape: Shape, seq: int, width: int = 2, attention: str = "flash", dropout: bool = True) -> int:
    """Bytes that one transformer layer keeps for backward of one sequence: ``s h (34 + 5 a s / h)`` with elements of
    ``width`` 2 and dropout (Korthikanti et al. 2022, equation 2), of which dropout's masks are 2 s h + a s^2.

    Without dropout it is ``2 s (16 h + 2 a s)``, as ZeRO-Infinity has it (Rajbhandari et al. 2021, equation 5). Flash
    attention keeps nothing of size s^2 but one float32 per row of the scores.
    """
    s, h, a = seq, shape.hidden, shape.heads
    linear = s * h * (16 * width + (2 if dropout else 0))
    if attention == "flash":
        return linear + 4 * a * s
    # Softmax, what dropout makes of it, and dropout's mask; without dropout scores and softmax.
    return linear + a * s * s * (2 * width + (1 if dropout else 0))


def by_formula(
    shape: Shape, units: tuple[str, ...], seq: int, dtype: str | None, attention: str = "flash", dropout: bool = True
) -> Activations:
    """:func:`layer_bytes` for every unit that is called by a number in a list ("blocks.0"), a share of it
    each where there are more or fewer of them than layers; and ``4 s (h + v)`` for the last norm, logits and loss
    (Korthikanti et al. 2022, section 4.3).
    """
    width = itemsize(dtype or "float32")
    blocks = [unit for unit in units if unit.rpartition(".")[2].isdigit()]
    if not blocks:
        return Activations({}, how="formula")
    whole = layer_bytes(shape, seq, width, attention, dropout) * shape.layers
    each = {unit: whole // len(blocks) for unit in blocks}
    layer_input = width * seq * shape.hidden * shape.layers // len(blocks)
    one = layer_bytes(shape, seq, width, attention, dropout)
    head = {units[0]: 4 * seq * (shape.hidden + shape.vocab)} if units[0] not in each else {}
    return Activations({**head, **each}, each, dict.fromkeys(each, layer_input), dict.fromkeys(each, one), "formula")


# Tracing


class _Attention(torch.autograd.Function):
    """What a flash kernel keeps of ``scaled_dot_product_attention``: its inputs, its output and a float32 per row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # Kernels lay their output out by tokens, so that joining the heads after is no copy.
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        if out.dim() == 4:
            batch, heads, tokens, width = out.shape
            out = query.new_empty(batch, tokens, heads, width).transpose(1, 2)
        rows = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, out, rows)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError("a trace has no backward")


class _OnMeta(TorchFunctionMode):
    """What the meta device cannot do by itself.

    Attention is replaced by what a flash kernel keeps of it: torch would take it apart. Questions about values, such as
    whether all of a mask is 1, are answered as for a batch without padding: everything is, nothing is not.
    """

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self._flash = flash
        self._no: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._flash and func is F.scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
            return _Attention.apply(named["query"], named["key"], named["value"])  # type: ignore[no-untyped-call]
        if func is Tensor.__bool__ and args[0].device.type == "meta":
            return not any(args[0] is no for no in self._no)
        out = func(*args, **kwargs)
        if func in (Tensor.any, torch.any) and isinstance(out, Tensor):
            self._no.append(out)
        return out


class _Count:
    """Distinct storages saved, by the unit that ran last."""

    def __init__(self, home: dict[nn.Module, str], blocks: set[nn.Module]) -> None:
        self._seen: set[int] = set()
        self._alive: list[Any] = []  # storages whose addresses are in _seen
        self._home = home
        self._are_blocks = blocks
        self._last = next(iter(home.values()), "")
        self._before = 0
        self.kept = dict.fromkeys(home.values(), 0)
        self.inside: dict[str, int] = {}
        self.inputs: dict[str, int] = {}
        self.blocks: dict[str, int] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "meta" and (size := self._fresh(tensor)):
            self.kept[self._last] += size
        return tensor

    def _fresh(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata in self._seen:
            return 0
        self._seen.add(storage._cdata)
        self._alive.append(storage)
        return int(storage.nbytes())

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._last = self._home[module]
        if module in self._are_blocks:
            tensors = [value for value in (*args[:1], kwargs.get("hidden_states")) if isinstance(value, Tensor)]
            size = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
            self.inputs[self._last] = self.inputs.get(self._last, 0) + size
            self._before = self.kept[self._last]

    def leave(self, module: nn.Module, *_: Any) -> None:
        if module in self._are_blocks:
            own, unit = self.kept[self._home[module]] - self._before, self._home[module]
            self.inside[unit] = self.inside.get(unit, 0) + own
            self.blocks[unit] = max(self.blocks.get(unit, 0), own)


def trace(built: Built, plan: Plan, seq: int, attention: str = "flash") -> Activations:
    """The activations of one sample of ``seq`` tokens, from a forward of the model on the meta device in the plan's dtype.

    ``attention="eager"`` leaves attention to the model. Raises :class:`PlanError` when its forward cannot run there.
    """
    if built.inputs is None:
        raise PlanError(f"{built.name} takes inputs that are not known, so its forward cannot be traced")
    units = find_units(built.model, plan.units)
    home = {entry: unit.name for unit in units for entry in unit.entries}
    blocks = {child for child in _blocks(built.model) if child in home}
    dtype = getattr(torch, plan.precision.dtype) if plan.precision.dtype else None
    count = _Count(home, blocks)
    given = built.inputs(1, seq)
    args, kwargs = ((), dict(given)) if isinstance(given, Mapping) else (given, {})
    with ExitStack() as stack:
        stack.enter_context(_in_dtype(built.model, dtype, count))
        for module in home:
            stack.callback(module.register_forward_pre_hook(count.enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(count.leave).remove)
        stack.enter_context(_OnMeta(attention == "flash"))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(count.pack, lambda tensor: tensor))
        try:
            built.model(*args, **kwargs)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError) as error:
            raise PlanError(f"the forward of {built.name} cannot run on the meta device: {error}") from error
    return Activations(count.kept, count.inside, count.inputs, count.blocks)


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The children of lists of blocks, which checkpointing drops and computes again one at a time."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            yield from module


@contextmanager
def _in_dtype(model: nn.Module, dtype: torch.dtype | None, count: _Count) -> Iterator[None]:
    """Within the context parameters and buffers are on meta, floating-point ones in ``dtype``, and not counted."""
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
            count._fresh(made[id(value)])
        store[name] = made[id(value)]
    try:
        yield
    finally:
        for (_, name), (store, value) in kept.items():
            store[name] = value
