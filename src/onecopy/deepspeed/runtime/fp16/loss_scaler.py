"""``deepspeed.runtime.fp16.loss_scaler``: the classes that DeepSpeed's checkpoints hold, pickled.

The engine scales with its own :class:`onecopy.engine.precision.LossScaler`; these carry the numbers of a file.
"""

from __future__ import annotations

__all__ = ["DynamicLossScaler", "LossScaler", "LossScalerBase"]


class LossScalerBase:
    """A scale and what it was set to."""

    def __init__(self, cur_scale: float) -> None:
        self.cur_scale = float(cur_scale)
        self.dynamic = False

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied with."""
        return self.cur_scale


class LossScaler(LossScalerBase):
    """A scale that stays."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(scale)


class DynamicLossScaler(LossScalerBase):
    """A scale that halves when gradients overflow and doubles after ``scale_window`` steps without."""

    def __init__(
        self,
        init_scale: float = 2.0**32,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
        min_scale: float = 1.0,
        delayed_shift: int = 1,
        consecutive_hysteresis: bool = False,
    ) -> None:
        super().__init__(init_scale)
        self.scale_factor, self.scale_window, self.min_scale = scale_factor, scale_window, min_scale
        self.delayed_shift, self.consecutive_hysteresis = delayed_shift, consecutive_hysteresis
        self.cur_iter, self.last_overflow_iter, self.cur_hysteresis = 0, -1, delayed_shift
        self.dynamic = True
