"""Random shapes, groups, freezing, accumulation and world sizes: one step is arithmetic that can be written down."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import onecopy
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.ranks

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Parameters with their group (None: frozen, -1: unused), and how they are trained."""
    parameters = draw(st.lists(st.tuples(shapes, st.sampled_from([0, 0, 1, 2, None, -1])), min_size=1, max_size=7))
    parameters.append(((3,), 0))  # something always trains
    world = draw(st.integers(1, 4))
    return {
        "parameters": parameters,
        "world": world,
        "number": draw(st.sampled_from([0, 1, 2, 3])),
        "shard": draw(st.sampled_from([None, *[d for d in range(1, world + 1) if world % d == 0]])),
        "accumulation": draw(st.integers(1, 3)),
        "clip": draw(st.sampled_from([None, 0.5, 100.0])),
        "norm_type": draw(st.sampled_from([1.0, 2.0, 3.0, math.inf])),
        "min_numel": draw(st.sampled_from([0, 10, 10**6])),
        "dtype": draw(st.sampled_from([None, None, "bf16"])),
        "nest": draw(st.booleans()),
    }


RATES, DECAYS = (0.5, 0.25, 0.125), (0.0, 0.5, 0.25)


class Linear(nn.Module):
    """``loss = sum(c_i * p_i)``, so that ``c_i`` is the gradient; some parameters sit in submodules."""

    def __init__(self, parameters: list[Any], nest: bool) -> None:
        super().__init__()
        self.groups = [group for _, group in parameters]
        self.parts = nn.ModuleList()
        values = [nn.Parameter(torch.ones(shape), requires_grad=group is not None) for shape, group in parameters]
        if nest:
            self.parts = nn.ModuleList(Part(value) for value in values)
        else:
            self.values = nn.ParameterList(values)

    def all(self) -> list[nn.Parameter]:
        return [part.value for part in self.parts] if len(self.parts) else list(self.values)

    def forward(self, coefficients: list[Tensor]) -> Tensor:
        used = [i for i, group in enumerate(self.groups) if group != -1]
        if len(self.parts):
            return sum(self.parts[i](coefficients[i]) for i in used)
        return sum((self.values[i] * coefficients[i]).float().sum() for i in used)


class Part(nn.Module):
    def __init__(self, value: nn.Parameter) -> None:
        super().__init__()
        self.value = value

    def forward(self, coefficients: Tensor) -> Tensor:
        return (self.value * coefficients).float().sum()


def coefficients(problem: dict[str, Any], rank: int, micro: int) -> list[Tensor]:
    """Small integers: no sum of them rounds, in any order or dtype."""
    source = torch.Generator().manual_seed(rank * 8 + micro)
    return [torch.randint(-3, 4, shape, generator=source).float() for shape, _ in problem["parameters"]]


def step_once(rank: int, world: int, problem: dict[str, Any]) -> tuple[float | None, list[Tensor], int]:
    model = Linear(problem["parameters"], problem["nest"])
    options = {key: problem[key] for key in ("accumulation", "clip", "norm_type", "dtype")}
    options["units"] = onecopy.Units(min_numel=problem["min_numel"])
    plan = onecopy.stage(problem["number"], **options).with_(group=problem["shard"])
    groups: list[dict[str, Any]] = [
        {"params": [], "lr": lr, "weight_decay": decay} for lr, decay in zip(RATES, DECAYS, strict=True)
    ]
    for parameter, (_, group) in zip(model.all(), problem["parameters"], strict=True):
        groups[group if group in (0, 1, 2) else 0]["params"].append(parameter)
    optimizer = torch.optim.SGD([group for group in groups if group["params"]], lr=1.0)
    engine = onecopy.initialize(model, plan, optimizer=optimizer)
    for micro in range(problem["accumulation"]):
        engine(coefficients(problem, rank, micro)).backward()
        engine.step()
    weights = [onecopy.full_param(p).clone() for p in model.all()]
    engine.close()
    return engine.grad_norm, weights, engine.skipped_steps


def expected(problem: dict[str, Any]) -> tuple[float, list[Tensor]]:
    """The same step on paper."""
    count = problem["world"] * problem["accumulation"]
    sums = [torch.zeros(shape, dtype=torch.float64) for shape, _ in problem["parameters"]]
    for rank in range(problem["world"]):
        for micro in range(problem["accumulation"]):
            for total, c in zip(sums, coefficients(problem, rank, micro), strict=True):
                total += c.double() / count
    trained = [s for s, (_, group) in zip(sums, problem["parameters"], strict=True) if group in (0, 1, 2)]
    flat = torch.cat([s.flatten() for s in trained])
    norm = torch.linalg.vector_norm(flat, problem["norm_type"]).item() if flat.numel() else 0.0
    scale = min(1.0, problem["clip"] / (norm + 1e-6)) if problem["clip"] is not None else 1.0
    weights = []
    for total, (shape, group) in zip(sums, problem["parameters"], strict=True):
        value = torch.ones(shape, dtype=torch.float64)
        if group in (0, 1, 2):
            value = value - RATES[group] * (total * scale + DECAYS[group] * value)
        weights.append(value)
    return norm, weights


@settings(max_examples=25)
@given(problems())
def test_one_step_is_as_on_paper(problem: dict[str, Any]) -> None:
    norm, weights = expected(problem)
    for seen, after, skipped in run_ranks(step_once, problem["world"], problem):
        assert skipped == 0
        # With bf16 gradients the mean of a few integers may round; without, nothing may.
        tolerance = 1e-5 if problem["dtype"] is None else 2e-2
        assert seen == pytest.approx(norm, rel=tolerance, abs=1e-6)
        for value, right, (_, group) in zip(after, weights, problem["parameters"], strict=True):
            assert value.shape == right.shape
            if group in (None, -1):
                assert torch.equal(value.double(), right), "frozen or unused, and moved"
            elif value.numel():
                assert (value - right).abs().max() <= tolerance


@settings(max_examples=15)
@given(st.lists(shapes, min_size=1, max_size=6), st.integers(1, 4), st.sampled_from([0, 1, 2, 3]), st.booleans())
def test_what_goes_in_comes_out(sizes: list[Any], world: int, number: int, deferred: bool) -> None:
    """Counting numbers put in through every door are read back through every other."""
    for wrong in run_ranks(round_trip, world, sizes, number, deferred):
        assert not wrong, wrong


class Zeros(nn.Module):
    """Parameters at zero whose every gradient is 1."""

    def __init__(self, sizes: list[Any]) -> None:
        super().__init__()
        self.values = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)

    def forward(self) -> Tensor:
        return sum(p.sum() for p in self.values)


def round_trip(rank: int, world: int, sizes: list[Any], number: int, deferred: bool) -> list[str]:
    if deferred:
        with onecopy.deferred():
            whole = Zeros(sizes)
    else:
        whole = Zeros(sizes)
    model = whole.values
    plan = onecopy.stage(number, units=onecopy.Units(min_numel=0))
    engine = onecopy.initialize(whole, plan, optimizer=lambda params: torch.optim.SGD(params, lr=1.0, momentum=0.9))
    truth = [torch.arange(float(math.prod(size))).reshape(size) + 100 * i for i, size in enumerate(sizes)]
    wrong = []

    def check(door: str) -> None:
        state = engine.full_state_dict()
        with onecopy.gathered(model):
            for i, (p, value) in enumerate(zip(model, truth, strict=True)):
                if not torch.equal(p.detach(), value):
                    wrong.append(f"{door}: gathered {i}")
                if not torch.equal(state[f"values.{i}"], value):
                    wrong.append(f"{door}: state dict {i}")
        wrong.extend(f"{door}: full {i}" for i, p in enumerate(model) if not torch.equal(onecopy.full_param(p), truth[i]))

    for p, value in zip(model, truth, strict=True):
        onecopy.set_full_param(p, value)
    check("set_full_param")
    truth = [value + 1 for value in truth]
    with onecopy.gathered(model, write_rank=world - 1), torch.no_grad():
        for p, value in zip(model, truth, strict=True):
            p.copy_(value if rank == world - 1 else value * 0 - 1)
    check("gathered")
    truth = [value + 1 for value in truth]
    model.load_state_dict({str(i): value for i, value in enumerate(truth)})
    check("load_state_dict")
    truth = [value + 1 for value in truth]
    with torch.no_grad():
        for p, value in zip(model, truth, strict=True):
            p.copy_(value)
    check("copy_")
    if not any(p.numel() for p in model):  # nothing to train: a step is refused
        engine.close()
        return wrong
    engine().backward()
    engine.step()
    truth = [value - 1 for value in truth]
    check("step")
    for p in model:
        if p.numel():
            if not torch.equal(onecopy.full_state(p, "momentum_buffer"), torch.ones(p.shape)):
                wrong.append("momentum")
            onecopy.set_full_state(p, "momentum_buffer", torch.zeros(p.shape))
    engine().backward()
    engine.step()
    truth = [value - 1 for value in truth]
    check("set_full_state")
    engine.close()
    return wrong
