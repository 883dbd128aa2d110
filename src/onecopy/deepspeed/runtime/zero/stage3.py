"""``deepspeed.runtime.zero.stage3``: the class of the optimizer at this stage, by which programs know it."""

from onecopy.deepspeed.runtime.base_optimizer import DeepSpeedZeroOptimizer_Stage3

__all__ = ["DeepSpeedZeroOptimizer_Stage3"]
