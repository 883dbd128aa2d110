"""The global gradient norm: what it is, what is reported, and what happens when it is not finite."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onecopy
from tests.ranks.cases.doors import beside_twin, doors, each_door, feed7, full_weights, sgd1
from tests.ranks.cases.test_shared_modules import Experts, halves
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import largest_gap

pytestmark = pytest.mark.ranks


class Vector(nn.Module):
    """Gradient ``x`` for a weight at 0."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


def sgd_one(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1.0)


# --------------------------------------------------------------------------------------------------------- what it is

# The gradients of the ranks: their mean is [1.5, 2.0] on two and on four ranks.
PULLS = {2: ([3.0, 0.0], [0.0, 4.0]), 3: ([3.0, 0.0], [0.0, 6.0], [1.5, 0.0]), 4: ([3.0, 0.0], [0.0, 4.0]) * 2}


def pulled(rank: int, world: int, norm_type: float) -> dict[str, tuple[float, list[float]]]:
    out = {}
    extra = {} if norm_type == 2.0 else {"norm_type": norm_type}
    for name, door in doors(world, clip=1.0, **extra).items():
        engine = door.open(Vector(), sgd_one)
        engine(torch.tensor(PULLS[world][rank])).backward()
        engine.step()
        out[name] = engine.grad_norm, onecopy.full_param(engine.module.w).tolist()
        engine.close()
    return out


@pytest.mark.parametrize(("world", "kind"), [(2, 2.0), (3, 2.0), (4, 2.0), (2, math.inf), (4, math.inf), (3, 1.0), (2, 3.0)])
def test_the_norm_of_two_halves(world: int, kind: float) -> None:
    """Rank gradients [3, 0] and [0, 4]: norm 2.5 and w = [-0.6, -0.8], not 3.5 or 5.0; the true maximum for inf; the
    same with hybrid groups; the same float on every rank (row 36)."""
    mean = torch.tensor(PULLS[world]).mean(0)
    norm = torch.linalg.vector_norm(mean, kind).item()
    if kind == 2.0:
        assert norm == pytest.approx(2.5)
    if kind == math.inf:
        assert norm == 2.0
    clipped = (-mean * min(1.0, 1.0 / norm)).tolist()
    runs = run_ranks(pulled, world, kind)
    for run in runs:
        for name, (seen, w) in run.items():
            assert seen == pytest.approx(norm, rel=1e-6), name
            assert w == pytest.approx(clipped, abs=2e-6), name
            assert seen == runs[0][name][0], f"{name}: the ranks report different floats"
    if world != 3 and kind == 2.0:
        assert clipped == pytest.approx([-0.6, -0.8])


class Routed(nn.Module):
    """Four one-weight experts, of which a rank uses two."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Vector(1) for _ in range(4))

    def forward(self, parts: list[tuple[int, Tensor]]) -> Tensor:
        return sum(self.experts[index](x) for index, x in parts)  # type: ignore[return-value]


def expert_norms(rank: int, world: int) -> dict[str, float]:
    out = {}
    for name, door in doors(world, clip=1.0).items():
        if name in ("stage 3", "stage 3 held", "hybrid 3"):
            continue  # each expert its own sharded unit, which every rank must enter; "one unit" has them together
        engine = door.open(Routed(), sgd_one)
        # Squared norms 16 + 4 = 20 on one half of the ranks and 64 + 36 = 100 on the other, of the mean over ranks.
        sizes = ((0, 4.0), (1, 2.0)) if rank % 2 == 0 else ((2, 8.0), (3, 6.0))
        engine([(index, torch.tensor([2 * size])) for index, size in sizes]).backward()
        engine.step()
        out[name] = engine.grad_norm
        engine.close()
    return out


def test_the_norm_over_experts_on_different_ranks() -> None:
    """Four experts with squared norms 20 and 100 on two ranks: sqrt(120) = 10.954, not 7.236 (row 36)."""
    for world in (2, 4):
        for run in run_ranks(expert_norms, world):
            assert run == dict.fromkeys(run, pytest.approx(math.sqrt(120), rel=1e-6)), run


@pytest.mark.parametrize("kind", [2.0, math.inf])
def test_the_norm_over_routed_experts_is_the_oracles(kind: float) -> None:
    """Norms and clipped weights of a real mixture of experts, beside one process (row 36)."""
    run_ranks(beside_twin, 4, Experts, halves, optimizer=sgd1, clip=0.05, norm_type=kind)


# ---------------------------------------------------------------------------------------------------- what is reported


def reported(rank: int, world: int) -> dict[str, dict[str, Any]]:
    """The norm asked for before, between and after; then the gradient is edited by hand."""
    out = {}
    for name, door in doors(world, clip=0.1).items():
        model = Vector()
        engine = door.open(model, sgd_one)
        ask = engine.get_global_grad_norm if name.startswith("json") else lambda engine=engine: engine.grad_norm
        seen: dict[str, Any] = {"at first": ask()}
        engine(torch.tensor(PULLS[world][rank])).backward()
        seen["after backward"] = ask()
        engine.step()
        seen["after step"] = ask()
        seen["moved"] = onecopy.full_param(model.w).norm().item()
        engine(torch.tensor(PULLS[world][rank])).backward()
        onecopy.set_full_grad(model.w, torch.tensor([6.0, 8.0]))
        engine.step()
        seen["edited"] = ask()
        seen["limit"] = engine.plan.clip.max_norm
        out[name] = seen
        engine.close()
    return out


def test_the_reported_norm_is_that_before_clipping() -> None:
    """Clip 0.1 and true norm 2.5: None before the first step, 2.5 after it, the edited gradient's norm after an edit;
    the weights moved by 0.1 (row 37)."""
    for world in (2, 3):
        for run in run_ranks(reported, world):
            for name, seen in run.items():
                assert seen["at first"] is None and seen["after backward"] is None, name
                assert seen["after step"] == pytest.approx(2.5, rel=1e-6), name
                assert seen["moved"] == pytest.approx(0.1, rel=1e-4), name
                assert seen["edited"] == pytest.approx(10.0, rel=1e-6), name
                assert seen["limit"] == 0.1, name


def test_the_documentation_says_which_norm_is_reported() -> None:
    """The attribute, the DeepSpeed name and the documentation say that the norm is that before clipping (row 37)."""
    from onecopy.deepspeed import DeepSpeedEngine

    assert "before clipping" in " ".join((onecopy.Engine.__doc__ or "").split())
    assert "before clipping" in (DeepSpeedEngine.get_global_grad_norm.__doc__ or "")
    docs = Path(onecopy.__file__).parents[2] / "docs" / "deepspeed.md"
    assert "before clipping" in docs.read_text()


def spoilt(rank: int, world: int, value: float, accumulation: int, culprit: int) -> None:
    """One rank's gradient is not finite in one window; the windows around it train as if it had not been."""
    torch.manual_seed(0)
    twin = nn.Linear(7, 7)
    plain = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for window in (0, 2):
        for micro in range(accumulation):
            for other in range(world):
                x, y = feed7(window * accumulation + micro, other)
                ((twin(x) - y).square().mean() / world / accumulation).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        plain.step()
        plain.zero_grad()
    for name, door in each_door(world, clip=0.5, accumulation=accumulation):
        model = nn.Linear(7, 7)
        engine = door.open(model, lambda params: torch.optim.AdamW(params, lr=1e-2))
        for window in range(3):
            before = full_weights(model)
            moments = onecopy.full_state(model.weight, "exp_avg")
            for micro in range(accumulation):
                x, y = feed7(window * accumulation + micro, rank)
                loss = (engine(x) - y).square().mean()
                if window == 1 and rank == culprit and micro == 0:
                    loss = loss * value
                loss.backward()
                moved = engine.step()
            assert moved == (window != 1), f"{name}: window {window}"
            if window == 1:
                now, kept = full_weights(model), onecopy.full_state(model.weight, "exp_avg")
                assert all(torch.equal(before[key], now[key]) for key in now), f"{name}: weights moved"
                assert moments is not None and kept is not None and torch.equal(moments, kept), name
                assert not math.isfinite(engine.grad_norm), name
        assert (engine.skipped_steps, engine.global_steps) == (1, 3), name
        assert math.isfinite(engine.grad_norm), name
        assert largest_gap(model, twin) <= 2e-6, name
        engine.close()


@pytest.mark.parametrize(
    ("world", "value", "accumulation", "culprit"),
    [(2, math.inf, 1, 0), (2, math.nan, 2, 1), (3, -math.inf, 1, 2)],
)
def test_a_gradient_that_is_not_finite_skips_the_step(world: int, value: float, accumulation: int, culprit: int) -> None:
    """One inf or NaN in fp32 on one rank: no weight or moment changes on any, one step is counted as skipped, and
    training goes on as if that batch had not been (row 37)."""
    run_ranks(spoilt, world, value, accumulation, culprit)
