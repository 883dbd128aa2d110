"""DeepSpeed JSON -> :class:`~onecopy.plan.plan.Plan`.

``load_config`` reads a file or a dict, checks every key and value, and translates. Whatever it cannot honour is an
error; whatever has no effect is named in ``Plan.notes``. Nothing is allocated and no process group is needed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from onecopy.errors import ConfigError
from onecopy.plan import schema
from onecopy.plan.batch import World, find_world, resolve_batch, undetermined
from onecopy.plan.keys import Remark
from onecopy.plan.offload_keys import Offload, read_offload
from onecopy.plan.plan import Batch, LossScale, Plan, Precision, Recipe, Rule, Units, Wire
from onecopy.plan.presets import stage as stage_plan
from onecopy.plan.reading import Tidy, override, read_config, why_idle
from onecopy.plan.recipe import Chosen, choose_optimizer, choose_schedule
from onecopy.plan.values import nearest, shown

__all__ = ["DEEPSPEED", "Defaults", "Reading", "load_config", "read_config", "read_plan"]

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Defaults:
    """What an absent key means, where that is a matter of convention.

    ``clip``: ``gradient_clipping``. ``cast_inputs``: whether floating-point inputs are cast to bf16 or fp16
    (``fp16.auto_cast`` decides when it is given).
    """

    clip: float | None = None
    cast_inputs: bool = True


DEEPSPEED = Defaults(clip=1.0, cast_inputs=False)


@dataclass(frozen=True)
class Reading:
    """All that can be said of a configuration: ``plan`` (None where keys or values are not legal), ``problems``, a line each,
    ``remarks``, ``filled`` (what "auto" became), ``open`` (what is still "auto"), the ``chosen`` optimizer and schedule."""

    plan: Plan | None
    problems: tuple[str, ...]
    remarks: tuple[Remark, ...] = ()
    filled: Mapping[str, Any] = field(default_factory=dict)
    open: tuple[str, ...] = ()
    chosen: Mapping[str, Chosen] = field(default_factory=dict)


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    world_size: int | None = None,
    *,
    auto: Mapping[str, Any] | None = None,
    override: Mapping[str, Any] | None = None,
    defaults: Defaults = Defaults(),
) -> Plan:
    """The plan that a DeepSpeed JSON file (or the dict it holds) describes.

    ``world_size``: number of data-parallel ranks, needed for ``train_batch_size``; by default WORLD_SIZE of the
    environment, else 1. Keys that begin with ``_`` are comments. ``auto``: what keys that say "auto" are, by dotted key
    (``{"bf16.enabled": True}``); others in it change nothing. ``override``: values that replace the file's, by dotted key.
    Raises :class:`ConfigError` with one line for every unknown key, bad value, unsupported feature, contradiction, and one
    with all that is still "auto".
    """
    found = read_plan(source, world_size, auto=auto, changes=override, defaults=defaults)
    problems = list(found.problems)
    if found.open:
        problems.append(f"still 'auto', and nothing here says what it is: {', '.join(found.open)}")
    if problems or found.plan is None:
        raise ConfigError("\n".join(problems))
    return found.plan


def read_plan(
    source: str | os.PathLike[str] | Mapping[str, Any],
    world_size: int | None = None,
    *,
    auto: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
    defaults: Defaults = Defaults(),
) -> Reading:
    """:func:`load_config` that says everything instead of raising; raises :class:`ConfigError` for a source that cannot be
    read. Keys that are still "auto" count as absent in the plan."""
    raw, world = override(read_config(source), changes or {}), find_world(world_size)
    tidy = Tidy(auto or {})
    data = tidy.section(tidy.unfold(raw), schema.Config, "")
    recipes = _Recipes(data, tidy.open)
    problems = [*tidy.problems, *recipes.problems]
    try:
        config = schema.Config.model_validate(data)
    except ValidationError as error:
        wrong = _lines([*_explain(error), *problems])
        return Reading(None, wrong, tuple(tidy.remarks), tidy.filled, tuple(tidy.open), recipes.chosen)
    parts = _Parts(config, defaults, tidy.open)
    batch = Batch()
    left = undetermined(*_batch_of(config), frozenset(tidy.open_batch))
    try:
        parts.translate()
        batch = _batch(config, world, left, tidy.open_batch)
    except ConfigError as error:
        problems.append(str(error))
    group = parts.zero.mics_shard_size
    if group > 0 and world.size > 1 and world.size % group:
        problems.append(f"zero_optimization.mics_shard_size is {group}, which does not divide the {world.size} ranks")
    if world.remark and config.train_batch_size is not None:
        parts.remark(f"train_batch_size {config.train_batch_size} was divided over 1 rank: {world.remark}")
    if tidy.filled:
        said = ", ".join(f"{key} {shown(value)}" for key, value in tidy.filled.items())
        parts.remark(f"'auto' became {said}")
    remarks = (*tidy.remarks, *recipes.remarks, *parts.remarks, *_idle(config))
    plan = None
    if not problems:
        plan = parts.plan(batch).with_(
            optimizer=recipes.found.get("optimizer"),
            scheduler=recipes.found.get("scheduler"),
            notes=tuple(map(str, remarks)),
        )
    return Reading(plan, _lines(problems), remarks, tidy.filled, (*tidy.open, *left), recipes.chosen)


def _lines(problems: list[str]) -> tuple[str, ...]:
    return tuple(line for problem in problems for line in problem.splitlines())


def _batch_of(config: schema.Config) -> tuple[int | None, int | None, int | None]:
    return config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps


def _batch(config: schema.Config, world: World, left: list[str], auto: list[str]) -> Batch:
    """The batch sizes; while some are open, those that are not."""
    train, micro, accumulation = _batch_of(config)
    if left:
        return Batch(accumulation=accumulation or 1, micro=micro)
    return resolve_batch(train, micro, accumulation, world, frozenset(auto))


def _idle(config: schema.Config) -> Iterator[Remark]:
    """One remark per reason, naming all keys that were used although they do nothing."""
    number = config.zero_optimization.stage if config.zero_optimization else 0
    below = f"zero_optimization.stage is {number}, and only stage 3 gathers parameters for use" if number < 3 else None
    reasons: dict[str, list[str]] = {}
    for key, why in why_idle(config, below):
        reasons.setdefault(why, []).append(key)
    for why, keys in sorted(reasons.items()):
        yield Remark(why, tuple(keys))


# ---------------------------------------------------------------------------------------------------------- reading


def _explain(error: ValidationError) -> Iterator[str]:
    for item in error.errors(include_url=False):
        where = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            yield _unknown(where, item["loc"])
        elif item["type"] == "missing":
            yield f"{where} is missing"
        elif item["type"] == "value_error":
            yield f"{where} is {shown(item['input'])}; it {item['ctx']['error']}"
        else:
            yield f"{where} is {shown(item['input'])}; it must be a section {{...}}"


def _unknown(where: str, loc: tuple[Any, ...]) -> str:
    section, name = ".".join(map(str, loc[:-1])), str(loc[-1])
    legal = schema.fields_of(section)
    owners = [head for head in schema.Config.model_fields if name in schema.fields_of(head)]
    if owners:
        return f"{where} is not a key; it belongs inside {owners[0]!r}"
    near = nearest(name, legal)
    if near is None:
        return f"{where} is not a key; legal keys: {', '.join(sorted(legal))}"
    return f"{where} is not a key - did you mean {'.'.join((*map(str, loc[:-1]), near))}?"


# ------------------------------------------------------------------------------------------------------ translation


class _Recipes:
    """The optimizer and the scheduler sections, checked; sections of a wrong shape are left to the schema.

    Where keys of one are still "auto", a key that it lacks is no problem of its own.
    """

    def __init__(self, data: Mapping[str, Any], left: list[str]) -> None:
        self.found: dict[str, Recipe] = {}
        self.chosen: dict[str, Chosen] = {}
        self.problems: list[str] = []
        self.remarks: list[Remark] = []
        for name, choose in (("optimizer", choose_optimizer), ("scheduler", choose_schedule)):
            section = data.get(name)
            if not isinstance(section, dict) or not isinstance(section.get("type"), str):
                continue
            params = section.get("params") or {}
            if not isinstance(params, dict):
                continue
            recipe = Recipe(section["type"], dict(params))
            open_keys = frozenset(key.removeprefix(f"{name}.params.") for key in left if key.startswith(f"{name}.params."))
            try:
                self.chosen[name] = choose(recipe, name, open_keys)
                self.remarks += self.chosen[name].remarks
            except ConfigError as error:
                self.problems.append(str(error))
            self.found[name] = recipe


class _Parts:
    """The pieces of the plan, each translated from its own keys."""

    def __init__(self, config: schema.Config, defaults: Defaults, left: list[str]) -> None:
        self.config, self.left = config, left
        self.zero = config.zero_optimization or schema.ZeroOptimization()
        self.defaults = defaults
        self.remarks: list[Remark] = []
        self._precision = Precision()
        self._offload = Offload()

    def remark(self, why: str, *keys: str) -> None:
        """Have ``why`` told, of ``keys`` that do nothing."""
        self.remarks.append(Remark(why, keys))

    def translate(self) -> None:
        """Raise :class:`ConfigError` with everything that keys contradict each other in."""
        problems = []
        for part in (self.precision, self.group, self.offload):
            try:
                part()
            except ConfigError as error:
                problems.append(str(error))
        if problems:
            raise ConfigError("\n".join(problems))

    def precision(self) -> None:
        fp16, bf16 = self.config.fp16 or schema.Fp16(), self.config.bf16 or schema.Bf16()
        if fp16.enabled and bf16.enabled:
            raise ConfigError("fp16.enabled and bf16.enabled are both true; set one of them to false")
        if bf16.bf16_optimizer_states != bf16.bf16_master_weights_and_grads:
            raise ConfigError(
                "bf16.bf16_master_weights_and_grads and bf16.bf16_optimizer_states differ; moments have the dtype of "
                "the master weights they belong to, so set both to true or both to false"
            )
        asked = self.config.data_types.grad_accum_dtype if self.config.data_types else None
        dtype = "float16" if fp16.enabled else "bfloat16" if bf16.enabled else None
        pure = bf16.enabled and bf16.bf16_master_weights_and_grads
        cast = fp16.auto_cast if "auto_cast" in fp16.model_fields_set else self.defaults.cast_inputs
        self._precision = Precision(
            dtype=dtype,
            master=None if pure else "float32",
            accumulate=_DTYPES[asked] if asked else "bfloat16" if pure else "float32",
            loss_scale=self._loss_scale(fp16) if fp16.enabled else None,
            cast_inputs=cast if fp16.enabled else self.defaults.cast_inputs,
        )
        for name, section in (("fp16", fp16), ("bf16", bf16)):
            idle = [f"{name}.{key}" for key in section.model_fields_set - {"enabled"}]
            if idle and not section.enabled and f"{name}.enabled" not in self.left:
                self.remark(f"{name} is not enabled", *idle)

    def _loss_scale(self, fp16: schema.Fp16) -> LossScale:
        if fp16.loss_scale:
            dynamic = {
                "initial_scale_power",
                "loss_scale_window",
                "hysteresis",
                "min_loss_scale",
                "consecutive_hysteresis",
            }
            idle = [f"fp16.{key}" for key in fp16.model_fields_set & dynamic]
            if idle:
                self.remark(f"fp16.loss_scale is {fp16.loss_scale:g} and stays there", *idle)
            return LossScale(initial=float(fp16.loss_scale), dynamic=False)
        initial = float(2**fp16.initial_scale_power)
        if fp16.min_loss_scale > initial:
            raise ConfigError(
                f"fp16.min_loss_scale {fp16.min_loss_scale:g} is above the initial scale "
                f"2**{fp16.initial_scale_power} = {initial:g}; lower it or raise fp16.initial_scale_power"
            )
        return LossScale(
            initial=initial,
            window=fp16.loss_scale_window,
            hysteresis=fp16.hysteresis,
            minimum=float(fp16.min_loss_scale),
            refill_hysteresis=fp16.consecutive_hysteresis,
        )

    def group(self) -> None:
        """Keys of the stage that must agree with its number."""
        if self.zero.mics_shard_size == 0:
            raise ConfigError("zero_optimization.mics_shard_size is 0; it must be from 1, or -1 for no groups")
        if self.zero.mics_shard_size > 0 and self.zero.stage != 3:
            raise ConfigError(
                f"zero_optimization.mics_shard_size is {self.zero.mics_shard_size} at stage {self.zero.stage}; it "
                "shards parameters inside groups, which is stage 3: set stage to 3"
            )

    def offload(self) -> None:
        """Where states rest."""
        self._offload = read_offload(self.config)
        self.remarks += self._offload.remarks

    def _units(self) -> Units:
        return Units(prefetch=0) if self.zero.stage3_prefetch_bucket_size == 0 else Units()

    def plan(self, batch: Batch) -> Plan:
        clip = self.config.gradient_clipping
        if "gradient_clipping" not in self.config.model_fields_set:
            clip = self.defaults.clip
        plan = stage_plan(self.zero.stage, precision=self._precision, batch=batch, clip=clip or None, units=self._units())
        wire = self.config.communication_data_type
        if wire is not None:
            rules = (Rule(rule.pattern, replace(rule.row, wire=Wire(reduce=_DTYPES[wire]))) for rule in plan.rules)
            plan = plan.with_(rules=tuple(rules))
        return self._offload.place(plan).with_(group=self.zero.mics_shard_size if self.zero.mics_shard_size > 0 else None)
