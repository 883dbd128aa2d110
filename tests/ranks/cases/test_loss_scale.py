"""Dynamic loss scaling in fp16: one verdict for all ranks, and an error that says where a scale ran out."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onecopy
import onecopy.deepspeed as deepspeed
from onecopy.errors import EngineError
from onecopy.plan.plan import LossScale, Precision
from tests.ranks.cases.everywhere import everywhere, json_plans, said, values
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.ranks

# ----------------------------------------------------------------------------------------- row 41: one shard overflows


class Two(nn.Module):
    """``sum(2 x a + 0.5 b)``: at scale 65536 and x = 1 the gradient of ``a`` is 131072, beyond fp16, that of ``b`` 32768."""

    def __init__(self, sizes: tuple[int, int] = (4, 4), frozen: bool = False) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(size)) for size in sizes)
        self.b.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return (2 * self.a.float() * x.float()).sum() + (0.5 * self.b.float()).sum()


@dataclass(frozen=True)
class Overflow:
    """What to train: the factors x by [window][micro-batch][rank], all ranks where there is one number for them."""

    xs: list[list[list[float]]]
    sizes: tuple[int, int] = (4, 4)
    frozen: bool = False
    hysteresis: int = 1
    dynamic: bool = True

    @property
    def accumulation(self) -> int:
        return len(self.xs[0])

    def x(self, window: int, micro: int, rank: int) -> float:
        parts = self.xs[window][micro]
        return parts[rank % len(parts)]


@dataclass
class Trace:
    """One line for each window: (moved, loss scale, skipped, windows done, learning rate, Adam's step count)."""

    lines: list[tuple[bool, float, int, int, float, float]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.25, weight_decay=0.1)


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def by_hand(case: Overflow, world: int) -> Trace:
    """The oracle: fp32 weights, the ranks' fp16 gradients written down, the policy of the scale in four lines."""
    model = Two(case.sizes, case.frozen)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = adam(trained)
    scheduler = halving(optimizer)
    scale, left, skipped, taken, trace = 65536.0, case.hysteresis, 0, 0, Trace()
    for window in range(len(case.xs)):
        grads = [torch.zeros_like(p) for p in trained]
        for micro in range(case.accumulation):
            for rank in range(world):
                for grad, slope in zip(grads, (2 * case.x(window, micro, rank), 0.5), strict=False):
                    grad += torch.tensor(slope * scale, dtype=torch.float16).float() / (world * case.accumulation)
        finite = all(bool(grad.isfinite().all()) for grad in grads)
        if finite:
            for p, grad in zip(trained, grads, strict=True):
                p.grad = grad / scale
            optimizer.step()
            scheduler.step()
            taken += 1
        else:
            skipped += 1
            if case.dynamic and left > 1:
                left -= 1
            elif case.dynamic:
                scale /= 2
        rate = optimizer.param_groups[0]["lr"]
        trace.lines.append((finite, scale, skipped, window + 1, rate, float(taken)))
        trace.weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return trace


def train(engine: Any, case: Overflow, rank: int) -> Trace:
    trace = Trace()
    for window in range(len(case.xs)):
        for micro in range(case.accumulation):
            # A device tensor in fp16 as it comes: 1.0 and 0.25 are exact.
            engine.backward(engine(torch.tensor([case.x(window, micro, rank)])))
            moved = engine.step()
        counts = {float(state["step"]) for state in engine.optimizer.state.values() if "step" in state}
        assert len(counts) <= 1, "one rank's pieces were stepped a different number of times"
        # A rank that keeps no trainable element has no state to look at: told by -1.
        count = counts.pop() if counts else (0.0 if not trace.lines else -1.0)
        trace.lines.append((moved, engine.loss_scale, engine.skipped_steps, engine.global_steps, engine.lr()[0], count))
        trace.weights.append(values(engine))
    return trace


def overflow_run(rank: int, world: int, case: Overflow) -> dict[str, Trace]:
    """``case`` under every plan and every JSON."""
    out = {}
    scale = LossScale(hysteresis=case.hysteresis, dynamic=case.dynamic)
    precision = Precision("float16", loss_scale=scale)
    for name, plan in everywhere(world, precision=precision, accumulation=case.accumulation).items():
        engine = onecopy.initialize(Two(case.sizes, case.frozen), plan, optimizer=adam, scheduler=halving)
        assert engine.loss_scale == 65536.0
        out[name] = train(engine, case, rank)
        engine.close()
    half = {"enabled": True, "hysteresis": case.hysteresis, "loss_scale": 0 if case.dynamic else 65536}
    keys = {"fp16": half, "gradient_accumulation_steps": case.accumulation}
    for name, setup in json_plans(world, **keys).items():
        model = Two(case.sizes, case.frozen)
        other, *_ = deepspeed.initialize(model=model, config=setup, optimizer=adam, lr_scheduler=halving)
        out[name] = train(other, case, rank)
        other.destroy()
    return out


OVERFLOWS = {
    "hysteresis 1": (2, Overflow([[[1.0]], [[0.25]], [[0.25]]])),
    "hysteresis 2": (2, Overflow([[[1.0]], [[1.0]], [[0.25]], [[1.0]]], hysteresis=2)),
    "one rank's data": (2, Overflow([[[0.25, 1.0]], [[0.25]]])),
    "a rank without trainable elements": (2, Overflow([[[1.0]], [[0.25]]], sizes=(1, 6), frozen=True)),
    "three ranks, one element": (3, Overflow([[[1.0]], [[0.25]]], sizes=(1, 1))),
    "four ranks, odd sizes, one rank's data": (4, Overflow([[[0.25, 0.25, 0.25, 1.0]], [[0.25]]], sizes=(3, 5))),
    "first of two micro-batches": (2, Overflow([[[1.0], [0.25]], [[0.25], [0.125]]])),
    "static scale": (2, Overflow([[[1.0]], [[0.25]]], dynamic=False)),
}


@pytest.mark.parametrize("kind", OVERFLOWS)
def test_an_overflow_that_one_shard_sees_is_everybodys(kind: str) -> None:
    """fp16, scale 65536: only the shard of ``a``, on one rank, sees infinity.

    All ranks skip: weights keep their bits, scale, counters, schedule and Adam's step count are those of one process
    (scale 32768 after the first overflow with hysteresis 1, still 65536 with hysteresis 2), and so is what is trained
    after it.
     (row 41)"""
    world, case = OVERFLOWS[kind]
    expected = by_hand(case, world)
    first = expected.lines[0]
    assert first[:2] == (False, 32768.0 if case.dynamic and case.hysteresis == 1 else 65536.0), "the oracle did not skip"
    assert first[2:] == (1, 1, 0.25, 0.0)
    assert any(line[0] for line in expected.lines), "the oracle took no step at all"
    for run in run_ranks(overflow_run, world, case):
        for name, trace in run.items():
            for found, line in zip(trace.lines, expected.lines, strict=True):
                assert found[:5] == line[:5], f"{name}: {found}, in one process {line}"
                assert found[5] in (line[5], -1.0), f"{name}: Adam counts {found[5]} steps, in one process {line[5]}"
            ones = {key: torch.ones_like(value) for key, value in trace.weights[0].items()}
            assert all(torch.equal(value, ones[key]) for key, value in trace.weights[0].items()), name
            for found, weights in zip(trace.weights, expected.weights, strict=True):
                gap = max((found[key] - value).abs().max().item() for key, value in weights.items())
                assert gap <= 1e-6, f"{name}: off by {gap}"


# ------------------------------------------------------------------------------------ row 42: the scale meets its floor


class Poisoned(nn.Module):
    """Three weights; the gradient of those in ``bad`` is NaN, the loss finite unless ``loud``.

    The square root of 0 has value 0 and slope infinity; times 0 the gradient is NaN and the loss is not.
    """

    def __init__(self, bad: tuple[str, ...], loud: bool, where: int | None) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Parameter(torch.ones(size)) for size in (3, 4, 5))
        self.bad, self.loud, self.where = bad, loud, where

    def forward(self, rank: int) -> Tensor:
        total = torch.zeros(())
        for name, p in self.named_parameters():
            term = (p.float() * 1e-3).sum()
            if name in self.bad and self.where in (None, rank):
                term = (p.float() * math.nan).sum() if self.loud else (p.float() * 0.0).sqrt().mul(0.0).sum()
            total = total + term
        return total


@dataclass(frozen=True)
class Floor:
    bad: tuple[str, ...] = ("second",)
    loud: bool = False
    where: int | None = None  # the rank whose forward is poisoned; None: all
    power: int = 16
    minimum: int = 1
    hysteresis: int = 1

    def skips(self) -> int:
        """Windows that are skipped before the one that cannot go lower, by counting."""
        scale, left, count = 2.0**self.power, self.hysteresis, 0
        while scale > self.minimum or left > 1:
            scale, left, count = (scale, left - 1, count) if left > 1 else (scale / 2, left, count)
            count += 1
        return count


def to_the_floor(rank: int, world: int, case: Floor) -> dict[str, tuple[str, int, float]]:
    """(what the error says, steps skipped before it, scale then) for every plan and JSON."""
    out = {}

    def run(engine: Any) -> tuple[str, int, float]:
        def steps() -> None:
            for _ in range(case.skips() + 8):
                engine.backward(engine(rank))
                engine.step()

        text = said(steps, EngineError)
        return text, engine.skipped_steps, engine.loss_scale

    policy = LossScale(2.0**case.power, minimum=float(case.minimum), hysteresis=case.hysteresis)
    for name, plan in everywhere(world, precision=Precision("float16", loss_scale=policy)).items():
        engine = onecopy.initialize(Poisoned(case.bad, case.loud, case.where), plan, optimizer=adam)
        out[name] = run(engine)
        assert all(torch.equal(value, torch.ones_like(value)) for value in values(engine).values()), name
        engine.close()
    half = {
        "enabled": True, "initial_scale_power": case.power, "min_loss_scale": case.minimum, "hysteresis": case.hysteresis,
    }  # fmt: skip
    for name, setup in json_plans(world, fp16=half).items():
        model = Poisoned(case.bad, case.loud, case.where)
        other, *_ = deepspeed.initialize(model=model, config=setup, optimizer=adam)
        out[name] = run(other)
        other.destroy()
    return out


FLOORS = {
    "alone": (1, Floor()),
    "two ranks": (2, Floor()),
    "two parameters, floor 256": (2, Floor(bad=("first", "third"), power=10, minimum=256)),
    "hysteresis 2, three ranks": (3, Floor(power=4, hysteresis=2)),
    "one rank's data": (2, Floor(power=3, where=1)),
    "loss": (2, Floor(power=3, loud=True)),
}


@pytest.mark.parametrize("kind", FLOORS)
def test_at_the_floor_the_culprits_the_step_and_a_rank_are_named(kind: str) -> None:
    """Parameters that give NaN for ever; the scale halves from 65536 to its floor 1 in 16 skipped steps.

    The 17th is an error, on all ranks, that names these parameters and no other, the step and a rank.
     (row 42)"""
    world, case = FLOORS[kind]
    if case == Floor():
        assert case.skips() == 16
    runs = run_ranks(to_the_floor, world, case)
    for run in runs:
        for name, (text, skipped, scale) in run.items():
            assert skipped == case.skips(), f"{name}: {skipped} steps were skipped"
            assert scale == case.minimum, name
            assert [word for word in ("first", "second", "third") if f"'{word}'" in text] == list(case.bad), text
            assert re.search(rf"step {skipped}\b", text), text
            assert re.search(r"rank \d", text), text
            assert text == runs[0][name][0], "ranks say different things"


def about_the_loss(text: str) -> str:
    """Does ``text`` say that the loss itself was, or was not, finite?"""
    if re.search(r"loss\b[^.;]*\b(not finite|non-finite|nan|inf)", text, re.IGNORECASE):
        return "not finite"
    return "finite" if re.search(r"loss\b[^.;]*\bfinite", text, re.IGNORECASE) else "says nothing"


def test_at_the_floor_the_error_says_whether_the_loss_was_finite() -> None:
    """A NaN that the forward pass makes is a matter of the model or the data, one that only backward makes of
    the scale: the error says which it was. (row 42)"""
    for loud, truth in ((True, "not finite"), (False, "finite")):
        for run in run_ranks(to_the_floor, 2, Floor(power=2, loud=loud)):
            found = {name: (about_the_loss(text), text) for name, (text, *_) in run.items()}
            assert {verdict for verdict, _ in found.values()} == {truth}, found


@pytest.mark.parametrize("where", [0, 1])
def test_at_the_floor_the_rank_whose_data_it_was_is_named(where: int) -> None:
    """NaN from one rank's data only: that rank is named, not the one which keeps the reduced gradient's piece. (row 42)"""
    for run in run_ranks(to_the_floor, 2, Floor(bad=("first", "third"), power=2, where=where)):
        ranks = {name: set(re.findall(r"rank (\d)", text)) for name, (text, *_) in run.items()}
        assert ranks == {name: {str(where)} for name in ranks}, run
