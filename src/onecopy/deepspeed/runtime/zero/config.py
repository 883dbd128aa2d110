"""``deepspeed.runtime.zero.config``: the stages by number."""

from __future__ import annotations

from enum import Enum

__all__ = ["ZeroStageEnum"]


class ZeroStageEnum(int, Enum):
    """What is cut over the ranks. Checkpoints of DeepSpeed hold one, pickled."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3
