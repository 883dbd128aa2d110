"""The configuration files of other projects train a step, or are refused with a reason.

``tests/data/public_configs.json`` has the keys and values of the 43 files that Accelerate, ms-swift, LLaMA-Factory, axolotl,
LLaVA, FastChat, Qwen and xtuner keep in their repositories, by repository and file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onecopy.deepspeed as deepspeed
from onecopy.errors import ConfigError
from onecopy.plan.auto import auto_keys
from onecopy.plan.config import DEEPSPEED, load_config
from onecopy.plan.reading import override
from tests.ranks import models
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.ranks

FILES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[1] / "data" / "public_configs.json").read_text())
REFUSED = {"LLaMA-Factory ds_z2_autotp_config": r"tensor_parallel is \{'autotp_size': 2\}; it is not supported in this"}
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-2, "weight_decay": 0.1}
# What a trainer writes where a file says "auto".
AUTO: dict[str, Any] = {
    "gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": models.MICRO, "gradient_clipping": 1.0,
    "bf16.enabled": True, "fp16.enabled": False,
    **{f"optimizer.params.{key}": value for key, value in ADAMW.items()},
    "scheduler.params.warmup_min_lr": 0.0, "scheduler.params.warmup_max_lr": ADAMW["lr"],
    "scheduler.params.warmup_num_steps": 1, "scheduler.params.total_num_steps": 20,
    "zero_optimization.reduce_bucket_size": models.WIDTH**2,
    "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * models.WIDTH**2),
    "zero_optimization.stage3_param_persistence_threshold": 10 * models.WIDTH,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": True,
}  # fmt: skip


def filled(config: dict[str, Any], world: int) -> dict[str, Any]:
    """``config`` as a trainer hands it over, with the batch of ``models``."""
    steps = config.get("gradient_accumulation_steps", 1)
    steps = AUTO["gradient_accumulation_steps"] if steps == "auto" else steps
    batch = {"train_batch_size": models.MICRO * steps * world, "train_micro_batch_size_per_gpu": models.MICRO}
    said = {key: AUTO[key] for key in auto_keys(config) if key not in batch}
    return override(config, said | {key: value for key, value in batch.items() if key in config})


def start(model: nn.Module, config: dict[str, Any]) -> deepspeed.DeepSpeedEngine:
    """The optimizer is the trainer's own where the file has none."""
    given = {} if "optimizer" in config else {"optimizer": torch.optim.AdamW(model.parameters(), **ADAMW)}
    return deepspeed.initialize(model=model, config=config, **given)[0]


def window(engine: deepspeed.DeepSpeedEngine, step: int, rank: int) -> None:
    for micro in range(engine.gradient_accumulation_steps()):
        loss = engine(*models.batch("gpt", step, micro, rank))
        assert loss.isfinite()
        engine.backward(loss)
        engine.step()


def as_written(rank: int, config: dict[str, Any]) -> None:
    """Windows until the weights moved, in the file's own precision: the first scales of fp16 may be too large, and a
    schedule may begin with rates of 0. At most 12."""
    engine = start(models.build("gpt"), config)
    before = deepspeed.utils.safe_get_full_fp32_param(engine.module.norm.weight)
    windows, moved = 0, False
    while not moved and windows < 12:
        window(engine, windows, rank)
        windows += 1
        moved = not torch.equal(before, deepspeed.utils.safe_get_full_fp32_param(engine.module.norm.weight))
    assert moved and engine.was_step_applied() and engine.global_steps == windows
    assert engine.predicted()["resident"] == engine.measured()["resident"]
    engine.destroy()


def plain(config: dict[str, Any]) -> dict[str, Any]:
    """``config`` in fp32 and without its schedule."""
    return {key: value for key, value in config.items() if key not in ("scheduler", "fp16", "bf16")}


def exactly(rank: int, world: int, config: dict[str, Any]) -> float:
    """One :func:`plain` step beside torch on the whole batch: the largest gap of a weight."""
    model, twin = models.build("gpt"), models.build("gpt")
    engine = start(model, plain(config))
    steps = engine.gradient_accumulation_steps()
    window(engine, 0, rank)
    for micro in range(steps):
        for other in range(world):
            (twin(*models.batch("gpt", 0, micro, other)) / (steps * world)).backward()
    nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    chosen = {key: value for key, value in ADAMW.items() if key in config.get("optimizer", {"params": ADAMW})["params"]}
    torch.optim.AdamW(twin.parameters(), **{"weight_decay": 0.0, **chosen}).step()
    found, expected, before = engine.full_state_dict(), twin.state_dict(), models.build("gpt").state_dict()
    engine.destroy()
    assert found.keys() == expected.keys()
    assert max((found[name] - before[name]).abs().max().item() for name in found) > 1e-3
    return max((found[name] - expected[name]).abs().max().item() for name in found)


def every_file(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    gaps: dict[str, float] = {}  # files that differ in keys without effect are one plan, which need be compared only once
    for name, config in FILES.items():
        given = filled(config, world)
        assert not auto_keys(given)
        if name in REFUSED:
            with pytest.raises(ConfigError, match=REFUSED[name]):
                start(models.build("gpt"), given)
            continue
        as_written(rank, given)
        plan = repr(load_config(plain(given), world, defaults=DEEPSPEED).with_(notes=()))
        if plan not in gaps:
            gaps[plan] = exactly(rank, world, given)
        found[name] = gaps[plan]
    return found


def test_every_file_trains_a_step_or_is_refused_with_a_reason() -> None:
    """In its own precision the weights move; in fp32 they are those of plain torch."""
    assert len(FILES) == 43
    for found in run_ranks(every_file, 2):
        assert found.keys() == FILES.keys() - REFUSED.keys()
        assert not [name for name, gap in found.items() if gap > 2e-6]
