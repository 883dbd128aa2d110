"""Forwards of every kind: ranks that route differently, any output, odd control flow, buffers, second derivatives."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onecopy
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import beside_oracle, every_plan, largest_gap, sgd
from tests.ranks.test_modules import adamw, feed7

pytestmark = pytest.mark.ranks


# -------------------------------------------------------------------------------------------------- ranks that differ


class Experts(nn.Module):
    """Rank 0 routes to experts 0 and 1, rank 1 to 2 and 3, inside one block."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(7, 7)
        self.experts = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor, chosen: tuple[int, ...]) -> Tensor:
        x = self.inp(x)
        return F.mse_loss(x + sum(self.experts[i](x) for i in chosen), y)


class Layers(nn.Module):
    """Two layers of experts, as transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixture() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor, chosen: tuple[int, ...]) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x, chosen))
        return F.mse_loss(x, y)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(7, 7)
        self.experts = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))

    def forward(self, x: Tensor, chosen: tuple[int, ...]) -> Tensor:
        return self.gate(x) + sum(self.experts[i](x) for i in chosen)


def routed(count: int, rank: int) -> tuple[Any, ...]:
    return (*feed7(count, rank), ((0, 1), (2, 3))[rank % 2])


def routed_in_turn(count: int, rank: int) -> tuple[Any, ...]:
    return (*feed7(count, rank), ((0,), (1, 2), (3, 0))[(count + rank) % 3])


def routed_by_one(count: int, rank: int) -> tuple[Any, ...]:
    return (*feed7(count, rank), (0, 1) if rank == 0 else ())


@pytest.mark.parametrize("feed", [routed, routed_in_turn, routed_by_one], ids=lambda f: f.__name__)
@pytest.mark.parametrize("build", [Experts, Layers], ids=lambda b: b.__name__)
def test_ranks_that_route_differently(build: Any, feed: Any) -> None:
    """Gradient of an expert = sum over ranks / world; a rank that did not use it counts zero. And no hang."""
    run_ranks(beside_oracle, 2, build, feed, optimizer=adamw, steps=4)
    run_ranks(beside_oracle, 2, build, feed, every_plan(accumulation=2, clip=0.2), steps=3)


# --------------------------------------------------------------------------------------------- what the forward gives

Pair = namedtuple("Pair", ["loss", "hidden"])


class Outputs(nn.Module):
    """Gives dicts, tuples, named tuples and nested ones; takes keyword and nested inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OutputBlock() for _ in range(2))

    def forward(self, batch: dict[str, Tensor], *, kind: str = "dict") -> Any:
        state = {"x": batch["x"], "extra": ["text", None]}
        for block in self.blocks:
            state = block(state, scale=1.5)
        loss = F.mse_loss(state["x"], batch["y"])
        given = {"dict": {"loss": loss, "n": 3}, "tuple": (loss, state["x"]), "named": Pair(loss, state["x"])}
        return given.get(kind, [{"deep": (loss,)}])


class OutputBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(7, 7)

    def forward(self, state: dict[str, Any], scale: float) -> dict[str, Any]:
        return {**state, "x": torch.tanh(self.lin(state["x"])) * scale}


def pick_dict(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return model({"x": x, "y": y}, kind="dict")["loss"]


def pick_tuple(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss, hidden = model({"x": x, "y": y}, kind="tuple")
    return loss + 0.1 * hidden.square().mean()


def pick_named(model: Any, x: Tensor, y: Tensor) -> Tensor:
    out = model(batch={"x": x, "y": y}, kind="named")
    assert isinstance(out, Pair)
    return out.loss


def pick_deep(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return model({"x": x, "y": y}, kind="deep")[0]["deep"][0]


@pytest.mark.parametrize("objective", [pick_dict, pick_tuple, pick_named, pick_deep], ids=lambda f: f.__name__)
def test_outputs_of_any_structure(objective: Any) -> None:
    run_ranks(beside_oracle, 2, Outputs, feed7, objective=objective)


class Detaching(nn.Module):
    """Part of the forward has no graph, an output is detached, an input needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            fixed = self.blocks[0](x)
        x = x.requires_grad_()
        x = torch.tanh(self.blocks[1](self.blocks[0](x))) + fixed
        _ = self.blocks[2](x).detach()
        return F.mse_loss(self.blocks[2](x), y)


class InPlace(nn.Module):
    """In-place operations on block inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x += 1
            x = F.relu(x, inplace=True) * 0.5
        return F.mse_loss(x, y)


class Recurrent(nn.Module):
    """LSTM over steps and multi-head attention: modules that read their weights outside a plain call."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(7, 7, num_layers=2, batch_first=True)
        self.attention = nn.MultiheadAttention(7, 1, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out, _ = self.rnn(x[None])
        return F.mse_loss(self.attention(out, out, out)[0][0], y)


class Borrowing(nn.Module):
    """The parent's forward reads a child's weight without calling the child."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(F.linear(self.a(x), self.b.weight, self.b.bias), y)


@pytest.mark.parametrize("build", [Detaching, InPlace, Recurrent], ids=lambda b: b.__name__)
def test_unusual_forwards(build: Any) -> None:
    run_ranks(beside_oracle, 2, build, feed7)


def test_a_forward_that_reads_a_childs_weight() -> None:
    """Right numbers, or the error that names the weight; merged into one unit it simply works."""
    run_ranks(beside_oracle, 2, Borrowing, feed7, every_plan(units=onecopy.Units()))


# ---------------------------------------------------------------------------------------------------------- buffers


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(7, 7)
        self.norm = nn.BatchNorm1d(7)
        self.register_buffer("kept", torch.arange(8.0))
        self.register_buffer("lost", torch.arange(8), persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.norm(self.lin(x)) + self.kept.sum() * 0, y)


def buffers_run(rank: int, world: int, dtype: str | None) -> None:
    for name, plan in every_plan(dtype=dtype).items():
        torch.manual_seed(rank)
        model = Buffers()
        with torch.no_grad():
            model.kept.add_(rank)
            model.lost.add_(rank)
        engine = onecopy.initialize(model, plan, optimizer=sgd)
        assert torch.equal(model.kept.float(), torch.arange(8.0)), f"{name}: rank 0's buffer is everybody's"
        assert torch.equal(model.lost, torch.arange(8)), f"{name}: and the one no state dict has"
        assert model.lost.dtype == torch.int64, name
        engine(*feed7(0, rank)).backward()
        engine.step()
        assert model.norm.num_batches_tracked == 1, name
        assert model.norm.running_mean.abs().sum() > 0, name
        state = engine.full_state_dict()
        assert list(state) == list(Buffers().state_dict()), name
        Buffers().load_state_dict(state, strict=True)
        engine.close()


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_buffers(dtype: str | None) -> None:
    run_ranks(buffers_run, 2, dtype)


# ------------------------------------------------------------------------------------------------ second derivatives


class Smooth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def input_penalty(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """A gradient penalty: the loss holds the gradient of the output with respect to the input."""
    x = x.requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.mse_loss(out, y) + (slope.square().sum(-1) - 1).square().mean()


def input_gradient(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """An inner first derivative that is used as a constant."""
    x = x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x)
    return F.mse_loss(model(x + 0.1 * slope.detach()), y)


@pytest.mark.parametrize("objective", [input_penalty, input_gradient], ids=lambda f: f.__name__)
def test_derivatives_inside_the_loss(objective: Any) -> None:
    run_ranks(beside_oracle, 2, Smooth, feed7, objective=objective)


def weighted_backward(rank: int, world: int) -> None:
    """``output.backward(gradient)`` of a non-scalar output."""
    weight = torch.linspace(-1, 1, 28).reshape(4, 7)
    for name, plan in every_plan().items():
        torch.manual_seed(0)
        twin, model = Smooth(), Smooth()
        model.load_state_dict(twin.state_dict())
        engine = onecopy.initialize(model, plan, optimizer=sgd)
        plain = sgd(twin.parameters())
        for count in range(3):
            engine(feed7(count, rank)[0]).backward(weight)
            engine.step()
            for other in range(world):
                twin(feed7(count, other)[0]).backward(weight / world)
            plain.step()
            plain.zero_grad()
        assert largest_gap(model, twin) <= 1e-6, name
        engine.close()


def test_backward_of_a_non_scalar() -> None:
    run_ranks(weighted_backward, 2)
