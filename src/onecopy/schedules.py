"""Learning-rate schedules with the names, arguments and curves of DeepSpeed configurations.

They are ordinary ``torch.optim.lr_scheduler.LRScheduler`` objects and work on any torch optimizer. ``step()`` is
called once per optimizer step taken. With ``i`` the number of calls so far minus one (so the constructor leaves
``i = -1``, and the optimizer's first step runs with the rate of ``i = -1``), ``get_lr()`` is a pure function of ``i``,
and ``state_dict()`` is ``{"last_batch_iteration": i}``. Rates may be given once or as a list with one per group.
Constructors raise :class:`~onecopy.errors.ConfigError` with the argument, its value and the legal range.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar, Union

import torch
from torch.optim.lr_scheduler import LRScheduler

from onecopy.errors import ConfigError
from onecopy.plan.recipe import check_schedule

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]

Rates = Union[float, Sequence[float]]  # noqa: UP007 - evaluated at run time, also on Python 3.10
# Momentum that grows while the rate decays stops here; at 1 an average would never forget.
_LARGEST_MOMENTUM = 0.999


class _Curve(LRScheduler):
    """A schedule whose rates are a function of ``last_batch_iteration`` alone."""

    def __init__(self, optimizer: Any, given: dict[str, Any]) -> None:
        """``given`` are the public constructor's arguments; subclasses keep what they need of them in ``_prepare``."""
        self.optimizer = _plain_optimizer(optimizer)
        clean = check_schedule(type(self).__name__, given, type(self).__name__)
        start = clean["last_batch_iteration"]
        if start >= 0:
            for group in self.optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        self._prepare(clean)
        # torch's constructor counts one step of its own, so its last_epoch is our iteration plus one.
        super().__init__(self.optimizer, start)

    def _prepare(self, given: dict[str, Any]) -> None:
        raise NotImplementedError

    @property
    def last_batch_iteration(self) -> int:
        """Calls of ``step`` so far minus one: -1 right after construction."""
        return self.last_epoch - 1

    def step(self, epoch: int | None = None) -> None:
        """Move to the next iteration, or to iteration ``epoch``, and write its rates into the optimizer's groups."""
        self._step_count = getattr(self, "_step_count", 0) + 1
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch + 1
        self._apply()

    def _apply(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = [_number(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the saved iteration; the optimizer's groups get the rates of that iteration at once."""
        self.last_epoch = state_dict["last_batch_iteration"] + 1
        self._apply()

    def _per_group(self, values: Any, key: str) -> list[float]:
        """``values`` as one per group; None is the rate that each group was built with."""
        groups = self.optimizer.param_groups
        if values is None:
            return [_number(group.get("initial_lr", group["lr"])) for group in groups]
        if not isinstance(values, Sequence):
            return [float(values)] * len(groups)
        if len(values) != len(groups):
            raise ConfigError(f"{key} has {len(values)} values but the optimizer has {len(groups)} parameter groups")
        return [float(value) for value in values]


def _number(rate: Any) -> float:
    return rate.item() if isinstance(rate, torch.Tensor) else rate


def _plain_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """``optimizer`` itself, or the torch optimizer that a wrapper carries as ``.optimizer``."""
    for candidate in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(candidate, torch.optim.Optimizer):
            return candidate
    raise TypeError(f"{type(optimizer).__name__} is not a torch optimizer and carries none as .optimizer")


def _given(arguments: dict[str, Any]) -> dict[str, Any]:
    """A public constructor's ``locals()`` without what is no setting."""
    return {key: value for key, value in arguments.items() if key not in ("self", "optimizer", "__class__")}


class WarmupLR(_Curve):
    """From ``warmup_min_lr`` to ``warmup_max_lr`` (None: each group's own rate) in ``warmup_num_steps``, then constant.

    ``warmup_type`` "log" rises as ``log(i + 1) / log(steps)``, "linear" as ``i / steps``; at least 2 steps are taken,
    and ``i = -1`` counts as 0.
    """

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, _given(locals()))

    def _prepare(self, given: dict[str, Any]) -> None:
        self._prepare_warmup(given)
        self.min_lrs = self._per_group(given["warmup_min_lr"], "warmup_min_lr")
        self.max_lrs = self._per_group(given["warmup_max_lr"], "warmup_max_lr")

    def _prepare_warmup(self, given: dict[str, Any]) -> None:
        self.warmup_num_steps: int = max(2, given["warmup_num_steps"])
        self.warmup_type = given["warmup_type"]

    def _share(self) -> float:
        """Share of the way from the first to the full rate."""
        i, steps = max(self.last_batch_iteration, 0), self.warmup_num_steps
        if i >= steps:
            return self._share_after_warmup(i)
        return math.log(i + 1) / math.log(steps) if self.warmup_type == "log" else i / steps

    def _share_after_warmup(self, i: int) -> float:
        return 1.0

    def get_lr(self) -> list[Any]:
        share = self._share()
        return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]


class WarmupDecayLR(WarmupLR):
    """:class:`WarmupLR`, then linearly down to ``warmup_min_lr`` at iteration ``total_num_steps``, and on there."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        _Curve.__init__(self, optimizer, _given(locals()))

    def _prepare(self, given: dict[str, Any]) -> None:
        super()._prepare(given)
        self.total_num_steps: int = given["total_num_steps"]

    def _share_after_warmup(self, i: int) -> float:
        return max(0.0, (self.total_num_steps - i) / max(1, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(WarmupLR):
    """Each group's own rate times a ratio: from ``warmup_min_ratio`` up to 1 in ``warmup_num_steps``, then down half a
    cosine to ``cos_min_ratio`` at iteration ``total_num_steps - 1``, and on there."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        _Curve.__init__(self, optimizer, _given(locals()))

    def _prepare(self, given: dict[str, Any]) -> None:
        self._prepare_warmup(given)
        self.total_num_steps: int = given["total_num_steps"]
        self.warmup_min_ratio, self.cos_min_ratio = given["warmup_min_ratio"], given["cos_min_ratio"]
        self.max_lrs = self._per_group(None, "lr")

    def get_lr(self) -> list[Any]:
        i = self.last_batch_iteration
        if i < self.warmup_num_steps:
            ratio = self.warmup_min_ratio + (1 - self.warmup_min_ratio) * self._share()
        else:
            done = (i - self.warmup_num_steps + 1) / max(1, self.total_num_steps - self.warmup_num_steps)
            half_cosine = (1 + math.cos(math.pi * min(1.0, done))) / 2
            ratio = self.cos_min_ratio + (1 - self.cos_min_ratio) * half_cosine
        return [rate * ratio for rate in self.max_lrs]


class LRRangeTest(_Curve):
    """A rate that only grows, to find the largest that trains: ``min_lr * (1 + step_rate * (i + 1) / step_size)``.

    ``lr_range_test_staircase`` rounds ``(i + 1) / step_size`` down, so the rate moves once in ``step_size`` steps.
    """

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, _given(locals()))

    def _prepare(self, given: dict[str, Any]) -> None:
        self.min_lrs = self._per_group(given["lr_range_test_min_lr"], "lr_range_test_min_lr")
        self.step_size, self.step_rate = given["lr_range_test_step_size"], given["lr_range_test_step_rate"]
        self.staircase = given["lr_range_test_staircase"]

    def get_lr(self) -> list[Any]:
        done = self.last_batch_iteration + 1
        intervals = done // self.step_size if self.staircase else done / self.step_size
        return [low * (1 + self.step_rate * intervals) for low in self.min_lrs]


class OneCycle(_Curve):
    """The 1-cycle policy (Smith 2018): the rate rises to ``cycle_max_lr`` in ``cycle_first_step_size`` steps and falls
    back to ``cycle_min_lr`` in ``cycle_second_step_size`` (None: as many), while the first beta moves the opposite way
    between ``cycle_max_mom`` and ``cycle_min_mom``; the other beta keeps the optimizer's value.

    After the cycle the rate is divided by ``1 + decay_lr_rate * n`` and the first beta multiplied by
    ``1 + decay_mom_rate * n`` (at most 0.999), ``n`` being steps since over ``decay_step_size`` (0: no decay).
    A stair count above 0 lets a half cycle move in that many jumps.
    """

    _DEFAULTS: ClassVar[dict[str, Any]] = {
        "cycle_first_step_size": 2000,
        "cycle_second_step_size": None,
        "cycle_first_stair_count": 0,
        "cycle_second_stair_count": None,
        "decay_step_size": 0,
        "cycle_momentum": True,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0.0,
        "last_batch_iteration": -1,
    }

    def __init__(
        self, optimizer: Any, cycle_min_lr: Rates, cycle_max_lr: Rates, decay_lr_rate: float = 0.0, **settings: Any
    ) -> None:
        """``settings``: any of the keys of ``_DEFAULTS``."""
        given = {"cycle_min_lr": cycle_min_lr, "cycle_max_lr": cycle_max_lr, "decay_lr_rate": decay_lr_rate}
        super().__init__(optimizer, self._DEFAULTS | given | settings)

    def _prepare(self, given: dict[str, Any]) -> None:
        first, second = given["cycle_first_step_size"], given["cycle_second_step_size"]
        stairs, more_stairs = given["cycle_first_stair_count"], given["cycle_second_stair_count"]
        self.halves: tuple[int, int] = (first, first if second is None else second)
        self.stairs = (stairs, stairs if more_stairs is None else more_stairs)
        self.lr_bounds = [self._per_group(given[key], key) for key in ("cycle_min_lr", "cycle_max_lr")]
        self.momentum_bounds = [self._per_group(given[key], key) for key in ("cycle_min_mom", "cycle_max_mom")]
        self.decay: tuple[float, float, int] = (
            given["decay_lr_rate"],
            given["decay_mom_rate"],
            given["decay_step_size"],
        )
        self.cycle_momentum = given["cycle_momentum"]
        if self.cycle_momentum and "betas" not in self.optimizer.defaults:
            warnings.warn(
                f"OneCycle: cycle_momentum has no effect, {type(self.optimizer).__name__} has no betas", stacklevel=4
            )
            self.cycle_momentum = False

    def _height(self) -> float:
        """How far the cycle has risen at this iteration, 0 to 1."""
        first, second = self.halves
        position = (self.last_batch_iteration + 1) % (first + second)
        rising = position <= first
        share = position / first if rising else (first + second - position) / second
        stairs = self.stairs[0 if rising else 1]
        if stairs:
            # From whole numbers: the share at the top may be a rounding error below 1, which would lose a whole stair.
            done, length = (position, first) if rising else (first + second - position, second)
            share = done * stairs // length / stairs
        return share

    def _decay_intervals(self) -> float:
        """Decay intervals since the end of the cycle; 0 inside it and when nothing decays."""
        after = self.last_batch_iteration - sum(self.halves) + 1
        return after / self.decay[2] if after > 0 and self.decay[2] else 0.0

    def _after(self) -> bool:
        return self.last_batch_iteration >= sum(self.halves)

    def get_lr(self) -> list[Any]:
        if self._after():
            return [low / (1 + self.decay[0] * self._decay_intervals()) for low in self.lr_bounds[0]]
        height = self._height()
        return [low + (high - low) * height for low, high in zip(*self.lr_bounds, strict=True)]

    def get_momentum(self) -> list[float]:
        """First betas of this iteration, one per group."""
        if self._after():
            growth = 1 + self.decay[1] * self._decay_intervals()
            return [high if growth == 1 else min(high * growth, _LARGEST_MOMENTUM) for high in self.momentum_bounds[1]]
        height = self._height()
        return [high - (high - low) * height for low, high in zip(*self.momentum_bounds, strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Both betas of this iteration, one pair per group, as DeepSpeed has them; None without ``cycle_momentum``."""
        if not self.cycle_momentum:
            return None
        groups = self.optimizer.param_groups
        return [(beta, group["betas"][1]) for beta, group in zip(self.get_momentum(), groups, strict=True)]

    def _apply(self) -> None:
        super()._apply()
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or [], strict=self.cycle_momentum):
            group["betas"] = betas
