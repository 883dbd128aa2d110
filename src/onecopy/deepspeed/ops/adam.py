"""``deepspeed.ops.adam``: Adam and AdamW under DeepSpeed's names, with its arguments and defaults."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from onecopy.plan.plan import Recipe
from onecopy.recipes import build_optimizer

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


def DeepSpeedCPUAdam(
    model_params: Iterable[Any],
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """``torch.optim.AdamW``, or ``torch.optim.Adam`` (decay added to the gradient) with ``adamw_mode=False``, fused.

    It runs where the plan keeps its states, the device as well. Raises :class:`~onecopy.errors.ConfigError` for a value
    out of range, and for ``bias_correction`` or ``fp32_optimizer_states`` that are false.
    """
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
    modes = {
        "adamw_mode": adamw_mode,
        "bias_correction": bias_correction,
        "fp32_optimizer_states": fp32_optimizer_states,
    }
    return build_optimizer(Recipe("Adam", {**options, **modes}), model_params)


def FusedAdam(
    params: Iterable[Any],
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    set_grad_none: bool = True,
) -> torch.optim.Optimizer:
    """:func:`DeepSpeedCPUAdam` with the arguments in another order. ``set_grad_none`` has no effect: gradients are freed
    after every step."""
    return DeepSpeedCPUAdam(params, lr, bias_correction, betas, eps, weight_decay, amsgrad, adam_w_mode)
