"""From a model to an engine: initialisers on sharded weights, whose values count, memory, optimizers made too early."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onecopy
import onecopy.deepspeed as deepspeed
from onecopy.errors import OneCopyError
from tests.ranks import models
from tests.ranks.cases.doors import beside_twin, doors, each_door, feed7, full_weights, json_config
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import largest_gap, sgd
from tests.ranks.test_ledger import live_bytes

pytestmark = pytest.mark.ranks

# -------------------------------------------------------------------------------------------- initialisers on sharded weights

Fill = Callable[[Tensor], Any]


def data_normal(weight: Tensor) -> Any:
    return weight.data.normal_(0, 0.02)


def data_scaled(weight: Tensor) -> Any:
    return weight.data.mul_(0.5)


def copied(weight: Tensor) -> Any:
    with torch.no_grad():
        return weight.copy_(torch.linspace(0, 1, weight.numel()).view(weight.shape))


FILLS: dict[str, Fill] = {
    "normal": lambda weight: nn.init.normal_(weight, std=0.02),
    "truncated": lambda weight: nn.init.trunc_normal_(weight, std=0.02),
    "xavier": nn.init.xavier_uniform_,
    "orthogonal": nn.init.orthogonal_,
    "constant": lambda weight: nn.init.constant_(weight, 0.25),
    "zeros": nn.init.zeros_,
    "data.normal": data_normal,
    "data.scaled": data_scaled,
    "copied": copied,
}


def filled(rank: int, world: int, size: int, where: str) -> dict[str, str]:
    """Each initialiser from user code on a weight that is sharded: the whole initialiser's bits, or a refusal."""
    out = {}
    for name, fill in FILLS.items():
        torch.manual_seed(1)
        twin = nn.Linear(size, size)
        fill(twin.weight)
        torch.manual_seed(1)
        engine = None
        try:
            if where == "onecopy":
                with onecopy.deferred():
                    model = nn.Linear(size, size)
                    fill(model.weight)
                whole = engine = onecopy.initialize(model, onecopy.stage(3))
            elif where == "deepspeed":
                with deepspeed.zero.Init():
                    model = nn.Linear(size, size)
                fill(model.weight)
                whole = engine = deepspeed.initialize(model=model, config=json_config(3))[0]
            else:
                model = nn.Linear(size, size)
                whole = engine = onecopy.initialize(model, onecopy.stage(3))
                fill(model.weight)
            weight = whole.full_state_dict()["weight"]
            out[name] = "right" if torch.equal(weight, twin.weight) else f"wrong, std {weight.std():.4f}"
            if name in ("normal", "data.normal"):
                assert 0.018 < weight.std() < 0.022, f"{name}: {weight.std()}"
        except OneCopyError as error:
            assert "weight" in str(error), f"the refusal does not name the parameter: {error}"
            out[name] = "refused"
        if engine is not None:
            engine.close()
    return out


@pytest.mark.parametrize("where", ["onecopy", "deepspeed", "after initialize"])
@pytest.mark.parametrize(("world", "size"), [(2, 256), (3, 65)])
def test_an_initialiser_on_a_sharded_weight_works_or_is_refused(where: str, world: int, size: int) -> None:
    """normal_(std=0.02) and its like on a sharded weight: those very values on all ranks, or an error (row 07)."""
    runs = run_ranks(filled, world, size, where)
    assert runs[0] == runs[-1]
    assert set(runs[0].values()) <= {"right", "refused"}, runs[0]
    assert runs[0]["normal"] == "right", "the commonest initialiser is not refused"


class Rescaled(nn.Module):
    """A constructor that initialises by ``apply`` and rescales some layers by hand, as GPT-2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 7, padding_idx=0)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.scale = nn.Parameter(torch.full((7,), 0.5))
        self.apply(self.fill)
        for name, parameter in self.named_parameters():
            if name.endswith("1.weight"):
                nn.init.normal_(parameter, std=0.02 / 2)

    def fill(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)
            module.weight.data[0].zero_()


def applied(rank: int, world: int) -> list[str]:
    torch.manual_seed(1)
    twin = Rescaled().state_dict()
    wrong = []
    for how in (onecopy.deferred, deepspeed.zero.Init):
        torch.manual_seed(1)
        try:
            with how():
                model = Rescaled()
        except OneCopyError as error:
            assert "weight" in str(error)
            wrong.append("refused")
            continue
        engine = onecopy.initialize(model, onecopy.stage(3))
        full = engine.full_state_dict()
        wrong += [name for name in twin if not torch.equal(twin[name], full[name])]
        engine.close()
    return wrong


def test_a_constructor_that_initialises_by_hand() -> None:
    """``apply``, ``.data`` writes, padding rows and rescaled layers under sharded construction: as unsharded (row 07)."""
    for world in (2, 3):
        for wrong in run_ranks(applied, world):
            assert set(wrong) <= {"refused"}, wrong


# ---------------------------------------------------------------------------------------------------------------- memory


class TenMB(nn.Module):
    """Ten layers of a megabyte."""

    BYTES = 10 * 512 * 512 * 4

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(10))


def built_before_the_group(rank: int, world: int, door: str) -> tuple[int, list[str]]:
    """Bytes of a model that was built sharded before there was a process group, and the warnings."""
    gc.collect()
    before = live_bytes()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with onecopy.deferred() if door == "onecopy" else deepspeed.zero.Init():
            model = TenMB()
    held = live_bytes() - before
    assert model.layers[0].weight.shape == (512, 512)
    return held, [str(one.message) for one in caught]


@pytest.mark.parametrize("door", ["onecopy", "deepspeed"])
def test_sharded_construction_before_the_process_group_holds_a_share(door: str) -> None:
    """WORLD_SIZE=2 and no process group yet: each rank holds half of 10 MB and a little, not all of it (row 08)."""
    for world in (2, 4):
        for held, _ in run_ranks(built_before_the_group, world, door, init_group=False):
            assert held <= TenMB.BYTES // world + TenMB.BYTES // 100, f"{held} bytes on each of {world} ranks"
    ((held, said),) = run_ranks(built_before_the_group, 1, door, init_group=False)
    assert held <= TenMB.BYTES + 4096
    assert not said, "a job of one rank is quiet"


def cannot_meet(rank: int, world: int, door: str, monkey: dict[str, str]) -> str:
    import os

    for name in ("MASTER_ADDR", "RANK"):
        os.environ.pop(name)
    os.environ.update(monkey)
    try:
        with onecopy.deferred() if door == "onecopy" else deepspeed.zero.Init():
            model = nn.Linear(512, 512)
    except OneCopyError as error:
        return str(error)
    finally:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    return f"a whole model of {model.weight.numel()} elements"


@pytest.mark.parametrize("door", ["onecopy", "deepspeed"])
def test_sharded_construction_that_cannot_meet_the_other_ranks_is_refused(door: str) -> None:
    """WORLD_SIZE=2 but no address to meet at: an error that says what is missing, not a whole model per rank (row 08)."""
    for said in run_ranks(cannot_meet, 2, door, {}, init_group=False):
        assert "WORLD_SIZE" in said and "MASTER_ADDR" in said, said


# ------------------------------------------------------------------------------------------------------ rank 0's values


class Buffers(nn.Module):
    """A layer and buffers of several kinds, some of them not in the state dict, one in a submodule."""

    def __init__(self, shift: int = 0) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.register_buffer("kept", torch.arange(8.0) + shift)
        self.register_buffer("lost", torch.arange(8) + shift, persistent=False)
        self.register_buffer("flag", torch.tensor(shift == 0), persistent=False)
        self.inner = nn.BatchNorm1d(8)
        self.inner.register_buffer("low", torch.arange(5.0).bfloat16() + shift, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(self.lin(x)) * self.kept + self.lost).square().mean()


def only_rank_0(rank: int, world: int, others: str) -> dict[str, str]:
    """Rank 0 has the real values; the others have meta tensors, or values of their own."""
    torch.manual_seed(0)
    real = Buffers()
    right = dict(real.named_parameters()) | dict(real.named_buffers())
    out = {}
    for name, door in doors(world).items():
        torch.manual_seed(rank)
        with torch.device("meta" if rank and others == "meta" else "cpu"):
            model = Buffers(shift=rank if others == "values" else 0)
        try:
            engine = door.open(model, sgd)
        except OneCopyError as error:
            assert "rank 0" in str(error) or "meta" in str(error)
            out[name] = "refused"
            continue
        got = full_weights(engine.module) | dict(engine.module.named_buffers())
        wrong = [key for key in right if not torch.equal(got[key], right[key].detach())]
        out[name] = f"wrong: {wrong}" if wrong else "right"
        assert all(got[key].dtype == right[key].dtype for key in right if key in dict(model.named_buffers()))
        engine(torch.randn(4, 8)).backward()
        engine.step()
        engine.close()
    return out


@pytest.mark.parametrize("others", ["meta", "values", "seeds"])
@pytest.mark.parametrize("world", [2, 3])
def test_rank_0s_weights_and_buffers_are_everybodys(others: str, world: int) -> None:
    """Rank 0 loads, the others are on meta or have other seeds: weights and all buffers become rank 0's (row 10)."""
    for run in run_ranks(only_rank_0, world, others):
        assert run == dict.fromkeys(run, "right"), run


# -------------------------------------------------------------------------------------------- an optimizer made too early


def early_optimizer(rank: int, world: int, forward_first: bool, split: bool) -> None:
    def groups(model: nn.Module) -> list[Any]:
        named = dict(model.named_parameters())
        if not split:
            return list(named.values())
        biases = [p for name, p in named.items() if name.endswith("bias")]
        return [{"params": [p for p in named.values() if p.dim() > 1]}, {"params": biases, "lr": 0.01}]

    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)

    torch.manual_seed(0)
    twin = models.MLP()
    plain = make(groups(twin))
    for count in range(3):
        for other in range(world):
            (twin(*feed7(count, other)) / world).backward()
        plain.step()
        plain.zero_grad()
    for name, door in each_door(world):
        model = models.MLP()
        optimizer = make(groups(model))
        if forward_first:
            model(*feed7(9, rank)).item()
        engine = door.open(model, optimizer)
        for count in range(3):
            engine(*feed7(count, rank)).backward()
            engine.step()
            optimizer.zero_grad()
        assert largest_gap(model, twin) <= 2e-6, name
        engine.close()


@pytest.mark.parametrize(("world", "forward_first", "split"), [(2, False, False), (2, True, True), (3, True, False)])
def test_an_optimizer_made_before_the_engine_trains(world: int, forward_first: bool, split: bool) -> None:
    """AdamW on model.parameters() before the model is sharded trains what it would have trained (row 11)."""
    run_ranks(early_optimizer, world, forward_first, split)


def strangers(rank: int, world: int) -> dict[str, list[str]]:
    """Optimizers over tensors that are not the model's, wholly or in part, or over fewer of them."""
    out: dict[str, list[str]] = {}
    for name, door in doors(world).items():
        said = []
        for how in ("a copy's", "one stranger"):
            model = models.MLP()
            other = models.MLP()
            params = list(other.parameters()) if how == "a copy's" else [*model.parameters(), nn.Parameter(torch.ones(3))]
            try:
                engine = door.open(model, torch.optim.AdamW(params, lr=0.1))
                engine(*feed7(0, rank)).backward()
                engine.step()
                said.append("accepted")
            except OneCopyError as error:
                assert isinstance(error, ValueError), type(error)
                said.append(str(error))
        out[name] = said
    return out


def test_an_optimizer_over_other_tensors_is_refused_with_their_number() -> None:
    """An optimizer that holds tensors the engine does not know is refused, and the message counts them (row 11)."""
    count = len(list(models.MLP().parameters()))
    for run in run_ranks(strangers, 2):
        for name, (copies, one) in run.items():
            assert str(count) in copies and "optimizer" in copies, f"{name}: {copies}"
            assert "1 " in one and "optimizer" in one, f"{name}: {one}"


def late_optimizer(rank: int, world: int) -> dict[str, str]:
    """An optimizer made on the engine's parameters and stepped by hand: it would find no gradients."""
    out = {}
    for name, door in doors(world).items():
        model = models.MLP()
        engine = door.open(model, None)
        before = full_weights(model)
        try:
            late = torch.optim.AdamW(engine.module.parameters(), lr=0.1)
            engine(*feed7(0, rank)).backward()
            late.step()
        except OneCopyError as error:
            out[name] = str(error)
        else:
            moved = any(not torch.equal(before[key], value) for key, value in full_weights(model).items())
            out[name] = "moved" if moved else "nothing happened, in silence"
        engine.close()
    return out


def test_an_optimizer_made_after_the_engine_is_not_ignored() -> None:
    """AdamW on engine.module.parameters() of an engine that was given none: an error at the first backward (row 11)."""
    for run in run_ranks(late_optimizer, 2):
        assert not [name for name, said in run.items() if "optimizer" not in said], run


class Loss(nn.Module):
    """One layer whose loss is a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(7, 7)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.lin(x), y)


def test_the_smallest_model_trains_through_every_door() -> None:
    """One layer, three steps on three and four ranks: the weights of one process (row 11)."""
    for world in (3, 4):
        run_ranks(beside_twin, world, Loss)
