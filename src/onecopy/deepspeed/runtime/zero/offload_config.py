"""``deepspeed.runtime.zero.offload_config``: where states rest, by DeepSpeed's names."""

from __future__ import annotations

from enum import Enum

__all__ = ["OffloadDeviceEnum"]


class OffloadDeviceEnum(str, Enum):
    """Values of ``offload_optimizer.device`` and ``offload_param.device``."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"
