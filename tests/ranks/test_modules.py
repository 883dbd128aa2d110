"""Shared, unused, frozen, mixed and awkward parameters, each model trained beside a plain twin."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onecopy
from tests.ranks import models
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import beside_oracle, every_plan

pytestmark = pytest.mark.ranks


def feed7(count: int, rank: int) -> tuple[Tensor, ...]:
    source = torch.Generator().manual_seed(1000 * rank + count)
    return tuple(torch.randn(4, 7, generator=source) for _ in range(2))


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1, weight_decay=0.1)


# ------------------------------------------------------------------------------------------ used twice, tied, unused


class Siamese(nn.Module):
    """``f(a) - f(b)``: one module, two uses in a forward."""

    def __init__(self, how: str = "plain") -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7))
        self.how = how

    def apply_f(self, x: Tensor) -> Tensor:
        if self.how == "plain":
            return self.f(x)
        return checkpoint(self.f, x.requires_grad_(), use_reentrant=self.how == "reentrant")

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (self.apply_f(a) - self.apply_f(b)).square().mean()


class Depth(nn.Module):
    """One block applied four times over."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(7, 7)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.tanh(self.blocks[0](x))
        return F.mse_loss(x, y)


class Power(nn.Module):
    """``3 * w * w``: gradient ``6w``, not ``3w``."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(2.0))

    def forward(self, *_: Tensor) -> Tensor:
        return 3 * self.w * self.w


class SameListTwice(nn.Module):
    """The same module under two names, and the same parameter in two modules of one block."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(7, 7)
        self.left = nn.Sequential(shared, nn.Tanh(), shared)
        self.right = nn.Linear(7, 7)
        self.right.bias = shared.bias

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.right(self.left(x)), y)


class TiedEmbedding(nn.Module):
    """Embedding(5, 3) tied to the head; blocks in between put the two uses far apart."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.emb(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return F.cross_entropy(self.head(x), y)


class Spare(nn.Module):
    """A linear layer, a parameter and a whole block nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7))
        self.spare = nn.Linear(7, 7)
        self.lonely = nn.Parameter(torch.ones(3))
        self.block = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.block[0](self.used(x)), y)


class Sometimes(nn.Module):
    """A layer used in odd micro-batches only: its state must not decay in the even ones."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.odd = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x: Tensor, y: Tensor, count: int) -> Tensor:
        x = self.always(x)
        return F.mse_loss(self.odd(x) if count % 2 else x, y)


def tokens(count: int, rank: int) -> tuple[Tensor, ...]:
    source = torch.Generator().manual_seed(1000 * rank + count)
    return tuple(torch.randint(5, (6,), generator=source) for _ in range(2))


def counted(count: int, rank: int) -> tuple[Any, ...]:
    return (*feed7(count, rank), count)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("build", [Siamese, Depth, Power, SameListTwice, Spare], ids=lambda b: b.__name__)
def test_shared_and_spare_modules(build: Any, world: int) -> None:
    run_ranks(beside_oracle, world, build, feed7)


def test_tied_embedding_with_adam() -> None:
    run_ranks(beside_oracle, 2, TiedEmbedding, tokens, optimizer=adamw)
    run_ranks(beside_oracle, 2, TiedEmbedding, tokens, every_plan(accumulation=2, clip=0.1), optimizer=adamw)


def test_a_layer_used_now_and_then() -> None:
    run_ranks(beside_oracle, 2, Sometimes, counted, steps=6)
    run_ranks(beside_oracle, 2, Sometimes, counted, every_plan(accumulation=2), steps=4)


def spare_run(rank: int, world: int, options: dict[str, Any]) -> dict[str, list[str]]:
    """Names of spare weights that changed."""
    out = {}
    for name, plan in every_plan(**options).items():
        torch.manual_seed(0)
        model = Spare()
        before = models.bare(model)
        engine = onecopy.initialize(model, plan, optimizer=adamw)
        for count in range(3 * plan.batch.accumulation):
            engine(*feed7(count, rank)).backward()
            engine.step()
        after = {n: onecopy.full_param(p).clone() for n, p in model.named_parameters()}
        spare = ("spare", "lonely", "block.1")
        out[name] = [n for n in after if n.startswith(spare) and not torch.equal(after[n], before[n])]
        assert not torch.equal(after["used.0.weight"], before["used.0.weight"])
        engine.close()
    return out


@pytest.mark.parametrize("options", [{}, {"accumulation": 2, "clip": 0.5}], ids=str)
@pytest.mark.parametrize("min_numel", [0, 10**6])
def test_unused_weights_do_not_decay(options: dict[str, Any], min_numel: int) -> None:
    """Torch leaves a parameter without gradient alone; a flat buffer of zeros would decay it to 0.99."""
    for run in run_ranks(spare_run, 2, {**options, "units": onecopy.Units(min_numel=min_numel)}):
        assert not any(run.values()), run


# -------------------------------------------------------------------------------------------- frozen, mixed, awkward


class Frozen(nn.Module):
    """First layer frozen, one bias frozen: mixed ``requires_grad`` in a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7))
        self.net[0].requires_grad_(False)
        self.net[2].bias.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.net(x), y)


class Lora(nn.Module):
    """bf16 frozen base, fp32 adapters and norm in one block; a frozen uint8 table beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).to(torch.bfloat16).requires_grad_(False)
        self.a, self.b = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        with torch.no_grad():
            self.norm.weight.fill_(1 + 2**-12)
        self.table = nn.Parameter(torch.arange(33, dtype=torch.uint8), requires_grad=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        assert self.table.dtype == torch.uint8 and int(self.table[32]) == 32
        h = self.base(x.to(torch.bfloat16)).float() + self.b(self.a(x))
        return F.mse_loss(self.norm(h), y)


class Awkward(nn.Module):
    """0-d, 0-size, one-element, non-contiguous, sliced and transposed parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0, 8))
        self.one = nn.Parameter(torch.ones(1))
        self.turned = nn.Parameter(torch.randn(7, 5).t())
        self.strided = nn.Parameter(torch.randn(10, 14)[::2, ::2])
        self.expanded = nn.Parameter(torch.randn(7, 1, 1).expand(7, 1, 1).contiguous())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = x @ self.turned.t() @ self.strided
        hidden = hidden * self.scale + self.one + self.none.sum() + self.expanded.flatten()
        return F.mse_loss(torch.tanh(hidden), y)


class OnlyScalars(nn.Module):
    """Fewer elements in the whole model than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.5))
        self.b = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(x * self.w + self.b, y)


class ChannelsLast(nn.Module):
    """A convolution whose weight is in channels-last order, with batch norm buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(5, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).square().mean() + self.conv(x).mean()


def images(count: int, rank: int) -> tuple[Tensor, ...]:
    return (torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(100 * rank + count)),)


def feed8(count: int, rank: int) -> tuple[Tensor, ...]:
    source = torch.Generator().manual_seed(1000 * rank + count)
    return tuple(torch.randn(4, 8, generator=source) for _ in range(2))


@pytest.mark.parametrize("world", [2, 4])
def test_frozen_and_awkward_parameters(world: int) -> None:
    run_ranks(beside_oracle, world, Frozen, feed7)
    run_ranks(beside_oracle, world, Awkward, feed7)
    run_ranks(beside_oracle, world, OnlyScalars, feed7)
    run_ranks(beside_oracle, world, ChannelsLast, images)


def test_awkward_parameters_clipped_and_accumulated() -> None:
    for build in (Awkward, OnlyScalars, Frozen):
        run_ranks(beside_oracle, 3, build, feed7, every_plan(accumulation=2, clip=0.1, norm_type=3.0))


def test_mixed_dtypes_keep_theirs() -> None:
    run_ranks(beside_oracle, 2, Lora, feed8, optimizer=adamw, tolerance=2e-6)


def frozen_cost(rank: int, world: int) -> dict[str, dict[str, int]]:
    """Resident bytes with one frozen million and a trained thousand."""
    out = {}
    for name, plan in every_plan().items():
        model = nn.Sequential(nn.Linear(1000, 1000, bias=False).requires_grad_(False), nn.Linear(1000, 1, bias=False))
        engine = onecopy.initialize(model, plan, optimizer=adamw)
        before = onecopy.full_param(model[0].weight).clone()
        for _ in range(2):
            engine(torch.ones(1, 1000)).sum().backward()
            engine.step()
        assert torch.equal(onecopy.full_param(model[0].weight), before)
        out[name] = engine.measured()["resident"]["device"]
        engine.close()
    return out


def test_frozen_weights_cost_no_optimizer_and_no_gradient() -> None:
    for run in run_ranks(frozen_cost, 2):
        for name, resident in run.items():
            assert resident["gradient"] <= 4000, name
            assert resident["moments"] <= 8000 + 64, name
            assert resident["master"] == 0, name
            assert resident["parameter"] == 1_001_000 * 4 // (2 if "3" in name else 1), name


def dtype_run(rank: int, world: int) -> None:
    """A plan that casts keeps integers; one that does not keeps everything."""
    for name, plan in every_plan().items():
        model = Lora()
        engine = onecopy.initialize(model, plan, optimizer=adamw)
        engine(*feed8(0, rank)).backward()
        engine.step()
        assert {n: p.dtype for n, p in model.named_parameters()} == {
            n: p.dtype for n, p in Lora().named_parameters()
        }, name
        with onecopy.gathered(model):
            assert torch.equal(model.table, torch.arange(33, dtype=torch.uint8)), name
            assert model.base.weight.dtype == torch.bfloat16, name
        engine.close()


def test_dtypes_after_training() -> None:
    run_ranks(dtype_run, 2)
