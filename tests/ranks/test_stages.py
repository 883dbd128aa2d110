"""Every stage trains the same weights: bit for bit among stages on two ranks, within 1e-6 of one process elsewhere."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import onecopy
from tests.ranks import models
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import Case, Outcome, difference, oracle, run_cases

pytestmark = pytest.mark.ranks

SGD: tuple[str, dict[str, Any]] = ("SGD", {"lr": 0.05, "momentum": 0.9})
ADAMW: tuple[str, dict[str, Any]] = ("AdamW", {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)})
HELD = {"reshard_after_forward": False}


def every_stage(case: Case) -> dict[str, Case]:
    """``case`` at stages 0 to 3, and 3 with parameters kept from forward to backward."""
    cases = {f"stage {n}": case.but(stage=n) for n in range(4)}
    return cases | {"stage 3 held": case.but(stage=3, plan={**case.plan, **HELD})}


def assert_trained(case: Case, outcome: Outcome) -> None:
    """The run could have failed: weights moved and losses differ."""
    start = models.bare(models.build(case.model))
    assert sum((start[k] - v).abs().sum() for k, v in outcome.weights.items()) > 1e-3
    assert len(set(outcome.losses)) > 1


def assert_bit_equal(runs: list[dict[str, Outcome]]) -> None:
    first = runs[0]["stage 0"]
    for rank, outcomes in enumerate(runs):
        for name, outcome in outcomes.items():
            assert outcome.losses == runs[rank]["stage 0"].losses, name
            unequal = [k for k, v in first.weights.items() if not torch.equal(v, outcome.weights[k])]
            assert not unequal, f"{name}, rank {rank}: {unequal}"
            assert outcome.norms == pytest.approx(first.norms, rel=1e-5)


def assert_like_oracle(runs: list[dict[str, Outcome]], expected: Outcome, tolerance: float = 1e-6) -> None:
    for rank, outcomes in enumerate(runs):
        for name, outcome in outcomes.items():
            assert difference(outcome, expected) <= tolerance, f"{name}, rank {rank}"
            assert outcome.norms == pytest.approx(expected.norms, rel=1e-5), f"{name}, rank {rank}"
            assert outcome.norms == runs[0][name].norms, f"{name}: ranks differ in a float every rank must share"
    for name in runs[0]:
        means = torch.tensor([run[name].losses for run in runs], dtype=torch.float64).mean(0)
        assert means.tolist() == pytest.approx(expected.losses, rel=1e-6, abs=2e-6), name


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("model", ["gpt", "mlp"])
def test_fp32_stages_are_bit_equal_on_two_ranks(model: str, optimizer: Any) -> None:
    case = Case(model, optimizer=optimizer, steps=20)
    runs = run_ranks(run_cases, 2, every_stage(case))
    assert_trained(case, runs[0]["stage 0"])
    assert_bit_equal(runs)
    assert_like_oracle(runs, oracle(case, 2), 5e-6)  # 20 steps; the three-step and clipped runs below are held to 1e-6


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("units", ["small", "merged"])
def test_bf16_stages_are_bit_equal_on_two_ranks(optimizer: Any, units: str) -> None:
    plan: dict[str, Any] = {"dtype": "bf16"} | ({"units": onecopy.Units(min_numel=10**6)} if units == "merged" else {})
    case = Case("gpt", optimizer=optimizer, steps=20, plan=plan)
    runs = run_ranks(run_cases, 2, every_stage(case))
    assert_trained(case, runs[0]["stage 0"])
    assert_bit_equal(runs)
    end = oracle(case, 2).losses
    means = torch.tensor([run["stage 3"].losses for run in runs]).mean(0)
    assert means.tolist() == pytest.approx(end, abs=0.05), "bf16 with fp32 masters follows fp32"


@pytest.mark.parametrize("min_numel", [200, 10**6])
def test_unit_size_changes_nothing(min_numel: int) -> None:
    case = Case("gpt", optimizer=ADAMW, steps=4)
    cases = every_stage(case) | every_stage(case.but(plan={"units": onecopy.Units(min_numel=min_numel)}))
    cases["merged"] = case.but(stage=3, plan={"units": onecopy.Units(min_numel=min_numel)})
    runs = run_ranks(run_cases, 2, cases)
    assert_bit_equal(runs)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_prefetch_changes_nothing(prefetch: int) -> None:
    case = Case("gpt", optimizer=ADAMW, steps=3, plan={"units": onecopy.Units(min_numel=0, prefetch=prefetch)})
    runs = run_ranks(run_cases, 2, every_stage(case))
    assert_bit_equal(runs)
    assert_like_oracle(runs, oracle(case, 2))


@pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
@pytest.mark.parametrize("model", ["gpt", "mlp"])
@pytest.mark.parametrize("world", [2, 4])
def test_accumulation_and_clipping_like_one_process(world: int, model: str, optimizer: Any) -> None:
    case = Case(model, optimizer=optimizer, steps=6, accumulation=2, clip=0.5 if model == "gpt" else 0.1)
    expected = oracle(case, world)
    assert min(expected.norms) > case.clip, "clipping must do something here"  # type: ignore[operator]
    assert difference(expected, oracle(case.but(clip=None), world)) > 1e-4
    cases = every_stage(case)
    if world == 4:
        cases |= {f"hsdp {n}": case.but(stage=n, plan={"shard": 2}) for n in range(4)}
        cases["hsdp held"] = case.but(stage=3, plan={"shard": 2, **HELD})
    runs = run_ranks(run_cases, world, cases)
    assert_trained(case, runs[0]["stage 0"])
    assert_like_oracle(runs, expected)


def test_groups_of_one_and_of_all() -> None:
    case = Case("mlp", optimizer=ADAMW, steps=4, accumulation=2, clip=0.1)
    cases = {f"{n} shard {s}": case.but(stage=n, plan={"shard": s}) for n in range(4) for s in (1, 2)}
    runs = run_ranks(run_cases, 2, cases)
    assert_like_oracle(runs, oracle(case, 2))


@pytest.mark.parametrize("world", [1, 3])
def test_odd_worlds(world: int) -> None:
    case = Case("mlp", optimizer=ADAMW, steps=5, accumulation=3, clip=0.1)
    runs = run_ranks(run_cases, world, every_stage(case))
    assert_like_oracle(runs, oracle(case, world))


@pytest.mark.parametrize("norm_type", [1.0, 3.0, math.inf])
def test_clipping_by_any_norm(norm_type: float) -> None:
    case = Case("mlp", optimizer=SGD, steps=4, accumulation=2, clip=0.05, norm_type=norm_type)
    expected = oracle(case, 2)
    assert min(expected.norms) > 0.05
    assert_like_oracle(run_ranks(run_cases, 2, every_stage(case)), expected)


def test_two_runs_are_the_same_run() -> None:
    case = Case("gpt", stage=3, optimizer=ADAMW, steps=4, accumulation=2, clip=0.5)
    first = run_ranks(run_cases, 2, {"stage 0": case})
    again = run_ranks(run_cases, 2, {"stage 0": case})
    assert first[0]["stage 0"].losses == again[0]["stage 0"].losses
    assert all(torch.equal(v, again[1]["stage 0"].weights[k]) for k, v in first[0]["stage 0"].weights.items())


def test_moved_says_when_weights_moved() -> None:
    case = Case("mlp", stage=2, steps=2, accumulation=3)
    for run in run_ranks(run_cases, 2, {"a": case}):
        assert run["a"].moved == [False, False, True] * 2
