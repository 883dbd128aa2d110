"""What may be said of a configuration key: what is legal for it, what it does, or why it does nothing.

:mod:`onecopy.plan.schema` writes these beside every key; loading, ``onecopy config check`` and the documentation read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, PlainValidator

from onecopy.plan.values import Choice, Flag, Kind, Number, Text, shown

__all__ = [
    "AlwaysOn", "Count", "Device", "Dtype", "MaybeSwitch", "Means", "Note", "Off", "OffSection", "Remark", "Section", "Size",
    "Switch", "Word", "checked",
]  # fmt: skip


@dataclass(frozen=True)
class Means:
    """Mark of a key that is translated into the plan: what it does, in our terms."""

    says: str


@dataclass(frozen=True)
class Note:
    """Mark of a key without effect: why that is so."""

    why: str


@dataclass(frozen=True)
class Remark:
    """Something to be told at the start of a run: ``keys`` do nothing, and why; without keys, only ``why``."""

    why: str
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.keys:
            return self.why
        return f"{', '.join(sorted(self.keys))} {'does' if len(self.keys) == 1 else 'do'} nothing: {self.why}"


@dataclass(frozen=True)
class Off:
    """A feature that does not exist here: only the values that leave it off are legal. ``instead``: what there is."""

    values: tuple[Any, ...]
    feature: str
    instead: str = ""

    @property
    def legal(self) -> str:
        return " or ".join(shown(value) for value in self.values)

    def check(self, value: Any) -> Any:
        if any(type(value) is type(off) and value == off for off in self.values):
            return value
        raise ValueError(_absent(self.feature, self.instead, self.legal))


@dataclass(frozen=True)
class OffSection:
    """A whole section for a feature that does not exist here; legal while its ``switch`` is off."""

    feature: str
    switch: str = "enabled"
    off: tuple[Any, ...] = (False,)
    instead: str = ""

    @property
    def legal(self) -> str:
        return f"null or a section with {self.switch} {shown(self.off[0])}"

    def check(self, value: Any) -> Any:
        if value is None or value == {}:
            return value
        said = value.get(self.switch) if isinstance(value, dict) else None
        if any(type(said) is type(off) and said == off for off in self.off):
            return value
        raise ValueError(_absent(self.feature, self.instead, self.legal))


def _absent(feature: str, instead: str, legal: str) -> str:
    hint = f" ({instead})" if instead else ""
    return f"is not supported in this version: {feature}{hint}; legal: {legal}, or no such key"


def checked(kind: Kind) -> PlainValidator:
    """The mark that makes pydantic check a field with ``kind``."""
    return PlainValidator(kind.check)


Switch = Annotated[bool, checked(Flag())]
MaybeSwitch = Annotated[bool | None, checked(Flag(optional=True))]
Count = Annotated[int | None, checked(Number(low=1, whole=True, optional=True))]
Size = Annotated[float | None, checked(Number(low=0, optional=True))]
Word = Annotated[str | None, checked(Text(optional=True))]
Dtype = Annotated[str | None, checked(Choice(("fp32", "fp16", "bf16"), optional=True))]
Device = Annotated[str | None, checked(Choice(("none", "cpu", "nvme"), optional=True))]
AlwaysOn = Annotated[bool, checked(Off((True,), "doing without it"))]


class Section(BaseModel):
    """A JSON object with known keys only."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
