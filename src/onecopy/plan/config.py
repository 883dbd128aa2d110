"""DeepSpeed JSON -> :class:`~onecopy.plan.plan.Plan`.

``load_config`` reads a file or a dict, checks every key and value, and translates. Whatever it cannot honour is an
error; whatever has no effect is named in ``Plan.notes``. Nothing is allocated and no process group is needed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from onecopy.errors import ConfigError
from onecopy.plan import schema
from onecopy.plan.batch import find_world, resolve_batch
from onecopy.plan.offload_keys import Offload, read_offload
from onecopy.plan.plan import Batch, LossScale, Plan, Precision, Recipe, Rule, Units, Wire
from onecopy.plan.presets import stage as stage_plan
from onecopy.plan.recipe import choose_optimizer, choose_schedule
from onecopy.plan.values import nearest, shown

__all__ = ["DEEPSPEED", "Defaults", "load_config", "read_config"]

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@dataclass(frozen=True)
class Defaults:
    """What an absent key means, where that is a matter of convention.

    ``clip``: ``gradient_clipping``. ``cast_inputs``: whether floating-point inputs are cast to bf16 or fp16
    (``fp16.auto_cast`` decides when it is given).
    """

    clip: float | None = None
    cast_inputs: bool = True


DEEPSPEED = Defaults(clip=1.0, cast_inputs=False)


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any],
    world_size: int | None = None,
    *,
    defaults: Defaults = Defaults(),
) -> Plan:
    """The plan that a DeepSpeed JSON file (or the dict it holds) describes.

    ``world_size``: number of data-parallel ranks, needed for ``train_batch_size``; by default WORLD_SIZE of the
    environment, else 1. Keys that begin with ``_`` are comments. Raises :class:`ConfigError` with one line for every
    unknown key, bad value, unsupported feature, contradiction and remaining "auto".
    """
    tidy = _Tidy()
    data = tidy.section(read_config(source), schema.Config, "")
    problems = list(tidy.problems)
    if tidy.auto:
        problems.append(f"still 'auto', which only a trainer that fills it in can resolve: {', '.join(tidy.auto)}")
    recipes = _Recipes(data)
    problems += recipes.problems
    try:
        config = schema.Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join((*_explain(error), *problems))) from None
    parts = _Parts(config, defaults)
    batch, world = Batch(), find_world(world_size)
    try:
        parts.translate()
        batch = resolve_batch(
            config.train_batch_size,
            config.train_micro_batch_size_per_gpu,
            config.gradient_accumulation_steps,
            world,
            frozenset(tidy.auto_batch),
        )
    except ConfigError as error:
        problems.append(str(error))
    group = parts.zero.mics_shard_size
    if group > 0 and world.size > 1 and world.size % group:
        problems.append(f"zero_optimization.mics_shard_size is {group}, which does not divide the {world.size} ranks")
    if problems:
        raise ConfigError("\n".join(problems))
    if world.remark and config.train_batch_size is not None:
        parts.notes.append(f"train_batch_size {config.train_batch_size} was divided over 1 rank: {world.remark}")
    return parts.plan(batch).with_(
        optimizer=recipes.found.get("optimizer"),
        scheduler=recipes.found.get("scheduler"),
        notes=(*tidy.notes, *recipes.notes, *parts.notes, *_notes(config)),
    )


# ---------------------------------------------------------------------------------------------------------- reading


def read_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> dict[str, Any]:
    """The dict in a JSON file, or a copy of the one given. Raises :class:`ConfigError` with line and column."""
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"a configuration is a path to a JSON file or a dict, not {type(source).__name__}")
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read configuration {str(path)!r}: {error}") from error
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a configuration is one JSON object {{...}}, not {type(data).__name__}")
    for key, line, column, first in _duplicates(text):
        raise ConfigError(f"{path}:{line}:{column}: {key!r} is given twice in one object, first in line {first}")
    return data


_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"(\s*:)?|[{}\[\]]')


def _duplicates(text: str) -> Iterator[tuple[str, int, int, int]]:
    """Keys that an object of valid JSON ``text`` holds twice: key, line, column, line of the first."""
    stack: list[dict[str, int]] = []
    for token in _TOKENS.finditer(text):
        word = token.group()
        if word in "{[":
            stack.append({})
        elif word in "}]":
            stack.pop()
        elif token.group(1):
            key = json.loads(word[: word.rindex('"') + 1])
            start = token.start()
            line = text.count("\n", 0, start) + 1
            if key in stack[-1]:
                yield key, line, start - text.rfind("\n", 0, start), stack[-1][key]
            stack[-1][key] = line


class _Tidy:
    """One walk over the raw dict: drops comments, follows aliases, takes out "auto", and notes what it did."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.auto: list[str] = []
        self.auto_batch: set[str] = set()

    def section(self, raw: Mapping[Any, Any], model: type[schema.Section] | None, path: str) -> dict[str, Any]:
        clean: dict[str, Any] = {}
        said: dict[str, str] = {}
        for key, value in raw.items():
            if not isinstance(key, str):
                self.problems.append(f"{path or 'the top level'} has the key {key!r}; keys are strings")
                continue
            if key.startswith("_") or (not path and self._flat(key)):
                continue
            name = schema.ALIASES.get(path, {}).get(key, key)
            dotted = f"{path}.{name}" if path else name
            if name in said:
                self.problems.append(f"{dotted} is given twice, as {said[name]!r} and as {key!r}; keep one")
                continue
            said[name] = key
            if value == "auto" and isinstance(value, str):
                self._auto(dotted)
            elif isinstance(value, Mapping):
                clean[name] = self.section(value, _model_of(model, name), dotted)
            else:
                clean[name] = value
        return clean

    def _auto(self, dotted: str) -> None:
        if dotted in _BATCH_KEYS:
            self.auto_batch.add(dotted)
        elif dotted not in schema.AUTO_ALLOWED:
            self.auto.append(dotted)

    def _flat(self, key: str) -> bool:
        """True for a top-level key like "zero_optimization.reduce_bucket_size", which some trainers write.

        It is let pass, with a note, when the nested key would have no effect either.
        """
        head, dot, tail = key.partition(".")
        model = _model_of(schema.Config, head)
        if not dot or model is None:
            return False
        tail = schema.ALIASES.get(head, {}).get(tail, tail)
        info = model.model_fields.get(tail)
        if info is not None and (_why(info) or f"{head}.{tail}" in schema.AUTO_ALLOWED):
            self.notes.append(f"{key!r} as one flat name does nothing; the key {tail!r} belongs inside {head!r}")
        else:
            self.problems.append(f"{key!r} is one flat name; the key {tail!r} belongs inside the section {head!r}")
        return True


def _model_of(model: type[schema.Section] | None, name: str) -> type[schema.Section] | None:
    """The class of section ``name`` of ``model``; None when it is no section with keys of its own."""
    info = model.model_fields.get(name) if model is not None else None
    if info is None:
        return None
    for option in (info.annotation, *get_args(info.annotation)):
        if isinstance(option, type) and issubclass(option, schema.Section):
            return option
    return None


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
    model: type[schema.Section] | None = schema.Config
    for part in loc[:-1]:
        model = _model_of(model, part)
    legal = model.model_fields if model is not None else {}
    owners = [head for head in schema.Config.model_fields if str(loc[-1]) in _fields(head)]
    if owners:
        return f"{where} is not a key; it belongs inside {owners[0]!r}"
    near = nearest(str(loc[-1]), legal)
    if near is None:
        return f"{where} is not a key; legal keys: {', '.join(sorted(legal))}"
    return f"{where} is not a key - did you mean {'.'.join((*map(str, loc[:-1]), near))}?"


def _fields(head: str) -> Mapping[str, FieldInfo]:
    model = _model_of(schema.Config, head)
    return model.model_fields if model is not None else {}


# ------------------------------------------------------------------------------------------------------ translation


def _why(info: FieldInfo) -> str | None:
    return next((mark.why for mark in info.metadata if isinstance(mark, schema.Note)), None)


def _notes(config: schema.Config) -> tuple[str, ...]:
    """One note per reason, naming all keys that were used although they do nothing."""
    reasons: dict[str, list[str]] = {}

    def walk(section: schema.Section, path: str) -> None:
        for name in section.model_fields_set:
            info, value = type(section).model_fields[name], getattr(section, name)
            if why := _why(info):
                reasons.setdefault(why, []).append(path + name)
            if isinstance(value, schema.Section):
                walk(value, f"{path}{name}.")

    walk(config, "")
    return tuple(f"{_these(keys)}: {why}" for why, keys in sorted(reasons.items()))


def _these(keys: list[str]) -> str:
    return f"{', '.join(sorted(keys))} {'does' if len(keys) == 1 else 'do'} nothing"


class _Recipes:
    """The optimizer and the scheduler sections, checked; sections of a wrong shape are left to the schema."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.found: dict[str, Recipe] = {}
        self.problems: list[str] = []
        self.notes: list[str] = []
        for name, choose in (("optimizer", choose_optimizer), ("scheduler", choose_schedule)):
            section = data.get(name)
            if not isinstance(section, dict) or not isinstance(section.get("type"), str):
                continue
            params = section.get("params") or {}
            if not isinstance(params, dict):
                continue
            recipe = Recipe(section["type"], dict(params))
            try:
                self.notes += choose(recipe, name).notes
            except ConfigError as error:
                self.problems.append(str(error))
            self.found[name] = recipe


class _Parts:
    """The pieces of the plan, each translated from its own keys."""

    def __init__(self, config: schema.Config, defaults: Defaults) -> None:
        self.config = config
        self.zero = config.zero_optimization or schema.ZeroOptimization()
        self.defaults = defaults
        self.notes: list[str] = []
        self._precision = Precision()
        self._offload = Offload()

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
            if idle and not section.enabled:
                self.notes.append(f"{_these(idle)}: {name} is not enabled")

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
                self.notes.append(f"{_these(idle)}: fp16.loss_scale is {fp16.loss_scale:g} and stays there")
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
        self.notes += self._offload.notes

    def _units(self) -> Units:
        path, size = "zero_optimization.stage3_prefetch_bucket_size", self.zero.stage3_prefetch_bucket_size
        if size is not None and self.zero.stage < 3:
            self.notes.append(f"{path} does nothing at stage {self.zero.stage}: only stage 3 gathers parameters for use")
        elif size == 0:
            return Units(prefetch=0)
        elif size is not None:
            self.notes.append(f"{path} only says whether to prefetch (0: no): what is prefetched is the next unit")
        return Units()

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
