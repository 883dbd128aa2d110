"""The functions a training script calls: initialize an engine, look at sharded values, edit them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from onecopy.comm.watch import set_patience
from onecopy.engine import inspect
from onecopy.engine.build import build_core, default_device
from onecopy.engine.engine import Engine
from onecopy.engine.gathered import gather_for_reading
from onecopy.errors import PlanError
from onecopy.plan.plan import Plan
from onecopy.plan.presets import stage

__all__ = [
    "full_grad",
    "full_param",
    "full_state",
    "gathered",
    "initialize",
    "set_full_grad",
    "set_full_param",
    "set_full_state",
]

E = TypeVar("E", bound=Engine)
_logger = logging.getLogger("onecopy")


def initialize(
    model: nn.Module,
    plan: Plan | None = None,
    *,
    optimizer: Optimizer | Callable[[list[nn.Parameter]], Optimizer] | None = None,
    scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
    device: torch.device | str | None = None,
    patience: float | None = None,
    engine_class: type[E] = Engine,  # type: ignore[assignment]
) -> E:
    """Shard ``model`` by ``plan`` (default: ``stage(2)``) and return the engine that trains it. Collective.

    ``optimizer``: a torch optimizer built on ``model.parameters()``, or a function from the list of trainable parameters
    to one; without either, the plan's recipe; with none at all the engine only runs forward. ``scheduler``: an LR
    schedule on that optimizer, or a function from the optimizer to one; it ticks once per step taken. ``device``:
    default this rank's accelerator, else the CPU. ``patience``: seconds that ranks wait for each other before the job ends
    with a :class:`~onecopy.errors.HangError` that says where each is; default ``ONECOPY_PATIENCE`` from the environment,
    else 30 on the CPU and 600 on an accelerator. Rank 0's weights and buffers become everybody's.

    What is to be said of the plan (keys of a configuration that do nothing, and why) is one line in the log ``onecopy``, on
    rank 0.

    Raises, on every rank: :class:`~onecopy.errors.PlanError` for a plan or optimizer that cannot train this model,
    :class:`~onecopy.errors.RankMismatchError` when ranks were given different ones.
    """
    if patience is not None:
        set_patience(patience)
    where = _usable(device) if device is not None else default_device()
    core = build_core(model, plan if plan is not None else stage(2), optimizer, scheduler, where)
    if core.plan.notes and (not dist.is_initialized() or dist.get_rank() == 0):
        _logger.warning("plan: %s", "; ".join(core.plan.notes))
    return engine_class(model, core)


def _usable(device: torch.device | str) -> torch.device:
    """``device``, which this installation of torch can use."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (AssertionError, RuntimeError) as error:  # torch's own words for a device that is not there, or no device
        said = str(error).splitlines()[0]
        raise PlanError(f"device {str(device)!r} cannot be used here: {said}; leave device= out for what there is") from error
    return found


@contextmanager
def gathered(params: nn.Module | nn.Parameter | Iterable[nn.Parameter], write_rank: int | None = None) -> Iterator[None]:
    """Within the context the full values of ``params`` are there on every rank. Collective.

    ``write_rank``: what that rank's code writes to them inside becomes everybody's, master weights included. Without
    it, writing raises :class:`~onecopy.errors.EngineError` at the end. Parameters of no engine are left as they are.
    """
    with gather_for_reading(params, write_rank):
        yield


def full_param(param: nn.Parameter) -> torch.Tensor:
    """The whole parameter (its master weights where it has some), on every rank; float32 unless it is wider. Collective."""
    return inspect.read_param(param)


def full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """The whole gradient as reduced so far in this window, unscaled; None when there is none. Collective."""
    return inspect.read_grad(param)


def full_state(param: nn.Parameter, name: str) -> torch.Tensor | None:
    """The optimizer's state ``name`` (such as ``"exp_avg"``) of ``param``, whole; None before the first step.
    Collective."""
    return inspect.read_state(param, name)


def set_full_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Make ``value`` (whole, the same on every rank) the parameter, master weights included."""
    inspect.write_param(param, value)


def set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Make ``value`` (whole, unscaled, the same on every rank) the gradient that the next step uses."""
    inspect.write_grad(param, value)


def set_full_state(param: nn.Parameter, name: str, value: torch.Tensor) -> None:
    """Make ``value`` (whole, the same on every rank) the optimizer's state ``name`` of ``param``."""
    inspect.write_state(param, name, value)
