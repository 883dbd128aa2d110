"""What a DeepSpeed JSON means here, key by key: :func:`explain`, the body of ``onecopy config check``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic.fields import FieldInfo

from onecopy.plan import schema
from onecopy.plan.config import Defaults, Reading, read_plan
from onecopy.plan.keys import Means, Note, Off, OffSection
from onecopy.plan.layout import Layout
from onecopy.plan.plan import Plan
from onecopy.plan.reading import override, read_config
from onecopy.plan.recipe import SCHEDULES
from onecopy.plan.values import shown

__all__ = ["VERDICTS", "Explained", "Line", "Verdict", "describe", "explain", "meaning"]

Verdict = Literal["honoured", "no effect", "off", "auto", "wrong"]
_DEFAULTS = Defaults()
VERDICTS: dict[Verdict, str] = {
    "honoured": "does what it says",
    "no effect": "is legal and changes nothing here",
    "off": "leaves something off that does not exist here, or that is not enabled",
    "auto": "is still open: a trainer fills it in, or you write a value",
    "wrong": "is an error",
}


@dataclass(frozen=True)
class Line:
    """One key of the file: its dotted name, its value, and what becomes of it."""

    key: str
    value: Any
    verdict: Verdict
    says: str


@dataclass(frozen=True)
class Explained:
    """Every key of a file in its order, and what was read of all of them together."""

    lines: tuple[Line, ...]
    reading: Reading

    @property
    def ok(self) -> bool:
        """Is there no error? What is still "auto" is none."""
        return not self.reading.problems


def explain(
    source: str | os.PathLike[str] | Mapping[str, Any],
    world_size: int | None = None,
    *,
    auto: Mapping[str, Any] | None = None,
    changes: Mapping[str, Any] | None = None,
    defaults: Defaults = _DEFAULTS,
) -> Explained:
    """Every key of a configuration with what it means; arguments are those of :func:`onecopy.plan.config.load_config`. Raises
    :class:`~onecopy.errors.ConfigError` only for a source that cannot be read."""
    raw = override(read_config(source), changes or {})
    reading = read_plan(raw, world_size, auto=auto, defaults=defaults)
    idle = {key: remark.why for remark in reading.remarks for key in remark.keys}
    return Explained(tuple(_Walk(reading, idle).section(raw, "", off=False)), reading)


@dataclass(frozen=True)
class _Walk:
    """Over the raw file, in its order."""

    reading: Reading
    idle: Mapping[str, str]

    def section(self, raw: Mapping[Any, Any], path: str, off: bool) -> Iterator[Line]:
        legal = schema.fields_of(path)
        for key, value in raw.items():
            name = schema.ALIASES.get(path, {}).get(str(key), str(key))
            if name.startswith("_"):
                continue
            dotted = f"{path}.{name}" if path else name
            inner = schema.fields_of(dotted)
            tool = "enabled" in inner and schema.mark_of(inner["enabled"], Note) is not None
            if isinstance(value, Mapping) and (inner or (name == "params" and name in legal)):
                yield from self.section(value, dotted, off=tool and value.get("enabled") is not True)
            else:
                yield self._line(dotted, value, legal.get(name), off)

    def _line(self, key: str, value: Any, info: FieldInfo | None, off: bool) -> Line:
        if info is None and "." in key:  # a flat name at the top level, of a key that belongs in a section
            head, _, tail = key.partition(".")
            info = schema.fields_of(head).get(schema.ALIASES.get(head, {}).get(tail, tail))
        problem = next((line for line in self.reading.problems if line.startswith((f"{key} ", f"{key!r} "))), None)
        if problem is not None:
            return Line(key, value, "wrong", problem.removeprefix(f"{key} "))
        if key in self.reading.open:
            return Line(key, value, "auto", "nothing here says what it is")
        if key in self.idle:
            return Line(key, value, "no effect", self.idle[key])
        if off:
            return Line(key, value, "off", "the section is not enabled")
        filled = f"{shown(self.reading.filled[key])} here; " if key in self.reading.filled else ""
        verdict, says = meaning(info) if info is not None else self._argument(key)
        if verdict == "honoured" and value is False:
            return Line(key, value, "off", f"not asked for: {says}")
        if value == "auto" and not filled and verdict == "honoured":
            filled = "follows from the others, or its default; "
        return Line(key, value, verdict, filled + says)

    def _argument(self, key: str) -> tuple[Verdict, str]:
        """An argument of the optimizer or the schedule, or a name that does nothing."""
        section, _, name = key.partition(".params.")
        chosen = self.reading.chosen.get(section)
        if chosen is not None and name:
            home = "torch.optim" if section == "optimizer" else "onecopy.schedules"
            home = home if section == "optimizer" or chosen.name in SCHEDULES else "torch.optim.lr_scheduler"
            if name in chosen.arguments or self.reading.filled.get(key) is not None:
                return "honoured", f"argument of {home}.{chosen.name}"
            return "honoured", f"of DeepSpeed's own optimizer: it chose {home}.{chosen.name} and its arguments"
        unread = f"not looked at until {section}.type is right" if name and chosen is None else "not looked at"
        said = next((str(remark) for remark in self.reading.remarks if f"{key!r}" in remark.why), unread)
        return "no effect", said


def meaning(info: FieldInfo) -> tuple[Verdict, str]:
    """What becomes of a key by itself, and in words."""
    if (means := schema.mark_of(info, Means)) is not None:
        return "honoured", means.says
    if (note := schema.mark_of(info, Note)) is not None:
        return "no effect", note.why
    kind = next((mark.func.__self__ for mark in info.metadata if hasattr(mark, "func")), None)
    if isinstance(kind, Off | OffSection):
        hint = f" ({kind.instead})" if kind.instead else ""
        return "off", f"off, as in every run here: {kind.feature}{hint}"
    return "honoured", "whether the section counts"


def describe(plan: Plan) -> list[str]:
    """``plan`` in a few lines: where each state is, the numbers, the batch, the optimizer."""
    row = plan.rules[-1].row
    over = f"over {plan.group} ranks" if plan.group is not None else "over all ranks"
    states = {"parameters": row.parameter.rest, "gradients": row.gradient.rest, "master and moments": row.optimizer}
    lines = ["; ".join(f"{name} {_where(layout, over)}" for name, layout in states.items())]
    precision, batch = plan.precision, plan.batch
    if precision.dtype is None:
        said = "the model's own dtype"
    else:
        said = f"{precision.dtype}, {'fp32 masters' if precision.master else 'no masters'}"
        said += f", loss scale {precision.loss_scale.initial:g}" if precision.loss_scale else ""
        said += " at first" if precision.loss_scale and precision.loss_scale.dynamic else ""
    micro = f"micro-batches of {batch.micro}" if batch.micro is not None else "micro-batches of any size"
    lines.append(f"{said}; {micro}, {batch.accumulation} to a step" + (f", {batch.total} in all" if batch.total else ""))
    clip = f"gradients clipped to norm {plan.clip.max_norm:g}" if plan.clip.max_norm is not None else "gradients not clipped"
    made = plan.optimizer.type if plan.optimizer is not None else "the optimizer that initialize gets"
    schedule = f", {plan.scheduler.type}" if plan.scheduler is not None else ""
    return [*lines, f"{made}{schedule}; {clip}"]


def _where(layout: Layout, over: str) -> str:
    return ("whole on every rank" if layout.replicated else f"cut {over}") + {
        "device": "", "host": ", in host memory", "disk": ", on disk"
    }[layout.tier]  # fmt: skip
