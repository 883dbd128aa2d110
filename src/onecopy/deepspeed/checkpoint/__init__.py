"""``deepspeed.checkpoint``."""

from onecopy.deepspeed.checkpoint import constants, utils

__all__ = ["constants", "utils"]
