"""Any elementwise torch optimizer, groups exactly as given, schedulers that tick once per step taken."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onecopy
from onecopy.errors import OneCopyError, PlanError
from tests.ranks import models
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import Case, difference, every_plan, oracle, run_cases

pytestmark = pytest.mark.ranks

ELEMENTWISE: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    ("Adam", {"lr": 1e-2, "weight_decay": 0.1}),
    ("Adam", {"lr": 1e-2, "amsgrad": True}),
    ("AdamW", {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
    ("RMSprop", {"lr": 1e-2, "momentum": 0.5, "centered": True}),
    ("Adagrad", {"lr": 1e-1, "lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    ("Adadelta", {"lr": 1.0, "weight_decay": 0.1}),
    ("NAdam", {"lr": 1e-2}),
    ("RAdam", {"lr": 1e-2, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("Adamax", {"lr": 1e-2}),
    ("ASGD", {"lr": 1e-2, "t0": 2}),
    ("Rprop", {"lr": 1e-2}),
]


@pytest.mark.parametrize("optimizer", ELEMENTWISE, ids=lambda o: "-".join([o[0], *list(o[1])[1:]]))
def test_elementwise_optimizers(optimizer: tuple[str, dict[str, Any]]) -> None:
    """On a loss whose gradients have no rounding the only arithmetic that could differ is the optimizer's."""
    case = Case("exact", optimizer=optimizer, steps=8)
    expected = oracle(case, 2)
    cases = {f"stage {n}": case.but(stage=n) for n in range(4)}
    for run in run_ranks(run_cases, 2, cases):
        for name, outcome in run.items():
            assert difference(outcome, expected) <= 1e-6, name


@pytest.mark.parametrize("flag", ["foreach", "fused"])
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adagrad"])
def test_the_users_kernel_choice_is_kept(kind: str, flag: str) -> None:
    case = Case("exact", optimizer=(kind, {"lr": 1e-2, flag: True}), steps=5)
    expected = oracle(case.but(optimizer=(kind, {"lr": 1e-2})), 2)
    for run in run_ranks(run_cases, 2, {n: case.but(stage=n) for n in (0, 2, 3)}):
        for outcome in run.values():
            assert difference(outcome, expected) <= 1e-6


class Lamb(torch.optim.Optimizer):
    """A trust ratio for each tensor: not elementwise."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * (p.norm() / (p.grad.norm() + 1e-6)).item())


def refused(rank: int, world: int, kind: str, number: int) -> str:
    model = models.build("even")
    build: Any = {
        "Lamb": lambda params: Lamb(params, 0.1),
        "LBFGS": lambda params: torch.optim.LBFGS(params),
        "Adafactor": lambda params: torch.optim.Adafactor(params),
        "Muon": lambda params: torch.optim.Muon([p for p in params if p.ndim == 2]),
        "SparseAdam": lambda params: torch.optim.SparseAdam(params),
    }[kind]
    try:
        engine = onecopy.initialize(model, onecopy.stage(number), optimizer=build)
        engine(*models.batch("even", 0, 0, rank)).backward()
        engine.step()
    except (OneCopyError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("kind", ["LBFGS", "Adafactor", "Muon", "Lamb"])
def test_optimizers_that_are_not_elementwise_are_refused(kind: str, number: int) -> None:
    if kind == "Muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    for said in run_ranks(refused, 2, kind, number):
        assert said.split(":")[0] in ("PlanError", "EngineError", "ConfigError"), said
        assert kind in said


def groups_run(rank: int, world: int, how: str) -> dict[str, Any]:
    """Two groups with their own everything, built before and by the engine."""
    out = {}
    for name, plan in every_plan().items():
        model = models.build("even")
        weights = [p for n, p in model.named_parameters() if "bias" not in n]
        biases = [p for n, p in model.named_parameters() if "bias" in n]
        groups = [
            {"params": weights, "lr": 1e-3, "weight_decay": 0.1, "name": "weights"},
            {"params": biases, "lr": 1e-4, "weight_decay": 0.0, "betas": (0.5, 0.6), "name": "biases"},
        ]
        built = torch.optim.AdamW(groups)
        optimizer: Any = built if how == "instance" else (lambda params, groups=groups: torch.optim.AdamW(groups))
        engine = onecopy.initialize(model, plan, optimizer=optimizer)
        keys = ("lr", "weight_decay", "betas", "eps", "name")
        first = [{k: g.get(k) for k in keys} for g in engine.optimizer.param_groups]
        for step in range(3):
            engine(*models.batch("even", step, 0, rank)).backward()
            engine.step()
        last = [{k: g.get(k) for k in keys} for g in engine.optimizer.param_groups]
        weights_now = {n: onecopy.full_param(p).clone() for n, p in model.named_parameters()}
        out[name] = first, last, list(engine.lr()), weights_now
        engine.close()
    return out


@pytest.mark.parametrize("how", ["instance", "callable"])
def test_groups_exactly_as_given(how: str) -> None:
    case = Case("even", optimizer=("AdamW", {"lr": 1e-3, "weight_decay": 0.1}), steps=3)
    case = case.but(groups=[("bias", {"lr": 1e-4, "weight_decay": 0.0, "betas": (0.5, 0.6)})])
    expected = oracle(case, 2)
    for run in run_ranks(groups_run, 2, how):
        for name, (first, last, lrs, weights) in run.items():
            assert first == last, name
            assert [g["lr"] for g in first] == lrs == [1e-3, 1e-4], name
            assert [g["weight_decay"] for g in first] == [0.1, 0.0], name
            assert [tuple(g["betas"]) for g in first] == [(0.9, 0.999), (0.5, 0.6)], name
            assert [g["name"] for g in first] == ["weights", "biases"], name
            for key, value in expected.weights.items():
                assert (weights[key] - value).abs().max() <= 1e-6, f"{name}: {key}"


def test_groups_beside_the_oracle_with_norms_and_clipping() -> None:
    case = Case("gpt", optimizer=("AdamW", {"lr": 1e-3, "weight_decay": 0.1}), steps=4, accumulation=2, clip=0.5)
    case = case.but(groups=[("norm", {"lr": 1e-4, "weight_decay": 0.0}), ("blocks.1", {"lr": 5e-3})])
    expected = oracle(case, 2)
    for run in run_ranks(run_cases, 2, {n: case.but(stage=n) for n in range(4)}):
        for name, outcome in run.items():
            assert difference(outcome, expected) <= 1e-6, name
            assert outcome.norms == pytest.approx(expected.norms, rel=1e-5)
            assert outcome.lrs == expected.lrs


def zero_gradient_group(rank: int, world: int) -> dict[str, bool]:
    """Group B has weight decay 0 and exactly zero gradients: it stays bit-equal."""
    out = {}
    for name, plan in every_plan().items():
        model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        model.forward = lambda x, model=model: (model["a"](x) + 0 * model["b"](x)).square().mean()  # type: ignore[assignment,misc]
        before = model["b"].weight.detach().clone()
        groups = [
            {"params": list(model["a"].parameters()), "lr": 1e-3, "weight_decay": 0.1},
            {"params": list(model["b"].parameters()), "lr": 1e-4, "weight_decay": 0.0},
        ]
        engine = onecopy.initialize(model, plan, optimizer=torch.optim.AdamW(groups))
        dist_weight = onecopy.full_param(model["b"].weight).clone()
        for _ in range(3):
            engine(torch.ones(2, 4)).backward()
            engine.step()
        out[name] = torch.equal(onecopy.full_param(model["b"].weight), dist_weight) and before.shape == (4, 4)
        engine.close()
    return out


def test_zero_gradient_without_decay_changes_nothing() -> None:
    for run in run_ranks(zero_gradient_group, 2):
        assert all(run.values()), run


def optimizer_before_and_after(rank: int, world: int, number: int) -> dict[str, str]:
    """An optimizer over tensors the engine does not know: refused. Over some parameters only: those train."""
    said = {}
    other = models.build("even")
    try:
        onecopy.initialize(
            models.build("even"), onecopy.stage(number), optimizer=torch.optim.SGD(other.parameters(), 0.1)
        )
        said["foreign"] = "accepted"
    except OneCopyError as error:
        said["foreign"] = str(error)
    model = models.build("even")
    last = list(model.last.parameters())
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    engine = onecopy.initialize(model, onecopy.stage(number), optimizer=torch.optim.SGD(last, 0.1, weight_decay=0.1))
    for step in range(2):
        engine(*models.batch("even", step, 0, rank)).backward()
        engine.step()
    moved = [n for n, p in model.named_parameters() if not torch.equal(onecopy.full_param(p), start[n])]
    said["partial"] = ",".join(moved)
    return said


@pytest.mark.parametrize("number", [0, 2, 3])
def test_optimizer_over_foreign_or_few_parameters(number: int) -> None:
    for said in run_ranks(optimizer_before_and_after, 2, number):
        assert said["foreign"] != "accepted"
        assert "optimizer" in said["foreign"]
        assert said["partial"] == "last.weight,last.bias"


def scheduler_run(rank: int, world: int, how: str) -> dict[str, list[float]]:
    """Learning rate at each optimizer step of a linear decay over ten steps, accumulation 2."""
    out = {}
    for name, plan in every_plan(accumulation=2).items():
        model = models.build("toy")
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def decay(optimizer: torch.optim.Optimizer) -> Any:
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)

        scheduler: Any = decay(optimizer) if how == "instance" else decay
        engine = onecopy.initialize(model, plan, optimizer=optimizer, scheduler=scheduler)
        rates = []
        for micro in range(20):
            engine(torch.tensor([1.0])).backward()
            rate = engine.lr()[0]
            if engine.step():
                rates.append(rate)
            assert engine.micro_steps == micro + 1
        out[name] = [*rates, engine.lr()[0], float(engine.global_steps), onecopy.full_param(model.w).item()]
        engine.close()
    return out


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("how", ["instance", "callable"])
def test_one_tick_per_step_taken(world: int, how: str) -> None:
    expected = [1 - i / 10 for i in range(11)] + [10.0, 1.0 - 5.5]
    for run in run_ranks(scheduler_run, world, how):
        for name, rates in run.items():
            assert rates == pytest.approx(expected, abs=1e-6), name


@pytest.mark.parametrize(
    "scheduler",
    [
        ("OneCycleLR", {"max_lr": 0.1, "total_steps": 20}),
        ("CosineAnnealingLR", {"T_max": 10}),
        ("StepLR", {"step_size": 2, "gamma": 0.5}),
        ("ExponentialLR", {"gamma": 0.9}),
        ("CyclicLR", {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3}),
    ],
    ids=lambda s: s[0],
)
def test_schedulers_beside_the_oracle(scheduler: tuple[str, dict[str, Any]]) -> None:
    """OneCycle and Cyclic write momentum or betas into the groups too."""
    case = Case("mlp", optimizer=("SGD", {"lr": 0.1, "momentum": 0.9}), scheduler=scheduler, steps=6, accumulation=2)
    expected = oracle(case, 2)
    assert len({rate for rates in expected.lrs for rate in rates}) > 1
    for run in run_ranks(run_cases, 2, {n: case.but(stage=n) for n in (0, 1, 3)}):
        for name, outcome in run.items():
            assert outcome.lrs == expected.lrs, name
            assert difference(outcome, expected) <= 1e-6, name


def set_lr_by_hand(rank: int, world: int) -> dict[str, float]:
    """``group["lr"] = ...`` on the engine's optimizer is obeyed at the next step."""
    out = {}
    for name, plan in every_plan().items():
        model = models.build("toy")
        engine = onecopy.initialize(model, plan, optimizer=lambda params: torch.optim.SGD(params, lr=1.0))
        for rate in (0.0, 0.5):
            engine.optimizer.param_groups[0]["lr"] = rate
            engine(torch.tensor([1.0])).backward()
            engine.step()
        out[name] = onecopy.full_param(model.w).item()
        engine.close()
    return out


def test_lr_set_by_hand() -> None:
    for run in run_ranks(set_lr_by_hand, 2):
        assert all(w == 0.5 for w in run.values()), run


def states_run(rank: int, world: int) -> dict[str, dict[str, Tensor]]:
    """Full moments, gradients and parameters of an odd-sized model, gathered by every rank."""
    out = {}
    for name, plan in every_plan().items():
        model = models.build("mlp")
        engine = onecopy.initialize(model, plan, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3))
        for step in range(2):
            engine(*models.batch("mlp", step, 0, rank)).backward()
            engine.step()
        named = list(model.named_parameters())
        out[name] = {
            f"{key} {n}": onecopy.full_state(p, key).clone() for n, p in named for key in ("exp_avg", "exp_avg_sq")
        }
        engine.close()
    return out


def test_moments_gather_whole() -> None:
    model = models.build("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(2):
        parts = [models.batch("mlp", step, 0, rank) for rank in range(2)]
        model(*(torch.cat(t) for t in zip(*parts, strict=True))).backward()
        optimizer.step()
        optimizer.zero_grad()
    for run in run_ranks(states_run, 2):
        for name, states in run.items():
            for n, p in model.named_parameters():
                for key in ("exp_avg", "exp_avg_sq"):
                    expected, found = optimizer.state[p][key], states[f"{key} {n}"]
                    assert found.shape == p.shape, f"{name} {n}"
                    assert (found - expected).abs().max() <= 1e-7, f"{name} {key} {n}"


# ------------------------------------------------------------------------------------------------------------- hooks


@pytest.mark.parametrize("tier", ["device", "host"])
def test_step_hooks_run_once_around_the_whole_step(tier: Any) -> None:
    """However many units and tiles a step has; and a schedule made for the optimizer sees a step (no warning)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 1))
    plan = onecopy.offload(
        onecopy.stage(2, step=onecopy.StepPolicy(tile=2048), units=onecopy.Units(min_numel=0)), optimizer=tier
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    engine = onecopy.initialize(model, plan, optimizer=optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    seen: list[tuple[str, float]] = []

    def note(when: str) -> Any:
        return lambda *_: seen.append((when, sum(value.sum().item() for value in engine.full_state_dict().values())))

    optimizer.register_step_pre_hook(note("before"))
    optimizer.register_step_post_hook(note("after"))
    start = sum(value.sum().item() for value in engine.full_state_dict().values())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            engine(torch.ones(2, 64)).sum().backward()
            engine.step()
            schedule.step()
    end = sum(value.sum().item() for value in engine.full_state_dict().values())
    assert [when for when, _ in seen] == ["before", "after"] * 2
    assert seen[0][1] == start and seen[1] == ("after", seen[2][1]) and seen[3][1] == end != start
    engine.close()


@pytest.mark.parametrize("option", ["capturable", "differentiable"])
def test_an_option_that_cannot_be_stepped_with(option: str) -> None:
    """Not on the host, or not at all: one error that says which, before anything of the model changes."""
    plan = onecopy.offload(onecopy.stage(2))
    with pytest.raises(PlanError, match=f"AdamW fails on cpu, where its states are stepped(?s:.*)make it without {option}"):
        onecopy.initialize(nn.Linear(3, 3), plan, optimizer=lambda params: torch.optim.AdamW(params, **{option: True}))
