"""``deepspeed.utils``: full tensors of parameters that are sharded, read and written. All of them are collective."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed import is_initialized

import onecopy
from onecopy.deepspeed.utils import groups, logging
from onecopy.deepspeed.utils.logging import log_dist, logger
from onecopy.deepspeed.utils.z3_leaf_module import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    unset_z3_leaf_modules,
    z3_leaf_module,
)

__all__ = [
    "get_z3_leaf_modules",
    "groups",
    "is_initialized",
    "log_dist",
    "logger",
    "logging",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The whole parameter from its fp32 master weights where it has some; fp32, ``param``'s shape."""
    return onecopy.full_param(param)


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The whole gradient, averaged over ranks and accumulated so far; fp32. None where there is none."""
    return onecopy.full_grad(param)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """The whole of an optimizer state such as ``"exp_avg"``; fp32. None before the optimizer has made it."""
    return onecopy.full_state(param, optim_state_key)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Overwrite the whole parameter and its master weights with ``value``, which must be equal on every rank."""
    onecopy.set_full_param(param, value)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Overwrite the accumulated gradient with ``value``; norms, clipping and the step then use it."""
    onecopy.set_full_grad(param, value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Overwrite an optimizer state with ``value``."""
    onecopy.set_full_state(param, optim_state_key, value)
