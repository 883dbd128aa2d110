"""Build the optimizer and the learning-rate schedule that a configuration names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import lr_scheduler as torch_schedules

from onecopy import schedules
from onecopy.errors import ConfigError
from onecopy.plan.plan import Recipe
from onecopy.plan.recipe import SCHEDULES, choose_optimizer, choose_schedule

__all__ = ["build_optimizer", "build_scheduler"]

_FUSED_ON = ("cpu", "cuda")


def build_optimizer(recipe: Recipe, params: Iterable[Any]) -> torch.optim.Optimizer:
    """The torch optimizer that ``recipe`` names, on ``params`` (parameters, named parameters or group dicts).

    Adam and AdamW use torch's fused kernel where it exists unless the recipe sets ``fused`` or ``foreach``.
    Raises :class:`ConfigError` for an unknown name, key or value.
    """
    chosen = choose_optimizer(recipe)
    params = list(params)
    if not params:
        raise ConfigError(f"optimizer {recipe.type!r} got no parameters; does any require a gradient?")
    arguments = dict(chosen.arguments)
    open_choice = chosen.name in ("Adam", "AdamW") and not {"fused", "foreach", "capturable"} & set(arguments)
    if open_choice and all(p.is_floating_point() and p.device.type in _FUSED_ON for p in _tensors(params)):
        # Nothing is said otherwise: parameters on the meta device now may be stepped on the host.
        arguments["fused"] = True
    kind: type[torch.optim.Optimizer] = getattr(torch.optim, chosen.name)
    return kind(params, **arguments)


def _tensors(params: Iterable[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for item in params:
        if isinstance(item, dict):
            inner = item["params"]
            found += _tensors([inner] if isinstance(inner, torch.Tensor) else inner)
        else:
            found.append(item[1] if isinstance(item, tuple) else item)
    return found


def build_scheduler(recipe: Recipe, optimizer: torch.optim.Optimizer) -> torch_schedules.LRScheduler:
    """The learning-rate schedule that ``recipe`` names, on ``optimizer``; raises :class:`ConfigError` as above."""
    chosen = choose_schedule(recipe)
    home = schedules if chosen.name in SCHEDULES else torch_schedules
    kind: type[torch_schedules.LRScheduler] = getattr(home, chosen.name)
    try:
        return kind(optimizer, **chosen.arguments)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"scheduler {recipe.type!r} with {chosen.arguments}: {error}") from error
