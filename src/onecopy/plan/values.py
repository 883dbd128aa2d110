"""Legal values of configuration keys: each kind of value is an object that checks one and can say what is legal.

Checks are stricter than Python's own conversions on purpose: ``True`` is not the number 1, ``"3"`` is not 3, and
``inf`` and ``nan`` are refused wherever a finite number is meant.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Protocol

__all__ = ["Choice", "Flag", "Kind", "ListOf", "Number", "Text", "nearest", "shown"]


class Kind(Protocol):
    """What a value may be. ``legal`` completes the sentence "... must be"; ``check`` returns the value to use or raises
    ``ValueError`` with that sentence."""

    @property
    def legal(self) -> str: ...

    def check(self, value: Any) -> Any: ...


def shown(value: Any) -> str:
    """``value`` as it would be written in JSON, shortened to one line of at most 60 characters."""
    words = {True: "true", False: "false", None: "null"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def nearest(word: str, legal: Iterable[str]) -> str | None:
    """The legal word most like ``word`` (letter case ignored), None when nothing is alike."""
    by_lower = {name.lower(): name for name in legal}
    found = get_close_matches(word.lower(), by_lower, n=1, cutoff=0.5)
    return by_lower[found[0]] if found else None


@dataclass(frozen=True)
class Number:
    """A finite number with ``low <= value <= high``; ``above``/``below`` exclude the end. ``whole`` numbers may be
    written as floats (``2e8``) when nothing is lost. ``endless`` admits ``inf``."""

    low: float | None = None
    high: float | None = None
    above: bool = False
    below: bool = False
    whole: bool = False
    optional: bool = False
    endless: bool = False

    @property
    def legal(self) -> str:
        text = "a whole number" if self.whole else "a finite number"
        if self.low is not None:
            text += f" above {self.low:g}" if self.above else f" from {self.low:g}"
        if self.high is not None:
            text += f" and below {self.high:g}" if self.below else f" to {self.high:g}"
        return text + (", or inf" if self.endless else "") + (", or null" if self.optional else "")

    def check(self, value: Any) -> Any:
        if value is None and self.optional:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not self._inside(value):
            raise ValueError(f"must be {self.legal}")
        return int(value) if self.whole and not math.isinf(value) else value

    def _inside(self, value: float) -> bool:
        if math.isinf(value) and self.endless:
            return value > 0
        if not math.isfinite(value) or (self.whole and value != int(value)):
            return False
        if self.low is not None and (value <= self.low if self.above else value < self.low):
            return False
        return self.high is None or (value < self.high if self.below else value <= self.high)


@dataclass(frozen=True)
class Flag:
    """true or false, and nothing that merely counts as one of them."""

    optional: bool = False

    @property
    def legal(self) -> str:
        return "true, false or null" if self.optional else "true or false"

    def check(self, value: Any) -> bool | None:
        if isinstance(value, bool) or (value is None and self.optional):
            return value
        raise ValueError(f"must be {self.legal}")


@dataclass(frozen=True)
class Choice:
    """One of a few words, letter case ignored."""

    words: tuple[str, ...]
    optional: bool = False

    @property
    def legal(self) -> str:
        return "one of " + ", ".join(repr(word) for word in self.words) + (", or null" if self.optional else "")

    def check(self, value: Any) -> str | None:
        if value is None and self.optional:
            return None
        if isinstance(value, str):
            for word in self.words:
                if word.lower() == value.lower():
                    return word
            near = nearest(value, self.words)
            raise ValueError(f"must be {self.legal}" + (f" - did you mean {near!r}?" if near else ""))
        raise ValueError(f"must be {self.legal}")


@dataclass(frozen=True)
class Text:
    """Any string that is not empty."""

    optional: bool = False

    @property
    def legal(self) -> str:
        return "a string that is not empty" + (", or null" if self.optional else "")

    def check(self, value: Any) -> str | None:
        if (isinstance(value, str) and value) or (value is None and self.optional):
            return value
        raise ValueError(f"must be {self.legal}")


@dataclass(frozen=True)
class ListOf:
    """A list of ``count`` values of one kind (None: of any length from 1); with ``or_one`` a single value will do."""

    kind: Kind
    count: int | None = None
    or_one: bool = False
    optional: bool = False

    @property
    def legal(self) -> str:
        many = f"a list of {self.count if self.count is not None else 'one or more'} values, each {self.kind.legal}"
        return (f"{self.kind.legal}, or {many}" if self.or_one else many) + (", or null" if self.optional else "")

    def check(self, value: Any) -> Any:
        if value is None and self.optional:
            return None
        if isinstance(value, Sequence) and not isinstance(value, str):
            if not value or (self.count is not None and len(value) != self.count):
                raise ValueError(f"must be {self.legal}")
            return [self._one(item) for item in value]
        if self.or_one:
            return self.kind.check(value)
        raise ValueError(f"must be {self.legal}")

    def _one(self, item: Any) -> Any:
        try:
            return self.kind.check(item)
        except ValueError:
            raise ValueError(f"must be {self.legal}") from None
