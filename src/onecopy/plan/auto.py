"""Keys that say "auto": which of a file do, and what they are in a run whose options are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onecopy.errors import ConfigError
from onecopy.plan import schema
from onecopy.plan.batch import ACCUMULATION, MICRO, TRAIN
from onecopy.plan.plan import Plan
from onecopy.plan.presets import DTYPES

__all__ = ["auto_keys", "batch_auto", "check_dtype", "precision_auto"]


def auto_keys(raw: Mapping[Any, Any], path: str = "") -> set[str]:
    """The dotted keys of ``raw`` that say "auto"."""
    found: set[str] = set()
    for key, value in raw.items():
        name = schema.ALIASES.get(path, {}).get(str(key), str(key))
        dotted = f"{path}.{name}" if path else name
        if isinstance(value, Mapping):
            found |= auto_keys(value, dotted)
        elif isinstance(value, str) and value == "auto" and not name.startswith("_"):
            found.add(dotted)
    return found


def precision_auto(dtype: str) -> dict[str, Any]:
    """What ``fp16.enabled`` and ``bf16.enabled`` are under ``dtype``, "bf16" or a torch dtype's name."""
    return {f"{name}.enabled": DTYPES[name] == DTYPES.get(dtype, dtype) for name in ("fp16", "bf16")}


def check_dtype(dtype: str | None, plan: Plan, file: str, left: set[str]) -> None:
    """Raise :class:`ConfigError` where ``--dtype`` was given and the sections that say "auto" (``left``) do not reach it."""
    has = plan.precision.dtype or "float32"
    if dtype is not None and DTYPES.get(dtype, dtype) != has:
        only = ", ".join(sorted({"fp16.enabled", "bf16.enabled"} & left))
        raise ConfigError(
            f"--dtype {dtype} beside --config {file}, which says 'auto' for {only} alone: the plan would have {has}; add the "
            f"section {dtype!r} to the file, or drop --dtype"
        )


def batch_auto(raw: Mapping[str, Any], micro: int | None, accumulation: int | None, default: int) -> dict[str, Any]:
    """What batch sizes that say "auto" in ``raw`` are, by options or, where nothing else says it, ``default`` samples of a
    micro-batch and no accumulation."""
    said: dict[str, int | None] = {MICRO: micro, ACCUMULATION: accumulation}
    left = {key for key in said if raw.get(key) == "auto"}
    if isinstance(raw.get(TRAIN), (int, float)):
        if left == set(said) and said == dict.fromkeys(said):
            said[ACCUMULATION] = 1
    else:
        said = {MICRO: micro or default, ACCUMULATION: accumulation or 1}
    return {key: value for key, value in said.items() if value is not None}
