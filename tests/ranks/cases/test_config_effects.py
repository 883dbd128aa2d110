"""Settings that take effect as given or are told: learning rates under a schedule, keys of other stages, buffers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import onecopy
import onecopy.deepspeed as deepspeed
from onecopy.errors import ConfigError, EngineError
from tests.ranks import models
from tests.ranks.cases.doors import feed7, json_config, sgd1
from tests.ranks.cases.test_config import FULL, refusal
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import largest_gap

pytestmark = pytest.mark.ranks

# ------------------------------------------------------------------------------------------------------ rate of a group

SCHEDULES: list[tuple[str, dict[str, Any], int]] = [
    ("WarmupLR", {"warmup_num_steps": 3}, 5),
    ("WarmupLR", {"warmup_num_steps": 3, "warmup_type": "linear"}, 5),
    ("WarmupDecayLR", {"warmup_num_steps": 3, "total_num_steps": 1000}, 4),
    ("WarmupCosineLR", {"warmup_num_steps": 3, "total_num_steps": 10000}, 4),
]


@pytest.mark.parametrize(("kind", "params", "ticks"), SCHEDULES, ids=lambda part: str(part))
@pytest.mark.parametrize("rates", [[5e-5], [5e-5, 3e-4]], ids=["one group", "two groups"])
def test_a_schedule_without_a_maximum_keeps_each_groups_rate(
    kind: str, params: dict[str, Any], ticks: int, rates: list[float]
) -> None:
    """Rate 5e-5 and a warm-up with no maximum: 5e-5 after the warm-up, not the schedule's own 1e-3 (row 05)."""
    model = nn.ModuleList(nn.Linear(3, 3) for _ in rates)
    model.forward = lambda x: sum(part(x).sum() for part in model)  # type: ignore[method-assign]
    groups = [{"params": list(part.parameters()), "lr": rate} for part, rate in zip(model, rates, strict=True)]
    optimizer = torch.optim.AdamW(copy.copy(groups), lr=1.0)
    alone = getattr(deepspeed.lr_schedules, kind)(optimizer, **params)
    config = json_config(1) | {
        "optimizer": {"type": "AdamW", "params": {"lr": 1.0}},
        "scheduler": {"type": kind, "params": params},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=groups)
    for _ in range(ticks):
        optimizer.step()
        alone.step()
        engine.backward(engine(torch.ones(1, 3)))
        engine.step()
    expected = pytest.approx(rates, rel=2e-3 if "total" in str(params) else 1e-9)
    assert [group["lr"] for group in optimizer.param_groups] == expected
    assert engine.get_lr() == expected
    engine.destroy()


# ------------------------------------------------------------------------------------------------ settings for no stage


OFFLOAD: dict[str, tuple[dict[str, Any], int]] = {
    "offload_param.device": ({"offload_param": {"device": "cpu"}}, 3),
    "cpu_offload_param": ({"cpu_offload_params": True}, 3),
    "offload_optimizer.device": ({"offload_optimizer": {"device": "cpu"}}, 1),
    "cpu_offload": ({"cpu_offload": True}, 1),
}


@pytest.mark.parametrize("name", OFFLOAD)
def test_offload_is_never_ignored(name: str) -> None:
    """A section for offload is honoured from one stage on; below it is named with the stage that was given and the one that
    would do it (row 06): for the optimizer in an error, for parameters, which trainers write there as a habit and DeepSpeed
    passes over, in the plan's notes."""
    section, lowest = OFFLOAD[name]
    for stage in range(4):
        for extra in ({}, {"optimizer": FULL["optimizer"]}):
            config = json_config(stage) | {"zero_optimization": {"stage": stage, **section}} | extra
            if stage < lowest == 3:
                (note,) = onecopy.load_config(config, world_size=1).notes
                assert note.startswith(f"zero_optimization.{name} does nothing: zero_optimization.stage is {stage}")
                assert note.endswith("only stage 3 honours it")
            elif stage < lowest:
                said = refusal(config, world_size=1)
                assert f"zero_optimization.{name} is " in said and f"zero_optimization.stage is {stage}" in said
                assert f"set stage to {lowest}" in said
            else:
                row = onecopy.load_config(config, world_size=1).row("x")
                assert "host" in (row.optimizer.tier, row.parameter.rest.tier)


def offloaded_nothing(rank: int, world: int) -> None:
    config = json_config(2) | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    engine = deepspeed.initialize(model=models.MLP(), config=config)[0]
    assert any("offload_optimizer does nothing: there is no optimizer" in note for note in engine.plan.notes)
    with pytest.raises(EngineError, match="no optimizer"):
        engine.backward(engine(*models.batch("mlp", 0, 0, rank)))
    engine.close()
    engine = deepspeed.initialize(model=models.MLP(), config=config, optimizer=sgd1)[0]
    assert not any("no optimizer" in note for note in engine.plan.notes)
    engine.close()


def test_an_optimizer_that_is_not_there_is_not_offloaded() -> None:
    """An offload section for the optimizer and no optimizer, as trainers give it for models that they only evaluate: a note
    says so, and training is an error (row 06)."""
    run_ranks(offloaded_nothing, 2)


@pytest.mark.parametrize("key", ["stage3_prefetch_bucket_size", "stage3_max_live_parameters", "mics_shard_size"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_key_of_stage_3_below_it_is_told(stage: int, key: str) -> None:
    """A key that only stage 3 would honour is named, in a note or an error (row 06)."""
    config = json_config(stage) | {"zero_optimization": {"stage": stage, key: 2}}
    try:
        notes = "\n".join(onecopy.load_config(config, world_size=2).notes)
    except ConfigError as error:
        notes = str(error)
    assert key in notes


class Hundred(nn.Module):
    """Exactly 100 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 5), nn.Linear(3, 1)])

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.parts[1](self.parts[0](x).tanh()) - y[:, :5]).square().mean() + self.parts[2](x[:, :3]).sum()


def huge_buckets(rank: int, world: int) -> dict[int, tuple[dict[str, int], int]]:
    out = {}
    for stage in range(4):
        sizes = {"reduce_bucket_size": 5e8, "allgather_bucket_size": 5e8, "stage3_prefetch_bucket_size": 5e8}
        config = json_config(stage) | {"zero_optimization": {"stage": stage, **sizes}}
        model = Hundred()
        size = 4 * sum(p.numel() for p in model.parameters())
        assert size == 400
        engine: Any = deepspeed.initialize(model=model, config=config, optimizer=sgd1)[0]
        for count in range(2):
            engine.backward(engine(*feed7(count, rank)))
            engine.step()
        peak = engine.measured()["peak"]["device"]
        out[stage] = {kind: held for kind, held in peak.items() if "buffer" in kind}, size
        assert engine.predicted()["peak"]["device"] == peak
        engine.destroy()
    return out


def test_buffers_of_a_tiny_model_are_tiny() -> None:
    """Buckets of 5e8 elements and 100 parameters: gather and reduce buffers take at most twice the model (row 06)."""
    for world in (2, 3):
        padded = 4 * world * -(-100 // world)
        for run in run_ranks(huge_buckets, world):
            for stage, (buffers, _) in run.items():
                moving = sum(held for kind, held in buffers.items() if kind != "exchange buffer")
                assert moving <= 2 * padded, f"stage {stage}: {buffers}"


def test_all_buffers_of_a_tiny_model_are_tiny() -> None:
    """All that is moved through takes at most twice the model, and the slots in which ranks of one host exchange it at most
    as much as the model again (row 06)."""
    for run in run_ranks(huge_buckets, 2):
        for stage, (buffers, size) in run.items():
            exchanged = buffers.get("exchange buffer", 0)
            assert exchanged <= size, f"stage {stage}: {buffers}"
            assert sum(buffers.values()) - exchanged <= 2 * size, f"stage {stage}: {buffers}"


def sharded_below_stage_3(rank: int, world: int) -> None:
    torch.manual_seed(0)
    twin = models.MLP()
    plain = sgd1(twin.parameters())
    for other in range(world):
        (twin(*feed7(0, other)) / world).backward()
    plain.step()
    for stage in range(4):
        for door in ("onecopy", "deepspeed"):
            torch.manual_seed(0)
            config = json_config(stage)
            if door == "onecopy":
                with onecopy.deferred():
                    model = models.MLP()
                engine: Any = onecopy.initialize(model, onecopy.stage(stage), optimizer=sgd1)
            else:
                with deepspeed.zero.Init(config_dict_or_path=config):
                    model = models.MLP()
                engine = deepspeed.initialize(model=model, config=config, optimizer=sgd1)[0]
            engine(*feed7(0, rank)).backward()
            engine.step()
            assert largest_gap(model, twin) <= 1e-6, (stage, door)
            engine.close()


def test_a_model_born_sharded_trains_at_every_stage() -> None:
    """Sharded construction is honoured below stage 3 too: the model is made whole, with the right weights (row 06)."""
    run_ranks(sharded_below_stage_3, 2)
