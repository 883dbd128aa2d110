"""Parameter groups keep their options through training and resuming, and schedules tick once per step taken."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onecopy
import onecopy.deepspeed as deepspeed
from tests.ranks import models
from tests.ranks.cases.doors import doors, each_door, feed7, full_weights, json_config, offloaded
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import largest_gap

pytestmark = pytest.mark.ranks

# ------------------------------------------------------------------------------------------------------ parameter groups

OPTIONS: list[dict[str, Any]] = [
    {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)},
    {"lr": 1e-4, "weight_decay": 0.0, "betas": (0.8, 0.99)},
]


class WithStillBias(nn.Module):
    """Layers whose biases get a gradient of exactly zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(nn.functional.linear(x, layer.weight)) + 0 * layer.bias  # type: ignore[operator, arg-type]
        return (x - y).square().mean()


def in_groups(model: nn.Module, options: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Weights by the first options, biases by the second, cut in as many groups as there are options."""
    named = dict(model.named_parameters())
    weights = [p for name, p in named.items() if name.endswith("weight")]
    biases = [p for name, p in named.items() if name.endswith("bias")]
    parts = [weights, biases] if len(options) == 2 else [weights[:1], weights[1:], biases]
    return [{"params": part, **chosen} for part, chosen in zip(parts, options, strict=True)]


def as_given(optimizer: torch.optim.Optimizer, options: list[dict[str, Any]]) -> bool:
    groups = optimizer.param_groups
    return len(groups) == len(options) and all(
        tuple(group[key]) == value if key == "betas" else group[key] == value
        for group, chosen in zip(groups, options, strict=True)
        for key, value in chosen.items()
    )


def grouped(rank: int, world: int, folder: str, options: list[dict[str, Any]], build: Any, through: Any = doors) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(in_groups(model, options))

    torch.manual_seed(0)
    twin = build()
    start = {name: value.detach().clone() for name, value in twin.named_parameters()}
    plain = make(twin)
    for count in range(5):
        for other in range(world):
            (twin(*feed7(count, other)) / world).backward()
        plain.step()
        plain.zero_grad()
    for number, (name, door) in enumerate(each_door(world, through)):
        engine = None
        for part in (range(3), range(3, 5)):
            torch.manual_seed(0)
            model = build()
            resumed = engine is not None
            engine = door.open(model, make(model))
            assert as_given(engine.optimizer, options), f"{name}: after initialize"
            if resumed:
                for group in engine.optimizer.param_groups:
                    group["lr"] = 7.0  # what the checkpoint says must count
                engine.load(f"{folder}/{number}")
                assert as_given(engine.optimizer, options), f"{name}: after load"
            for count in part:
                engine(*feed7(count, rank)).backward()
                engine.step()
                assert as_given(engine.optimizer, options), f"{name}: after step {count}"
                assert engine.lr() == [chosen["lr"] for chosen in options]
            if build is WithStillBias:
                got = full_weights(model)
                still = [key for key in got if key.endswith("bias")]
                assert still and all(torch.equal(got[key], start[key]) for key in still), f"{name}: biases moved"
            if not resumed:
                engine.save(f"{folder}/{number}")
            else:
                assert largest_gap(model, twin) <= 1e-6, name
            engine.close()


def test_groups_keep_their_options_where_states_are_offloaded(tmp_path: Path) -> None:
    """The same with the states on the host and on disk, by plan and by JSON (row 38)."""
    run_ranks(grouped, 2, str(tmp_path), OPTIONS, WithStillBias, partial(offloaded, folder=str(tmp_path)))


MORE = [{**OPTIONS[0], "eps": 1e-6}, *OPTIONS]


@pytest.mark.parametrize(
    ("world", "options", "build"), [(2, OPTIONS, WithStillBias), (3, OPTIONS, models.MLP), (2, MORE, WithStillBias)]
)
def test_groups_keep_their_options(tmp_path: Path, world: int, options: list[dict[str, Any]], build: Any) -> None:
    """Rates, decay and betas of each group are those given, after init, after steps and after resuming; a group with
    zero gradients and no decay is not moved by a bit (row 38)."""
    run_ranks(grouped, world, str(tmp_path), options, build)


def by_json(rank: int, world: int) -> None:
    """The JSON's optimizer over the caller's groups: what a group does not say comes from the JSON."""
    said = [{"lr": 1e-3, "weight_decay": 0.1}, {"weight_decay": 0.0}]
    full = [{"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)}, {"lr": 1e-4, "weight_decay": 0.0, "betas": (0.9, 0.95)}]
    for stage in range(4):
        torch.manual_seed(0)
        model, twin = WithStillBias(), WithStillBias()
        twin.load_state_dict(model.state_dict())
        optimizer = {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}}
        config = json_config(stage) | {"optimizer": optimizer}
        engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=in_groups(model, said))
        plain = torch.optim.AdamW(in_groups(twin, full))
        for count in range(3):
            engine.backward(engine(*feed7(count, rank)))
            engine.step()
            assert engine.optimizer is not None and as_given(engine.optimizer, full), stage
            for other in range(world):
                (twin(*feed7(count, other)) / world).backward()
            plain.step()
            plain.zero_grad()
        assert largest_gap(model, twin) <= 1e-6, stage
        engine.destroy()


def test_groups_given_beside_a_json() -> None:
    """model_parameters as groups and an optimizer by name: the groups' options win, stage by stage (row 38)."""
    run_ranks(by_json, 2)


def split_or_not(rank: int, world: int) -> None:
    """The same parameters in one group and in three groups of equal options: the same gradients and weights."""
    for name, door in doors(world, clip=0.1).items():
        seen = []
        for count in (1, 3):
            torch.manual_seed(0)
            model = models.MLP()
            params = list(model.parameters())
            groups = [{"params": params[i::count]} for i in range(count)]
            engine = door.open(model, torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1))
            norms = []
            for step in range(3):
                engine(*feed7(step, rank)).backward()
                engine.step()
                norms.append(engine.grad_norm)
            seen.append((norms, full_weights(model)))
            engine.close()
        (one_norms, one), (three_norms, three) = seen
        assert one_norms == pytest.approx(three_norms, rel=1e-6), name
        assert all((one[key] - three[key]).abs().max() <= 1e-7 for key in one), name


def test_splitting_a_group_changes_nothing() -> None:
    """One group or three with the same options: the same norms and weights (row 38)."""
    run_ranks(split_or_not, 2)


# ------------------------------------------------------------------------------------------------------------ schedules


def linear(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)


def rates(rank: int, world: int, accumulation: int, spoilt: int | None) -> dict[str, list[float]]:
    """The rate that each of ten windows runs with; window ``spoilt`` has a gradient that is not finite."""
    out = {}
    for name, door in doors(world, accumulation=accumulation).items():
        engine = door.open(models.build("toy"), lambda params: torch.optim.SGD(params, lr=1.0), linear)
        seen = []
        for window in range(10):
            seen.append(engine.lr()[0])
            for _ in range(accumulation):
                x = float("inf") if window == spoilt and rank == 0 else 1.0
                engine(torch.tensor([x])).backward()
                engine.step()
        seen.append(engine.lr()[0])
        out[name] = seen
        engine.close()
    return out


def torch_rates(spoilt: int | None) -> list[float]:
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
    scheduler = linear(optimizer)
    seen = []
    for window in range(10):
        seen.append(optimizer.param_groups[0]["lr"])
        if window != spoilt:
            optimizer.step()
            scheduler.step()
    return [*seen, optimizer.param_groups[0]["lr"]]


@pytest.mark.parametrize(("accumulation", "spoilt"), [(2, None), (3, 4)])
def test_a_schedule_ticks_once_per_step_on_any_number_of_ranks(accumulation: int, spoilt: int | None) -> None:
    """Linear decay over ten steps gives one list of rates on 1, 2 and 4 ranks, and a skipped step is no tick (row 40)."""
    expected = torch_rates(spoilt)
    assert (expected[-1] == 0.0) == (spoilt is None)
    for world in (1, 2, 4):
        for run in run_ranks(rates, world, accumulation, spoilt):
            assert run == dict.fromkeys(run, pytest.approx(expected, abs=1e-12)), (world, run)


def json_rates(rank: int, world: int, kind: str, params: dict[str, Any]) -> list[list[float]]:
    out = []
    for stage in (0, 2, 3):
        sections = {
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "scheduler": {"type": kind, "params": params},
        }
        engine: Any = deepspeed.initialize(model=models.build("toy"), config=json_config(stage, 2, **sections))[0]
        seen = []
        for _ in range(10):
            seen += engine.get_lr()
            for _ in range(2):
                engine.backward(engine(torch.ones(1)))
                engine.step()
        out.append(seen + engine.lr_scheduler.get_last_lr())
        engine.destroy()
    return out


SCHEDULES = [
    ("WarmupDecayLR", {"warmup_num_steps": 2, "total_num_steps": 10, "warmup_type": "linear"}),
    ("WarmupCosineLR", {"warmup_num_steps": 2, "total_num_steps": 10}),
    ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_first_step_size": 4}),
]


@pytest.mark.parametrize(("kind", "params"), SCHEDULES, ids=lambda part: str(part))
def test_a_schedule_of_the_configuration_does_not_depend_on_the_ranks(kind: str, params: dict[str, Any]) -> None:
    """The JSON's schedules give the rates that they give a plain optimizer, on 1, 2 and 3 ranks (row 40)."""
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.5)
    alone = getattr(deepspeed.lr_schedules, kind)(optimizer, **params)
    expected = []
    for _ in range(10):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        alone.step()
    expected.append(optimizer.param_groups[0]["lr"])
    assert len({round(rate, 9) for rate in expected}) > 4
    for world in (1, 2, 3):
        for run in run_ranks(json_rates, world, kind, params):
            for seen in run:
                assert seen == pytest.approx(expected, abs=1e-12), world
    assert onecopy.load_config(json_config(0)).scheduler is None
