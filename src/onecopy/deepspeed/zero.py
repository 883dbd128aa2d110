"""``deepspeed.zero``: sharded construction and gathered reads under their DeepSpeed names."""

from __future__ import annotations

import contextlib
import logging
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
from onecopy.plan.config import DEEPSPEED, load_config, read_config
from onecopy.plan.offload_keys import DEVICES
from onecopy.plan.plan import Plan

__all__ = ["GatheredParameters", "Init", "register_external_parameter", "unregister_external_parameter"]

_logger = logging.getLogger("onecopy")

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
    config is checked here already, but for what is still "auto". ``dtype``: floating-point dtype of what is made inside.
    ``remote_device`` ("cpu", "nvme"): shards are born in host memory, from where ``initialize`` takes them to where its
    configuration keeps them.
    ``mem_efficient_linear`` and ``pin_memory`` have no effect. Raises :class:`ConfigError` for what this version does not
    do, and for a ``remote_device`` that is not the config's ``offload_param.device``.
    """
    for name, value, instead in (
        ("module", module, "pass the finished module to initialize, which shards it"),
        ("data_parallel_group", data_parallel_group, "shard inside groups with zero_optimization.mics_shard_size"),
        ("mpu", mpu, "there is no model parallelism"),
    ):
        if value is not None:
            raise ConfigError(f"zero.Init({name}=...) is not supported in this version: {instead}")
    if launched_ranks() > 1:
        init_distributed()
    sources = [read_config(source) for source in (config_dict_or_path, config) if source is not None]
    given = [_settled(_without_training(source)) for source in sources]
    plans = [load_config(source, world_size(), defaults=DEEPSPEED) for source in given]
    away = _born_away(remote_device, plans)
    with contextlib.ExitStack() as stack:
        if dtype is not None:
            stack.enter_context(_default_dtype(dtype))
        if enabled and not _inside.get():
            stack.callback(_inside.reset, _inside.set(True))
            stack.enter_context(onecopy.deferred("cpu" if away else None))
        yield


def _without_training(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` without optimizer and scheduler: a trainer fills both in, and what is left of them then may be no whole."""
    return {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}


def _settled(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` without what is still "auto": a trainer fills it in by the time of ``initialize``, and none of it says
    where parameters are born."""
    found = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            found[key] = _settled(value)
        elif not (isinstance(value, str) and value == "auto"):
            found[key] = value
    return found


def _born_away(remote_device: str | None, plans: list[Plan]) -> bool:
    """Do parameters rest off the device? Raises :class:`ConfigError` when ``remote_device`` and the plan disagree."""
    remote = "none" if remote_device is None else remote_device
    if remote not in DEVICES:
        raise ConfigError(f"zero.Init(remote_device={remote_device!r}): it is None, 'none', 'cpu' or 'nvme'")
    tiers = {rule.row.parameter.rest.tier for plan in plans for rule in plan.rules}
    if DEVICES[remote] == "device":
        return bool(tiers - {"device"})
    if tiers and tiers != {DEVICES[remote]}:
        device = next(name for name, tier in DEVICES.items() if tiers == {tier})
        raise ConfigError(
            f"zero.Init(remote_device={remote!r}) and the config's zero_optimization.offload_param.device is {device!r}; "
            "leave remote_device out, the config decides"
        )
    if not tiers:
        _logger.warning(
            "zero.Init(remote_device=%r) without a config: the parameters are born in host memory, and rest where "
            "zero_optimization.offload_param of initialize's configuration says",
            remote,
        )
    return True


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


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Say that ``module``'s forward uses ``parameter`` of another module.

    It is gathered on use, said or not; ``module.ds_external_parameters()`` lists what was said. Raises TypeError for
    what is no parameter.
    """
    if not isinstance(parameter, nn.Parameter):
        raise TypeError(f"register_external_parameter takes a parameter, not {type(parameter).__name__}")
    module.__dict__.setdefault(_EXTERNAL, {})[id(parameter)] = parameter


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Take back what was said. Raises RuntimeError when nothing was."""
    if module.__dict__.get(_EXTERNAL, {}).pop(id(parameter), None) is None:
        raise RuntimeError("unregister_external_parameter: this parameter was not registered with this module")


_EXTERNAL = "_ds_external_parameters"


def _external_parameters(self: nn.Module) -> Iterable[tuple[int, nn.Parameter]]:
    """Parameters of other modules that were registered with this one."""
    return self.__dict__.get(_EXTERNAL, {}).items()  # type: ignore[no-any-return]


nn.Module.ds_external_parameters = _external_parameters  # type: ignore[attr-defined]
