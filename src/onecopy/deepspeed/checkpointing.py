"""``deepspeed.checkpointing``: activation checkpointing, which is torch's own here."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from onecopy.deepspeed.utils import logger
from onecopy.plan.config import read_config

__all__ = ["CheckpointFunction", "checkpoint", "configure", "follow", "is_configured", "reset"]

_configured = False
_in_cpu = False
# Arguments of configure that change no number, and why they do nothing here.
_IDLE = {
    "partition_activations": "they are divided over tensor-parallel ranks, and every rank is data-parallel",
    "contiguous_checkpointing": "each block's inputs are kept as they are",
    "synchronize": "no timer stops the device",
    "profile": "no timer stops the device",
}


def configure(
    mpu_: Any = None,
    deepspeed_config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Say how :func:`checkpoint` keeps what backward starts from again. ``checkpoint_in_cpu``: in host memory; by default
    as ``activation_checkpointing.cpu_checkpointing`` of ``deepspeed_config`` says. What else is asked for is named in the
    log: it changes no number, and nothing here."""
    global _configured, _in_cpu
    _configured = True
    if deepspeed_config is not None:
        follow(read_config(deepspeed_config))
    if checkpoint_in_cpu is not None:
        _in_cpu = checkpoint_in_cpu
    asked = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "synchronize": synchronize,
        "profile": profile,
    }
    if said := [f"{name} ({_IDLE[name]})" for name, value in asked.items() if value]:
        logger.warning("checkpointing.configure: of no effect here: %s", "; ".join(said))


def follow(config: Mapping[str, Any]) -> None:
    """Do what the section ``activation_checkpointing`` of ``config`` says, where there is one."""
    global _in_cpu
    section = config.get("activation_checkpointing")
    if isinstance(section, Mapping) and "cpu_checkpointing" in section:
        _in_cpu = section["cpu_checkpointing"] is True


def is_configured() -> bool:
    """Was :func:`configure` called?"""
    return _configured


def reset() -> None:
    """Nothing is kept between steps."""


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)``, whose activations are recomputed in backward; random numbers come again as they were.

    What is kept are the tensors among ``args``: in host memory, pinned where there is an accelerator, after
    ``configure(checkpoint_in_cpu=True)``. Torch's checkpoint gives them to the hooks around it, and nothing else.
    """
    found = torch.accelerator.current_accelerator() if _in_cpu and torch.accelerator.is_available() else None
    moved = save_on_cpu(pin_memory=True, device_type=found.type) if found is not None else contextlib.nullcontext()
    with moved:
        return torch_checkpoint(function, *args, use_reentrant=False)


class CheckpointFunction:
    """:func:`checkpoint` as ``CheckpointFunction.apply(function, all_outputs, *args)``."""

    @staticmethod
    def apply(function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        """The results, which are appended to ``all_outputs`` too."""
        found = checkpoint(function, *args)
        all_outputs += list(found) if isinstance(found, tuple) else [found]
        return found
