"""``deepspeed.ops.adagrad``: Adagrad under DeepSpeed's name, with its arguments and defaults."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from onecopy.errors import ConfigError
from onecopy.plan.plan import Recipe
from onecopy.recipes import build_optimizer

__all__ = ["DeepSpeedCPUAdagrad"]


def DeepSpeedCPUAdagrad(
    model_params: Iterable[Any],
    lr: float = 1e-2,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """``torch.optim.Adagrad``. Raises :class:`~onecopy.errors.ConfigError` for a value out of range, and for ``amsgrad``
    or states that are not fp32, which Adagrad does not have."""
    if amsgrad or not fp32_optimizer_states:
        raise ConfigError(
            f"DeepSpeedCPUAdagrad(amsgrad={amsgrad}, fp32_optimizer_states={fp32_optimizer_states}); Adagrad has no amsgrad, "
            "and its sums have the dtype of the master weights: leave both out"
        )
    return build_optimizer(Recipe("Adagrad", {"lr": lr, "eps": eps, "weight_decay": weight_decay}), model_params)
