"""``p.grad`` and ``p.data`` as a PyTorch loop uses them between backward and step, beside plain torch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import onecopy
from onecopy.errors import EngineError
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import every_plan, largest_gap

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) + self.frozen(x)
        return (x * self.scale).square().mean()


def batch(number: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * number + rank)) * 3


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.3, momentum=0.9)


def clip_norm(model: nn.Module) -> Any:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.05)


def clip_inf(model: nn.Module) -> Any:
    return nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.01, norm_type=float("inf"))


def clip_one_block(model: nn.Module) -> Any:
    return nn.utils.clip_grad_norm_(model.blocks[1].parameters(), 0.01, norm_type=1.0)


def clip_twice(model: nn.Module) -> Any:
    first = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    return torch.stack([first, nn.utils.clip_grad_norm_(model.parameters(), 0.01)])


def clip_value(model: nn.Module) -> Any:
    return nn.utils.clip_grad_value_(model.parameters(), 0.002)


def scale(model: nn.Module) -> Any:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.25)
            p.grad *= 2
    return None


def norms(model: nn.Module) -> Any:
    found = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return torch.stack(found).norm()


EDITS: list[Callable[[nn.Module], Any]] = [clip_norm, clip_inf, clip_one_block, clip_twice, clip_value, scale, norms]


def edit_all(rank: int, world: int, dtype: str | None) -> dict[str, tuple[float, float]]:
    """The largest gap of a weight to plain torch, and of what the edit returned."""
    out = {}
    for edit in EDITS:
        options: dict[str, Any] = {}
        if dtype == "fp16":  # a scale at which nothing overflows
            options["precision"] = onecopy.Precision(dtype="float16", loss_scale=onecopy.LossScale(initial=256.0))
        for name, plan in every_plan(accumulation=2, **options).items():
            torch.manual_seed(1)
            twin = Net()
            model = copy.deepcopy(twin)
            engine, plain = onecopy.initialize(model, plan, optimizer=sgd), sgd(twin.parameters())
            off = 0.0
            for number in range(6):
                engine.backward(engine(batch(number, rank)))
                for other in range(world):
                    (twin(batch(number, other)) / world / 2).backward()
                if number % 2:
                    one, two = edit(model), edit(twin)
                    if two is not None:
                        off = max(off, float((one - two).abs().max() / two.abs().max()))
                    plain.step()
                    plain.zero_grad()
                engine.step()
            assert engine.skipped_steps == 0
            out[f"{edit.__name__}, {name}"] = (largest_gap(model, twin), off)
            engine.close()
    return out


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_edits_of_gradients_are_those_of_one_process(world: int) -> None:
    for run in run_ranks(edit_all, world, None):
        # One block's gradients are small differences of large terms here: their norm has fewer digits than the weights.
        wrong = {name: gaps for name, gaps in run.items() if gaps[0] > 1e-6 or gaps[1] > 1e-4}
        assert not wrong, wrong


def test_edits_see_unscaled_gradients_in_fp16() -> None:
    for run in run_ranks(edit_all, 2, "fp16"):
        wrong = {name: gaps for name, gaps in run.items() if gaps[0] > 5e-3 or gaps[1] > 2e-2}
        assert not wrong, wrong


def look_around(rank: int, world: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, plan in every_plan(accumulation=2).items():
        torch.manual_seed(1)
        model = Net()
        engine = onecopy.initialize(model, plan, optimizer=sgd)
        out[name] = look_at(engine, model, rank)
    return out


def look_at(engine: Any, model: Net, rank: int) -> dict[str, Any]:
    weight, frozen = model.blocks[0].weight, model.frozen.weight
    seen: dict[str, Any] = {"before": weight.grad}
    engine(batch(0, rank)).backward()
    model.zero_grad()  # in the middle of a window: nothing is lost
    model.zero_grad(set_to_none=False)
    seen["middle"] = refused(lambda: weight.grad.norm())
    engine.step()
    engine(batch(1, rank)).backward()
    seen["shape"] = tuple(weight.grad.shape), weight.grad.dtype, str(weight.grad.device), frozen.grad
    seen["read"] = refused(lambda: weight.grad + 1)
    seen["print"] = repr(weight.grad)
    seen["write"] = refused(lambda: setattr(weight, "grad", torch.zeros(5, 5)))
    seen["copy"] = refused(lambda: weight.grad.copy_(torch.zeros(5, 5)))
    assert engine.step()
    seen["after"] = weight.grad
    state = engine.full_state_dict()
    assert all(type(value) is Tensor for value in state.values())
    engine.close()
    seen["kinds"] = sorted({type(p).__name__ for p in model.parameters()})
    return seen


class Twice(nn.Module):
    """Recomputed twice in backward, so that its second gradient comes after the first was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            y = torch.utils.checkpoint.checkpoint(self.cell, x.requires_grad_(), use_reentrant=True)
            x = (y if self.recomputes else self.cell(x)).tanh()
        return self.head(x).sum()


def look_at_late(rank: int, world: int) -> dict[str, float]:
    gaps = {}
    for name, plan in every_plan().items():
        torch.manual_seed(1)
        twin = Twice()
        engine = onecopy.initialize(copy.deepcopy(twin), plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
        for number in range(3):
            twin.zero_grad()
            engine.module.recomputes = number > 0  # nothing is late in the first window
            engine(batch(number, rank)[:, :4]).backward()
            for other in range(world):
                (twin(batch(number, other)[:, :4]) / world).backward()
            seen = onecopy.full_grad(engine.module.cell.weight)
            assert seen is not None
            gap = float((seen - twin.cell.weight.grad).abs().max())
            gaps[name] = max(gap, gaps.get(name, 0.0))
            engine.step()
        engine.close()
    return gaps


def test_gradients_that_came_late_are_seen_in_every_window() -> None:
    for run in run_ranks(look_at_late, 2):
        assert all(gap <= 1e-5 for gap in run.values()), run


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except EngineError as error:
        return str(error)
    return "not refused"


def test_what_a_gradient_shows_and_refuses() -> None:
    for run in run_ranks(look_around, 2):
        for name, seen in run.items():
            assert seen["before"] is None and seen["after"] is None, name
            assert "last micro-batch" in seen["middle"], name
            assert seen["shape"] == ((5, 5), torch.float32, "cpu", None), name
            for way in ("read", "copy"):
                assert "'blocks.0.weight'" in seen[way] and "onecopy.full_grad" in seen[way], (name, way, seen[way])
            assert "onecopy.set_full_grad" in seen["write"], name
            assert "gradient of 'blocks.0.weight'" in seen["print"], name
            if name in ("stage 0", "stage 1", "stage 2"):
                assert seen["kinds"] == ["Parameter"], name


def write_through_data(rank: int, world: int, dtype: str | None) -> dict[str, float]:
    """Weights clamped and scaled through ``.data`` after each step."""
    gaps = {}
    for name, plan in every_plan(dtype=dtype).items():
        torch.manual_seed(1)
        model = Net()
        engine = onecopy.initialize(model, plan, optimizer=sgd)
        for number in range(3):
            engine.backward(engine(batch(number, rank)))
            engine.step()
            for p in model.parameters():
                p.data.clamp_(-0.2, 0.2)
        final = torch.cat([onecopy.full_param(p).reshape(-1) for p in model.parameters()])
        gaps[name] = float(final.abs().max())
        engine.close()
    return gaps


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_writes_through_data_reach_the_master_weights(dtype: str | None) -> None:
    for run in run_ranks(write_through_data, 2, dtype):
        for name, largest in run.items():
            assert largest <= 0.2002, f"{name}: a weight is {largest} after it was clamped to 0.2"


def write_in_place(rank: int, world: int) -> dict[str, float]:
    gaps = {}
    for name, plan in every_plan().items():
        torch.manual_seed(1)
        twin = Net()
        model = copy.deepcopy(twin)
        engine = onecopy.initialize(model, plan, optimizer=sgd)
        for net in (model, twin):
            for p in net.parameters():
                p.data += 0.25
                p.data *= 0.5
                p.data.sub_(0.1)
                p.data = p.data
        gaps[name] = largest_gap(model, twin)
        engine.close()
    return gaps


def test_augmented_assignments_to_data() -> None:
    """``p.data += 1`` reads, writes and assigns."""
    for run in run_ranks(write_in_place, 2):
        assert all(gap <= 1e-7 for gap in run.values()), run


def test_a_managed_parameter_copies_pickles_and_compiles_as_any() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    engine = onecopy.initialize(model, onecopy.stage(0), optimizer=sgd)
    twin = copy.deepcopy(model)
    assert torch.equal(twin[0].weight, model[0].weight) and twin[0].weight.grad is None
    twin(torch.ones(1, 3)).sum().backward()
    assert isinstance(twin[0].weight.grad, Tensor) and twin[0].weight.grad.sum() != 0
    again = pickle.loads(pickle.dumps(model.state_dict()))
    assert torch.equal(again["0.weight"], model[0].weight)
    with pytest.raises(EngineError, match=r"copy engine\.module"):
        copy.deepcopy(engine)
    engine.close()
