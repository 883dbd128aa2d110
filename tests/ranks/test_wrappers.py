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


class Checkpointed(models.GPT):
    """A GPT with dropout whose blocks are recomputed: by the parent around the block, or inside the block."""

    def __init__(self, mode: str, frozen: bool = False) -> None:
        super().__init__(blocks=3, tied=True, dropout=0.1)
        self.mode = mode
        if frozen:
            for block in self.blocks:
                block.norm1.requires_grad_(False)
                block.norm2.requires_grad_(False)
                block.up.requires_grad_(False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.emb(tokens)
        for block in self.blocks:
            if self.mode == "off" or not self.training:
                x = block(x)
            elif self.mode.startswith("inside"):
                x = x + checkpoint(block.norm2, x, use_reentrant="re-entrant" in self.mode)
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.mode == "re-entrant")
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class InsideOff(Checkpointed):
    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x + block.norm2(x))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def checkpointed_run(rank: int, world: int, modes: list[str], options: dict[str, Any], frozen: bool) -> dict[str, Any]:
    out = {}
    for mode in modes:
        for name, plan in every_plan(**options).items():
            torch.manual_seed(0)
            model = InsideOff("off", frozen) if mode == "inside off" else Checkpointed(mode, frozen)
            engine = onecopy.initialize(model, plan, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3))
            torch.manual_seed(rank)  # dropout
            losses = []
            for count in range(3 * plan.batch.accumulation):
                loss = engine(*models.batch("gpt", count, 0, rank))
                loss.backward()
                engine.step()
                losses.append(loss.item())
            out[f"{mode} {name}"] = losses, {n: onecopy.full_param(p).clone() for n, p in model.named_parameters()}
            engine.close()
    return out


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen norms"])
@pytest.mark.parametrize("options", [{}, {"dtype": "bf16"}, {"accumulation": 2, "clip": 0.5}], ids=str)
@pytest.mark.parametrize("group", ["around", "inside"])
def test_checkpointing_is_bit_equal(group: str, options: dict[str, Any], frozen: bool) -> None:
    modes = {
        "around": ["off", "re-entrant", "not re-entrant"],
        "inside": ["inside off", "inside re-entrant", "inside not"],
    }[group]
    for run in run_ranks(checkpointed_run, 2, modes, options, frozen, timeout=120):
        losses, weights = run[f"{modes[0]} stage 0"]
        assert len(set(losses)) > 1
        for name, (other_losses, other) in run.items():
            if options.get("accumulation"):
                assert other_losses == pytest.approx(losses, abs=1e-6), name
            else:
                assert other_losses == losses, name
            for key, value in weights.items():
                if options.get("accumulation"):
                    assert (other[key] - value).abs().max() <= 1e-6, f"{name}: {key}"
                elif group == "around":
                    assert torch.equal(other[key], value), f"{name}: {key}"
                else:  # the same gradient is summed in another order when a module is used twice
                    assert (other[key] - value).abs().max() <= (2e-3 if options else 1e-6), f"{name}: {key}"


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
        for run in run_ranks(compiled_run, 2, order, timeout=180):
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
