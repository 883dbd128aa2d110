"""Ready-made DeepSpeed JSON files, by the names that people know them by; ``onecopy config show`` prints them.

Their ``_why`` keys say when to use each. They hold only keys that are honoured here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from onecopy.errors import ConfigError
from onecopy.plan.values import nearest

__all__ = ["FILLED_BY_TRAINERS", "NAMES", "resolve", "template", "with_auto"]

NAMES = (
    "zero0", "zero1", "zero2", "zero2_offload", "zero2_lora", "zero3", "zero3_offload", "zero3_nvme", "zero3_lora", "qlora",
    "zeropp", "inference",
)  # fmt: skip
FILLED_BY_TRAINERS = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "bf16.enabled",
    "optimizer.params.lr",
    "optimizer.params.betas",
    "optimizer.params.weight_decay",
)
"""Keys that a trainer with arguments of its own (Hugging Face, Accelerate) fills in where they say "auto"."""


def template(name: str) -> dict[str, Any]:
    """The template called ``name``. Raises :class:`ConfigError` with the nearest name."""
    if name not in NAMES:
        near = nearest(name, NAMES)
        hint = f"did you mean {near!r}?" if near else f"there are {', '.join(NAMES)}"
        raise ConfigError(f"there is no template {name!r}; {hint}")
    text = resources.files(__name__).joinpath(f"{name}.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def with_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``config`` that says "auto" where a trainer knows better."""
    found: dict[str, Any] = json.loads(json.dumps(config))
    for key in FILLED_BY_TRAINERS:
        *sections, name = key.split(".")
        place: Any = found
        for section in sections:
            place = place.get(section) or {}
        if name in place:
            place[name] = "auto"
    return found


def resolve(source: str) -> str | dict[str, Any]:
    """What ``--config`` means: the file of that name, or else the template."""
    if not Path(source).exists() and source in NAMES and os.sep not in source:
        return template(source)
    return source
