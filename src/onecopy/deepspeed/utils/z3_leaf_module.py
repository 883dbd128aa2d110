"""``deepspeed.utils.z3_leaf_module``: blocks whose parameters are gathered together whichever of them run."""

from __future__ import annotations

from torch import nn

__all__ = ["get_z3_leaf_modules", "set_z3_leaf_module", "set_z3_leaf_modules", "unset_z3_leaf_modules", "z3_leaf_module"]

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


def _names_of(kind: type) -> set[str]:
    return {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}


def _set(model: nn.Module, leaf_module_classes: list[type] | list[str], flag: bool) -> list[nn.Module]:
    names = {each for each in leaf_module_classes if isinstance(each, str)}
    kinds = tuple(each for each in leaf_module_classes if isinstance(each, type))
    wrong = [each for each in leaf_module_classes if not isinstance(each, str | type)]
    if wrong:
        raise TypeError(f"leaf modules are classes, or names of classes; got {wrong[0]!r}")
    found = [module for module in model.modules() if isinstance(module, kinds) or names & _names_of(type(module))]
    if not found:
        raise ValueError(f"no module of {type(model).__name__} is one of {leaf_module_classes}")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: list[type] | list[str]) -> list[nn.Module]:
    """Mark the modules of these classes (or class names), and return them. Raises ValueError when there is none.

    A unit is gathered as a whole here anyway, experts with the block they are in: the mark says so to those who ask.
    """
    return _set(model, leaf_module_classes, True)


def unset_z3_leaf_modules(model: nn.Module, leaf_module_classes: list[type] | list[str]) -> list[nn.Module]:
    """Take the mark away again."""
    return _set(model, leaf_module_classes, False)
