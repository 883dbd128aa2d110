"""Ways to get silent wrong numbers or a dead process, each with the value that plain torch gives."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onecopy
from onecopy.comm.shared import Shared
from onecopy.errors import EngineError, OneCopyError, PlanError
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import every_plan, largest_gap

pytestmark = pytest.mark.ranks


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


class Clamped(nn.Module):
    """A weight whose constraint never bites beside one that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum() + self.v.sum()


def clamp_each_step(rank: int, world: int) -> dict[str, tuple[float, float]]:
    out = {}
    for name, plan in every_plan(dtype="bf16").items():
        model = Clamped()
        engine = onecopy.initialize(model, plan, optimizer=lambda params: torch.optim.SGD(params, lr=1e-3))
        for _ in range(40):
            engine(torch.ones(8)).backward()
            engine.step()
            with torch.no_grad():
                model.v.clamp_(-5, 5)
        out[name] = onecopy.full_param(model.w)[0].item(), onecopy.full_param(model.v)[0].item()
        engine.close()
    return out


def test_a_constraint_that_does_not_bite_keeps_the_masters_precision() -> None:
    for run in run_ranks(clamp_each_step, 2):
        for name, values in run.items():
            assert values == pytest.approx((0.96, 0.96), abs=1e-5), name


class Odd(nn.Module):
    """Uses a child's weight without calling it, edits one in place, and keeps a view of another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.view: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.a.weight.clamp_(-0.1, 0.1)
        x = x + x @ self.b.weight.detach()
        x = torch.tanh(self.a(x))
        self.view = self.a.weight.t()
        return F.linear(torch.tanh(self.b(x)), self.c.weight).pow(2).mean()


def beside_torch(rank: int, world: int) -> dict[str, float]:
    gaps = {}
    data = torch.randn(2 * world, 64, generator=torch.Generator().manual_seed(1))
    for name, plan in every_plan().items():
        torch.manual_seed(0)
        model = Odd()
        torch.manual_seed(0)
        twin = Odd()
        engine, optimizer = onecopy.initialize(model, plan, optimizer=sgd), sgd(twin.parameters())
        for _ in range(3):
            engine(data[2 * rank : 2 * rank + 2]).backward()
            engine.step()
            assert model.view is not None and bool(torch.isfinite(model.view.sum())), "a kept view lost its memory"
            optimizer.zero_grad()
            twin(data).backward()
            optimizer.step()
        gaps[name] = largest_gap(model, twin)
        engine.close()
    return gaps


def test_weights_used_edited_and_kept_outside_their_modules() -> None:
    for run in run_ranks(beside_torch, 2):
        assert max(run.values()) <= 1e-6, run


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        x = torch.tanh(self.a(x))
        if extra:
            x = torch.tanh(self.b(x))
        return self.c(x).pow(2).mean()


def skipped_by_one(rank: int, world: int) -> dict[str, list[float]]:
    """One rank skips a layer of a unit of several: the default grouping."""
    out = {}
    for name, plan in every_plan(units=onecopy.Units()).items():
        torch.manual_seed(0)
        engine = onecopy.initialize(Optional(), plan, optimizer=sgd)
        for _ in range(4):
            engine(torch.ones(2, 8), rank == 0).backward()
            engine.step()
        out[name] = [engine.grad_norm or 0.0]
        engine.close()
    return out


def test_a_layer_that_one_rank_skips() -> None:
    first, second = run_ranks(skipped_by_one, 2)
    assert first == second
    assert len({round(norms[0], 6) for norms in first.values()}) == 1


def scaled_roads(rank: int, world: int) -> dict[str, float]:
    """fp16: a penalty that reaches parameters beside the model's outputs, through engine.backward."""
    out = {}
    for name, plan in every_plan(dtype="fp16").items():
        model = nn.Linear(4, 1, bias=False)
        nn.init.constant_(model.weight, 0.5)
        scaler = onecopy.LossScale(initial=256.0)
        plan = plan.with_(precision=onecopy.Precision(dtype="float16", loss_scale=scaler))
        engine = onecopy.initialize(model, plan, optimizer=sgd)
        loss = engine(torch.zeros(1, 4)).float().sum()
        with onecopy.gathered(model):
            engine.backward(loss + model.weight.float().pow(2).sum())
        engine.step()
        out[name] = onecopy.full_param(model.weight)[0, 0].item()
        engine.close()
    return out


def test_a_penalty_beside_the_outputs_is_scaled_like_the_rest() -> None:
    for run in run_ranks(scaled_roads, 2):
        for name, value in run.items():
            assert value == pytest.approx(0.5 - 0.1 * 2 * 0.5, abs=2e-3), name


def refused(rank: int, world: int) -> None:
    for plan in every_plan().values():
        tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        tied[1].weight.data = tied[0].weight.data
        with pytest.raises(PlanError, match="over the same memory"):
            onecopy.initialize(tied, plan, optimizer=sgd)
        with pytest.raises(PlanError, match="max_norm"):
            onecopy.initialize(nn.Embedding(4, 4, max_norm=1.0), plan, optimizer=sgd)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        engine = onecopy.initialize(model, plan, optimizer=sgd)
        y = engine(torch.ones(1, 4))
        y.pow(2).sum().backward(retain_graph=True)
        engine.step()
        with pytest.raises(RuntimeError, match=r"inplace operation|changed by engine\.step"):
            y.abs().sum().backward()
        engine.discard_gradients()
        assert engine.optimizer is not None
        engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        engine(torch.ones(1, 4)).sum().backward()
        with pytest.raises(EngineError, match="groups"):
            engine.step()
        engine.close()


def test_what_cannot_be_right_is_refused() -> None:
    run_ranks(refused, 2)


# ------------------------------------------------------------------------------- things that ranks must do alike, by chance


def alike_or_refused(rank: int, world: int, case: str) -> dict[str, str]:
    out = {}
    for name, plan in every_plan().items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        engine = onecopy.initialize(model, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), patience=3)
        try:
            engine(torch.ones(1, 4) + rank).sum().backward()
            if rank == 0 and case == "lr":
                engine.optimizer.param_groups[0]["lr"] = 0.01
            if rank == 0 and case == "norm":
                model[0].weight.grad.norm()
            if rank == 0 and case == "write" and not name.startswith("stage 3"):
                with torch.no_grad():
                    model[0].weight.zero_()
            engine.step()
            out[name] = "done"
        except OneCopyError as error:
            out[name] = str(error)
        if case == "norm":
            return out  # the group is broken
        engine.close()
    return out


def test_a_learning_rate_set_on_one_rank_is_refused_on_all() -> None:
    for run in run_ranks(alike_or_refused, 2, "lr"):
        assert all("disagree about what their optimizers are set to" in said for said in run.values()), run
        assert all("0.01" in said and "0.1" in said for said in run.values()), run


def test_a_weight_written_on_one_rank_is_refused_on_all() -> None:
    for run in run_ranks(alike_or_refused, 2, "write"):
        for name, said in run.items():
            assert said == "done" if name.startswith("stage 3") else "written since the last step" in said, (name, said)


def test_a_norm_asked_for_on_one_rank_ends_the_job_with_a_word() -> None:
    """It meets the vote of the other rank's step: neither pairs with the other, and the process lives to say so."""
    for run in run_ranks(alike_or_refused, 2, "norm"):
        assert "the vote of engine.step()" in run["stage 0"], run


def test_dropping_gradients_by_zero_grad_is_noticed() -> None:
    model = nn.Linear(3, 1)
    engine = onecopy.initialize(model, onecopy.stage(2), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    for zero in (engine.zero_grad, model.zero_grad):
        engine(torch.ones(1, 3)).sum().backward()
        with pytest.warns(UserWarning, match=r"discard_gradients\(\)"):
            zero()
        engine.step()
    engine.close()


def test_step_after_every_window_only_is_noticed() -> None:
    engine = onecopy.initialize(
        nn.Linear(3, 1), onecopy.stage(2, accumulation=2), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    )
    for _ in range(2):
        engine(torch.ones(1, 3)).sum().backward()
    with pytest.warns(UserWarning, match="belongs after every micro-batch"):
        engine.step()
    engine.close()


def test_misspelt_options_are_refused_with_the_nearest() -> None:
    with pytest.raises(onecopy.errors.PlanError, match=r"'acumulation'; did you mean 'accumulation'"):
        onecopy.stage(2, acumulation=4)
    with pytest.raises(onecopy.errors.PlanError, match=r"'Liner'.*did you mean 'Linear'"):
        onecopy.initialize(nn.Sequential(nn.Linear(2, 2)), onecopy.stage(0, units=onecopy.Units(blocks=("Liner",))))
    with pytest.raises(onecopy.errors.ConfigError, match="patience"):
        onecopy.initialize(nn.Linear(2, 2), onecopy.stage(0), patience="5")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------- a rank that is behind at the end


def last_message(rank: int, world: int) -> list[float]:
    """No slot of shared memory is free, so all goes over the wire; rank 0 is slow to ask for it, and rank 1, which has
    everything, leaves the group as soon as it may."""
    claim, receive = Shared._claim, Shared._receive

    def slow(self: Shared, *args: Any) -> None:
        if rank == 0:
            time.sleep(0.3)
        receive(self, *args)

    Shared._claim, Shared._receive = lambda self: None, slow  # type: ignore[method-assign, assignment]
    try:
        engine = onecopy.initialize(
            nn.Linear(4, 4), onecopy.stage(2), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), patience=10
        )
        losses = []
        for _ in range(2):
            loss = engine(torch.ones(2, 4)).square().mean()
            loss.backward()
            engine.step()
            losses.append(loss.item())
        engine.close()
        del engine, loss
        return losses
    finally:
        Shared._claim, Shared._receive = claim, receive  # type: ignore[method-assign]


def test_a_rank_that_is_ahead_stays_until_the_others_have_its_last_message() -> None:
    one, other = run_ranks(last_message, 2)
    assert one == other
