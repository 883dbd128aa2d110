"""``onecopy.deepspeed``: construction, data, process groups, and calls that cannot be right."""

from __future__ import annotations

import argparse
import json
import logging
import os
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onecopy.deepspeed as deepspeed
from onecopy.deepspeed.runtime import zero
from onecopy.errors import CheckpointError, ConfigError, EngineError, OneCopyError, ShardedReadError
from tests.ranks import models
from tests.ranks.harness import run_ranks
from tests.ranks.test_deepspeed import SGD, Toy, config, toy_config, values

pytestmark = pytest.mark.ranks


# ------------------------------------------------------------------------------------------------------ construction


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def as_launched(port: int) -> None:
    """The environment in which rank 0 itself hosts the store, on ``port``."""
    os.environ.update(MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="False")


def born_sharded(rank: int, world: int, stage: int, port: int) -> dict[str, torch.Tensor]:
    """zero.Init before any process group exists, as scripts started by a launcher have it."""
    as_launched(port)
    assert not torch.distributed.is_initialized()
    torch.manual_seed(0 if rank == 0 else 99)
    with deepspeed.zero.Init(config_dict_or_path=config(stage)):
        assert torch.distributed.get_world_size() == world
        with deepspeed.zero.Init():
            model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 3))
        nn.init.normal_(model[0].weight, std=0.02)
    for param in model.parameters():
        with pytest.raises(ShardedReadError, match="gathered"):
            param.sum()
    assert model[0].weight.shape == (64, 8)
    with deepspeed.zero.Init(enabled=False):
        assert nn.Linear(2, 2).weight.untyped_storage().nbytes() == 16
    with deepspeed.zero.Init(dtype=torch.bfloat16):
        assert nn.Linear(2, 2).weight.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32
    engine, *_ = deepspeed.initialize(model=model, config=config(stage))
    return values(engine)


@pytest.mark.parametrize("stage", [1, 3])
def test_models_are_born_sharded_with_the_values_they_would_have(stage: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 3))
    nn.init.normal_(model[0].weight, std=0.02)
    expected = {name: p.detach() for name, p in model.named_parameters()}
    for weights in run_ranks(born_sharded, 2, stage, free_port(), init_group=False):
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def wrong_triangle(rank: int, world: int, port: int) -> list[str]:
    as_launched(port)
    texts = []
    setup = config(3, train_batch_size=16, gradient_accumulation_steps=2)
    for attempt in (
        lambda: deepspeed.initialize(model=Toy(), config=setup),
        lambda: deepspeed.zero.Init(config=setup).__enter__(),
        lambda: deepspeed.initialize(model=Toy(), config={"train_batch_size": 7}),
    ):
        with pytest.raises(ConfigError) as info:
            attempt()
        texts.append(str(info.value))
    engine, *_ = deepspeed.initialize(model=Toy(), config={"train_batch_size": 8, "optimizer": SGD})
    assert (engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()) == (4, 1)
    return texts


def test_the_batch_triangle_counts_the_ranks_there_are() -> None:
    for first, second, third in run_ranks(wrong_triangle, 2, free_port(), init_group=False):
        assert "16 != 2*2*2 = 8" in first and first == second
        assert "7 is not divisible by 2 ranks" in third


# -------------------------------------------------------------------------------------------------------------- data


def loader_of(rank: int, world: int, drop_last: bool) -> list[list[list[int]]]:
    data = list(range(11))
    _, _, loader, _ = deepspeed.initialize(
        model=Toy(), config=toy_config(1, dataloader_drop_last=drop_last), training_data=data,
        collate_fn=lambda batch: torch.tensor(batch),
    )  # fmt: skip
    assert loader is not None and loader.batch_size == models.MICRO
    return [[batch.tolist() for batch in loader] for _ in range(2)]


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_dataloader_splits_every_epoch_over_the_ranks(drop_last: bool) -> None:
    ranks = run_ranks(loader_of, 2, drop_last)
    for epoch in range(2):
        seen = [x for rank in ranks for batch in rank[epoch] for x in batch]
        assert len(seen) == 12 if not drop_last else len(seen) == 12 // 2 // models.MICRO * 2 * models.MICRO
        assert drop_last or set(seen) == set(range(11))
        assert [len(batch) for batch in ranks[0][epoch]] == [len(batch) for batch in ranks[1][epoch]]
    assert ranks[0][0] != ranks[0][1], "the next epoch has another order"


# ----------------------------------------------------------------------------------------- one process, no launcher


def test_a_script_without_a_launcher(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(toy_config(3, zero_optimization={"stage": 3, "reduce_bucket_size": 5e8})))
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    with caplog.at_level(logging.WARNING, logger="onecopy"):
        engine, *_ = deepspeed.initialize(args=args, model=Toy())
    assert "zero_optimization.reduce_bucket_size" in caplog.text
    for x in (1.0, 3.0):
        engine.backward(engine(x))
        engine.step()
    assert engine.module.w.item() == pytest.approx(0.8)
    for config_args in ({"config": str(path)}, {"config_params": path}, {"args": {"deepspeed_config": str(path)}}):
        assert deepspeed.initialize(model=Toy(), **config_args)[0].zero_optimization_stage() == 3


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"config": {}}, "needs a model"),
        ({"model": Toy()}, "no configuration"),
        ({"model": Toy(), "config": {}, "config_params": {}}, "config and config_params; keep one"),
        ({"model": Toy(), "config": {}, "mpu": object()}, "mpu"),
        ({"model": Toy(), "config": {"optimizer": SGD}, "training_data": [1, 2]}, "train_micro_batch_size_per_gpu"),
        ({"model": Toy(), "config": toy_config(1), "training_data": iter([1])}, "without a length"),
        ({"model": Toy(), "config": {"zero_optimization": {"stge": 1}}}, "did you mean zero_optimization.stage?"),
    ],
)
def test_calls_that_cannot_be_right_are_refused(arguments: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as info:
        deepspeed.initialize(**arguments)
    assert part in str(info.value)


def one_rank_differs(rank: int, world: int) -> list[str]:
    texts = []
    for changed in ({"gradient_clipping": -1}, {"gradient_clipping": 0.5}, {"optimizer": {"type": "SGD"}}):
        setup = toy_config(2, **(changed if rank == 1 else {}))
        with pytest.raises(OneCopyError) as info:
            deepspeed.initialize(model=Toy(), config=setup)
        texts.append(str(info.value))
    return texts


def test_a_config_that_differs_on_one_rank_is_an_error_on_all() -> None:
    first, second = run_ranks(one_rank_differs, 2)
    assert first[0] == "rank 1 failed: gradient_clipping is -1; it must be a finite number from 0, or null"
    assert second[0].startswith("gradient_clipping is -1")
    for texts in (first, second):
        assert all("disagree about the plan" in text for text in texts[1:])


def test_process_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match="dist_init_required is False"):
        deepspeed.init_distributed(dist_init_required=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(EngineError, match="mpirun"):
        deepspeed.init_distributed()
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(EngineError, match="RANK"):
        deepspeed.init_distributed()
    with pytest.raises(OneCopyError, match="RANK"), deepspeed.zero.Init():
        pass
    monkeypatch.delenv("WORLD_SIZE")
    deepspeed.init_distributed("gloo", verbose=False)
    try:
        deepspeed.init_distributed()
        assert (deepspeed.comm.get_world_size(), deepspeed.comm.get_rank(), deepspeed.comm.get_local_rank()) == (
            1,
            0,
            0,
        )
        assert deepspeed.comm.is_initialized()
    finally:
        torch.distributed.destroy_process_group()
    assert os.environ.get("MASTER_PORT") is None or "MASTER_ADDR" in os.environ


# ------------------------------------------------------------------------------------------------------- checkpoints

WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 8, "warmup_type": "linear"}}


def advance(engine: deepspeed.DeepSpeedEngine, rank: int, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = engine(*models.batch("gpt", engine.global_steps, 0, rank))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def start(stage: int) -> deepspeed.DeepSpeedEngine:
    return deepspeed.initialize(model=models.build("gpt"), config=config(stage, scheduler=WARMUP))[0]


def save_and_resume(rank: int, world: int, folder: str, stage: int, other: int) -> None:
    engine = start(stage)
    advance(engine, rank, 2)
    best = {"epoch": 7, "scores": {"best": torch.tensor([1.5, 2.5]), "seen": {1, 2}}}
    assert engine.save_checkpoint(folder, "best", client_state=best, save_latest=False) is True
    path, state = engine.load_checkpoint(folder, "best")
    assert state["epoch"] == 7 and state["scores"]["seen"] == {1, 2}
    assert torch.equal(state["scores"]["best"], best["scores"]["best"])
    with pytest.raises(CheckpointError, match="is a Toy, which cannot be written as JSON"):
        engine.save_checkpoint(folder, "worse", client_state={"model": Toy()})
    assert engine.save_checkpoint(folder, client_state={"epoch": 7}) is True
    advance(engine, rank, 1)
    engine.save_checkpoint(folder, "aside", save_latest=False)
    expected, weights, rates = advance(engine, rank, 2), values(engine), engine.get_lr()
    if rank == 0:
        torch.save(weights, Path(folder) / "weights.pt")
    engine.save_checkpoint(folder, "last", save_latest=False)

    resumed = start(other)
    path, client = resumed.load_checkpoint(folder)
    assert Path(path) == Path(folder) / "global_step2" and client == {"epoch": 7}
    assert (resumed.global_steps, resumed.micro_steps) == (2, 2)
    advance(resumed, rank, 1)
    assert advance(resumed, rank, 2) == expected
    assert resumed.get_lr() == rates
    assert all(torch.equal(weights[name], value) for name, value in values(resumed).items())

    third = start(stage)
    third.load_checkpoint(folder, tag="aside")
    assert third.global_steps == 3 and advance(third, rank, 2) == expected

    bare = start(stage)
    path, _ = bare.load_checkpoint(folder, load_module_only=True)
    assert bare.global_steps == 0 and bare.get_lr() == [0.0]
    moment = deepspeed.utils.safe_get_full_optimizer_state(next(bare.module.parameters()), "exp_avg")
    assert moment is None
    late = start(stage)
    late.load_checkpoint(folder, load_lr_scheduler_states=False)
    assert late.global_steps == 2 and late.get_lr() == [0.0]

    with pytest.raises(CheckpointError) as info:
        bare.load_checkpoint(folder, tag="global_step9")
    assert "global_step9" in str(info.value) and "global_step2" in str(info.value)
    with pytest.raises(CheckpointError):
        bare.load_checkpoint(os.path.join(folder, "elsewhere"))


@pytest.mark.parametrize(("stage", "other"), [(0, 3), (1, 1), (2, 2), (3, 0)])
def test_training_goes_on_from_a_checkpoint_at_any_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int, other: int
) -> None:
    run_ranks(save_and_resume, 2, str(tmp_path), stage, other)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "argv", ["zero_to_fp32.py", str(tmp_path), str(tmp_path / "plain"), "--tag", "last"])
        runpy.run_path(str(tmp_path / "zero_to_fp32.py"), run_name="__main__")
    plain = torch.load(tmp_path / "plain" / "pytorch_model.bin")
    assert all(torch.equal(plain[name], value) for name, value in torch.load(tmp_path / "weights.pt").items())


def one_model_two_engines(rank: int, world: int) -> None:
    """A trainer that comes after another one does not know of its engine."""
    for stage in (1, 2, 3):
        former, optimizer, *_ = deepspeed.initialize(model=models.build("gpt"), config=config(stage))
        kinds = (zero.stage_1_and_2.DeepSpeedZeroOptimizer, zero.stage3.DeepSpeedZeroOptimizer_Stage3)
        assert type(optimizer) is kinds[stage == 3]
        advance(former, rank, 1)
        trained = values(former)
        engine, optimizer, *_ = deepspeed.initialize(model=former.module, config=config(stage))
        assert all(torch.equal(trained[name], value) for name, value in values(engine).items())
        advance(engine, rank, 1)
        with pytest.raises(EngineError, match="closed"):
            former(*models.batch("gpt", 0, 0, rank))


def test_the_newest_engine_has_the_model() -> None:
    run_ranks(one_model_two_engines, 2)


# ---------------------------------------------------------------------------------------------------------- loss scale


class Overflows(nn.Module):
    """Two weights; the gradient of ``bad`` is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.good, self.bad = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.good * x).sum() + (self.bad * (x * float("nan"))).sum()


def to_the_floor(rank: int, world: int) -> list[float]:
    half = {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 1, "hysteresis": 1}
    setup = toy_config(2, fp16=half, gradient_accumulation_steps=1)
    engine, optimizer, *_ = deepspeed.initialize(model=Overflows(), config=setup)
    assert engine.fp16_enabled() and not optimizer.overflow and optimizer.loss_scale == optimizer.cur_scale == 4.0
    scales = []
    with pytest.raises(OneCopyError) as info:
        for _ in range(9):
            scales.append(engine.loss_scale)
            engine.backward(engine(torch.ones(3, dtype=torch.float16)))
            engine.step()
            assert optimizer.overflow and not engine.was_step_applied()
    assert "bad" in str(info.value) and "good" not in str(info.value)
    assert engine.skipped_steps == len(scales) - 1
    return scales


def test_a_loss_scale_at_its_floor_names_the_parameter() -> None:
    assert run_ranks(to_the_floor, 2) == [[4.0, 2.0, 1.0]] * 2


# ------------------------------------------------------------------------------------------- this rank's own elements


def own_elements(rank: int, world: int, zero: dict[str, Any]) -> None:
    """What a rank reads of its own is its part of the whole; what it writes there is what all then read."""
    from onecopy.deepspeed import utils

    model = models.build("mlp")
    model.layers[3].bias.requires_grad_(False)
    engine, *_ = deepspeed.initialize(model=model, config=config(3, zero_optimization={"stage": 3, **zero}))
    layers = engine.module.layers
    for read in (utils.safe_get_full_fp32_param, utils.safe_get_full_grad, utils.safe_get_local_fp32_param):
        assert read(layers[3].bias) is None
    for read in (utils.safe_get_full_optimizer_state, utils.safe_get_local_optimizer_state):
        assert read(layers[3].bias, "exp_avg") is None
    assert utils.safe_get_local_grad(layers[3].bias) is None
    cut = [layer.weight for layer in layers if 0 < layer.weight.ds_tensor.numel() < layer.weight.ds_numel]
    param, name = cut[0], next(name for name, each in engine.module.named_parameters() if each is cut[0])
    elsewhere = next(layer.weight for layer in layers if not layer.weight.ds_tensor.numel())
    assert utils.safe_get_local_grad(elsewhere) is None
    assert [each.numel() for each in (utils.safe_get_local_fp32_param(elsewhere), elsewhere.ds_tensor)] == [0, 0]

    def mine(whole: torch.Tensor | None) -> torch.Tensor:
        assert whole is not None
        start, numel = param.ds_tensor.numel(), utils.safe_get_local_fp32_param(param).numel()
        assert start == numel
        parts: list[Any] = [None] * world
        torch.distributed.all_gather_object(parts, numel)
        assert sum(parts) == param.ds_numel
        return whole.reshape(-1)[sum(parts[:rank]) : sum(parts[: rank + 1])]

    assert utils.safe_get_local_grad(param) is None and utils.safe_get_local_optimizer_state(param, "exp_avg") is None
    engine.backward(engine(*models.batch("mlp", 0, 0, rank)))
    assert torch.allclose(utils.safe_get_local_grad(param), mine(utils.safe_get_full_grad(param)))
    utils.safe_set_local_grad(param, torch.full_like(utils.safe_get_local_grad(param), 0.5))
    assert (utils.safe_get_full_grad(param) == 0.5).all()
    utils.safe_update_full_grad_vectorized([param], lambda grad, _: grad * 2)
    assert (utils.safe_get_full_grad(param) == 1.0).all()
    engine.step()
    for key in ("exp_avg", "exp_avg_sq"):
        state = utils.safe_get_local_optimizer_state(param, key)
        assert torch.equal(state, mine(utils.safe_get_full_optimizer_state(param, key)))
        utils.safe_set_local_optimizer_state(param, torch.full_like(state, 2.0 + rank), key)
        assert torch.equal(torch.full_like(state, 2.0 + rank), mine(utils.safe_get_full_optimizer_state(param, key)))
    values = utils.safe_get_local_fp32_param(param)
    assert torch.equal(values, mine(utils.safe_get_full_fp32_param(param)))
    utils.safe_set_local_fp32_param(param, values + 1 / 3)
    assert torch.equal(values + 1 / 3, mine(utils.safe_get_full_fp32_param(param)))
    with deepspeed.zero.GatheredParameters(param):
        assert torch.equal(param, utils.safe_get_full_fp32_param(param))
        with pytest.raises(EngineError, match=f"{name!r} is gathered"):
            utils.safe_set_local_fp32_param(param, values)
    with pytest.raises(EngineError, match=f"this rank keeps {values.numel()} elements of {name!r}; got a value of 99"):
        utils.safe_set_local_fp32_param(param, torch.zeros(99))
    assert engine.get_batch_info() == (models.MICRO * world, models.MICRO, 1)
    assert [tuple(each) for each in engine.get_mom()] == [(0.9, 0.95)]
    with pytest.raises(AttributeError, match=r"no set_train_batch_size\(\): .*gradient_accumulation_steps"):
        engine.set_train_batch_size(64)
    assert not hasattr(engine, "offload_states")
    engine.destroy()
    if not zero:
        whole, *_ = deepspeed.initialize(model=models.build("mlp"), config=config(2))
        with pytest.raises(EngineError, match=r"which is whole on every rank \(stage 3 cuts it\)"):
            utils.safe_get_local_fp32_param(whole.module.layers[1].weight)
        whole.destroy()


@pytest.mark.parametrize("offloaded", [False, True])
def test_own_elements_of_a_cut_parameter(offloaded: bool) -> None:
    host = {"device": "cpu"}
    run_ranks(own_elements, 2, {"offload_param": host, "offload_optimizer": host} if offloaded else {})


def test_a_loader_again_and_again() -> None:
    loader = deepspeed.utils.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    with pytest.raises(StopIteration):
        next(deepspeed.utils.RepeatingLoader([]))


def test_the_files_of_a_foreign_checkpoint(tmp_path: Path) -> None:
    from onecopy.deepspeed.utils.zero_to_fp32 import get_model_state_file, get_optim_files

    for rank in (10, 2, 0):
        for kind in ("model", "optim"):
            (tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt").touch()
    assert get_model_state_file(tmp_path, 3) == str(tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    assert [Path(path).name.split("_")[3] for path in get_optim_files(tmp_path)] == ["0", "2", "10"]
    (tmp_path / "ours").mkdir()
    with pytest.raises(FileNotFoundError, match=r"there is no \*_optim_states\.pt in .*no tag folder of DeepSpeed's"):
        get_optim_files(tmp_path / "ours")
