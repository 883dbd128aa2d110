"""What a first program does wrong, or does as on one process: one clear error on every rank, or the right thing."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

import onecopy
from onecopy.errors import ConfigError, EngineError, OneCopyError, PlanError
from tests.ranks.cases.everywhere import everywhere
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import every_plan, largest_gap

pytestmark = pytest.mark.ranks


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def sgd(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, **{"lr": 0.1} | options)


def other() -> torch.optim.Optimizer:
    return sgd([nn.Parameter(torch.ones(1))])


WRONG: dict[str, tuple[type[OneCopyError], str, Callable[[], Any]]] = {
    "clip and norm_type": (
        PlanError,
        r"norm_type=1\.0 and clip=Clip",
        lambda: onecopy.stage(1, clip=onecopy.Clip(0.05), norm_type=1.0),
    ),
    "another's scheduler": (
        PlanError,
        r"StepLR is over another optimizer",
        lambda: onecopy.initialize(net(), onecopy.stage(1), optimizer=sgd, scheduler=StepLR(other(), 1)),
    ),
    "no optimizer": (
        PlanError,
        "no optimizer for it",
        lambda: onecopy.initialize(net(), onecopy.stage(1), scheduler=lambda o: StepLR(o, 1)),
    ),
    "plateau": (
        PlanError,
        "ReduceLROnPlateau wants a metric",
        lambda: onecopy.initialize(net(), onecopy.stage(1), optimizer=sgd, scheduler=ReduceLROnPlateau),
    ),
    "no scheduler made": (
        PlanError,
        "returned NoneType",
        lambda: onecopy.initialize(net(), onecopy.stage(1), optimizer=sgd, scheduler=lambda o: None),  # type: ignore
    ),
    "no parameters": (
        PlanError,
        "ReLU, has no parameters",
        lambda: onecopy.initialize(nn.ReLU(), onecopy.stage(1), optimizer=sgd),
    ),
    "a rate of nan": (
        PlanError,
        "'lr' is nan in group 0 of SGD",
        lambda: onecopy.initialize(net(), onecopy.stage(1), optimizer=lambda p: sgd(p, lr=float("nan"))),
    ),
    "batch": (
        PlanError,
        r"batch is 4; it must be a Batch object.*accumulation=",
        lambda: onecopy.initialize(net(), onecopy.stage(1, batch=4), optimizer=sgd),
    ),
    "units": (
        PlanError,
        r"units is \{\}; it must be a Units object",
        lambda: onecopy.initialize(net(), onecopy.stage(1, units={}), optimizer=sgd),
    ),
    "divide": (
        PlanError,
        "batch divide is 'no'",
        lambda: onecopy.initialize(net(), onecopy.stage(1, batch=onecopy.Batch(divide="no")), optimizer=sgd),  # type: ignore
    ),
    "groups of 3 in 4": (ConfigError, "does not divide the 4 ranks", lambda: mics(3)),
    "groups of none": (ConfigError, "mics_shard_size is 0", lambda: mics(0)),
}


def mics(size: int) -> Any:
    keys = {"train_batch_size": 4, "zero_optimization": {"stage": 3, "mics_shard_size": size}}
    return onecopy.load_config(keys, world_size=4)


@pytest.mark.parametrize("case", WRONG)
def test_a_setting_that_cannot_be_is_one_error(case: str) -> None:
    kind, words, call = WRONG[case]
    with pytest.raises(kind, match=words):
        call()


def wrong_on_ranks(rank: int, world: int) -> dict[str, str]:
    """On one rank only: the others hear of it."""
    said = {}
    for case, call in {
        "plateau": lambda: onecopy.initialize(
            net(), onecopy.stage(2), optimizer=sgd, scheduler=ReduceLROnPlateau if rank else None
        ),
        "options": lambda: onecopy.initialize(net(), onecopy.stage(2), optimizer=lambda p: sgd(p, lr=0.1 + rank)),
    }.items():
        with pytest.raises(OneCopyError) as caught:
            call()
        said[case] = str(caught.value)
    return said


def test_a_wrong_scheduler_on_one_rank_ends_all_and_options_that_differ_are_named() -> None:
    for said in run_ranks(wrong_on_ranks, 2):
        assert "wants a metric" in said["plateau"]
        assert "disagree about the optimizer's 'lr' in group 0: rank 0 has 0.1, rank 1 has 1.1; give" in said["options"]


@pytest.mark.parametrize(
    ("kind", "params", "words"),
    [
        ("StepLR", {"step_size": 0}, "step_size is 0"),
        ("StepLR", {"step_size": 1.5}, "step_size is 1.5"),
        ("CosineAnnealingLR", {"T_max": 0}, "T_max is 0"),
        ("MultiStepLR", {"milestones": ["a"]}, "milestones is"),
        ("OneCycleLR", {"max_lr": 0.1, "total_steps": 1}, "of 1 steps in all"),
        ("OneCycleLR", {"max_lr": 0.1, "total_steps": 10, "pct_start": 0.1}, "pct_start is 0.1 of 10 steps"),
        ("OneCycleLR", {"max_lr": 0.1}, "needs scheduler.params.total_steps"),
    ],
)
def test_a_schedule_that_divides_by_zero_is_refused_at_load(kind: str, params: dict[str, Any], words: str) -> None:
    keys = {
        "train_batch_size": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "scheduler": {"type": kind, "params": params},
    }
    with pytest.raises(ConfigError) as caught:
        onecopy.load_config(keys, world_size=1)
    assert words in str(caught.value)


def test_a_grad_scaler_is_pointed_at_the_plan() -> None:
    for make in (sgd, torch.optim.AdamW):
        engine = onecopy.initialize(net(), onecopy.stage(1), optimizer=make)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(engine(torch.ones(2, 4)).sum()).backward()
        scaler.unscale_(engine.optimizer)
        with pytest.raises(EngineError, match=r"GradScaler.*dtype='fp16'"):
            scaler.step(engine.optimizer)
        engine.close()


def test_a_scheduler_that_is_ticked_twice_is_noticed() -> None:
    for by_hand in (False, True):
        engine = onecopy.initialize(
            net(), onecopy.stage(1), optimizer=sgd, scheduler=lambda o: LambdaLR(o, lambda step: 1 / (step + 1))
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(4):
                engine(torch.ones(2, 4)).sum().backward()
                engine.step()
                if by_hand:
                    engine.scheduler.step()
        told = [str(one.message) for one in caught if "LambdaLR" in str(one.message)]
        assert len(told) == by_hand, told
        engine.close()


def test_a_local_rank_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    from onecopy.comm.groups import local_rank

    monkeypatch.setenv("LOCAL_RANK", "first")
    with pytest.raises(EngineError, match="LOCAL_RANK is 'first'"):
        local_rank()


def moved(rank: int, world: int) -> dict[str, list[str]]:
    """Modules moved and cast: to what they are, nothing; to something else, an error that says where to say it."""
    out: dict[str, list[str]] = {}
    for name, plan in every_plan().items():
        engine = onecopy.initialize(net(), plan, optimizer=sgd)
        engine.module.to("cpu").float().to(torch.float32)
        out[name] = [_said(engine.module.bfloat16), _said(engine.module.double)]
        engine(torch.ones(2, 4)).sum().backward()
        assert engine.step()
        out[name].append(str(onecopy.full_param(engine.module[0].weight).isfinite().all().item()))
        engine.close()
    with onecopy.deferred():
        model = net()
    model.to("cpu").float()
    with onecopy.gathered(model):
        assert torch.equal(model[0].weight, net()[0].weight)
    out["deferred"] = [_said(model.half), "onecopy.initialize(device=", "True"]
    return out


def _said(call: Callable[[], Any]) -> str:
    try:
        call()
    except OneCopyError as error:
        return str(error)
    return "nothing"


def test_moving_and_casting_a_model_of_an_engine() -> None:
    for run in run_ranks(moved, 2):
        for name, (cast, wider, finite) in run.items():
            assert "dtype='bf16'" in cast and "onecopy.initialize(device=" in wider and finite == "True", (name, cast, wider)


def set_from_itself(rank: int, world: int) -> None:
    """``p.data = p`` is no write; from another sharded parameter there are no values to take."""
    model = net()
    engine = onecopy.initialize(model, onecopy.stage(3), optimizer=sgd)
    model[0].weight.data = model[0].weight
    assert torch.equal(onecopy.full_param(model[0].weight), net()[0].weight)
    with pytest.raises(OneCopyError, match=r"2\.bias"):
        model[0].bias.data = model[2].bias
    engine.close()


def test_data_of_a_sharded_parameter_is_not_taken_from_a_hidden_one() -> None:
    run_ranks(set_from_itself, 2)


def saved_whole(rank: int, world: int) -> dict[str, float]:
    """``torch.save(model)`` and a deep copy; at stage 3 once it is gathered."""
    out = {}
    for name, plan in every_plan().items():
        model = net()
        engine = onecopy.initialize(model, plan, optimizer=sgd)
        place = io.BytesIO()
        with onecopy.gathered(model):
            torch.save(model, place)
            twin = copy.deepcopy(model)
        place.seek(0)
        loaded = torch.load(place, weights_only=False)
        x = torch.ones(2, 4)
        loaded(x).sum().backward()
        assert loaded[0].weight.grad is not None
        out[name] = max(float((each(x) - engine(x)).detach().abs().max()) for each in (loaded, twin))
        if name == "stage 3":
            assert "copying or pickling" in _said(lambda model=model: torch.save(model, io.BytesIO()))
        engine.load_state_dict(net().state_dict())
        engine.load_state_dict({f"module.{key}": value for key, value in net().state_dict().items()})
        with pytest.raises(RuntimeError, match="Missing"):
            engine.load_state_dict({"0.weight": torch.zeros(4, 4)})
        engine.close()
    return out


def test_models_are_pickled_and_loaded_by_bare_names() -> None:
    for run in run_ranks(saved_whole, 2):
        assert all(gap == 0 for gap in run.values()), run


def transformed(rank: int, world: int) -> dict[str, float]:
    """A forward-mode derivative through the engine."""
    gaps, x = {}, torch.ones(2, 4)
    for name, plan in everywhere(world).items():
        engine = onecopy.initialize(net(), plan, optimizer=sgd)
        made = torch.func.jvp(lambda z, engine=engine: engine(z), (x,), (x,))
        plain = torch.func.jvp(lambda z: net()(z), (x,), (x,))
        gaps[name] = max(float((a - b).detach().abs().max()) for a, b in zip(made, plain, strict=True))
        engine.close()
    return gaps


def test_jvp_through_the_engine() -> None:
    for run in run_ranks(transformed, 2):
        assert all(gap <= 1e-6 for gap in run.values()), run


def large(rank: int, world: int, size: float) -> dict[str, tuple[bool, float, float]]:
    """Gradients whose squares are beyond float32."""
    out = {}
    for name, plan in everywhere(world, clip=1.0).items():
        model, twin = net(), net()
        engine, plain = onecopy.initialize(model, plan, optimizer=sgd), sgd(twin.parameters())
        (engine(torch.ones(2, 4)).sum() * size).backward()
        (twin(torch.ones(2, 4)).sum() * size).backward()
        norm = torch.stack([p.grad.double().norm() for p in twin.parameters()]).norm().item()
        for p in twin.parameters():
            p.grad.mul_(1 / norm)
        plain.step()
        out[name] = engine.step(), largest_gap(model, twin), engine.grad_norm / norm
        engine.close()
    return out


def test_large_finite_gradients_are_clipped_and_stepped() -> None:
    for run in run_ranks(large, 2, 1e25):
        for name, (moved, gap, ratio) in run.items():
            assert moved and gap <= 1e-6 and abs(ratio - 1) < 1e-5, (name, moved, gap, ratio)
