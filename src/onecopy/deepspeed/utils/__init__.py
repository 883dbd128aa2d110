"""``deepspeed.utils``: tensors of parameters that are sharded, read and written.

``safe_get_full_*`` and ``safe_set_full_*`` are collective; ``safe_get_local_*`` and ``safe_set_local_*`` are about the
elements that this rank keeps, flat, of a parameter that is cut (stage 3). A frozen parameter is not trained: every
``safe_get_*`` of it is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn
from torch.distributed import is_initialized

import onecopy
from onecopy.deepspeed.runtime.dataloader import RepeatingLoader
from onecopy.deepspeed.utils import groups, logging
from onecopy.deepspeed.utils.logging import log_dist, log_dist_once, logger, set_log_level_from_string
from onecopy.deepspeed.utils.z3_leaf_module import (
    get_z3_leaf_modules,
    set_z3_leaf_module,
    set_z3_leaf_modules,
    set_z3_leaf_modules_by_name,
    set_z3_leaf_modules_by_suffix,
    unset_z3_leaf_modules,
    z3_leaf_module,
)
from onecopy.engine import local

__all__ = [
    "RepeatingLoader",
    "get_z3_leaf_modules",
    "groups",
    "is_initialized",
    "log_dist",
    "log_dist_once",
    "logger",
    "logging",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_log_level_from_string",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """The whole parameter from its fp32 master weights where it has some; fp32, ``param``'s shape."""
    return onecopy.full_param(param) if param.requires_grad else None


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """The whole gradient, averaged over ranks and accumulated so far; fp32. None where there is none."""
    return onecopy.full_grad(param) if param.requires_grad else None


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """The whole of an optimizer state such as ``"exp_avg"``; fp32. None before the optimizer has made it."""
    return onecopy.full_state(param, optim_state_key) if param.requires_grad else None


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Overwrite the whole parameter and its master weights with ``value``, which must be equal on every rank."""
    onecopy.set_full_param(param, value)


def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Overwrite the accumulated gradient with ``value``; norms, clipping and the step then use it."""
    onecopy.set_full_grad(param, value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Overwrite an optimizer state with ``value``."""
    onecopy.set_full_state(param, optim_state_key, value)


def safe_update_full_grad_vectorized(param_list: Iterable[nn.Parameter], update_func: Callable[..., Tensor]) -> None:
    """The gradient of each parameter becomes ``update_func(gradient, parameter)``, which must be the same on every rank."""
    for param in param_list:
        gradient = onecopy.full_grad(param) if param.requires_grad else None
        if gradient is not None:
            onecopy.set_full_grad(param, update_func(gradient, param))


def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """This rank's elements from the master weights where there are some; fp32."""
    return local.read_param(param) if param.requires_grad else None


def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Overwrite them, and the master weights."""
    local.write_param(param, value)


def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's elements of the gradient, averaged over ranks and accumulated so far; fp32. None where there is none."""
    return local.read_grad(param) if param.requires_grad else None


def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Overwrite them; norms, clipping and the step then use them."""
    local.write_grad(param, value)


def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """This rank's elements of an optimizer state such as ``"exp_avg"``; fp32. None before the optimizer has made it."""
    return local.read_state(param, optim_state_key) if param.requires_grad else None


def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Overwrite them."""
    local.write_state(param, optim_state_key, value)
