"""``deepspeed.zero``: sharded construction and gathered reads under their DeepSpeed names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

import onecopy
from onecopy.comm.groups import world_size
from onecopy.deepspeed.comm import init_distributed, launched_ranks
from onecopy.errors import ConfigError
from onecopy.plan.config import DEEPSPEED, load_config

__all__ = ["GatheredParameters", "Init"]

_inside: ContextVar[bool] = ContextVar("inside_zero_init", default=False)


@contextlib.contextmanager
def Init(
    module: nn.Module | None = None,
    data_parallel_group: Any = None,
    mem_efficient_linear: bool = True,
    remote_device: str | None = None,
    pin_memory: bool = False,
    config_dict_or_path: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    enabled: bool = True,
    dtype: torch.dtype | None = None,
    mpu: Any = None,
) -> Iterator[None]:
    """Parameters of modules made inside are born sharded, with the values they would have unsharded.

    ``enabled=False`` makes ordinary parameters; a context inside another adds nothing. The process group is started
    first when the launcher's environment names several ranks, so that no rank holds the whole model by mistake. A
    config is checked here already. ``dtype``: floating-point dtype of what is made inside. ``mem_efficient_linear``
    and ``pin_memory`` have no effect. Raises :class:`ConfigError` for what this version does not do.
    """
    for name, value, instead in (
        ("module", module, "pass the finished module to initialize, which shards it"),
        ("data_parallel_group", data_parallel_group, "shard inside groups with zero_optimization.mics_shard_size"),
        ("mpu", mpu, "there is no model parallelism"),
        ("remote_device", None if remote_device in (None, "none") else remote_device, "nothing is offloaded"),
    ):
        if value is not None:
            raise ConfigError(f"zero.Init({name}=...) is not supported in this version: {instead}")
    if launched_ranks() > 1:
        init_distributed()
    for source in (config_dict_or_path, config):
        if source is not None:
            load_config(source, world_size(), defaults=DEEPSPEED)
    with contextlib.ExitStack() as stack:
        if dtype is not None:
            stack.enter_context(_default_dtype(dtype))
        if enabled and not _inside.get():
            stack.callback(_inside.reset, _inside.set(True))
            stack.enter_context(onecopy.deferred())
        yield


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def GatheredParameters(
    params: nn.Parameter | nn.Module | Iterable[nn.Parameter],
    modifier_rank: int | None = None,
    fwd_module: nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[None]:
    """The full values of ``params`` are readable inside; with ``modifier_rank`` that rank's edits become everybody's.

    ``params`` may be one parameter, a module, or any iterable, also empty, with repeats, and with parameters that no
    engine shards. ``fwd_module`` needs no registration here and has no effect. ``enabled=False`` does nothing.
    """
    if not enabled:
        yield
        return
    chosen: Any = params
    if isinstance(params, nn.Module):
        chosen = list(params.parameters())
    elif not isinstance(params, torch.Tensor):
        chosen = list({id(p): p for p in params}.values())
    with onecopy.gathered(chosen, write_rank=modifier_rank):
        yield
