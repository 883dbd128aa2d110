"""Whole configuration files train: those that people start from, and every template of ``onecopy config show``."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onecopy
import onecopy.deepspeed as deepspeed
from onecopy.errors import ConfigError
from onecopy.plan.explain import explain
from onecopy.plan.reading import override
from onecopy.templates import NAMES, template
from tests.ranks import models
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import largest_gap

pytestmark = pytest.mark.ranks

ADAMW = {"lr": 2e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
# Files as they are found: fp16 with the optimizer, or everything, on the host; accumulation with keys of another stage and of
# activation checkpointing; the optimizer on a disk.
FOUND: dict[str, dict[str, Any]] = {
    "fp16, stage 2, offload": {
        "fp16": {"enabled": True, "initial_scale_power": 16},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {
            "stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True, "contiguous_gradients": True,
            "reduce_scatter": True,
        },
        "train_batch_size": 128, "gradient_accumulation_steps": 4,
    },
    "stage 2, offload, accumulation": {
        "train_batch_size": 64, "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "eps": 1e-8}},
        "zero_optimization": {
            "stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "contiguous_gradients": True,
            "overlap_comm": True, "reduce_bucket_size": 5e8, "stage3_prefetch_bucket_size": 5e8,
            "stage3_param_persistence_threshold": 1e6, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
        },
        "activation_checkpointing": {"partition_activations": True},
    },
    "fp16, stage 3, all offloaded": {
        "fp16": {"enabled": True, "initial_scale_power": 16}, "bf16": {"enabled": False},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {
            "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True}, "overlap_comm": True, "contiguous_gradients": True,
            "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "train_batch_size": 128, "gradient_accumulation_steps": 4, "model_parallel_size": 1,
    },
    "stage 3, nvme": {
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/mnt/nvme", "buffer_count": 4, "fast_readwrite": True},
        },
        "train_batch_size": 16, "gradient_accumulation_steps": 1,
    },
}  # fmt: skip
# Keys of those files that do nothing here.
IDLE = {
    "fp16, stage 2, offload": {"overlap_comm", "contiguous_gradients", "reduce_scatter"},
    "stage 2, offload, accumulation": {
        "pin_memory", "contiguous_gradients", "overlap_comm", "reduce_bucket_size", "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance",
        "partition_activations",
    },
    "fp16, stage 3, all offloaded": {
        "pin_memory", "overlap_comm", "contiguous_gradients", "stage3_max_live_parameters", "stage3_max_reuse_distance",
    },
    "stage 3, nvme": {"buffer_count", "fast_readwrite"},
}  # fmt: skip


class Adapted(nn.Module):
    """A frozen linear map, or one whose weights are whole tensors of integers, with a low-rank map beside it."""

    def __init__(self, base: nn.Linear, integers: bool) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        if integers:
            scale = base.weight.abs().max() / 127
            whole = (base.weight / scale).round().to(torch.int8)
            self.base.weight = nn.Parameter(whole, requires_grad=False)
            self.register_buffer("scale", scale.detach())
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base.weight
        if not weight.is_floating_point():
            weight = weight.to(x.dtype) * self.scale.to(x.dtype)
        return nn.functional.linear(x, weight) + self.up(self.down(x))


def build(name: str) -> nn.Module:
    """A GPT, with adapters where the file is for those."""
    model = models.build("gpt")
    if "lora" in name:
        model.requires_grad_(False)
        for block in model.blocks:  # type: ignore[union-attr]
            block.out = Adapted(block.out, integers=name == "qlora")  # type: ignore[union-attr]
    return model


def changes(config: dict[str, Any], world: int, folder: str) -> dict[str, Any]:
    """What has to be scaled to ``world`` ranks of this machine: the batch, the groups, and the folder of the disk."""
    found: dict[str, Any] = {}
    if "train_batch_size" in config:
        found["train_batch_size"] = models.MICRO * config["gradient_accumulation_steps"] * world
    zero = config["zero_optimization"]
    if "mics_shard_size" in zero:
        found["zero_optimization.mics_shard_size"] = world
    for section in ("offload_optimizer", "offload_param"):
        if "nvme_path" in zero.get(section, {}):
            found[f"zero_optimization.{section}.nvme_path"] = folder
    return found


def exactly(rank: int, world: int, name: str, config: dict[str, Any], scaled: dict[str, Any]) -> tuple[float, float]:
    """One step in fp32 beside plain torch on the whole batch: the largest gap of a weight, and how far weights went.

    The step of Adam is the sign of a gradient where that is large beside eps, so eps is made large enough to be smooth.
    """
    floats = {f"{dtype}.enabled": False for dtype in ("fp16", "bf16")}
    smooth = {"optimizer.params.lr": 0.01, "optimizer.params.eps": 0.01} if "optimizer" in config else {}
    plan = onecopy.load_config(config, world, override=scaled | floats | smooth)
    model, twin = build(name), build(name)
    before = copy.deepcopy(twin)
    steps = plan.batch.accumulation
    engine = onecopy.initialize(model, plan)
    for micro in range(steps):
        loss = engine(*models.batch("gpt", 0, micro, rank))
        if plan.optimizer is None:
            assert torch.allclose(loss, twin(*models.batch("gpt", 0, micro, rank)), atol=1e-6)
            break
        loss.backward()
        engine.step()
    if plan.optimizer is not None:
        for micro in range(steps):
            for other in range(world):
                (twin(*models.batch("gpt", 0, micro, other)) / (steps * world)).backward()
        trained = [p for p in twin.parameters() if p.requires_grad]
        if plan.clip.max_norm:
            nn.utils.clip_grad_norm_(trained, plan.clip.max_norm)
        torch.optim.AdamW(trained, **{"weight_decay": 0.0, **plan.optimizer.params}).step()
        assert engine.global_steps == 1
    ledgers = engine.predicted(), engine.measured()
    assert ledgers[0]["resident"] == ledgers[1]["resident"]
    gaps = largest_gap(model, twin), largest_gap(model, before)
    engine.close()
    return gaps


def as_written(rank: int, world: int, name: str, config: dict[str, Any], scaled: dict[str, Any]) -> list[str]:
    """One step through DeepSpeed's door in the file's own precision. Returns what was logged."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("onecopy").addHandler(handler)
    model = build(name)
    engine, optimizer, *_ = deepspeed.initialize(model=model, config=override(config, scaled))
    logging.getLogger("onecopy").removeHandler(handler)
    for window in range(9):  # the first scales of fp16 may be too large
        for micro in range(engine.gradient_accumulation_steps()):
            loss = engine(*models.batch("gpt", window, micro, rank))
            assert loss.isfinite()
            if optimizer is not None:
                engine.backward(loss)
                engine.step()
        if optimizer is None or engine.global_steps:
            break
    assert optimizer is None or engine.global_steps == 1
    assert engine.skipped_steps == 0 or engine.fp16_enabled()
    engine.destroy()
    return said


def trained(rank: int, world: int, files: dict[str, dict[str, Any]], folder: str) -> dict[str, Any]:
    found = {}
    for name, config in files.items():
        scaled = changes(config, world, folder)
        found[name] = (exactly(rank, world, name, config, scaled), as_written(rank, world, name, config, scaled))
    return found


def test_every_file_trains_a_step_and_one_line_names_what_does_nothing(tmp_path: Path) -> None:
    """In fp32 the weights of plain torch, in the file's own precision a step; what has no effect is one line on rank 0."""
    files = {**FOUND, **{name: template(name) for name in NAMES}}
    first, second = run_ranks(trained, 2, files, str(tmp_path), timeout=240)
    for name in files:
        (gap, went), said = first[name]
        assert gap <= 1e-5, name
        assert (went > 1e-3) == ("optimizer" in files[name]), name
        assert second[name][0][0] <= 1e-5 and second[name][1] == [], name
        idle = IDLE.get(name, set())
        assert len(said) == bool(idle), (name, said)
        assert all(key in said[0] and "\n" not in said[0] for key in idle), (name, said)


@pytest.mark.parametrize("name", FOUND)
def test_check_explains_every_key(name: str) -> None:
    found = explain(FOUND[name], 2)
    assert found.ok and not found.reading.open
    assert {line.key.rpartition(".")[2] for line in found.lines if line.verdict == "no effect"} == IDLE[name]
    assert {line.verdict for line in found.lines} <= {"honoured", "no effect", "off"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_auto_is_what_the_model_and_the_optimizer_are(dtype: torch.dtype) -> None:
    """``fp16.enabled`` and ``bf16.enabled`` are the model's dtype, the optimizer's arguments those of the one passed."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "SGD", "params": {"lr": "auto"}},
    }
    model = models.build("toy").to(dtype)
    with pytest.raises(ConfigError, match=r"still 'auto', and nothing here says what it is: optimizer\.params\.lr$"):
        deepspeed.initialize(model=model, config=config)
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=0.25))
    assert engine.bfloat16_enabled() == (dtype == torch.bfloat16)
    assert engine.fp16_enabled() == (dtype == torch.float16)
    assert any("optimizer.params.lr 0.25" in note for note in engine.plan.notes)
    engine.destroy()
