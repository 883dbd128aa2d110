"""A chosen plan as a DeepSpeed JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onecopy.errors import ConfigError
from onecopy.plan.plan import Plan
from onecopy.planner.search import SCRATCH, Choice

__all__ = ["as_config", "write_config"]

_DEVICES = {"host": "cpu", "disk": "nvme"}


def as_config(choice: Choice, base: Plan, why: list[str]) -> dict[str, Any]:
    """The configuration that says what ``choice`` does with ``base``'s precision, accumulation and clipping; ``why`` is in a
    comment. Raises :class:`ConfigError` for what such a file has no key for."""
    if choice.moments is not None:
        raise ConfigError(
            f"moments in {choice.moments} have no key in a DeepSpeed configuration; in Python: onecopy.low_precision(plan, "
            f"{choice.moments!r})"
        )
    zero: dict[str, Any] = {"stage": choice.number}
    for key, tier in (("offload_optimizer", choice.optimizer), ("offload_param", choice.parameter)):
        if tier != "device":
            path = {"nvme_path": base.scratch.folder if base.scratch else SCRATCH} if tier == "disk" else {}
            zero[key] = {"device": _DEVICES[tier], **path}
    config: dict[str, Any] = {
        "_why": why,
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": choice.batch,
        "gradient_accumulation_steps": base.batch.accumulation,
    }
    if choice.recompute:
        config["_recompute"] = "switch the model's activation checkpointing on: this plan counts on it"
    sections = {"bfloat16": "bf16", "float16": "fp16"}
    if base.precision.dtype in sections:
        config[sections[base.precision.dtype]] = {"enabled": True}
    if base.clip.max_norm is not None:
        config["gradient_clipping"] = base.clip.max_norm
    if base.optimizer is not None:
        config["optimizer"] = {"type": base.optimizer.type, "params": base.optimizer.params}
    return config


def write_config(path: Path, config: dict[str, Any]) -> None:
    """Write ``config``; raises :class:`ConfigError` where that cannot be."""
    try:
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--write {path} cannot be written: {error.strerror or error}") from error
