"""Sizes that divide no number of ranks, dtypes and frozen parameters mixed in one unit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onecopy
import onecopy.deepspeed as deepspeed
from onecopy.deepspeed import utils
from tests.ranks.cases.doors import adamw, beside_twin, each_door, feed7, full_weights, sgd1
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.ranks

# --------------------------------------------------------------------------------------------- sizes that do not divide


class Counted(nn.Module):
    """Parameters of the given sizes, each set to 1..n; the loss reads all of them."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.arange(1.0, size + 1) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        return sum(((part - 1) * x[: part.numel()]).sum() for part in self.parts)  # type: ignore[return-value]


class Vocabulary(nn.Module):
    """A vocabulary of 32001, as one more token than a round number makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(32001, 3)
        self.head = nn.Linear(3, 101)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.emb(x))), y)


def words(count: int, rank: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1000 * rank + count)
    seen = torch.randint(32001, (6,), generator=source)
    seen[0] = 32000
    return seen, torch.randint(101, (6,), generator=source)


def every_gather(engine: Any) -> dict[str, list[list[float]]]:
    """The values of all parameters by each way there is to read them."""
    params = list(engine.module.parameters())
    out = {
        "full_param": [onecopy.full_param(p).tolist() for p in params],
        "state dict": [value.tolist() for value in engine.full_state_dict().values()],
        "safe_get": [utils.safe_get_full_fp32_param(p).tolist() for p in params],  # type: ignore[union-attr]
        "one by one": [],
        "backwards": [],
    }
    for p in params:
        with onecopy.gathered(p):
            out["one by one"].append(p.tolist())
    for p in reversed(params):
        with deepspeed.zero.GatheredParameters(p):
            out["backwards"].insert(0, p.tolist())
    with onecopy.gathered(engine.module):
        out["module"] = [p.tolist() for p in params]
    with deepspeed.zero.GatheredParameters(params):
        out["GatheredParameters"] = [p.tolist() for p in params]
    return out


def gather_odd(rank: int, world: int, sizes: tuple[int, ...], low: bool) -> None:
    expected = [[float(i) for i in range(1, size + 1)] for size in sizes]
    for name, door in each_door(world, **({"dtype": "bf16"} if low else {})):
        engine = door.open(Counted(*sizes), sgd1)
        for how, got in every_gather(engine).items():
            assert got == expected, f"{name}, {how}: {got}"
        loss = engine(torch.ones(max(sizes)))
        assert loss.item() == sum(size * (size - 1) / 2 for size in sizes), name
        engine.close()


@pytest.mark.parametrize(
    ("world", "sizes", "low"),
    [(2, (5, 7), False), (3, (5, 7), True), (4, (3,), False), (4, (1, 2, 1, 9), False), (2, (1,), True)],
)
def test_odd_sizes_gather_to_their_values(world: int, sizes: tuple[int, ...], low: bool) -> None:
    """5 and 7 elements on 2 ranks, 3 on 4 (an empty shard): every way to gather gives 1..n exactly (row 19)."""
    run_ranks(gather_odd, world, sizes, low)


def vectors(count: int, rank: int) -> tuple[Tensor]:
    return (torch.randn(16, generator=torch.Generator().manual_seed(1000 * rank + count)),)


class Odd(Counted):
    def __init__(self) -> None:
        super().__init__(5, 7, 1, 12)


class Three(Counted):
    def __init__(self) -> None:
        super().__init__(3)


@pytest.mark.parametrize(
    ("build", "feed", "world"), [(Odd, vectors, 2), (Odd, vectors, 3), (Three, vectors, 4), (Vocabulary, words, 2)]
)
def test_odd_sizes_train_with_the_norm_of_their_elements_only(build: Any, feed: Any, world: int) -> None:
    """Clipped AdamW on odd sizes is the oracle's, norm included: padding is no part of it (row 19)."""
    run_ranks(beside_twin, world, build, feed, optimizer=adamw, clip=0.5, tolerance=3e-6)


def poison(engine: Any) -> int:
    """Write NaN to every element of padding that the engine holds; returns how many there were."""
    count = 0
    for unit in engine._core.run.units:
        for weights in unit.weights:
            layout = weights.spec.layout
            assert weights.rest.plain is not None
            held: list[tuple[Tensor, int]] = [(weights.rest.plain, weights.piece * layout.shard)]
            if weights.present:
                held.append((weights.full, 0))
            if weights.master is not None:
                assert weights.master.plain is not None
                held.append((weights.master.plain, weights.stepped()[0]))
            for tensor, low in held:
                start = max(layout.numel - low, 0)
                count += max(tensor.numel() - start, 0)
                with torch.no_grad():
                    tensor[start:].fill_(float("nan"))
    return count


def poisoned(rank: int, world: int) -> int:
    count = 0
    for name, door in each_door(world, clip=0.5):
        runs = []
        for bad in (False, True):
            torch.manual_seed(0)
            engine = door.open(Odd(), adamw)
            norms = []
            for step in range(3):
                count += poison(engine) if bad else 0
                engine(*vectors(step, rank)).backward()
                assert engine.step(), f"{name}: the step was skipped"
                norms.append(engine.grad_norm)
            runs.append((norms, full_weights(engine.module), engine.full_state_dict()))
            engine.close()
        (norms, weights, state), (bad_norms, bad_weights, bad_state) = runs
        assert norms == bad_norms, name
        assert all(torch.equal(weights[key], bad_weights[key]) for key in weights), name
        assert all(torch.equal(state[key], bad_state[key]) for key in state), name
    return count


def test_padding_is_never_read() -> None:
    """NaN in every padding element changes no norm, no weight and no saved value (row 19)."""
    for world in (3, 4):
        assert sum(run_ranks(poisoned, world)) > 0, "there was no padding to poison"


# -------------------------------------------------------------------------------------------------------- mixed dtypes


class Adapted(nn.Module):
    """A frozen base in low precision, fp32 adapters and an fp32 norm: one unit."""

    def __init__(self, base: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.base = nn.Linear(7, 7, dtype=base).requires_grad_(False)
        self.a, self.b = nn.Linear(7, 2, bias=False), nn.Linear(2, 7, bias=False)
        self.norm = nn.LayerNorm(7)
        with torch.no_grad():
            self.norm.weight.fill_(1 + 2**-12)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.base(x.to(self.base.weight.dtype)).to(x.dtype) + self.b(self.a(x))
        return F.mse_loss(self.norm(hidden), y)


class HalfBase(Adapted):
    def __init__(self) -> None:
        super().__init__(torch.float16)


class DoubleBase(Adapted):
    def __init__(self) -> None:
        super().__init__(torch.float64)


class AdaptedBlocks(nn.Module):
    """Two such blocks between trained fp32 layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 7)
        self.blocks = nn.ModuleList(Adapted() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        return sum(block(x, y) for block in self.blocks)  # type: ignore[return-value]


def dtypes_kept(engine: Any, twin: nn.Module) -> None:
    """Gathered tensors have the twin's dtypes, and the frozen ones its bits."""
    full = engine.full_state_dict()
    for name, value in twin.named_parameters():
        assert full[name].dtype == value.dtype, f"{name} became {full[name].dtype}"
        if not value.requires_grad:
            assert torch.equal(full[name], value), f"{name} moved"
    with onecopy.gathered(engine.module):
        for (name, one), other in zip(engine.module.named_parameters(), twin.parameters(), strict=True):
            assert one.dtype == other.dtype, name


@pytest.mark.parametrize(
    ("build", "world"), [(Adapted, 2), (HalfBase, 2), (DoubleBase, 3), (AdaptedBlocks, 2), (AdaptedBlocks, 4)]
)
def test_mixed_dtypes_in_one_unit_keep_theirs(build: Any, world: int) -> None:
    """A frozen bf16 layer beside fp32 adapters and norms trains, and every tensor keeps its dtype (row 25)."""
    run_ranks(beside_twin, world, build, after=dtypes_kept, tolerance=2e-6)


def tiny_bits(rank: int, world: int) -> None:
    for deferred in (False, True):
        for name, door in each_door(world):
            if deferred:
                with onecopy.deferred():
                    model = Adapted()
            else:
                model = Adapted()
            engine = door.open(model, sgd1)
            assert set(onecopy.full_param(model.norm.weight).tolist()) == {1 + 2**-12}, name
            with onecopy.gathered(model.norm.weight):
                assert set(model.norm.weight.tolist()) == {1 + 2**-12}, name
            engine.close()


def test_fp32_beside_bf16_is_not_rounded() -> None:
    """1 + 2^-12 in the fp32 norm survives beside a bf16 layer, which could not hold it (row 25)."""
    assert torch.tensor(1 + 2**-12).bfloat16().item() == 1.0
    run_ranks(tiny_bits, 2)


# -------------------------------------------------------------------------------------------------------- partly frozen


class HalfFrozen(nn.Module):
    """An MLP in one block whose layer 0 is frozen, and whose layer 1 has a frozen bias only."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7))
        self.block[0].requires_grad_(False)
        self.block[2].bias.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.block(x), y)


class FrozenTail(HalfFrozen):
    """The last layers frozen instead: gradients pass through them."""

    def __init__(self) -> None:
        super().__init__()
        self.block.requires_grad_(True)
        self.block[4].requires_grad_(False)
        self.block[2].weight.requires_grad_(False)


def frozen_is_free(engine: Any, twin: nn.Module) -> None:
    """Frozen weights keep their bits and cost neither gradient memory nor optimizer state."""
    got = full_weights(engine.module)
    for name, value in twin.named_parameters():
        if not value.requires_grad:
            assert torch.equal(got[name], value), f"{name} moved"
    trained = sum(p.numel() for p in twin.parameters() if p.requires_grad)
    resident = engine.measured()["resident"]["device"]
    room = 4 * torch.distributed.get_world_size() * len(got)  # padding
    assert resident["gradient"] <= 4 * trained + room, resident
    assert resident["moments"] <= 8 * trained + 2 * room, resident
    assert resident["master"] == 0, resident


@pytest.mark.parametrize(
    ("build", "world", "options"),
    [(HalfFrozen, 2, {}), (HalfFrozen, 3, {"accumulation": 2, "clip": 0.1}), (FrozenTail, 2, {}), (FrozenTail, 4, {})],
)
def test_frozen_and_trained_parameters_in_one_unit(build: Any, world: int, options: dict[str, Any]) -> None:
    """Some parameters of a unit are frozen: their bits stay, the others train as in one process (row 26)."""
    run_ranks(beside_twin, world, build, optimizer=adamw, after=frozen_is_free, tolerance=3e-6, **options)


def frozen_group(rank: int, world: int) -> None:
    """A param group that holds nothing trainable, first or last, given as an object and as a function."""
    for name, door in each_door(world):
        for place in (0, 1):
            torch.manual_seed(0)
            model, twin = HalfFrozen(), HalfFrozen()
            twin.load_state_dict(model.state_dict())

            def make(module: HalfFrozen, place: int = place) -> torch.optim.Optimizer:
                frozen = [p for p in module.parameters() if not p.requires_grad]
                groups = [{"params": [p for p in module.parameters() if p.requires_grad], "lr": 0.05}]
                groups.insert(place, {"params": frozen, "lr": 1.0})
                return torch.optim.AdamW(groups, weight_decay=0.1)

            plain = make(twin)
            engine = door.open(model, make(model))
            for count in range(3):
                engine(*feed7(count, rank)).backward()
                engine.step()
                for other in range(world):
                    (twin(*feed7(count, other)) / world).backward()
                plain.step()
                plain.zero_grad()
            got = full_weights(model)
            for key, value in twin.named_parameters():
                limit = 2e-6 if value.requires_grad else 0.0
                assert (got[key] - value).abs().max() <= limit, f"{name}: {key}"
            assert engine.lr() == ([1.0, 0.05] if place == 0 else [0.05, 1.0]), name
            engine.close()


def test_a_parameter_group_that_is_frozen_throughout() -> None:
    """A group without any trainable parameter keeps its place among the groups and moves nothing (row 26)."""
    run_ranks(frozen_group, 2)
