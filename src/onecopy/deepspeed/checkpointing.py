"""``deepspeed.checkpointing``: activation checkpointing, which is torch's own here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint

from onecopy.errors import ConfigError

__all__ = ["CheckpointFunction", "checkpoint", "configure", "is_configured", "reset"]

_configured = False


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Say how activations are checkpointed: recomputed, all of them. Raises :class:`ConfigError` for what is not done:
    activations that are cut over model-parallel ranks, kept in one buffer or moved to the host, and timers."""
    global _configured
    asked = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "synchronize": synchronize,
        "profile": profile,
    }
    wrong = [f"{name}=True" for name, value in asked.items() if value]
    if wrong:
        raise ConfigError(
            f"checkpointing.configure({', '.join(wrong)}) is not supported: activations are recomputed from what is kept on "
            "the device; leave it out, or use torch.autograd.graph.save_on_cpu in the model"
        )
    _configured = True


def is_configured() -> bool:
    """Was :func:`configure` called?"""
    return _configured


def reset() -> None:
    """Nothing is kept between steps."""


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, whose activations are recomputed in backward; random numbers come again as they were."""
    return torch_checkpoint(function, *args, use_reentrant=False)


class CheckpointFunction:
    """:func:`checkpoint` as ``CheckpointFunction.apply(function, all_outputs, *args)``."""

    @staticmethod
    def apply(function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        """The results, which are appended to ``all_outputs`` too."""
        found = checkpoint(function, *args)
        all_outputs += list(found) if isinstance(found, tuple) else [found]
        return found
