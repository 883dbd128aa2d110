"""Optimizers and schedules by name: the right class with the right arguments, or an error that says what to use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onecopy.errors import ConfigError
from onecopy.plan.config import load_config
from onecopy.plan.plan import Recipe
from onecopy.plan.recipe import OPTIMIZERS
from onecopy.recipes import build_optimizer, build_scheduler

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("recipe", "kind", "expected"),
    [
        (Recipe("adam", {"lr": 1e-3}), "AdamW", {"lr": 1e-3, "weight_decay": 0.0}),
        (Recipe("AdamW", {"betas": [0.8, 0.9]}), "AdamW", {"betas": (0.8, 0.9), "weight_decay": 0.0}),
        (Recipe("AdamW", {"torch_adam": True}), "AdamW", {"weight_decay": 0.01}),
        (Recipe("Adam", {"adam_w_mode": False, "weight_decay": 0.1}), "Adam", {"weight_decay": 0.1}),
        (Recipe("Adam", {"torch_adam": True, "adam_w_mode": True}), "AdamW", {"weight_decay": 0.01}),
        (Recipe("Adam", {"fused": False}), "AdamW", {"fused": False}),
        (Recipe("Adam", {"foreach": True}), "AdamW", {"foreach": True, "fused": None}),
        (Recipe("Adam", {"set_grad_none": True, "bias_correction": True}), "AdamW", {"fused": True}),
        (Recipe("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}), "SGD", {"momentum": 0.9, "nesterov": True}),
        (Recipe("adagrad", {"lr": 0.1}), "Adagrad", {"lr": 0.1, "eps": 1e-10}),
        (Recipe("RMSprop", {"alpha": 0.9}), "RMSprop", {"alpha": 0.9}),
        (Recipe("NAdam"), "NAdam", {"lr": 2e-3}),
    ],
)
def test_optimizers_by_name(recipe: Recipe, kind: str, expected: dict[str, Any]) -> None:
    layer = torch.nn.Linear(3, 3)
    optimizer = build_optimizer(recipe, layer.parameters())
    assert type(optimizer) is getattr(torch.optim, kind)
    assert {key: optimizer.defaults[key] for key in expected} == expected
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def test_every_optimizer_that_is_offered_is_torchs_and_steps() -> None:
    for name in OPTIMIZERS:
        layer = torch.nn.Linear(2, 2)
        before = layer.weight.detach().clone()
        optimizer = build_optimizer(Recipe(name, {"lr": 0.1}), layer.parameters())
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert not torch.equal(before, layer.weight), name


def test_groups_and_names_survive_and_no_parameters_is_an_error() -> None:
    layer = torch.nn.Linear(2, 2)
    groups = [{"params": [layer.weight], "lr": 0.5}, {"params": layer.bias, "weight_decay": 0.25}]
    optimizer = build_optimizer(Recipe("AdamW", {"lr": 0.1}), iter(groups))
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.5, 0.0), (0.1, 0.25)]
    assert len(build_optimizer(Recipe("SGD"), layer.named_parameters()).param_groups[0]["params"]) == 2
    with pytest.raises(ConfigError, match="got no parameters"):
        build_optimizer(Recipe("AdamW"), [])


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe("WarmupLR", {"warmup_num_steps": 3}),
        Recipe("warmupdecaylr", {"total_num_steps": 10, "warmup_num_steps": 3}),
        Recipe("StepLR", {"step_size": 2, "gamma": 0.5}),
        Recipe("CosineAnnealingLR", {"T_max": 5}),
        Recipe("LinearLR", {"total_iters": 4}),
        Recipe("OneCycleLR", {"max_lr": 0.1, "total_steps": 10}),
    ],
)
def test_schedules_by_name(recipe: Recipe) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    schedule = build_scheduler(recipe, optimizer)
    assert isinstance(schedule, torch.optim.lr_scheduler.LRScheduler)
    seen = set()
    for _ in range(4):
        optimizer.step()
        schedule.step()
        seen.add(optimizer.param_groups[0]["lr"])
    assert len(seen) > 1
    load_config({"scheduler": {"type": recipe.type, "params": recipe.params}})


def test_what_torch_refuses_in_a_schedule_is_a_config_error() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ConfigError, match="OneCycleLR"):
        build_scheduler(Recipe("OneCycleLR", {"max_lr": 0.1}), optimizer)
