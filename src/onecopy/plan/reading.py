"""Reading a DeepSpeed JSON: from a file or a dict to a tidy dict, without comments, other names and "auto"."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from onecopy.errors import ConfigError
from onecopy.plan import schema
from onecopy.plan.batch import ACCUMULATION, MICRO, TRAIN
from onecopy.plan.keys import Note, Remark
from onecopy.plan.values import shown

__all__ = ["Tidy", "override", "read_config", "why_idle"]

# Keys that mean their default while they are "auto": a size that nothing depends on, and rates that the optimizer's own is.
_DEFAULTED = {
    "zero_optimization.stage3_prefetch_bucket_size",
    "scheduler.params.warmup_min_lr",
    "scheduler.params.warmup_max_lr",
}

# Sections that trainers put into the file for themselves, or that examples carry along; DeepSpeed does not know them.
_FOREIGN = {"msamp", "comms_config", "monitor_config"}


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


def override(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``config`` with the values at the dotted keys of ``changes`` (``"fp16.enabled"``) set; sections that are not
    there are made. Raises :class:`ConfigError` where a part of a key is no section."""
    found = copy.deepcopy(dict(config))
    for key, value in changes.items():
        *sections, name = key.split(".")
        place = found
        for depth, section in enumerate(sections):
            inner = place.setdefault(section, {})
            if not isinstance(inner, dict):
                where = ".".join(sections[: depth + 1])
                raise ConfigError(f"{key} cannot be set: {where} is {shown(inner)}, which is no section")
            place = inner
        place[name] = value
    return found


class Tidy:
    """One walk over the raw dict: drops comments, follows aliases, replaces "auto", and notes what it did.

    ``auto``: values, by dotted key, for what is left "auto". ``filled`` holds those that were used, ``open`` the keys that
    are left, ``open_batch`` those of the batch sizes, which may still follow from each other.
    """

    def __init__(self, auto: Mapping[str, Any]) -> None:
        self.auto = auto
        self.problems: list[str] = []
        self.remarks: list[Remark] = []
        self.filled: dict[str, Any] = {}
        self.open: list[str] = []
        self.open_batch: list[str] = []

    def section(self, raw: Mapping[Any, Any], model: type[schema.Section] | None, path: str) -> dict[str, Any]:
        clean: dict[str, Any] = {}
        said: dict[str, str] = {}
        for key, value in raw.items():
            if not isinstance(key, str):
                self.problems.append(f"{path or 'the top level'} has the key {key!r}; keys are strings")
                continue
            if key.startswith("_"):
                continue
            name = schema.ALIASES.get(path, {}).get(key, key)
            dotted = f"{path}.{name}" if path else name
            if name in said:
                self.problems.append(f"{dotted} is given twice, as {said[name]!r} and as {key!r}; keep one")
                continue
            said[name] = key
            if value == "auto" and isinstance(value, str):
                if dotted in self.auto:
                    self.filled[dotted] = clean[name] = self.auto[dotted]
                else:
                    self._left(dotted, model, name)
            elif isinstance(value, Mapping):
                clean[name] = self.section(value, schema.section_of(model, name), dotted)
            else:
                clean[name] = value
        return clean

    def _left(self, dotted: str, model: type[schema.Section] | None, name: str) -> None:
        """``dotted`` stays "auto": that is fine where nothing depends on it."""
        info = model.model_fields.get(name) if model is not None else None
        if dotted in (TRAIN, MICRO, ACCUMULATION):
            self.open_batch.append(dotted)
        elif dotted not in _DEFAULTED and (info is None or schema.mark_of(info, Note) is None):
            self.open.append(dotted)

    def unfold(self, raw: Mapping[Any, Any]) -> dict[Any, Any]:
        """The whole file, where top-level keys like "zero_optimization.reduce_bucket_size", which some trainers write, are
        in the place that they spell; and without the sections that trainers put there for themselves."""
        found = {key: value for key, value in raw.items() if key not in _FOREIGN}
        if foreign := sorted(raw.keys() & _FOREIGN):
            self.remarks.append(Remark("the section of another program, which is let pass", tuple(foreign)))
        flat = [key for key in found if isinstance(key, str) and schema.fields_of(key.partition(".")[0]) and "." in key]
        for key in flat:
            head, _, tail = key.partition(".")
            name = f"{head}.{schema.ALIASES.get(head, {}).get(tail, tail)}"
            there = _value_at(found, name)
            if there not in (None, "auto", found[key]):
                self.remarks.append(Remark(f"{key!r} takes the place of {shown(there)} in its section"))
            found = override(found, {name: found.pop(key)})
        return found


def _value_at(config: Any, dotted: str) -> Any:
    """What is at a dotted key of ``config``; None where there is nothing."""
    for part in dotted.split("."):
        config = config.get(part) if isinstance(config, Mapping) else None
    return config


def why_idle(config: schema.Config, below: str | None) -> Iterator[tuple[str, str]]:
    """Keys that were used although they do nothing, and why. ``below``: why keys of stage 3 do nothing, below it."""

    def walk(section: schema.Section, path: str) -> Iterator[tuple[str, str]]:
        if isinstance(section, schema.Tool) and not section.enabled:
            return
        for name in sorted(section.model_fields_set):
            info, value = type(section).model_fields[name], getattr(section, name)
            if isinstance(value, schema.Section):
                yield from walk(value, f"{path}{name}.")
            elif below is not None and name.startswith("stage3_"):
                yield path + name, below
            elif note := schema.mark_of(info, Note):
                yield path + name, note.why

    yield from walk(config, "")
