"""Saved and loaded by the same ranks under the same plan: the run goes on to the bit, whatever the model is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onecopy
from onecopy.checkpoint.format import MANIFEST, parse
from onecopy.plan.plan import LossScale, Precision
from tests.ranks.checkpoints import SMALL, everything, start, steps, unequal
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import every_plan, sgd

pytestmark = pytest.mark.ranks

STATES = ("exp_avg", "exp_avg_sq")

# ------------------------------------------------------------------------------------------- the same ranks and plan

OPTIMIZERS = {
    "sgd momentum": (sgd, ("momentum_buffer",)),
    "adagrad": (lambda p: torch.optim.Adagrad(p, lr=0.01), ("sum",)),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9), ("square_avg", "momentum_buffer")),
    "nadam": (lambda p: torch.optim.NAdam(p, lr=1e-3), ("exp_avg", "mu_product")),
    "asgd": (lambda p: torch.optim.ASGD(p, lr=1e-3), ("ax",)),
    "amsgrad": (lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True), ("max_exp_avg_sq",)),
    "fused": (lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True), ("exp_avg_sq", "step")),
}


def continues(rank: int, world: int, folder: str, kind: str, plans: dict[str, Any]) -> dict[str, Any]:
    """Six straight steps against three, save, load into another engine, three more."""
    optimizer, states = OPTIMIZERS[kind]
    out = {}
    for name, plan in plans.items():
        place = f"{folder}/{name}"
        first = start("gpt", plan, optimizer)
        steps(first, "gpt", rank, world, range(3))
        first.save(place)
        expected = steps(first, "gpt", rank, world, range(3, 6))
        second = start("gpt", plan, optimizer)
        steps(second, "gpt", rank, world, range(7, 9))  # a used engine, so that nothing of its own may shine through
        second.load(place)
        assert second.loss_scale == first.loss_scale
        losses = steps(second, "gpt", rank, world, range(3, 6))
        out[name] = losses == expected, unequal(everything(first, states), everything(second, states))
        first.close(), second.close()
    return out


@pytest.mark.parametrize("dtype", [None, "bf16", "fp16"])
def test_sgd_goes_on_to_the_bit(tmp_path: Path, dtype: str | None) -> None:
    plans = every_plan(**({"dtype": dtype} if dtype else {}))
    for run in run_ranks(continues, 2, str(tmp_path), "sgd momentum", plans):
        assert all(result == (True, []) for result in run.values()), run


@pytest.mark.parametrize("kind", [kind for kind in OPTIMIZERS if kind != "sgd momentum"])
def test_every_optimizer_goes_on_to_the_bit(tmp_path: Path, kind: str) -> None:
    plans = {"two": onecopy.stage(2, units=SMALL), "three": onecopy.stage(3, dtype="bf16")}
    for run in run_ranks(continues, 2, str(tmp_path), kind, plans):
        assert all(result == (True, []) for result in run.values()), run


def scales(rank: int, world: int, folder: str) -> tuple[Any, Any]:
    """A loss scale that moves, with a window half full and hysteresis half used when it is saved."""
    scale = LossScale(initial=2.0**40, window=3, hysteresis=2)
    plan = onecopy.stage(2, precision=Precision("float16", loss_scale=scale), units=SMALL)
    first, second = start("mlp", plan, sgd), start("mlp", plan, sgd)

    def run(engine: Any, numbers: range) -> list[Any]:
        seen = []
        for number in numbers:
            steps(engine, "mlp", rank, world, range(number, number + 1))
            seen.append((engine.loss_scale, engine.skipped_steps, engine.global_steps))
        return seen

    run(first, range(28))
    assert first.skipped_steps > 10
    first.save(folder)
    second.load(folder)
    assert second._scaler.state() == first._scaler.state()
    return run(first, range(28, 36)), run(second, range(28, 36))


def test_the_loss_scale_goes_on(tmp_path: Path) -> None:
    for expected, found in run_ranks(scales, 2, str(tmp_path)):
        assert expected == found
        assert len({scale for scale, *_ in expected}) > 1, "the scale never moved"


# ------------------------------------------------------------------------------------------------------------ odd models


class Odd(nn.Module):
    """Tied, frozen, unused, empty, scalar and transposed parameters; buffers that are saved, not saved, and shared."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.last = nn.Linear(5, 5, bias=False)
        self.last.weight = self.first.weight
        self.frozen = nn.Linear(5, 3).requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.turned = nn.Parameter(torch.randn(3, 7).t())
        self.norm = nn.BatchNorm1d(5)
        self.register_buffer("table", torch.randn(3))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.again = nn.Module()
        self.again.register_buffer("table", self.table)

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(torch.tanh(self.norm(self.first(x)))) * self.scale
        return (self.turned @ self.frozen(y).t()).square().mean() + self.table.sum() * self.scale

    def get_extra_state(self) -> Any:
        return {"calls": getattr(self, "calls", 0), "shape": (1, 2)}

    def set_extra_state(self, state: Any) -> None:
        assert state["shape"] == (1, 2)
        self.calls = state["calls"]


def odd_save(rank: int, world: int, folder: str, dtype: str | None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Odd()
    model.calls = 41 + rank
    engine = start(model, onecopy.stage(3, units=SMALL, **({"dtype": dtype} if dtype else {})))
    for count in range(2):
        engine(torch.randn(4, 5, generator=torch.Generator().manual_seed(count))).backward()
        engine.step()
    engine.save(folder)
    values = everything(engine) | {f"state {k}": v for k, v in engine.full_state_dict().items()}
    engine.close()
    return values


def odd_load(rank: int, world: int, folder: str, dtype: str | None, number: int) -> tuple[dict[str, Tensor], int, bool]:
    torch.manual_seed(5)
    model = Odd()
    model.scratch.fill_(3)
    engine = start(model, onecopy.stage(number, **({"dtype": dtype} if dtype else {})))
    engine.load(folder)
    values = everything(engine) | {f"state {k}": v for k, v in engine.full_state_dict().items()}
    kept = model.scratch.tolist() == [3, 3] and model.last.weight is model.first.weight
    engine(torch.randn(4, 5)).backward()
    engine.step()
    engine.close()
    return values, model.calls, kept


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_odd_parameters_and_buffers(tmp_path: Path, dtype: str | None) -> None:
    truth = run_ranks(odd_save, 2, str(tmp_path), dtype)[0]
    manifest = parse((tmp_path / "step00000002" / MANIFEST).read_text(), "m")
    tied = manifest.parameters["first.weight"]
    assert tied.names == ("first.weight", "last.weight")
    assert "last.weight" not in manifest.parameters
    assert manifest.parameters["empty"].weight.spans == ()
    assert not manifest.parameters["frozen.weight"].trainable
    assert not manifest.parameters["frozen.weight"].moments
    assert not manifest.parameters["unused.weight"].moments
    assert "scratch" not in manifest.buffers
    assert {name for group in manifest.optimizer.groups for name in group.params} == {  # type: ignore[union-attr]
        "first.weight", "first.bias", "unused.weight", "unused.bias", "scale", "turned", "norm.weight", "norm.bias",
    }  # fmt: skip
    for world, number in ((1, 0), (2, 1), (3, 2), (4, 3)):
        for values, calls, kept in run_ranks(odd_load, world, str(tmp_path), dtype, number):
            assert not unequal(truth, values), (world, number)
            assert calls == 41
            assert kept


def trained_before_saving(rank: int, world: int, folder: str) -> list[str]:
    """Weights that user code wrote, after the last step and by every way there is, are in the checkpoint."""
    wrong = []
    for name, plan in every_plan(dtype="bf16").items():
        first, second = start("even", plan), start("even", plan)
        steps(first, "even", rank, world, range(1))
        with onecopy.gathered(first.module.first, write_rank=0), torch.no_grad():
            first.module.first.weight.fill_(0.5)
        with torch.no_grad():
            first.module.last.weight.fill_(0.25)
        onecopy.set_full_param(first.module.last.bias, torch.full((16,), 0.1))
        truth = everything(first, STATES)
        first.save(f"{folder}/{name}")
        with torch.no_grad():
            second.module.last.weight.fill_(9)  # older than the load, so not to be taken up by the step after it
        second.load(f"{folder}/{name}")
        wrong += [f"{name}: {key}" for key in unequal(truth, everything(second, STATES))]
        steps(first, "even", rank, world, range(1, 2))
        steps(second, "even", rank, world, range(1, 2))
        wrong += [f"{name} a step later: {key}" for key in unequal(everything(first), everything(second))]
        first.close(), second.close()
    return wrong


def test_weights_written_by_hand(tmp_path: Path) -> None:
    assert run_ranks(trained_before_saving, 2, str(tmp_path)) == [[], []]
