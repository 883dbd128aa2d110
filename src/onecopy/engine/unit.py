"""Units: which parameters are gathered together, found without annotations.

Blocks first (the children of ``ModuleList``s that repeat one class, or classes the plan names), then what is left, module
by module, in the order of registration. Neighbours are merged until a unit is worth a collective. The experts of a
block stay inside their block's unit, so that ranks which route differently still issue the same collectives.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from onecopy.engine.quantised import packed
from onecopy.errors import PlanError
from onecopy.plan.layout import ParamFact, UnitFact
from onecopy.plan.plan import Units

__all__ = ["UnitModules", "find_units", "named_modules", "named_parameters", "unwrapped"]

# What torch.compile and activation checkpointing name the module they wrap. No model has these names by itself; data
# parallel wrappers say "module", which many a model says too, so those are known by their type.
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def _inner(module: nn.Module) -> nn.Module | None:
    """The module that ``module`` only wraps; None when it has anything of its own."""
    children = module._modules
    if len(children) != 1 or module._parameters or module._buffers:
        return None
    key, child = next(iter(children.items()))
    return child if key in _WRAPPED or (key == "module" and isinstance(module, _PARALLEL)) else None


def unwrapped(module: nn.Module) -> nn.Module:
    """What is inside of the wrappers around ``module``; itself where there are none."""
    while (inner := _inner(module)) is not None:
        module = inner
    return module


def _bare(path: str, module: nn.Module, key: str) -> str:
    """The name of what ``module``, called ``path``, has as ``key``: without the prefix that a wrapper adds."""
    if _inner(module) is not None:
        return path
    return f"{path}.{key}" if path else key


def named_modules(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module of ``model`` under every bare name it has; a wrapper has the name of what it wraps."""
    yield path, model
    for key, child in model._modules.items():
        if child is not None:
            yield from named_modules(child, _bare(path, model, key))


def named_parameters(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Every parameter of ``model`` once, with all its bare names (several when weights are tied)."""
    names: dict[nn.Parameter, list[str]] = {}
    for path, module in named_modules(model):
        for key, param in module._parameters.items():
            name = _bare(path, module, key)
            if param is not None and name not in names.setdefault(param, []):
                names[param].append(name)
    return names


@dataclass
class UnitModules:
    """A unit in the model: its parameters, and the ``entries``, the modules whose forward uses them."""

    name: str
    params: list[nn.Parameter] = field(default_factory=list)
    entries: list[nn.Module] = field(default_factory=list)
    spans: bool = False

    def numel(self) -> int:
        return sum(param.numel() for param in self.params)

    def fact(self, names: dict[nn.Parameter, list[str]], dtype: torch.dtype | None) -> UnitFact:
        """What the plan must know of this unit once floating-point parameters are cast to ``dtype``."""
        facts = tuple(param_fact(param, names[param], dtype) for param in self.params)
        return UnitFact(self.name, facts, self.spans)


def param_fact(param: nn.Parameter, names: list[str], dtype: torch.dtype | None) -> ParamFact:
    """What the plan must know of ``param``; ``dtype``: what floating-point parameters are cast to, but for those that only
    store the bits of others."""
    cast = dtype if dtype is not None and param.is_floating_point() and not packed(param) else param.dtype
    return ParamFact(tuple(names), tuple(param.shape), str(cast).removeprefix("torch."), param.requires_grad)


def find_units(model: nn.Module, policy: Units) -> list[UnitModules]:
    """Group ``model``'s parameters into units, in the order in which the model registers them.

    Each parameter is in exactly one unit, the first that reaches it; a module elsewhere that uses it too (a tied head)
    becomes an entry of that unit.
    """
    if next(model.parameters(), None) is None:
        raise PlanError(f"the model, a {type(model).__name__}, has no parameters: there is nothing to shard or train")
    units: list[UnitModules] = []
    home: dict[nn.Parameter, UnitModules] = {}
    root = unwrapped(model)
    _refuse_unknown(model, policy.blocks or ())
    for name, entry, members in _candidates(model, "", policy.blocks):
        fresh = [param for param in members if param not in home]
        for param in members:
            if param in home and entry not in home[param].entries:
                home[param].entries.append(entry)
        if not fresh:
            continue
        unit = _unit_for(units, entry is root, policy)
        if unit is None:
            unit = UnitModules(name or "root")
            units.append(unit)
        unit.params.extend(fresh)
        if entry not in unit.entries:
            unit.entries.append(entry)
        home.update((param, unit) for param in fresh)
    _mark_spans(model, units)
    return units


def _refuse_unknown(model: nn.Module, blocks: tuple[str, ...]) -> None:
    """A block class that the model has not got is a slip, and its layers would be units of another size."""
    known = sorted({type(module).__name__ for module in model.modules()})
    for block in blocks:
        if block not in known:
            near = difflib.get_close_matches(block, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {known}"
            raise PlanError(f"units.blocks names {block!r}, a class that no module of the model has; {hint}")


def _mark_spans(model: nn.Module, units: list[UnitModules]) -> None:
    """A unit spans when one of its entries comes after the first entry of the next unit, or is the root itself."""
    place = {module: at for at, module in enumerate(model.modules())}
    for unit, following in zip(units, [*units[1:], None], strict=True):
        last = max(place[entry] for entry in unit.entries)
        after = min(place[entry] for entry in following.entries) if following is not None else len(place)
        unit.spans = unwrapped(model) in unit.entries or last > after


def _unit_for(units: list[UnitModules], is_root: bool, policy: Units) -> UnitModules | None:
    """The previous unit when it is still too small to be worth a collective of its own.

    Parameters that the root module itself owns are used all through the forward pass: they stay apart, or everything
    merged with them would be held as long.
    """
    if not units or is_root or units[-1].name == "root":
        return None
    return units[-1] if units[-1].numel() < policy.min_numel else None


Candidate = tuple[str, nn.Module, list[nn.Parameter]]


def _candidates(module: nn.Module, name: str, blocks: tuple[str, ...] | None) -> Iterator[Candidate]:
    """``(name, entry, parameters)`` depth first; nothing inside a block is listed again.

    Experts belong to the module that routes to them: a rank may call none of them, but it calls that.
    """
    own = list(module.parameters(recurse=False))
    if own:
        yield name, module, own
    for key, child in module.named_children():
        path = _bare(name, module, key)
        if _are_experts(child, path):
            yield path, module, list(child.parameters())
        elif blocks is None and _repeats(unwrapped(child)):
            for index, block in unwrapped(child).named_children():
                yield f"{path}.{index}", block, list(block.parameters())
        elif blocks is not None and type(unwrapped(child)).__name__ in blocks:
            yield path, child, list(child.parameters())
        else:
            yield from _candidates(child, path, blocks)


def _are_experts(module: nn.Module, name: str) -> bool:
    container = isinstance(unwrapped(module), nn.ModuleList | nn.ModuleDict)
    return container and "expert" in name.rpartition(".")[2].lower()


def _repeats(module: nn.Module) -> bool:
    """Is ``module`` a list of blocks of one class?"""
    if not isinstance(module, nn.ModuleList) or len(module) < 2:
        return False
    kinds = {type(unwrapped(child)) for child in module}
    return len(kinds) == 1 and any(True for _ in module[0].parameters())
