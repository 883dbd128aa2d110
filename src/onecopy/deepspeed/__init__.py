"""DeepSpeed's names and signatures on top of onecopy: ``import onecopy.deepspeed as deepspeed`` is a migration.

What differs from DeepSpeed, and which keys of its JSON do what, is in ``docs/deepspeed.md`` and
``docs/configuration.md``.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import onecopy
from onecopy import schedules as lr_schedules
from onecopy.comm import meeting
from onecopy.comm.groups import world_size
from onecopy.deepspeed import (
    accelerator,
    checkpoint,
    checkpointing,
    comm,
    git_version_info,
    ops,
    params,
    runtime,
    utils,
    zero,
)
from onecopy.deepspeed.accelerator import get_accelerator
from onecopy.deepspeed.comm import init_distributed
from onecopy.deepspeed.data import make_dataloader
from onecopy.deepspeed.engine import DeepSpeedEngine, Settings
from onecopy.deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from onecopy.deepspeed.utils.logging import log_dist, logger
from onecopy.deepspeed.version import git_branch as __git_branch__
from onecopy.deepspeed.version import git_hash as __git_hash__
from onecopy.deepspeed.version import numbers, version
from onecopy.errors import ConfigError
from onecopy.plan.config import DEEPSPEED, load_config, read_config
from onecopy.plan.plan import Plan
from onecopy.recipes import build_optimizer

__all__ = [
    "DeepSpeedEngine", "DeepSpeedOptimizer", "accelerator", "add_config_arguments", "checkpoint", "checkpointing", "comm",
    "get_accelerator", "git_version_info", "init_distributed", "initialize", "log_dist", "logger", "lr_schedules", "ops",
    "params", "runtime", "utils", "version", "zero",
]  # fmt: skip

__version__ = version
__version_major__, __version_minor__, __version_patch__ = numbers
# Names that are no part of training with ZeRO, and what they would be.
_ABSENT = {
    "tp_model_init": "tensor parallelism",
    "init_inference": "the inference engine; use the model itself under torch.no_grad()",
    "PipelineModule": "pipeline parallelism",
    "DeepSpeedHybridEngine": "the hybrid engine",
    "OnDevice": "construction on another device; use torch.device('meta') as a context, or zero.Init",
}


def __getattr__(name: str) -> Any:
    if name in _ABSENT:
        raise AttributeError(f"onecopy.deepspeed has no {name}: {_ABSENT[name]}")
    raise AttributeError(f"module 'onecopy.deepspeed' has no attribute {name!r}")


ConfigSource = str | os.PathLike[str] | Mapping[str, Any]


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` (a flag for the script's own use) and ``--deepspeed_config`` to ``parser``."""
    group = parser.add_argument_group("DeepSpeed", "configuration")
    group.add_argument("--deepspeed", action="store_true", help="a flag for the script's own use")
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of the JSON configuration")
    return parser


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: ConfigSource | None = None,
    mesh_param: Any = None,
    config_params: ConfigSource | None = None,
) -> tuple[DeepSpeedEngine, torch.optim.Optimizer | None, DataLoader[Any] | None, Any]:
    """``(engine, optimizer, dataloader, lr_scheduler)`` for ``model`` under a DeepSpeed configuration.

    The configuration is ``config``, ``config_params`` or ``args.deepspeed_config``. An ``optimizer`` given here (an
    object, or a function of the parameters) takes the place of the configuration's; a scheduler in the configuration
    takes the place of ``lr_scheduler`` (an object, or a function of the optimizer), and either is said in the log.
    With neither optimizer the engine runs forward only. ``model_parameters`` are the parameters or groups for the
    configuration's optimizer. ``training_data``: a dataset, to be split over the ranks in micro-batches. An engine that has
    ``model`` already is closed, and the log says so.
    """
    if model is None:
        raise ConfigError("initialize needs a model: initialize(model=..., config=...)")
    for name, value in (("mpu", mpu), ("mesh_param", mesh_param)):
        if value is not None:
            raise ConfigError(f"initialize({name}=...) is not supported in this version: every rank is data-parallel")
    if dist_init_required is False or comm.launched_ranks() > 1:
        comm.init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    ranks = world_size()
    rank = torch.distributed.get_rank() if ranks > 1 else 0

    def prepare() -> tuple[dict[str, Any], tuple[Plan, Any, Any], DataLoader[Any] | None]:
        given = read_config(_source(args, config, config_params))
        plan = load_config(given, ranks, auto=_facts(model, optimizer), defaults=DEEPSPEED)
        chosen = _choices(plan, optimizer, model_parameters, lr_scheduler)
        chosen = _idle_offload(chosen[0], chosen[1]), *chosen[1:]
        loader = None
        if training_data is not None:
            share: dict[str, Any] = {"micro": chosen[0].batch.micro, "rank": rank, "world": ranks}
            drop_last = bool(given.get("dataloader_drop_last", False))
            loader = make_dataloader(training_data, **share, collate_fn=collate_fn, drop_last=drop_last)
        return given, chosen, loader

    if rank == 0:
        logger.info("DeepSpeed info: version=%s, git-hash=%s, git-branch=%s", version, __git_hash__, __git_branch__)
    given, (plan, make_optimizer, scheduler), loader = meeting.all_or_none(prepare)
    if DeepSpeedEngine.close_former(model) and rank == 0:
        logger.warning("the model was another engine's, which is closed: what it knew besides the weights is gone with it")
    engine = onecopy.initialize(model, plan, optimizer=make_optimizer, scheduler=scheduler, engine_class=DeepSpeedEngine)
    checkpointing.follow(given)
    section = given.get("zero_optimization") or {}
    engine.settings = Settings(given, int(section.get("stage", 0)), ranks, rank)
    return engine, engine.optimizer, loader, engine.lr_scheduler


def _facts(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """What keys that say "auto" are: the precision is the model's, arguments of an optimizer are those of the one passed."""
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad and p.is_floating_point()}
    found: dict[str, Any] = {}
    if len(dtypes) == 1:
        found = {"fp16.enabled": dtypes == {torch.float16}, "bf16.enabled": dtypes == {torch.bfloat16}}
    if isinstance(optimizer, torch.optim.Optimizer):
        found |= {f"optimizer.params.{key}": value for key, value in optimizer.defaults.items()}
    return found


def _idle_offload(plan: Plan, optimizer: Any) -> Plan:
    """``plan``, with a note when an optimizer is to be offloaded and there is none: trainers give the reference of a policy,
    and a model that is only evaluated, the file of the training."""
    tiers = {rule.row.optimizer.tier for rule in plan.rules} - {"device"}
    if not tiers or optimizer is not None or plan.optimizer is not None:
        return plan
    note = "zero_optimization.offload_optimizer does nothing: there is no optimizer, so the engine runs forward only"
    return plan.with_(notes=(*plan.notes, note))


def _source(args: Any, config: ConfigSource | None, config_params: ConfigSource | None) -> ConfigSource:
    """The one configuration among the three places it may be given in."""
    of_args = args.get("deepspeed_config") if isinstance(args, Mapping) else getattr(args, "deepspeed_config", None)
    places = {"config": config, "config_params": config_params, "args.deepspeed_config": of_args}
    given: dict[str, ConfigSource] = {name: source for name, source in places.items() if source is not None}
    if not given:
        raise ConfigError("no configuration: pass config=<dict or path>, or --deepspeed_config on the command line")
    if len(given) > 1:
        raise ConfigError(f"the configuration is given {len(given)} times, as {' and '.join(given)}; keep one")
    source = next(iter(given.values()))
    return _decoded(source) if isinstance(source, str) else source


def _decoded(source: str) -> ConfigSource:
    """The dict in ``source`` where that is urlsafe base64 of a JSON object, as some launchers pass it; else ``source``."""
    if os.path.exists(source):
        return source
    try:
        found = json.loads(base64.urlsafe_b64decode(source.encode()).decode())
    except ValueError:  # not base64, not UTF-8 or not JSON: it is a path, whose reader says what is wrong with it
        return source
    return found if isinstance(found, dict) else source


def _choices(plan: Plan, optimizer: Any, model_parameters: Iterable[Any] | None, lr_scheduler: Any) -> tuple[Plan, Any, Any]:
    """Plan, optimizer and scheduler for the engine where both the configuration and the caller may name one."""
    notes = []
    if optimizer is not None and plan.optimizer is not None:
        notes.append("optimizer of the configuration is not used: an optimizer was passed to initialize")
        plan = plan.with_(optimizer=None)
    if lr_scheduler is not None and plan.scheduler is not None:
        notes.append("lr_scheduler passed to initialize is not used: the configuration has a scheduler")
        lr_scheduler = None
    recipe = plan.optimizer
    if optimizer is None and recipe is not None and model_parameters is not None:
        params = list(model_parameters)
        optimizer = lambda _: build_optimizer(recipe, params)  # noqa: E731 - the groups are the caller's
    if optimizer is None and recipe is None and (plan.scheduler is not None or lr_scheduler is not None):
        raise ConfigError("there is a scheduler but no optimizer; name one in the configuration or pass one")
    if notes:
        plan = plan.with_(notes=(*plan.notes, *notes))
    return plan, optimizer, lr_scheduler
