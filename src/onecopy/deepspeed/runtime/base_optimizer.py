"""``deepspeed.runtime.base_optimizer``: the optimizer that ``initialize`` returns.

It is the caller's torch optimizer seen through one object that also knows how the last step went. Stepping, clipping and
loss scaling are the engine's.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from onecopy.deepspeed.engine import DeepSpeedEngine

__all__ = [
    "DeepSpeedOptimizer", "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "ParameterOffload", "ZeROOptimizer",
]  # fmt: skip


class DeepSpeedOptimizer:
    """Base of what ``initialize`` returns as the optimizer."""


class ZeROOptimizer(DeepSpeedOptimizer, torch.optim.Optimizer):
    """The optimizer of an engine: parameter groups, states and everything else are those of ``optimizer``.

    Being a ``torch.optim.Optimizer`` by class it may be given to a learning-rate schedule, which then writes into the
    groups of the one that is stepped.
    """

    # A schedule made on this object asks whether it was stepped before the schedule; the engine steps the other one.
    _opt_called = True

    def __init__(self, optimizer: torch.optim.Optimizer, engine: DeepSpeedEngine) -> None:
        # Not Optimizer.__init__: the groups and states are the other's.
        self.optimizer = optimizer
        self._engine = weakref.ref(engine)

    def _of(self) -> DeepSpeedEngine:
        engine = self._engine()
        if engine is None:
            raise ReferenceError("the engine of this optimizer is gone")
        return engine

    @property
    def overflow(self) -> bool:
        """Was the last window skipped, because a gradient was not finite?"""
        return self._of().overflow

    @property
    def loss_scale(self) -> float:
        """What gradients are multiplied with on their way in; 1.0 unless fp16 is enabled."""
        return self._of().loss_scale

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Does the loss scale move?"""
        scale = self._of().plan.precision.loss_scale
        return scale is not None and scale.dynamic

    @property
    def clip_grad(self) -> float:
        """Largest global norm; 0 when gradients are not clipped."""
        return self._of().gradient_clipping()

    @property
    def parameter_offload(self) -> ParameterOffload:
        """The part that gathers parameters, where they are cut (stage 3)."""
        if not self._of().zero_optimization_partition_weights():
            raise AttributeError("parameter_offload: this stage does not cut parameters")
        return ParameterOffload(self._of().module)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the engine's: gradients are dropped by its ``step``."""
        self._of().zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """The engine's step. Raises TypeError for a closure, which would have to run the forward pass again."""
        if closure is not None:
            raise TypeError("the engine steps with the gradients that are there: no closure")
        self._of().step()

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """The engine's backward."""
        self._of().backward(loss, **options)

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "_engine"):  # not there yet
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"ZeROOptimizer({self.optimizer!r})"


class DeepSpeedZeroOptimizer(ZeROOptimizer):
    """Where the states of the optimizer are cut over the ranks and the parameters are not (stages 1 and 2)."""


class DeepSpeedZeroOptimizer_Stage3(ZeROOptimizer):
    """Where the parameters are cut as well (stage 3)."""


class ParameterOffload:
    """What generation helpers of RLHF trainers ask before they run a gathered model with the hooks off, and on after.

    The engine's hooks let a gathered parameter be, so there are none to take off: the lists are empty, no trace of a
    forward pass is kept that could become invalid, and registering again needs nothing.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []
        self.param_coordinator = _NoTrace()

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """The hooks are on it all the time."""


class _NoTrace:
    """The order of gathers is learned anew whenever it changes."""

    def is_invalid_trace(self) -> bool:
        return False

    def _invalidate_trace(self) -> None:
        """There is none."""
