"""``deepspeed.runtime.zero.stage_1_and_2``: the class of the optimizer at these stages, by which programs know it."""

from onecopy.deepspeed.runtime.base_optimizer import DeepSpeedZeroOptimizer

__all__ = ["DeepSpeedZeroOptimizer"]
