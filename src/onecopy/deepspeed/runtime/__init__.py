"""``deepspeed.runtime``."""

from onecopy.deepspeed.runtime import base_optimizer, dataloader, engine, lr_schedules, zero

__all__ = ["base_optimizer", "dataloader", "engine", "lr_schedules", "zero"]
