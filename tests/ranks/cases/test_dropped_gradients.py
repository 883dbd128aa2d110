"""Gradients of single parameters that a loop drops, zeroes or edits before the step, and parameters that it freezes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onecopy
from onecopy.errors import OneCopyError
from tests.ranks.cases.everywhere import everywhere
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import largest_gap

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.head = nn.Linear(5, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x).square().mean()


def batch(number: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * number + rank)) * 3


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.3, momentum=0.9, weight_decay=0.1)


def none(model: Net) -> None:
    model.head.weight.grad = None


def dropped_by_del(model: Net) -> None:
    for p in model.blocks[0].parameters():
        del p.grad


def none_then_clip(model: Net) -> float:
    model.head.weight.grad = None
    assert model.head.weight.grad is None
    return float(nn.utils.clip_grad_norm_(model.parameters(), 0.05))


def zero(model: Net) -> None:
    model.head.weight.grad.zero_()


def zero_each(model: Net) -> None:
    torch._foreach_zero_([p.grad for p in model.blocks.parameters()])


DROPS: list[Callable[[Net], Any]] = [none, dropped_by_del, none_then_clip, zero, zero_each]


def drop_all(rank: int, world: int, accumulation: int) -> dict[str, float]:
    """The largest gap of a weight to plain torch when a part of the gradients is dropped in every other step."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return drop_each(rank, world, accumulation)


def drop_each(rank: int, world: int, accumulation: int) -> dict[str, float]:
    out = {}
    for drop in DROPS:
        for name, plan in everywhere(world, accumulation=accumulation).items():
            torch.manual_seed(1)
            twin = Net()
            model = copy.deepcopy(twin)
            engine, plain = onecopy.initialize(model, plan, optimizer=momentum), momentum(twin.parameters())
            for number in range(4 * accumulation):
                engine(batch(number, rank)).backward()
                for other in range(world):
                    (twin(batch(number, other)) / world / accumulation).backward()
                if (number + 1) % accumulation == 0:
                    if number // accumulation % 2:
                        one, two = drop(model), drop(twin)
                        assert one is two is None or one == pytest.approx(two, rel=1e-5)
                    plain.step()
                    plain.zero_grad()
                assert engine.step() == ((number + 1) % accumulation == 0)
            out[f"{drop.__name__}, {name}"] = largest_gap(model, twin)
            engine.close()
    return out


@pytest.mark.parametrize(("world", "accumulation"), [(1, 1), (2, 1), (2, 2)])
def test_dropped_gradients_are_those_of_one_process(world: int, accumulation: int) -> None:
    for run in run_ranks(drop_all, world, accumulation):
        wrong = {name: gap for name, gap in run.items() if not gap <= 1e-6}
        assert not wrong, wrong


def drop_elsewhere(rank: int, world: int) -> dict[str, list[str]]:
    """In the middle of a window, all of them, and what ``full_grad`` says of one that was dropped."""
    out = {}
    for name, plan in everywhere(world, accumulation=2).items():
        model = Net()
        engine = onecopy.initialize(model, plan, optimizer=momentum)
        said = []
        engine(batch(0, rank)).backward()
        said.append(_ends(lambda model=model: none(model)))
        said.append(_ends(lambda model=model: zero(model)))
        engine.step()
        engine(batch(1, rank)).backward()
        before = onecopy.full_param(model.head.weight)
        for p in model.parameters():
            p.grad = None
        assert onecopy.full_grad(model.head.weight) is None
        said.append(_ends(engine.step))
        assert torch.equal(before, onecopy.full_param(model.head.weight))
        engine.close()
        out[name] = said
    return out


def _ends(call: Callable[[], Any]) -> str:
    try:
        call()
    except OneCopyError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_what_cannot_be_dropped_says_so() -> None:
    for run in run_ranks(drop_elsewhere, 2):
        for name, (middle, zeroed, everything) in run.items():
            assert "'head.weight' is not complete before the last micro-batch" in middle, (name, middle)
            assert "'head.weight' is not complete before the last micro-batch" in zeroed, (name, zeroed)
            assert "after every p.grad was set to None" in everything, (name, everything)


class Only:
    """What only one rank does, after the norm that all ask for, before the step."""

    @staticmethod
    def none(model: Net, engine: Any) -> None:
        model.head.weight.grad = None

    @staticmethod
    def scale(model: Net, engine: Any) -> None:
        model.head.weight.grad.mul_(0.5)

    @staticmethod
    def freeze(model: Net, engine: Any) -> None:
        model.head.weight.requires_grad_(False)

    @staticmethod
    def rate(model: Net, engine: Any) -> None:
        engine.optimizer.param_groups[0]["lr"] = 0.25


def one_rank_only(rank: int, world: int, way: str) -> dict[str, str]:
    out = {}
    for name, plan in everywhere(world).items():
        model = Net()
        engine = onecopy.initialize(model, plan, optimizer=momentum)
        if way == "freeze" and rank == 1:
            Only.freeze(model, engine)
        engine(batch(0, rank)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        if rank == 1:
            getattr(Only, way)(model, engine)
        out[name] = _ends(engine.step)
        engine.close()
    return out


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("none", "what was done to p.grad before the step: rank 0 has [], rank 1 has [('head.weight', '= None')]"),
        ("scale", "what was done to p.grad before the step: rank 0 has [], rank 1 has [('head.weight', 'mul_', 0.5)]"),
        ("freeze", "which parameters are frozen (requires_grad): rank 0 has [], rank 1 has ['head.weight']"),
        ("rate", "what their optimizers are set to, 'lr' of group 0: rank 0 has 0.3, rank 1 has 0.25"),
    ],
)
def test_what_one_rank_does_alone_is_refused_on_all(way: str, words: str) -> None:
    for run in run_ranks(one_rank_only, 2, way):
        for name, said in run.items():
            assert said.startswith("RankMismatchError") and words in said, (name, said)


WRITES: dict[str, Callable[[nn.Parameter, int], Any]] = {
    "data, one rank": lambda p, rank: p.data.fill_(3.0) if rank else None,
    "each its own": lambda p, rank: p.detach().fill_(float(rank)),
    "data, each its own": lambda p, rank: p.data.fill_(float(rank)),
    "looked at": lambda p, rank: p.data.norm() if rank else None,
    "alike": lambda p, rank: p.data.fill_(0.5),
}


def write_apart(rank: int, world: int) -> dict[str, tuple[str, float]]:
    """Weights written between steps on one rank, or with other values on each."""
    out = {}
    for name, plan in everywhere(world).items():
        if name.startswith("stage 3"):
            continue  # where each rank writes the whole tensor's share that it keeps
        for way, write in WRITES.items():
            model = Net()
            engine = onecopy.initialize(model, plan, optimizer=momentum)
            write(model.head.weight, rank)
            engine(batch(0, rank)).backward()
            out[f"{way}, {name}"] = _ends(engine.step), float(model.head.weight.detach().double().sum())
            engine.close()
    return out


def test_replicas_that_were_written_apart_are_refused() -> None:
    one, two = run_ranks(write_apart, 2)
    for way, (said, total) in one.items():
        assert said == two[way][0]
        if way.startswith(("looked", "alike")):
            assert said == "nothing" and total == two[way][1], way
        else:
            assert said.startswith("RankMismatchError") and "the values of the parameters in" in said, (way, said)


def frozen_midway(rank: int, world: int) -> dict[str, float]:
    """All ranks freeze a part for some steps and train it again: torch leaves what gets no gradient alone."""
    out = {}
    for name, plan in everywhere(world).items():
        torch.manual_seed(1)
        twin = Net()
        model = copy.deepcopy(twin)
        engine, plain = onecopy.initialize(model, plan, optimizer=momentum), momentum(twin.parameters())
        for number in range(6):
            for net in (model, twin):
                net.blocks[1].requires_grad_(number not in (2, 3))
            engine(batch(number, rank)).backward()
            for other in range(world):
                (twin(batch(number, other)) / world).backward()
            engine.step()
            plain.step()
            plain.zero_grad()
        out[name] = largest_gap(model, twin)
        engine.close()
    return out


def test_freezing_on_all_ranks_is_that_of_one_process() -> None:
    for run in run_ranks(frozen_midway, 2):
        assert all(gap <= 1e-6 for gap in run.values()), run


def hooked(rank: int, world: int, when: str) -> dict[str, tuple[float, int]]:
    """A hook on a gradient that has accumulated sees it, whether it is registered before or after the engine is made."""
    out = {}
    for name, plan in everywhere(world).items():
        torch.manual_seed(1)
        twin = Net()
        model = copy.deepcopy(twin)
        seen: list[bool] = []

        def halve(p: Any, seen: list[bool] = seen) -> None:
            seen.append(p.grad is not None)
            p.grad.mul_(0.5)

        def drop(p: Any) -> None:
            p.grad = None

        def register(net: Net, halve: Any = halve) -> None:
            net.head.weight.register_post_accumulate_grad_hook(halve)
            net.blocks[0].weight.register_post_accumulate_grad_hook(halve).remove()
            net.blocks[0].bias.register_post_accumulate_grad_hook(drop)

        if when == "before":
            register(model)
        engine, plain = onecopy.initialize(model, plan, optimizer=momentum), momentum(twin.parameters())
        if when == "after":
            register(model)
        for number in range(3):
            engine(batch(number, rank)).backward()
            sum(twin(batch(number, other)) / world for other in range(world)).backward()
            twin.head.weight.grad.mul_(0.5)
            twin.blocks[0].bias.grad = None
            engine.step()
            plain.step()
            plain.zero_grad()
        out[name] = largest_gap(model, twin), sum(seen)
        engine.close()
    return out


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_on_accumulated_gradients_see_them(when: str) -> None:
    for run in run_ranks(hooked, 2, when):
        for name, (gap, seen) in run.items():
            assert gap <= 1e-6 and seen == 3, (name, gap, seen)


