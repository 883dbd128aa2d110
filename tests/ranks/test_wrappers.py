"""Activation checkpointing in both modes and torch.compile in either order change nothing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onecopy
from tests.ranks import models
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import beside_oracle, every_plan, largest_gap, sgd
from tests.ranks.test_forwards import feed7

pytestmark = pytest.mark.ranks


class PartBlock(models.Block):
    """A block that recomputes its own feed-forward part; ``mode`` "off" calls it plainly."""

    mode = "off"

    def feed_forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.mode == "off":
            return x + self.feed_forward(x)
        return x + checkpoint(self.feed_forward, x, use_reentrant=self.mode == "re-entrant")


class Checkpointed(models.GPT):
    """A GPT with dropout; ``place`` says whether the parent recomputes blocks or the blocks a part of themselves."""

    def __init__(self, place: str, mode: str, frozen: bool) -> None:
        super().__init__(blocks=3, tied=True, dropout=0.1)
        self.place, self.mode = place, mode
        if place == "inside":
            self.blocks = nn.ModuleList(PartBlock(dropout=0.1) for _ in range(3))
            for block in self.blocks:
                block.mode = mode
        if frozen:
            for block in self.blocks:
                for part in (block.norm1, block.norm2, block.up):
                    part.requires_grad_(False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.emb(tokens)
        for block in self.blocks:
            if self.place == "inside" or self.mode == "off":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.mode == "re-entrant")
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


MODES = ("off", "re-entrant", "not re-entrant")


def checkpointed_run(rank: int, world: int, place: str, options: dict[str, Any], frozen: bool) -> dict[str, Any]:
    out = {}
    for mode in MODES:
        for name, plan in every_plan(**options).items():
            torch.manual_seed(0)
            model = Checkpointed(place, mode, frozen)
            engine = onecopy.initialize(model, plan, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3))
            torch.manual_seed(rank)  # dropout
            losses = []
            for count in range(3 * plan.batch.accumulation):
                loss = engine(*models.batch("gpt", count, 0, rank))
                loss.backward()
                engine.step()
                losses.append(loss.item())
            weights = {n: onecopy.full_param(p).clone() for n, p in model.named_parameters()}
            out.setdefault(name, {})[mode] = losses, weights
            engine.close()
    return out


@pytest.mark.parametrize(
    ("options", "frozen"),
    [
        ({}, False),
        ({"dtype": "bf16"}, False),
        ({"accumulation": 2, "clip": 0.5}, True),
        pytest.param({}, True, marks=pytest.mark.long),
        pytest.param({"dtype": "bf16"}, True, marks=pytest.mark.long),
        pytest.param({"accumulation": 2, "clip": 0.5}, False, marks=pytest.mark.long),
    ],
    ids=str,
)
@pytest.mark.parametrize("place", ["around", "inside"])
def test_checkpointing_is_bit_equal_to_not_checkpointing(place: str, options: dict[str, Any], frozen: bool) -> None:
    low = options.get("dtype") is not None
    for run in run_ranks(checkpointed_run, 2, place, options, frozen):
        for name, by_mode in run.items():
            losses, weights = by_mode["off"]
            assert len(set(losses)) > 1
            for mode, (other_losses, other) in by_mode.items():
                # A block that recomputes a part it uses twice sums the two gradients in another order.
                exact = place == "around"
                assert other_losses == (losses if exact else pytest.approx(losses, rel=1e-3 if low else 1e-6)), mode
                for key, value in weights.items():
                    gap = (other[key] - value).abs().max().item()
                    assert gap <= (0 if exact else 2e-3 if low else 1e-6), f"{name} {mode}: {key}"


def direct_child(rank: int, world: int) -> dict[str, str]:
    """The parent calls a part of a block without the block: right, or the error that names the parameter."""
    out = {}
    for name, plan in every_plan().items():
        model = models.build("gpt")
        tokens = models.batch("gpt", 0, 0, rank)[0]
        expected = model.blocks[1].norm2(model.emb(tokens)).sum().item()
        engine = onecopy.initialize(model, plan, optimizer=sgd)
        model.forward = lambda t, m=model: m.blocks[1].norm2(m.emb(t)).sum()  # type: ignore[method-assign,misc]
        try:
            out[name] = "right" if abs(engine(tokens).item() - expected) < 1e-4 else "wrong"
        except onecopy.errors.ShardedReadError as error:
            out[name] = "right" if "norm2" in str(error) else str(error)
        engine.close()
    return out


def test_a_part_called_without_its_block() -> None:
    for run in run_ranks(direct_child, 2):
        assert run == dict.fromkeys(run, "right"), run


class Early(nn.Module):
    """Early-stopping recomputation: the checkpointed function ends in an operation that saves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))

    def part(self, x: Tensor, first: nn.Module, second: nn.Module) -> Tensor:
        return second(torch.tanh(first(x))) + 1

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = checkpoint(self.part, x, self.blocks[0], self.blocks[1], use_reentrant=False)
        x = checkpoint(self.part, x, self.blocks[2], self.blocks[3], use_reentrant=False)
        return F.mse_loss(x, y)


class Nested(nn.Module):
    """A checkpoint inside a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))

    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(self.blocks[1](x))

    def outer(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.blocks[0](x))
        return self.blocks[2](checkpoint(self.inner, x, use_reentrant=False))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(checkpoint(self.outer, x, use_reentrant=False), y)


class Offloaded(nn.Module):
    """Saved tensors pass through hooks, as activation offload does: a saved weight must not be read when freed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            for block in self.blocks:
                x = torch.tanh(block(x))
        return F.mse_loss(x, y)


@pytest.mark.parametrize("build", [Early, Nested, Offloaded], ids=lambda b: b.__name__)
def test_other_recomputation(build: Any) -> None:
    run_ranks(beside_oracle, 2, build, feed7)


class NormLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 7), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(7, 7)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x), y)


def compiled_run(rank: int, world: int, order: str) -> dict[str, float]:
    """Compile blocks or the model, before or after ``initialize``; three steps beside an eager plain twin."""
    out = {}
    for name, plan in every_plan().items():
        torch._dynamo.reset()
        torch.manual_seed(0)
        twin, model = NormLinear(), NormLinear()
        model.load_state_dict(twin.state_dict())
        names = list(model.state_dict())
        whole: Any = model
        if order == "blocks before":
            for i, block in enumerate(model.blocks):
                model.blocks[i] = torch.compile(block, backend="aot_eager")
        elif order == "in place before":
            for block in model.blocks:
                block.compile(backend="aot_eager")
        elif order == "model before":
            whole = torch.compile(model, backend="aot_eager")
        engine = onecopy.initialize(whole, plan, optimizer=sgd)
        call: Any = engine
        if order == "model after":
            call = torch.compile(engine.module, backend="aot_eager")
        elif order == "blocks after":
            for i, block in enumerate(model.blocks):
                model.blocks[i] = torch.compile(block, backend="aot_eager")
        elif order == "in place after":
            for block in model.blocks:
                block.compile(backend="aot_eager")
        plain = sgd(twin.parameters())
        for count in range(3):
            call(*feed7(count, rank)).backward()
            assert engine.step()
            for other in range(world):
                (twin(*feed7(count, other)) / world).backward()
            plain.step()
            plain.zero_grad()
        full = engine.full_state_dict()
        assert list(full) == names, f"{name}: {list(full)}"
        out[name] = max((full[k] - v).abs().max().item() for k, v in twin.state_dict().items())
        engine.close()
    return out


@pytest.mark.parametrize(
    "order", ["blocks before", "in place before", "model before", "blocks after", "in place after", "model after"]
)
def test_compile_in_either_order(order: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for run in run_ranks(compiled_run, 2, order):
            assert not {k: v for k, v in run.items() if v > 1e-5}, run


def wrapped_names(rank: int, world: int) -> list[str]:
    """Wrappers named ``module`` nested around a compiled model: names stay bare."""

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any) -> Any:
            return self.module(*args)

    torch.manual_seed(0)
    bare = NormLinear()
    engine = onecopy.initialize(torch.compile(Wrapper(bare), backend="aot_eager"), onecopy.stage(3), optimizer=sgd)
    names = list(engine.full_state_dict())
    engine.close()
    return names


def test_names_under_a_compiled_wrapper() -> None:
    names = run_ranks(wrapped_names, 2)[0]
    assert not [n for n in names if "_orig_mod" in n], names


def autocast_run(rank: int, world: int) -> dict[str, float]:
    """``torch.autocast`` around the engine call, fp32 parameters."""
    out = {}
    for name, plan in every_plan().items():
        torch.manual_seed(0)
        twin, model = NormLinear(), NormLinear()
        model.load_state_dict(twin.state_dict())
        engine = onecopy.initialize(model, plan, optimizer=sgd)
        plain = sgd(twin.parameters())
        for count in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = engine(*feed7(count, rank))
            loss.backward()
            engine.step()
            for other in range(world):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = twin(*feed7(count, other))
                (loss / world).backward()
            plain.step()
            plain.zero_grad()
        out[name] = largest_gap(model, twin)
        engine.close()
    return out


def test_autocast_beside_the_oracle() -> None:
    for run in run_ranks(autocast_run, 2):
        assert not {k: v for k, v in run.items() if v > 2e-3}, run
        assert len({round(v, 7) for v in run.values()}) <= 2, f"stages differ under autocast: {run}"
