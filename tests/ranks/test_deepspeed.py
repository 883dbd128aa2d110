"""``onecopy.deepspeed``: a DeepSpeed script and its JSON train what plain torch trains on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import onecopy
import onecopy.deepspeed as deepspeed
from onecopy import schedules
from onecopy.errors import ConfigError, EngineError
from tests.ranks import models
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.ranks

STAGES = [0, 1, 2, 3]
ADAMW = {"type": "AdamW", "params": {"lr": 5e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 3, "warmup_type": "linear"}}


def config(stage: int, **changes: Any) -> dict[str, Any]:
    base = {
        "train_micro_batch_size_per_gpu": models.MICRO,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": ADAMW,
    }
    return {key: value for key, value in (base | changes).items() if value is not None}


def values(engine: deepspeed.DeepSpeedEngine) -> dict[str, torch.Tensor]:
    full = {}
    for name, param in engine.module.named_parameters():
        value = deepspeed.utils.safe_get_full_fp32_param(param)
        assert value is not None
        full[name] = value.clone()
    return full


def gap(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


# --------------------------------------------------------------------------------------------------------- training


def plain(world: int, steps: int, accumulation: int, clip: float | None) -> tuple[dict[str, Any], list[float]]:
    """The oracle: one process, the whole batch, AdamW with the warm-up written down."""
    model = models.build("gpt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.95), weight_decay=0.1)
    norms = []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 5e-3 * min(max(step - 1, 0) / 3, 1.0)
        for micro in range(accumulation):
            parts = [models.batch("gpt", step, micro, rank) for rank in range(world)]
            loss = model(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
            (loss / accumulation).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
    return models.bare(model), norms


def train(rank: int, world: int, setup: dict[str, Any], steps: int, plain_backward: bool) -> Any:
    model = models.build("gpt")
    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config=setup)
    assert loader is None and isinstance(scheduler, schedules.WarmupLR) and engine.lr_scheduler is scheduler
    assert isinstance(optimizer.optimizer, torch.optim.AdamW) and optimizer is engine.optimizer
    accumulation = engine.gradient_accumulation_steps()
    norms, rates, bounds = [], [], []
    for step in range(steps):
        for micro in range(accumulation):
            loss = engine(*models.batch("gpt", step, micro, rank))
            if plain_backward:
                loss.backward()
            else:
                counted = engine.backward(loss)
                assert counted.item() == pytest.approx(loss.item() / accumulation)
            bounds.append(engine.is_gradient_accumulation_boundary())
            engine.step()
        norms.append(engine.get_global_grad_norm())
        rates.append(engine.get_lr()[0])
    assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (steps, steps * accumulation, 0)
    assert bounds == ([False] * (accumulation - 1) + [True]) * steps
    return values(engine), norms, rates


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("plain_backward", [False, True], ids=["engine.backward", "loss.backward"])
def test_a_json_trains_what_plain_torch_trains(stage: int, plain_backward: bool) -> None:
    setup = config(stage, scheduler=WARMUP, gradient_accumulation_steps=2, gradient_clipping=0.5)
    expected, norms = plain(2, 4, 2, 0.5)
    for weights, seen, rates in run_ranks(train, 2, setup, 4, plain_backward):
        assert gap(weights, expected) <= 2e-6
        assert seen == pytest.approx(norms, rel=1e-5)
        assert rates == pytest.approx([0.0, 5e-3 / 3, 5e-3 * 2 / 3, 5e-3])


def test_gradients_are_clipped_to_norm_1_unless_the_config_says_otherwise() -> None:
    setup = config(2, scheduler=WARMUP)
    expected, norms = plain(2, 4, 1, 1.0)
    assert max(norms) > 1.0, "the case would not show clipping"
    unclipped, _ = plain(2, 4, 1, None)
    for (weights, seen, _), (free, _, _) in zip(
        run_ranks(train, 2, setup, 4, False),
        run_ranks(train, 2, setup | {"gradient_clipping": 0}, 4, False),
        strict=True,
    ):
        assert gap(weights, expected) <= 2e-6 and gap(free, unclipped) <= 2e-6
        assert seen == pytest.approx(norms, rel=1e-5)
    assert gap(expected, unclipped) > 1e-4


def rates_of(rank: int, world: int, setup: dict[str, Any], steps: int) -> list[float]:
    engine, *_ = deepspeed.initialize(model=models.build("mlp"), config=setup)
    rates = []
    for step in range(steps):
        rates.append(engine.get_lr()[0])
        for micro in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(*models.batch("mlp", step, micro, rank)))
            engine.step()
    return rates


def test_the_schedule_ticks_once_per_optimizer_step_on_any_number_of_ranks() -> None:
    decay = {"type": "WarmupDecayLR", "params": {"total_num_steps": 6, "warmup_num_steps": 2}}
    setup = config(1, scheduler=decay, gradient_accumulation_steps=2)
    lists = [run_ranks(rates_of, world, setup, 8) for world in (1, 2)]
    (expected,) = lists[0]
    assert expected[-1] == 0.0 and 0 < expected[4] < max(expected) == 5e-3
    assert all(rates == expected for rates in lists[1])


# ------------------------------------------------------------------------------------------------ one scalar weight


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: float) -> torch.Tensor:
        return self.w * x

    def shout(self) -> str:
        return "toy"


SGD = {"type": "SGD", "params": {"lr": 0.1}}
DATA = [[1.0, 3.0], [2.0, 4.0]]


def toy_config(stage: int, **changes: Any) -> dict[str, Any]:
    setup = config(stage, optimizer=SGD, gradient_accumulation_steps=2, gradient_clipping=0)
    return {key: value for key, value in (setup | changes).items() if value is not None}


def toy(rank: int, world: int, style: str) -> dict[int, float]:
    """The weight after one step over two micro-batches; the gradient is the mean of 1, 2, 3, 4."""
    results = {}
    for stage in STAGES:
        engine, *_ = deepspeed.initialize(model=Toy(), config=toy_config(stage))
        for micro, x in enumerate(DATA[rank]):
            if style == "no_sync" and micro == 0:
                with engine.no_sync():
                    engine.backward(engine(x))
            elif style == "divided":
                engine.backward(engine(x) / 2, scale_wrt_gas=False)
            elif style == "plain":
                engine(x).backward()
            elif style == "zero_grad":
                engine.backward(engine(x))
                engine.zero_grad()
            elif style == "retain":
                loss = engine(x) / 2
                engine.backward(loss, retain_graph=True)
                engine.backward(loss)
            else:
                engine.backward(engine(x))
            engine.step()
        results[stage] = values(engine)["w"].item()
    return results


@pytest.mark.parametrize("style", ["engine", "plain", "no_sync", "divided", "zero_grad", "retain"])
def test_every_way_to_accumulate_gives_the_mean(style: str) -> None:
    for results in run_ranks(toy, 2, style):
        assert results == pytest.approx({stage: 0.75 for stage in STAGES})


def boundaries(rank: int, world: int) -> list[tuple[float, int, float]]:
    seen = []
    for stage in STAGES:
        engine, *_ = deepspeed.initialize(model=Toy(), config=toy_config(stage, gradient_accumulation_steps=1))
        engine.set_gradient_accumulation_boundary(False)
        engine.backward(engine(DATA[rank][0]))
        assert not engine.is_gradient_accumulation_boundary()
        engine.step()
        before = values(engine)["w"].item()
        engine.set_gradient_accumulation_boundary(True)
        engine.backward(engine(DATA[rank][1]))
        engine.step()
        seen.append((before, engine.global_steps, values(engine)["w"].item()))
    return seen


def test_boundaries_can_be_set_by_hand() -> None:
    for seen in run_ranks(boundaries, 2):
        # Accumulation 1: two micro-batches add up to 1.5 + 3.5.
        assert seen == [pytest.approx((1.0, 1, 0.5))] * len(STAGES)


def names_of(rank: int, world: int) -> None:
    setup = toy_config(2, bf16={"enabled": True}, gradient_clipping=0.25)
    engine, *_ = deepspeed.initialize(model=Toy(), config=setup)
    assert isinstance(engine, onecopy.Engine) and isinstance(engine, nn.Module)
    assert engine.train_batch_size() == models.MICRO * 2 * world
    assert engine.train_micro_batch_size_per_gpu() == models.MICRO
    assert engine.zero_optimization_stage() == 2
    assert engine.gradient_clipping() == 0.25
    assert engine.bfloat16_enabled() and not engine.fp16_enabled()
    assert engine.config is not setup and engine.config == setup
    assert (engine.global_rank, engine.local_rank, engine.world_size, engine.dp_world_size) == (
        rank,
        rank,
        world,
        world,
    )
    assert engine.shout() == "toy", "what no engine has is the module's"
    assert engine.w is engine.module.w
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = engine.nothing_of_the_kind
    assert engine.get_global_grad_norm() is None
    engine.eval()
    assert not engine.module.training
    engine.train()
    assert engine.module.training
    engine.lr_scheduler = None
    assert engine.lr_scheduler is None


@pytest.mark.parametrize(
    "section",
    [
        {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}}},
        {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 100, "warmup_num_steps": "auto"}}},
        {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": "auto", "cycle_max_lr": "auto"}}},
        {"optimizer": {"type": "auto", "params": {"lr": "auto"}}},
    ],
    ids=str,
)
def test_parameters_are_born_sharded_before_a_trainer_has_filled_in_what_is_auto(section: dict[str, Any]) -> None:
    """``from_pretrained`` under a trainer's configuration: what is left of a scheduler without its "auto" is no whole."""
    setup = {"train_batch_size": "auto", "zero_optimization": {"stage": 3, "offload_param": {"device": "auto"}}, **section}
    with deepspeed.zero.Init(config_dict_or_path=setup):
        layer = nn.Linear(4, 3)
    assert layer.weight.shape == (3, 4)
    wrong = setup | {"zero_optimization": {"stage": 7}}
    with pytest.raises(ConfigError, match="stage"), deepspeed.zero.Init(config_dict_or_path=wrong):
        pass


def test_the_engine_answers_to_its_names() -> None:
    run_ranks(names_of, 2)


# ---------------------------------------------------------------------------------------- optimizers and schedules


def choices(rank: int, world: int) -> None:
    model = Toy()
    mine = torch.optim.SGD(model.parameters(), lr=0.5)
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model,
        optimizer=mine,
        config=toy_config(1),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
    )
    assert optimizer.optimizer is mine and engine.get_lr() == [0.5]
    assert isinstance(scheduler, torch.optim.lr_scheduler.StepLR)
    assert any("optimizer of the configuration is not used" in note for note in engine.plan.notes)

    engine, optimizer, _, _ = deepspeed.initialize(
        model=Toy(), optimizer=lambda params: torch.optim.Adagrad(params, lr=0.25), config=toy_config(3, optimizer=None)
    )
    assert isinstance(optimizer.optimizer, torch.optim.Adagrad) and engine.get_lr() == [0.25]

    model = nn.Linear(4, 4)
    groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "weight_decay": 0.0}]
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model, model_parameters=groups, config=config(2, scheduler=WARMUP), lr_scheduler=lambda o: None
    )
    assert isinstance(scheduler, schedules.WarmupLR), "the configuration's scheduler comes first"
    assert optimizer is not None
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    for _ in range(6):
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
    assert engine.get_lr() == pytest.approx([0.5, 5e-3])


def test_what_the_caller_gives_and_what_the_config_names() -> None:
    run_ranks(choices, 2)


def forward_only(rank: int, world: int) -> None:
    for stage in STAGES:
        torch.manual_seed(3)
        model = nn.Linear(4, 4)
        x = torch.ones(1, 4)
        expected = model(x).detach()
        engine, optimizer, _, scheduler = deepspeed.initialize(model=model, config=config(stage, optimizer=None))
        assert optimizer is None and scheduler is None
        engine.eval()
        with torch.no_grad():
            assert torch.equal(engine(x), expected)
        with pytest.raises(EngineError, match="no optimizer"):
            engine.backward(engine(x).sum())
    with pytest.raises(ConfigError, match="there is a scheduler but no optimizer"):
        deepspeed.initialize(model=Toy(), config=config(1, optimizer=None, scheduler=WARMUP))


def test_without_an_optimizer_the_engine_runs_forward() -> None:
    run_ranks(forward_only, 2)


# ------------------------------------------------------------------------------------- reading and writing full values


def reach_in(rank: int, world: int, stage: int) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    weight, bias = model[0].weight, model[1].bias
    engine, *_ = deepspeed.initialize(model=model, config=config(stage, bf16={"enabled": True}, gradient_clipping=0))
    gather, utils = deepspeed.zero.GatheredParameters, deepspeed.utils
    with gather([weight, bias, weight], modifier_rank=1):
        if rank == 1:
            weight.data.fill_(2.0)
    with gather(p for p in [weight]), gather(weight), gather([]), gather(nn.Parameter(torch.ones(2))), gather(model):
        assert weight.shape == (7, 5) and torch.equal(weight.float(), torch.full((7, 5), 2.0))
    with gather(weight, enabled=False):
        pass
    full = utils.safe_get_full_fp32_param(weight)
    assert full is not None and full.dtype == torch.float32 and torch.equal(full, torch.full((7, 5), 2.0))
    assert utils.safe_get_full_optimizer_state(weight, "exp_avg") is None

    engine.backward(engine(torch.full((2, 5), rank + 1.0, dtype=torch.bfloat16)).float().mean())
    grad = utils.safe_get_full_grad(bias)
    assert grad is not None and torch.allclose(grad, torch.full((3,), 1 / 3), rtol=1e-2)
    utils.safe_set_full_grad(bias, torch.tensor([1.0, 2.0, 3.0]))
    utils.safe_set_full_grad(weight, torch.zeros(7, 5))
    before = utils.safe_get_full_fp32_param(bias)
    engine.step()
    moment = utils.safe_get_full_optimizer_state(bias, "exp_avg")
    assert moment is not None and torch.allclose(moment, torch.tensor([0.1, 0.2, 0.3]))
    after = utils.safe_get_full_fp32_param(bias)
    assert before is not None and after is not None and not torch.equal(before, after)

    utils.safe_set_full_fp32_param(weight, torch.full((7, 5), 1 + 2**-12))
    utils.safe_set_full_optimizer_state(weight, torch.full((7, 5), 0.5), "exp_avg_sq")
    again = utils.safe_get_full_fp32_param(weight)
    assert again is not None and torch.equal(again, torch.full((7, 5), 1 + 2**-12)), "the master weights keep fp32"
    squares = utils.safe_get_full_optimizer_state(weight, "exp_avg_sq")
    assert squares is not None and torch.equal(squares, torch.full((7, 5), 0.5))
    with gather(weight):
        assert torch.equal(weight.float(), torch.ones(7, 5))


@pytest.mark.parametrize("stage", STAGES)
def test_full_values_can_be_read_and_written(stage: int) -> None:
    run_ranks(reach_in, 2, stage)


# ----------------------------------------------------------------------------------------------- keys that move bytes

BF16 = {"bf16": {"enabled": True}}
PURE = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}


def bytes_of(rank: int, world: int, setups: dict[str, dict[str, Any]]) -> dict[str, tuple[dict[str, int], int]]:
    found = {}
    for name, setup in setups.items():
        engine, *_ = deepspeed.initialize(model=models.build("even"), config=setup)
        dtype = torch.bfloat16 if engine.bfloat16_enabled() else torch.float32  # inputs are the script's to cast
        for micro in range(2):
            engine.backward(engine(*(x.to(dtype) for x in models.batch("even", 0, micro, rank))))
            engine.step()
        measured = engine.measured()
        found[name] = (measured["resident"]["device"], measured["collectives"]["reduce"]["bytes"])
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_dtypes_of_the_wire_the_accumulator_and_the_moments_are_as_configured(stage: int) -> None:
    def setup(**changes: Any) -> dict[str, Any]:
        return config(stage, gradient_accumulation_steps=2, **changes)

    setups = {
        "fp32": setup(),
        "fp32, bf16 wire": setup(communication_data_type="bf16"),
        "bf16": setup(**BF16),
        "bf16, fp32 wire": setup(communication_data_type="fp32", **BF16),
        "bf16, bf16 accumulator": setup(data_types={"grad_accum_dtype": "bf16"}, **BF16),
        "pure bf16": setup(**PURE),
    }
    kept, sent = {}, {}
    for name, (resident, reduced) in run_ranks(bytes_of, 2, setups)[0].items():
        kept[name], sent[name] = resident, reduced
    assert sent["fp32"] == 2 * sent["bf16"] == 2 * sent["fp32, bf16 wire"] == sent["bf16, fp32 wire"]
    assert kept["bf16"]["gradient"] == kept["fp32"]["gradient"] == 2 * kept["bf16, bf16 accumulator"]["gradient"]
    assert kept["bf16"]["moments"] == 2 * kept["bf16"]["master"] == 2 * kept["pure bf16"]["moments"]
    assert (kept["pure bf16"]["master"], kept["fp32"]["master"]) == (0, 0)
