"""``deepspeed.ops.lion``: Lion (Chen et al. 2023, algorithm 2), which torch does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from onecopy.errors import ConfigError

__all__ = ["DeepSpeedCPULion", "FusedLion", "Lion"]


class Lion(torch.optim.Optimizer):
    """``p -= lr * (sign(b1 * m + (1 - b1) * g) + weight_decay * p)``, then ``m = b2 * m + (1 - b2) * g``.

    One state, ``exp_avg``, of the parameter's dtype. Elementwise, so it runs on shards as it does on whole tensors.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: Sequence[float] = (0.9, 0.999), weight_decay: float = 0.0
    ) -> None:
        """Raises :class:`ConfigError` for a rate or decay below 0, and for betas outside [0, 1)."""
        if not (lr >= 0 and weight_decay >= 0 and len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
            raise ConfigError(
                f"Lion(lr={lr}, betas={tuple(betas)}, weight_decay={weight_decay}): lr and weight_decay are from 0, and two "
                "betas from 0 to below 1"
            )
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what ``closure`` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rate, (fast, slow) = group["lr"], group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                moment = state["exp_avg"]
                update = torch.lerp(param.grad, moment, fast).sign_()
                if group["weight_decay"]:
                    param.mul_(1 - rate * group["weight_decay"])
                param.sub_(update, alpha=float(rate))
                moment.lerp_(param.grad, 1 - slow)
        return loss


def DeepSpeedCPULion(
    model_params: Iterable[Any],
    lr: float = 1e-3,
    betas: Sequence[float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """:class:`Lion`. Raises :class:`ConfigError` for states that are not of the master weights' dtype."""
    if not fp32_optimizer_states:
        raise ConfigError("DeepSpeedCPULion(fp32_optimizer_states=False): the state has the dtype of the master weights")
    return Lion(model_params, lr, betas, weight_decay)


def FusedLion(
    params: Iterable[Any],
    lr: float = 1e-3,
    betas: Sequence[float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    set_grad_none: bool = True,
) -> torch.optim.Optimizer:
    """:class:`Lion`. ``set_grad_none`` has no effect: gradients are freed after every step."""
    return Lion(params, lr, betas, weight_decay)
