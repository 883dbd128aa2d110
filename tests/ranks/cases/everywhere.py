"""Plans and configurations that a case is tried under, for any number of ranks."""

from __future__ import annotations

from typing import Any

import torch

import onecopy
from onecopy.errors import OneCopyError
from tests.ranks.oracle import every_plan

__all__ = ["everywhere", "json_plans", "said", "values"]


def everywhere(world: int, **options: Any) -> dict[str, Any]:
    """All stages, stage 3 without resharding, and hybrid sharding in pairs where the ranks form several pairs."""
    options = {"units": onecopy.Units(min_numel=0)} | options
    plans = every_plan(**options)
    if world > 2 and world % 2 == 0:
        plans |= {f"pairs, stage {number}": onecopy.hsdp(shard=2, number=number, **options) for number in (1, 3)}
    return plans


def json_plans(world: int, **keys: Any) -> dict[str, dict[str, Any]]:
    """DeepSpeed configurations of all stages; ``keys`` are top-level keys. Gradients are not clipped unless they say so."""
    base: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0} | keys
    found = {f"json {number}": base | {"zero_optimization": {"stage": number}} for number in range(4)}
    if world > 2 and world % 2 == 0:
        found["json 3 in pairs"] = base | {"zero_optimization": {"stage": 3, "mics_shard_size": 2}}
    return found


def values(engine: Any) -> dict[str, torch.Tensor]:
    """Every parameter whole, in fp32; collective."""
    return {name: onecopy.full_param(p).clone() for name, p in engine.module.named_parameters()}


def said(call: Any, kind: type[OneCopyError] = OneCopyError) -> str:
    """What the ``kind`` of error that ``call()`` ends with says."""
    try:
        result = call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no error; the call returned {result!r:.200}")
