"""``deepspeed.runtime.engine``."""

from onecopy.deepspeed.engine import DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
