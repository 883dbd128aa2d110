"""Optimizers and learning-rate schedules by name, as configuration files give them: legal names, keys and values.

``choose_optimizer`` and ``choose_schedule`` turn a :class:`~onecopy.plan.plan.Recipe` into a class name plus keyword
arguments, or raise :class:`~onecopy.errors.ConfigError` that lists everything wrong with it. Nothing is built here.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import lr_scheduler as torch_schedules

from onecopy.errors import ConfigError
from onecopy.plan.keys import Remark
from onecopy.plan.plan import Recipe
from onecopy.plan.values import Choice, Flag, Kind, ListOf, Number, nearest, shown

__all__ = ["OPTIMIZERS", "SCHEDULES", "TORCH_SCHEDULES", "Chosen", "check_keys", "choose_optimizer", "choose_schedule"]

# Optimizers whose update of an element depends on that element alone, so that they may run on flat shards.
OPTIMIZERS = (
    "Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "ASGD", "Rprop",
)  # fmt: skip

_REFUSED = {
    "lion": "torch has no Lion; the nearest that works here is 'AdamW', or pass an elementwise Lion of your own",
    "lamb": "LAMB needs the norm of whole layers, which shards do not have; the nearest that works here is 'AdamW'",
    "muon": "Muon needs whole matrices, which shards do not have; the nearest that works here is 'AdamW'",
    "adafactor": "Adafactor needs the rows and columns of whole matrices; the nearest that works here is 'AdamW'",
    "sparseadam": "SparseAdam needs sparse gradients; the nearest that works here is 'Adam'",
    "lbfgs": "LBFGS evaluates the loss several times a step; the nearest that works here is 'SGD'",
    "onebitadam": "1-bit optimizers are not supported in this version; the nearest that works here is 'Adam'",
    "onebitlamb": "1-bit optimizers are not supported in this version; the nearest that works here is 'AdamW'",
    "zerooneadam": "0/1 Adam is not supported in this version; the nearest that works here is 'Adam'",
    "muadam": "mup optimizers are not supported in this version; pass one as an object, or use 'Adam'",
    "muadamw": "mup optimizers are not supported in this version; pass one as an object, or use 'AdamW'",
    "musgd": "mup optimizers are not supported in this version; pass one as an object, or use 'SGD'",
}

_FROM_0, _SHARE = Number(low=0), Number(low=0, high=1, below=True)
_OPTIMIZER_KEYS: dict[str, Kind] = {
    "lr": _FROM_0,
    "betas": ListOf(_SHARE, count=2),
    "eps": _FROM_0,
    "weight_decay": _FROM_0,
    "amsgrad": Flag(),
    "foreach": Flag(optional=True),
    "fused": Flag(optional=True),
    "maximize": Flag(),
    "capturable": Flag(),
    "decoupled_weight_decay": Flag(),
    "momentum": _FROM_0,
    "dampening": Number(),
    "nesterov": Flag(),
    "lr_decay": _FROM_0,
    "initial_accumulator_value": _FROM_0,
    "alpha": _FROM_0,
    "centered": Flag(),
    "rho": Number(low=0, high=1),
    "momentum_decay": _FROM_0,
    "lambd": _FROM_0,
    "t0": _FROM_0,
    "etas": ListOf(Number(low=0, above=True), count=2),
    "step_sizes": ListOf(Number(low=0, above=True), count=2),
}
# Keys that only DeepSpeed's own Adam knows.
_ADAM_KEYS: dict[str, Kind] = {
    "torch_adam": Flag(),
    "adam_w_mode": Flag(),
    "adamw_mode": Flag(),
    "bias_correction": Flag(),
    "set_grad_none": Flag(),
    "fp32_optimizer_states": Flag(optional=True),
}

_STEPS, _STEPS_FROM_0 = Number(low=1, whole=True), Number(low=0, whole=True)
_RATES = ListOf(_FROM_0, or_one=True)
_WARMUP: dict[str, Kind] = {
    "warmup_num_steps": _STEPS,
    "warmup_type": Choice(("log", "linear")),
    "last_batch_iteration": Number(low=-1, whole=True),
}
_WARMUP_LR = _WARMUP | {
    "warmup_min_lr": _RATES,
    "warmup_max_lr": ListOf(_FROM_0, or_one=True, optional=True),
}
SCHEDULES: dict[str, dict[str, Kind]] = {
    "WarmupLR": _WARMUP_LR,
    "WarmupDecayLR": _WARMUP_LR | {"total_num_steps": _STEPS},
    "WarmupCosineLR": _WARMUP | {"total_num_steps": _STEPS, "warmup_min_ratio": Number(0, 1), "cos_min_ratio": Number(0, 1)},
    "OneCycle": {
        "cycle_min_lr": _RATES,
        "cycle_max_lr": _RATES,
        "decay_lr_rate": _FROM_0,
        "cycle_first_step_size": _STEPS,
        "cycle_second_step_size": Number(low=0, whole=True, optional=True),
        "cycle_first_stair_count": _STEPS_FROM_0,
        "cycle_second_stair_count": Number(low=0, whole=True, optional=True),
        "decay_step_size": _STEPS_FROM_0,
        "cycle_momentum": Flag(),
        "cycle_min_mom": ListOf(_SHARE, or_one=True),
        "cycle_max_mom": ListOf(_SHARE, or_one=True),
        "decay_mom_rate": _FROM_0,
        "last_batch_iteration": Number(low=-1, whole=True),
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": _RATES,
        "lr_range_test_step_size": _STEPS,
        "lr_range_test_step_rate": _FROM_0,
        "lr_range_test_staircase": Flag(),
        "last_batch_iteration": Number(low=-1, whole=True),
    },
}
_REQUIRED = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}
# torch's schedules that a file can describe: no callables, no metric, no other schedule inside.
TORCH_SCHEDULES = (
    "StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "CosineAnnealingLR", "CyclicLR",
    "CosineAnnealingWarmRestarts", "OneCycleLR", "PolynomialLR",
)  # fmt: skip


@dataclass(frozen=True)
class Chosen:
    """A class by name, the keyword arguments it gets, and what to tell about keys that have no effect."""

    name: str
    arguments: dict[str, Any]
    remarks: tuple[Remark, ...] = ()


def check_keys(params: Mapping[str, Any], kinds: Mapping[str, Kind], path: str) -> dict[str, Any]:
    """``params`` with every value checked. Raises ``ConfigError`` with one line per unknown key or bad value."""
    problems, clean = [], {}
    for key, value in params.items():
        if key.startswith("_"):
            continue
        if key not in kinds:
            near = nearest(key, kinds)
            hint = f" - did you mean {path}.{near}?" if near else f"; legal keys: {', '.join(sorted(kinds))}"
            problems.append(f"{path}.{key} is not a key{hint}")
            continue
        try:
            clean[key] = kinds[key].check(value)
        except ValueError as error:
            problems.append(f"{path}.{key} is {shown(value)}; it {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    return clean


def choose_optimizer(recipe: Recipe, path: str = "optimizer", later: frozenset[str] = frozenset()) -> Chosen:
    """The torch optimizer class and arguments of ``recipe``. ``type`` is matched without regard to letter case; ``later``:
    keys that somebody still fills in."""
    asked = recipe.type.lower()
    name = next((name for name in OPTIMIZERS if name.lower() == asked), None)
    if name is None:
        if asked in _REFUSED:
            raise ConfigError(f"{path}.type is {recipe.type!r}: {_REFUSED[asked]}")
        near = nearest(recipe.type, OPTIMIZERS)
        hint = f" - did you mean {near!r}?" if near else f"; choose from {', '.join(OPTIMIZERS)}"
        raise ConfigError(f"{path}.type {recipe.type!r} is no optimizer that works here{hint}")
    if "max_grad_norm" in recipe.params:
        raise ConfigError(f"{path}.params.max_grad_norm is not an optimizer's; clip with the top-level gradient_clipping")
    signature = inspect.signature(getattr(torch.optim, name).__init__).parameters
    kinds = {key: kind for key, kind in _OPTIMIZER_KEYS.items() if key in signature}
    if name in ("Adam", "AdamW"):
        return _choose_adam(name, check_keys(recipe.params, kinds | _ADAM_KEYS, f"{path}.params"), f"{path}.params")
    arguments = check_keys(recipe.params, kinds, f"{path}.params")
    if arguments.get("nesterov") and not (arguments.get("momentum", 0) > 0 and arguments.get("dampening", 0) == 0):
        raise ConfigError(f"{path}.params.nesterov is true; it needs momentum above 0 and dampening 0")
    return Chosen(name, _tuples(arguments))


def _choose_adam(name: str, given: dict[str, Any], path: str) -> Chosen:
    """Adam means decoupled weight decay unless ``adam_w_mode`` is false; without ``torch_adam`` the weight decay that
    is not given is 0 for both, as DeepSpeed's own Adam has it (torch's AdamW has 0.01)."""
    torch_adam = given.pop("torch_adam", False)
    modes = {key: given.pop(key) for key in ("adam_w_mode", "adamw_mode") if key in given}
    if name == "AdamW" and False in modes.values():
        raise ConfigError(f"{path}.{next(iter(modes))} is false but optimizer.type is 'AdamW'; use type 'Adam'")
    if not given.pop("bias_correction", True):
        raise ConfigError(f"{path}.bias_correction is false; torch's Adam always corrects, remove the key")
    if given.pop("fp32_optimizer_states", None) is False:
        raise ConfigError(f"{path}.fp32_optimizer_states is false; moments have their master weights' dtype, remove the key")
    remarks = []
    if "set_grad_none" in given:
        del given["set_grad_none"]
        remarks.append(Remark("gradients are freed after every step", (f"{path}.set_grad_none",)))
    if given.get("foreach") and given.get("fused"):
        raise ConfigError(f"{path}.foreach and {path}.fused are both true; set one of them")
    decoupled = given.pop("decoupled_weight_decay", False) or name == "AdamW" or False not in modes.values()
    if not torch_adam:
        given.setdefault("weight_decay", 0.0)
    return Chosen("AdamW" if decoupled else "Adam", _tuples(given), tuple(remarks))


def _tuples(arguments: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}


def choose_schedule(recipe: Recipe, path: str = "scheduler", later: frozenset[str] = frozenset()) -> Chosen:
    """The schedule class and arguments of ``recipe``: one of :data:`SCHEDULES` or of torch's own. ``later``: keys that
    somebody still fills in."""
    names = (*SCHEDULES, *TORCH_SCHEDULES)
    name = next((name for name in names if name.lower() == recipe.type.lower()), None)
    if name is None:
        near = nearest(recipe.type, names)
        hint = f" - did you mean {near!r}?" if near else f"; choose from {', '.join(names)}"
        raise ConfigError(f"{path}.type {recipe.type!r} is no schedule that a file can describe{hint}")
    path = f"{path}.params"
    if name in SCHEDULES:
        arguments = check_schedule(name, recipe.params, path, later)
        return Chosen(name, arguments, _without_decay(arguments, path))
    signature = dict(inspect.signature(getattr(torch_schedules, name).__init__).parameters)
    for key in ("self", "optimizer", "verbose", "scale_fn"):
        signature.pop(key, None)
    arguments = check_keys(recipe.params, {key: _TORCH_KEYS.get(key, _Plain()) for key in signature}, path)
    needed = [key for key, value in signature.items() if value.default is inspect.Parameter.empty]
    _check_required(name, needed, {*arguments, *later}, path)
    if name == "OneCycleLR" and not later:
        _check_one_cycle(arguments, path)
    return Chosen(name, arguments)


def _check_one_cycle(arguments: Mapping[str, Any], path: str) -> None:
    """torch divides by the length of the rising part, less one."""
    total = arguments.get("total_steps") or arguments.get("epochs", 0) * arguments.get("steps_per_epoch", 0)
    if not total:
        raise ConfigError(f"OneCycleLR needs {path}.total_steps, or {path}.epochs and {path}.steps_per_epoch")
    share = arguments.get("pct_start", 0.3)
    if total < 2 or share * total == 1:
        raise ConfigError(
            f"{path}.pct_start is {share:g} of {total} steps in all, so the rate would rise within {share * total:g} steps; "
            "it needs more than one"
        )


def _without_decay(arguments: Mapping[str, Any], path: str) -> tuple[Remark, ...]:
    return tuple(
        Remark(f"{path}.decay_step_size is 0", (f"{path}.{key}",))
        for key in ("decay_lr_rate", "decay_mom_rate")
        if arguments.get(key) and not arguments.get("decay_step_size")
    )


def check_schedule(
    name: str, params: Mapping[str, Any], path: str, later: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Checked arguments of the schedule ``name`` of :data:`SCHEDULES`, with what two keys must satisfy together."""
    arguments = check_keys(params, SCHEDULES[name], path)
    _check_required(name, _REQUIRED.get(name, ()), {*arguments, *later}, path)
    if "total_num_steps" in arguments and "warmup_num_steps" not in later:
        warmup, total = arguments.get("warmup_num_steps", 1000), arguments["total_num_steps"]
        if warmup >= total:
            raise ConfigError(
                f"{path}.warmup_num_steps is {warmup}{'' if 'warmup_num_steps' in arguments else ' (its default)'} and "
                f"{path}.total_num_steps is {total}; the warm-up must be shorter than the whole"
            )
    return arguments


def _check_required(name: str, keys: Any, arguments: Container[str], path: str) -> None:
    missing = [f"{path}.{key}" for key in keys if key not in arguments]
    if missing:
        raise ConfigError(f"{name} needs {' and '.join(missing)}")


# Numbers that torch's schedules do not check, and count or divide by.
_SOME = Number(low=1, whole=True, optional=True)
_TORCH_KEYS: dict[str, Kind] = {
    "step_size": _STEPS,
    "T_max": _STEPS,
    "T_0": _STEPS,
    "T_mult": _STEPS,
    "total_iters": _STEPS_FROM_0,
    "milestones": ListOf(_STEPS_FROM_0),
    "gamma": _FROM_0,
    "eta_min": Number(),
    "power": Number(),
    "total_steps": _SOME,
    "epochs": _SOME,
    "steps_per_epoch": _SOME,
    "pct_start": Number(0, 1),
    "div_factor": Number(low=0, above=True),
    "final_div_factor": Number(low=0, above=True),
    "step_size_up": _STEPS,
    "step_size_down": _SOME,
    "base_lr": _RATES,
    "max_lr": _RATES,
    "cycle_momentum": Flag(),
    "three_phase": Flag(),
    "last_epoch": Number(low=-1, whole=True),
}


@dataclass(frozen=True)
class _Plain:
    """What torch's schedules take: a finite number, a flag, a word, or a list of numbers. They check the rest."""

    legal: str = "a finite number, true, false, a word, or a list of numbers"

    def check(self, value: Any) -> Any:
        items = value if isinstance(value, list) else [value]
        for item in items:
            if not isinstance(item, (int, float, str)) or (isinstance(item, float) and not math.isfinite(item)):
                raise ValueError(f"must be {self.legal}")
        return value
