"""What is planned for: a model that nobody builds (numbers alone), or one on the meta device.

Either gives the units that the engine would make of it, so that a prediction is a fold over the engine's own schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn

from onecopy.engine.unit import find_units, named_parameters
from onecopy.errors import PlanError
from onecopy.optim import probe
from onecopy.plan.layout import ParamFact, UnitFact
from onecopy.plan.plan import Plan
from onecopy.recipes import build_optimizer
from onecopy.schedule.lower import Facts

__all__ = ["ADAM", "Built", "Numbers", "Shape", "Subject", "facts", "facts_from_model", "facts_from_numbers"]

States = tuple[tuple[str, str | None], ...]
# What Adam and AdamW keep of each element, in the dtype of the weight they step.
ADAM: States = (("exp_avg", None), ("exp_avg_sq", None))


@dataclass(frozen=True)
class Shape:
    """A transformer's sizes, as closed formulas want them. ``assumed``: nobody gave them, they follow from the number of
    parameters."""

    layers: int
    hidden: int
    heads: int
    vocab: int = 0
    assumed: bool = False


class Subject(Protocol):
    """Something with parameters in units; ``shape`` is None where it is not known to be a transformer."""

    @property
    def name(self) -> str:
        """What to call it."""
        ...

    @property
    def shape(self) -> Shape | None:
        """Its sizes as a transformer."""
        ...

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        ...

    def units(self, plan: Plan) -> tuple[UnitFact, ...]:
        """The units that the engine makes of it under ``plan``."""
        ...

    def moments(self, plan: Plan) -> Mapping[str, States]:
        """By parameter, the states that the plan's optimizer keeps of it; AdamW's where the plan names none."""
        ...


def facts(subject: Subject, plan: Plan, world: int) -> Facts:
    """What :func:`onecopy.schedule.lower.lower` must know of ``subject`` on ``world`` ranks."""
    return Facts(subject.units(plan), plan.mesh(world), subject.moments(plan))


def _trained(tensors: list[nn.Parameter], plan: Plan) -> list[States]:
    """The states of each of ``tensors``, found by stepping small ones of each kind."""
    recipe = plan.optimizer
    if recipe is None:
        return [ADAM] * len(tensors)
    made = build_optimizer(recipe, tensors)
    found = probe(made, torch.device("cpu"))
    return [found[0] or ()] * len(tensors)


# Numbers alone

_MOST_UNITS = 100_000
# Layers that share weights or are narrow inside have fewer parameters than 12 layers hidden^2; ALBERT a seventh. Models of
# less than a million parameters are for trying out.
_TOO_LARGE, _REAL = 10, 10**6
# Blocks are multiples of this many elements where they are large, so that they divide evenly over any usual number of ranks
# (2^n, and 3 or 5 or 15 times that): what is over is one unit's.
_EVEN = (1 << 14) * 15


@dataclass(frozen=True)
class Numbers:
    """``count`` parameters in units of ``sizes``, made up: the first is the largest, the others are alike."""

    name: str
    sizes: tuple[tuple[str, int], ...]
    shape: Shape | None = None

    @property
    def parameters(self) -> int:
        return sum(size for _, size in self.sizes)

    def units(self, plan: Plan) -> tuple[UnitFact, ...]:
        dtype = plan.precision.dtype or "float32"
        return tuple(UnitFact(name, (ParamFact((f"{name}.weight",), (size,), dtype),)) for name, size in self.sizes)

    def moments(self, plan: Plan) -> Mapping[str, States]:
        states = _trained([nn.Parameter(torch.zeros(1))], plan)[0]
        return {f"{name}.weight": states for name, _ in self.sizes}


def facts_from_numbers(
    params: int, largest_unit: int | None = None, *, layers: int | None = None, hidden: int | None = None,
    vocab: int | None = None, heads: int | None = None,
) -> Numbers:  # fmt: skip
    """A made-up model of exactly ``params`` elements: embeddings of ``vocab`` x ``hidden`` (or ``largest_unit``) elements,
    and ``layers`` equal blocks of the rest.

    Without ``layers`` and ``hidden`` the shape is that of a usual decoder, ``params = 12 layers hidden^2`` with ``hidden =
    128 layers`` (as GPT-3 6.7B: 32 and 4096), and marked as assumed. Raises :class:`PlanError` for numbers that contradict
    each other.
    """
    given = {"layers": layers, "hidden": hidden, "vocab": vocab, "heads": heads}
    for what, value in {"params": params, "largest_unit": largest_unit, **given}.items():
        if value is not None and value < 1:
            raise PlanError(f"--{what.replace('_', '-')} {value}: it is a whole number from 1")
    if heads is not None and hidden is not None and hidden % heads:
        raise PlanError(f"--hidden {hidden} is not a multiple of --heads {heads}")
    shape = _shape(params, layers, hidden, vocab, heads)
    body = 12 * shape.layers * shape.hidden**2
    if layers is not None and hidden is not None and body > _TOO_LARGE * params >= _TOO_LARGE * _REAL:
        near = _shape(params, None, None, vocab, None)
        raise PlanError(
            f"--layers {layers} of --hidden {hidden} are about {body:,} parameters (12 layers hidden^2), not --params "
            f"{params:,}; a usual decoder of that many has {near.layers} layers of {near.hidden}"
        )
    count = max(shape.layers, -(-params // largest_unit) if largest_unit else 1)
    if count > _MOST_UNITS:
        options = [f"--{name} {value}" for name, value in given.items() if value is not None]
        said = ", ".join(options) or f"--largest-unit {largest_unit}"
        raise PlanError(f"--params {params} with {said} would be {count:,} units; give numbers of a model that there is")
    first = largest_unit if largest_unit is not None else shape.vocab * shape.hidden
    if first > params:
        embeddings = f"--vocab {vocab} x --hidden {shape.hidden} = {first}"
        what = f"--largest-unit {first}" if largest_unit is not None else embeddings
        raise PlanError(f"{what} is more than --params {params}; the largest unit is a part of the model")
    rest, count = params - first, shape.layers
    if largest_unit is not None and rest:
        count = max(count, -(-rest // largest_unit))
    block = rest // count
    even = block // _EVEN * _EVEN
    if block > 4 * _EVEN and (largest_unit is None or rest - even * count <= largest_unit):
        block = even
    sizes = [("embed", first + rest - block * count if first else rest - block * count)]
    if largest_unit is not None and sizes[0][1] > largest_unit:
        sizes = [("embed", first), ("rest", rest - block * count)]
    sizes += [(f"blocks.{index}", block) for index in range(count)]
    return Numbers(f"{params:,} parameters", tuple((name, size) for name, size in sizes if size), shape)


def _shape(params: int, layers: int | None, hidden: int | None, vocab: int | None, heads: int | None) -> Shape:
    assumed = layers is None or hidden is None
    body = max(params - (vocab or 0) * (hidden or 0), 1)
    if layers is None:
        layers = max(1, round(body / (12 * hidden**2)) if hidden else round((body / (12 * 128**2)) ** (1 / 3)))
    if hidden is None:
        hidden = max(128, round((body / (12 * layers)) ** 0.5 / 128) * 128)
    return Shape(layers, hidden, heads or max(1, hidden // 128), vocab or 0, assumed)


# Models


@dataclass
class Built:
    """A model on the meta device. ``inputs``: arguments of its forward for a batch and a sequence length, where known."""

    name: str
    model: nn.Module
    inputs: Callable[[int, int], Mapping[str, Any] | tuple[Any, ...]] | None = None
    shape: Shape | None = None
    states: dict[Any, dict[str, States]] = field(default_factory=dict)

    @cached_property
    def names(self) -> dict[nn.Parameter, list[str]]:
        """Every parameter with its names."""
        return named_parameters(self.model)

    @property
    def parameters(self) -> int:
        return sum(param.numel() for param in self.names)

    def units(self, plan: Plan) -> tuple[UnitFact, ...]:
        dtype = getattr(torch, plan.precision.dtype) if plan.precision.dtype else None
        return tuple(unit.fact(self.names, dtype) for unit in find_units(self.model, plan.units))

    def moments(self, plan: Plan) -> Mapping[str, States]:
        key = repr(plan.optimizer)
        if key not in self.states:
            trained = [param for param in self.names if param.requires_grad]
            found = _trained(trained, plan)
            self.states[key] = {self.names[param][0]: states for param, states in zip(trained, found, strict=True)}
        return self.states[key]


def facts_from_model(model: nn.Module, name: str | None = None, **known: Any) -> Built:
    """``model`` as something to plan for; ``known``: ``inputs`` and ``shape`` of :class:`Built`. Its values are not read."""
    if not isinstance(model, nn.Module):
        raise PlanError(f"a model is a torch module; got {type(model).__name__}")
    return Built(name or type(model).__name__, model, **known)
