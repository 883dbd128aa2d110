"""Modules that are unused, used by some ranks only, used twice, or share a weight."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onecopy
import onecopy.deepspeed as deepspeed
from onecopy.comm import shared
from onecopy.errors import OneCopyError
from tests.ranks.cases.doors import adamw, beside_twin, doors, each_door, feed7, full_weights, json_config, sgd1
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import largest_gap

pytestmark = pytest.mark.ranks

# -------------------------------------------------------------------------------------------------------------- unused


class Spare(nn.Module):
    """A two-layer network, a layer nobody calls, a parameter nobody reads and a block nobody enters."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(7, 7), nn.Linear(7, 7)
        self.spare = nn.Linear(7, 7)
        self.loose = nn.Parameter(torch.ones(()))
        self.block = nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.two(torch.tanh(self.one(x))), y)


UNUSED = ("spare.weight", "spare.bias", "loose", "block.0.weight", "block.1.weight", "block.1.bias")


def spare_stays(engine: Any, twin: nn.Module) -> None:
    """Weights without a gradient are the bits they began with: zero gradients would let AdamW decay 1.0 to 0.99."""
    torch.manual_seed(0)
    start = dict(Spare().named_parameters())
    got = full_weights(engine.module)
    for name in UNUSED:
        assert torch.equal(got[name], start[name].detach()), f"{name} moved"
    assert got["loose"].item() == 1.0
    for name in ("spare.weight", "loose"):
        assert onecopy.full_state(dict(engine.module.named_parameters())[name], "exp_avg") is None


@pytest.mark.parametrize(("world", "options"), [(2, {}), (2, {"accumulation": 2, "clip": 0.1}), (3, {}), (4, {"clip": 0.1})])
def test_a_parameter_nobody_uses_stays_as_it_is(world: int, options: dict[str, Any]) -> None:
    """A spare layer under AdamW with decay runs at every stage and is not touched, as in torch (row 13)."""
    run_ranks(beside_twin, world, Spare, optimizer=adamw, after=spare_stays, **options)


def spare_in_bf16(rank: int, world: int) -> None:
    for name, door in each_door(world, dtype="bf16"):
        model = Spare()
        before = {key: value.detach().clone() for key, value in model.named_parameters()}
        engine = door.open(model, adamw)
        x, y = feed7(0, rank)
        for _ in range(3):
            engine(x.bfloat16(), y.bfloat16()).backward()
            engine.step()
        got = full_weights(model)
        assert not [key for key in UNUSED if not torch.equal(got[key], before[key])], name
        assert not torch.equal(got["one.weight"], before["one.weight"]), name
        engine.close()


def test_a_parameter_nobody_uses_stays_as_it_is_in_bf16() -> None:
    """The same with fp32 masters over bf16 weights (row 13)."""
    run_ranks(spare_in_bf16, 2)


# ----------------------------------------------------------------------------------------------------- on some ranks only


class Experts(nn.Module):
    """A router's choice comes with the data: only the chosen experts run."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(7, 7)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 7)) for _ in range(4))
        self.head = nn.Linear(7, 7)

    def forward(self, x: Tensor, y: Tensor, chosen: tuple[int, ...]) -> Tensor:
        x = self.stem(x)
        for index in chosen:
            x = x + self.experts[index](x) / len(chosen)
        return F.mse_loss(self.head(x), y)


class OptionalEncoder(nn.Module):
    """Text goes through every time, an image only where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(7, 7), nn.GELU(), nn.Linear(7, 7))
        self.text = nn.Linear(7, 7)

    def forward(self, x: Tensor, y: Tensor, image: bool) -> Tensor:
        hidden = self.text(x)
        return F.mse_loss(hidden + self.image(x) if image else hidden, y)


def halves(count: int, rank: int) -> tuple[Any, ...]:
    return (*feed7(count, rank), ((0, 1), (2, 3))[rank % 2])


def wandering(count: int, rank: int) -> tuple[Any, ...]:
    """Another choice every time, in another order; sometimes none at all."""
    return (*feed7(count, rank), ((0,), (3, 1), (), (2, 0, 1))[(count + rank) % 4])


def image_on_rank_1(count: int, rank: int) -> tuple[Any, ...]:
    return (*feed7(count, rank), rank == 1)


def image_by_turns(count: int, rank: int) -> tuple[Any, ...]:
    return (*feed7(count, rank), (count + rank) % 3 == 0)


ROUTES = [
    (Experts, halves, 2, {}),
    (Experts, halves, 4, {"clip": 0.2}),
    # Below stage 3 nothing is gathered in forward, so ranks may part there as they like.
    (Experts, wandering, 2, {"accumulation": 2, "clip": 0.2, "only": "0,1,2"}),
    (OptionalEncoder, image_on_rank_1, 2, {"only": "0,1,2"}),
    (OptionalEncoder, image_by_turns, 3, {"only": "0,1,2"}),
]


@pytest.mark.parametrize(("build", "feed", "world", "options"), ROUTES, ids=lambda part: getattr(part, "__name__", str(part)))
def test_a_module_that_only_some_ranks_use(build: Any, feed: Any, world: int, options: dict[str, Any]) -> None:
    """Experts without tokens, an encoder one rank skips: no hang, and a rank that did not use it counts zero (row 14)."""
    run_ranks(beside_twin, world, build, feed, optimizer=adamw, tolerance=2e-6, **options)


def right_or_refused(rank: int, world: int, which: str, build: Any, feed: Any, wire: bool) -> str:
    """Train through the door ``which``, waiting four seconds at most for other ranks."""
    os.environ["ONECOPY_PATIENCE"] = "4"
    folder = shared._FOLDER
    if wire:
        shared._FOLDER = Path("/nowhere")  # as between machines: no memory is shared, all goes through the group
    try:
        beside_twin(rank, world, build, feed, optimizer=adamw, tolerance=2e-6, only=which)
    except OneCopyError as error:
        return str(error)
    finally:
        del os.environ["ONECOPY_PATIENCE"]
        shared._FOLDER = folder
    return "right"


PARTED = [(OptionalEncoder, image_on_rank_1, 2), (OptionalEncoder, image_by_turns, 3), (Experts, wandering, 2)]
PLACES = [("stage 3", False), ("held", False), ("unit", False), ("json 3", False), ("stage 3", True), ("held", True)]


@pytest.mark.parametrize(("which", "wire"), PLACES)
@pytest.mark.parametrize(("build", "feed", "world"), PARTED, ids=lambda part: getattr(part, "__name__", str(part)))
def test_a_sharded_module_that_only_some_ranks_use(build: Any, feed: Any, world: int, which: str, wire: bool) -> None:
    """With sharded parameters too: the right weights, or an error that names module and ranks, but no hang (row 14)."""
    module = "image" if build is OptionalEncoder else "experts"
    for said in run_ranks(right_or_refused, world, which, build, feed, wire, init_group=False):
        assert said == "right" or (module in said and "rank" in said), said


def expert_gradients(rank: int, world: int) -> None:
    torch.manual_seed(0)
    twin = Experts()
    for other in range(world):
        twin(*halves(0, other)).backward()
    for name, door in each_door(world):
        model = Experts()
        engine = door.open(model, sgd1)
        engine(*halves(0, rank)).backward()
        for (key, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
            got = onecopy.full_grad(one)
            assert got is not None and other.grad is not None, f"{name}: {key}"
            assert (got - other.grad / world).abs().max() <= 1e-6, f"{name}: {key}"
        engine.step()
        engine.close()


def test_the_gradient_of_an_expert_is_the_sum_over_ranks_by_their_number() -> None:
    """Rank 0 routes to experts 0 and 1, rank 1 to 2 and 3: each gradient is (sum over ranks) / world (row 14)."""
    for world in (2, 4):
        run_ranks(expert_gradients, world)


# --------------------------------------------------------------------------------------------------------- applied twice


class Siamese(nn.Module):
    """``f(a) - f(b)`` with one ``f``, recomputed in backward or not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7))
        self.how = how

    def once(self, x: Tensor) -> Tensor:
        if self.how == "plain":
            return self.f(x)
        return checkpoint(self.f, x.clone().requires_grad_(), use_reentrant=self.how == "re-entrant")

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (self.once(a) - self.once(b)).square().mean()


class AcrossDepth(nn.Module):
    """One block for three layers, as models that share weights across depth have it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner = Siamese(how)
        self.head = nn.Linear(7, 7)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        for _ in range(3):
            a = a + self.inner.once(a)
        return F.mse_loss(self.head(a), b)


class Square(nn.Module):
    """``3 * w * w`` at w = 2."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(2.0))

    def forward(self) -> Tensor:
        return 3 * self.w * self.w


KINDS = ("plain", "re-entrant", "not re-entrant")


class PlainSiamese(Siamese):
    def __init__(self) -> None:
        super().__init__("plain")


class ReentrantSiamese(Siamese):
    def __init__(self) -> None:
        super().__init__("re-entrant")


class RecomputedSiamese(Siamese):
    def __init__(self) -> None:
        super().__init__("not re-entrant")


class PlainDepth(AcrossDepth):
    def __init__(self) -> None:
        super().__init__("plain")


class ReentrantDepth(AcrossDepth):
    def __init__(self) -> None:
        super().__init__("re-entrant")


TWICE = [PlainSiamese, ReentrantSiamese, RecomputedSiamese, PlainDepth, ReentrantDepth]


@pytest.mark.parametrize("build", TWICE, ids=lambda build: build.__name__)
def test_a_module_applied_twice(build: Any) -> None:
    """f(a) - f(b), and one block at three depths, recomputed in backward or not: the oracle's weights (row 15)."""
    run_ranks(beside_twin, 2, build)


def low_precision_twice(rank: int, world: int) -> None:
    """bf16 beside the same in fp32: a gradient counted once instead of twice would be off by half."""
    for how in KINDS:
        torch.manual_seed(0)
        twin = Siamese(how)
        for other in range(world):
            (twin(*feed7(0, other)) / world).backward()
        for name, door in each_door(world, dtype="bf16"):
            model = Siamese(how)
            engine = door.open(model, sgd1)
            engine(*(x.bfloat16() for x in feed7(0, rank))).backward()
            for (key, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
                got = onecopy.full_grad(one)
                assert got is not None and other.grad is not None
                # The last bias cancels in f(a) - f(b): what is left of it is rounding.
                limit = 0.03 * max(other.grad.abs().max().item(), 0.3)
                assert (got - other.grad).abs().max() <= limit, f"{how} {name}: {key}"
            engine.step()
            engine.close()


def test_a_module_applied_twice_in_bf16() -> None:
    """Stage 2 in bf16 on several ranks once gave wrong gradients in silence; here they follow fp32 (row 15)."""
    run_ranks(low_precision_twice, 2)


def squared(rank: int, world: int) -> dict[str, tuple[float, float]]:
    out = {}
    for name, door in doors(world).items():
        model = Square()
        engine = door.open(model, sgd1)
        engine().backward()
        gradient = onecopy.full_grad(model.w)
        assert gradient is not None
        engine.step()
        out[name] = gradient.item(), onecopy.full_param(model.w).item()
        engine.close()
    return out


def test_a_weight_used_twice_in_a_product() -> None:
    """3 w w at w = 2 has gradient 12, not 6 (row 15)."""
    w = torch.tensor(2.0, requires_grad=True)
    (3 * w * w).backward()
    assert w.grad is not None and w.grad.item() == 12.0
    for world in (2, 3):
        for run in run_ranks(squared, world):
            assert run == dict.fromkeys(run, (12.0, pytest.approx(0.8))), run


# ----------------------------------------------------------------------------------------------------------------- tied


class Tied(nn.Module):
    """Embedding(5, 3) and the output layer share one weight; blocks between put them in different units."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.emb(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return F.cross_entropy(self.head(x), targets)


class TiedThrice(nn.Module):
    """One matrix in three places, one of them deep inside, and a bias shared by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.inner = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Sequential(nn.Linear(7, 7)))
        self.last = nn.Linear(7, 7)
        self.inner[2][0].weight = self.first.weight
        self.last.weight = self.first.weight
        self.last.bias = self.inner[0].bias

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(self.inner(self.first(x).tanh())), y)


def tokens(count: int, rank: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1000 * rank + count)
    given, wanted = torch.randint(5, (2, 6), generator=source)
    return given, wanted


def still_tied(engine: Any, twin: nn.Module) -> None:
    """One parameter object, one state dict value, one optimizer state under all names."""
    module = engine.module
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    tied = [known for known in names.values() if len(known) > 1]
    assert tied, "the model came untied"
    full = engine.full_state_dict()
    for known in tied:
        assert all(torch.equal(full[known[0]], full[name]) for name in known)
    count = sum(len(group["params"]) for group in engine.optimizer.param_groups)
    # Each rank steps its pieces, so it may hold fewer.
    assert count <= len(names), f"{count} tensors in the optimizer for {len(names)} parameters"
    unique = sum(p.numel() for p in twin.parameters())
    world = torch.distributed.get_world_size()
    assert engine.measured()["resident"]["device"]["moments"] <= 8 * (unique + world * len(names))


def tied_adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


@pytest.mark.parametrize(("build", "feed", "world"), [(Tied, tokens, 2), (Tied, tokens, 3), (TiedThrice, feed7, 4)])
def test_tied_weights_stay_one_weight(build: Any, feed: Any, world: int) -> None:
    """Embedding and head share a weight across units: one storage, one optimizer state, both gradients (row 16)."""
    run_ranks(beside_twin, world, build, feed, optimizer=tied_adam, after=still_tied, tolerance=2e-6)


def tied_deferred(rank: int, world: int) -> None:
    torch.manual_seed(0)
    twin = Tied()
    plain = tied_adam(twin.parameters())
    for count in range(3):
        for other in range(world):
            (twin(*tokens(count, other)) / world).backward()
        plain.step()
        plain.zero_grad()
    for how in (onecopy.deferred, deepspeed.zero.Init):
        for stage in range(4):
            torch.manual_seed(0)
            with how():
                model = Tied()
            engine: Any = deepspeed.initialize(model=model, config=json_config(stage), optimizer=tied_adam)[0]
            for count in range(3):
                engine.backward(engine(*tokens(count, rank)))
                engine.step()
            assert largest_gap(model, twin) <= 2e-6, stage
            still_tied(engine, twin)
            engine.close()


def test_tied_weights_stay_one_weight_when_born_sharded() -> None:
    """The same for a model that was built sharded (row 16)."""
    run_ranks(tied_deferred, 2)
