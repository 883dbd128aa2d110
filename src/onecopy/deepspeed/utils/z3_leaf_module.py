"""``deepspeed.utils.z3_leaf_module``: blocks whose parameters are gathered together whichever of them run.

A unit is gathered as a whole here anyway, experts with the block they are in: the mark says so to those who ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

__all__ = [
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]

_FLAG = "_z3_leaf"


def z3_leaf_module(model: nn.Module) -> bool:
    """Is ``model`` marked?"""
    return bool(getattr(model, _FLAG, False))


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The marked modules of ``model``."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark ``model`` itself."""
    setattr(model, _FLAG, flag)


def _mark(modules: Iterable[nn.Module], flag: bool) -> None:
    for module in modules:
        set_z3_leaf_module(module, flag)


def _names_of(kind: type) -> set[str]:
    return {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}


def _set(
    model: nn.Module, leaf_module_classes: list[type] | list[str], flag: bool, raise_if_not_found: bool
) -> list[nn.Module]:
    names = {each for each in leaf_module_classes if isinstance(each, str)}
    kinds = tuple(each for each in leaf_module_classes if isinstance(each, type))
    wrong = [each for each in leaf_module_classes if not isinstance(each, str | type)]
    if wrong:
        raise TypeError(f"leaf modules are classes, or names of classes; got {wrong[0]!r}")
    found = [module for module in model.modules() if isinstance(module, kinds) or names & _names_of(type(module))]
    if raise_if_not_found and not found:
        raise ValueError(f"no module of {type(model).__name__} is one of {leaf_module_classes}")
    _mark(found, flag)
    return found


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: list[type] | list[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of these classes (or class names), and return them. Raises ValueError when there is none, unless
    ``raise_if_not_found`` is false."""
    return _set(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: list[type] | list[str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the mark away again."""
    return _set(model, leaf_module_classes, False, raise_if_not_found)


def _set_named(
    model: nn.Module, wanted: list[str], fits: Callable[[str, str], bool], flag: bool, raise_if_not_found: bool
) -> tuple[list[nn.Module], list[str]]:
    """Mark what is called as ``fits(name, wanted)`` says; what was found, each once, and what of ``wanted`` was not. Nothing
    is marked when this raises."""
    named = dict(model.named_modules())
    found = {each: [module for name, module in named.items() if fits(name, each)] for each in wanted}
    missing = [each for each, modules in found.items() if not modules]
    if raise_if_not_found and missing:
        raise ValueError(f"no module of {type(model).__name__} is called {', '.join(map(repr, missing))}")
    modules = list(dict.fromkeys(module for each in found.values() for module in each))
    _mark(modules, flag)
    return modules, missing


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: list[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark (or unmark) the modules of these names in ``named_modules()``; those found, and the names that are none. Raises
    ValueError for such a name, unless ``raise_if_not_found`` is false."""
    return _set_named(model, module_names, str.__eq__, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: list[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """:func:`set_z3_leaf_modules_by_name` for all modules whose names end so."""
    return _set_named(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)
