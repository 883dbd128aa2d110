"""``deepspeed.ops.adam``: Adam and AdamW under DeepSpeed's names, with its arguments and defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.optim.adam import adam

from onecopy.plan.plan import Recipe
from onecopy.recipes import build_optimizer

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


class _WideStates:
    """Over torch's Adam or AdamW: parameters narrower than fp32 get moments in fp32, and are stepped in it and rounded once.

    Its subclasses have the names of torch's classes, and are those to a checkpoint: an engine's weights they step as torch.
    """

    param_groups: list[dict[str, Any]]
    state: dict[torch.Tensor, dict[str, Any]]
    _given: frozenset[int] = frozenset()  # ids of the narrow parameters that the caller gave

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, and give its narrow parameters wide moments."""
        super().add_param_group(param_group)  # type: ignore[misc]
        self.widen()

    def widen(self) -> None:
        """From now on, keep wide moments of the narrow parameters that are here."""
        params = [param for group in self.param_groups for param in group["params"]]
        self._given = frozenset(id(param) for param in params if param.dtype.itemsize < 4)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what ``closure`` does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        narrow = {}
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and self._is_wide(param):
                    narrow[param] = param.grad
                    self._step_wide(param, param.grad.float(), group)
                    param.grad = None  # torch's step passes it by
        try:
            super().step()  # type: ignore[misc]
        finally:
            for param, grad in narrow.items():
                param.grad = grad
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what ``state_dict()`` gave, in the dtypes that it has there: torch's narrows moments to the weights'."""
        super().load_state_dict(state_dict)  # type: ignore[misc]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, torch.Tensor) and value.dtype != self.state[param][key].dtype:
                    self.state[param][key] = value.to(self.state[param][key].device, copy=True)

    def _is_wide(self, param: torch.Tensor) -> bool:
        """Are moments of ``param`` wider than it is? What an engine puts in its place is stepped as its plan says."""
        state = self.state.get(param)
        return state["exp_avg"].dtype != param.dtype if state else id(param) in self._given

    def _step_wide(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        wide = param.float()
        if not state:
            keys = ["exp_avg", "exp_avg_sq"] + (["max_exp_avg_sq"] if group["amsgrad"] else [])
            state["step"] = torch.zeros((), device=param.device if group["fused"] or group["capturable"] else "cpu")
            state |= {key: torch.zeros_like(wide, memory_format=torch.preserve_format) for key in keys}
        beta1, beta2 = group["betas"]
        same = "amsgrad lr weight_decay eps maximize foreach fused capturable decoupled_weight_decay".split()
        adam(
            [wide], [grad], [state["exp_avg"]], [state["exp_avg_sq"]],
            [state["max_exp_avg_sq"]] if group["amsgrad"] else [], [state["step"]],
            beta1=beta1, beta2=beta2, **{key: group[key] for key in same},
        )  # fmt: skip
        param.copy_(wide)


_ADAMS = (torch.optim.Adam, torch.optim.AdamW)
_WIDE: dict[type, type] = {kind: type(kind.__name__, (_WideStates, kind), {}) for kind in _ADAMS}


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

    It runs where the plan keeps its states, the device as well. Moments of parameters in bf16 or fp16 are in fp32, and with
    ``fp32_optimizer_states=False`` in the parameters' dtype; an engine steps fp32 masters, or what its plan says. Raises
    :class:`~onecopy.errors.ConfigError` for a value out of range, and for ``bias_correction`` that is false.
    """
    options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
    modes = {"adamw_mode": adamw_mode, "bias_correction": bias_correction}
    made: Any = build_optimizer(Recipe("Adam", {**options, **modes}), model_params)
    params = [param for group in made.param_groups for param in group["params"]]
    if fp32_optimizer_states and any(param.dtype.itemsize < 4 for param in params):
        made.__class__ = _WIDE[type(made)]
        made.widen()
    return made  # type: ignore[no-any-return]


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
