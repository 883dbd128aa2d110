"""How ``onecopy train`` trains: the options of its command line, or a DeepSpeed JSON, as a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from onecopy.errors import ConfigError
from onecopy.place import Place
from onecopy.plan.auto import auto_keys, batch_auto, check_dtype, precision_auto
from onecopy.plan.batch import ACCUMULATION, MICRO
from onecopy.plan.config import load_config, read_config
from onecopy.plan.plan import Plan
from onecopy.plan.presets import stage
from onecopy.plan.reading import override
from onecopy.templates import resolve

__all__ = ["ROWS", "Method", "default_dtype"]

ROWS = 16
"""Rows of a micro-batch on one rank unless something says otherwise."""


def default_dtype() -> str:
    """bf16 where there is an accelerator, else fp32."""
    return "bf16" if torch.accelerator.is_available() else "fp32"


@dataclass(frozen=True)
class Method:
    """How it is trained. Either ``config`` (a DeepSpeed JSON, or the name of a template) or the other fields; None: the
    default. ``batch_size``: rows of one micro-batch on one rank. ``recompute``: activation checkpointing. ``changes``: by
    dotted key, what replaces what the file says.
    """

    config: str | None = None
    stage: int | None = None
    dtype: str | None = None
    batch_size: int | None = None
    accumulation: int | None = None
    lr: float | None = None
    recompute: bool = False
    place: Place = field(default_factory=Place)
    changes: Mapping[str, Any] = field(default_factory=dict)

    def plan(self, world: int, auto: Mapping[str, Any] | None = None) -> Plan:
        """The plan for ``world`` ranks; ``auto``: what keys that say "auto" are, beside those that the options say. Raises
        :class:`ConfigError` when a file and an option say the same thing."""
        if self.config is None:
            if self.changes:
                raise ConfigError(f"--set {next(iter(self.changes))} without --config: there is no file to change")
            number = 2 if self.stage is None else self.stage
            dtype = self.dtype or default_dtype()
            return self.place.apply(stage(number, dtype=dtype, accumulation=self.accumulation or 1, clip=1.0))
        raw = override(read_config(resolve(self.config)), self.changes)
        left = auto_keys(raw)
        known = {**precision_auto(self.dtype or default_dtype()), **batch_auto(raw, self.batch_size, self.accumulation, ROWS)}
        plan = load_config(raw, world_size=world, auto={"gradient_clipping": 1.0, **known, **(auto or {})})
        open_precision = {"fp16.enabled", "bf16.enabled"} & left
        said = {
            "--stage": (self.stage, "zero_optimization.stage"),
            "--dtype": (None if open_precision else self.dtype, "fp16 and bf16"),
            "--accumulation": (None if ACCUMULATION in left else self.accumulation, ACCUMULATION),
            "--batch-size": (self.batch_size if plan.batch.micro and MICRO not in left else None, MICRO),
            "--lr": (self.lr if plan.optimizer and "optimizer.params.lr" not in left else None, "optimizer.params.lr"),
            **self.place.decided_by_file(),
        }
        for option, (value, key) in said.items():
            if value is not None:
                raise ConfigError(f"{option} {value} beside --config {self.config}: the file decides by {key}; drop one")
        check_dtype(self.dtype, plan, self.config, left)
        return self.place.apply(plan)
