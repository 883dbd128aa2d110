"""``deepspeed.checkpoint``."""

from onecopy.deepspeed.checkpoint import utils

__all__ = ["utils"]
