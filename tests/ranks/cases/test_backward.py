"""Ways to run backward, activation checkpointing over frozen parts, and torch.compile."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import onecopy
from onecopy.errors import OneCopyError
from tests.ranks.cases.doors import doors, each_door, feed7, sgd1
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import largest_gap, sgd

pytestmark = pytest.mark.ranks

# ------------------------------------------------------------------------------------------------- the one-weight problem

# x of each rank's two micro-batches: the gradient is their mean, 2.5 on two ranks, and w = 1 - 0.1 * 2.5.
INPUTS = {0: (1.0, 3.0), 1: (2.0, 4.0), 2: (6.0, 5.0), 3: (0.5, -1.0)}
Named = namedtuple("Named", ["logits", "loss"])


def expected_weight(world: int) -> float:
    """w after one step of SGD with rate 0.1 on the mean over ranks and micro-batches, by torch."""
    w = torch.ones(1, requires_grad=True)
    for rank in range(world):
        for x in INPUTS[rank]:
            (w * x / world / 2).sum().backward()
    torch.optim.SGD([w], lr=0.1).step()
    return w.item()


class Toy(nn.Module):
    """``w * x``, in whatever container ``kind`` says."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, kind: str = "tensor") -> Any:
        loss = (self.w * x).sum()
        return {
            "tensor": loss,
            "dict": {"loss": loss, "logits": x},
            "tuple": (x, loss),
            "named": Named(x, loss),
            "nested": {"out": [{"loss": (loss,)}]},
            "vector": self.w * x,
        }[kind]


Way = Callable[[Any, Tensor], None]


def by_key(engine: Any, x: Tensor) -> None:
    engine(x, kind="dict")["loss"].backward()


def by_position(engine: Any, x: Tensor) -> None:
    engine.backward(engine(x, "tuple")[1])


def by_attribute(engine: Any, x: Tensor) -> None:
    engine(x, "named").loss.backward()


def nested(engine: Any, x: Tensor) -> None:
    engine(x, kind="nested")["out"][0]["loss"][0].backward()


def with_gradient(engine: Any, x: Tensor) -> None:
    engine(x, "vector").backward(torch.ones(1))


def engine_with_gradient(engine: Any, x: Tensor) -> None:
    engine.backward(engine(x, "vector"), gradient=torch.ones(1))


def autograd_backward(engine: Any, x: Tensor) -> None:
    torch.autograd.backward([engine(x, "vector")], [torch.ones(1)])


def in_two_parts(engine: Any, x: Tensor) -> None:
    loss = engine(x)
    (0.25 * loss).backward(retain_graph=True)
    (0.75 * loss).backward()


WAYS: dict[str, Way] = {
    "loss.backward": lambda engine, x: engine(x).backward(),
    "engine.backward": lambda engine, x: engine.backward(engine(x)) and None,
    **{way.__name__: way for way in (by_key, by_position, by_attribute, nested, with_gradient)},
    **{way.__name__: way for way in (engine_with_gradient, autograd_backward, in_two_parts)},
}


def toy_ways(rank: int, world: int) -> dict[str, float]:
    out = {}
    for way, run in WAYS.items():
        for name, door in doors(world, accumulation=2).items():
            if world > 2 and name not in ("stage 0", "stage 2", "stage 3", "json 3"):
                continue
            model = Toy()
            engine = door.open(model, sgd1)
            for x in INPUTS[rank]:
                run(engine, torch.tensor([x]))
                engine.step()
            out[f"{way}, {name}"] = onecopy.full_param(model.w).item()
            assert engine.global_steps == 1
            engine.close()
    return out


def test_every_way_to_run_backward_averages_over_the_ranks() -> None:
    """loss.backward(), a gradient given by hand, a loss inside a dict or tuple: w = 0.75 on both ranks (row 22)."""
    assert expected_weight(2) == pytest.approx(0.75)
    for world in (2, 3):
        for run in run_ranks(toy_ways, world):
            assert run == dict.fromkeys(run, pytest.approx(expected_weight(world))), run


def zeroed(rank: int, world: int) -> dict[str, float]:
    """Every zero_grad there is, called between the micro-batches of a window."""
    out = {}
    for name, door in doors(world, accumulation=2).items():
        model = Toy()
        engine = door.open(model, sgd1)
        for x in INPUTS[rank]:
            engine(torch.tensor([x])).backward()
            engine.step()
            for place in (engine, engine.optimizer, engine.module):
                for to_none in (True, False):
                    place.zero_grad(set_to_none=to_none)
        out[name] = onecopy.full_param(model.w).item()
        engine.close()
    return out


def test_zero_grad_by_hand_between_micro_batches_loses_nothing() -> None:
    """zero_grad on engine, optimizer or module in the middle of a window: still w = 0.75 (row 22)."""
    for world in (2, 4):
        for run in run_ranks(zeroed, world):
            assert run == dict.fromkeys(run, pytest.approx(expected_weight(world))), run


def misused(rank: int, world: int) -> dict[str, list[Any]]:
    """step() before any backward, step() twice, step() left out for good."""
    out: dict[str, list[Any]] = {}
    for name, door in doors(world).items():
        model = Toy()
        engine = door.open(model, sgd1)
        said: list[Any] = []
        for _ in range(2):
            steps = engine.global_steps
            try:
                said.append("no-op" if not engine.step() and engine.global_steps == steps else "stepped")
            except OneCopyError as error:
                said.append("refused" if "backward" in str(error) else str(error))
            engine(torch.ones(1)).backward()
            assert engine.step(), name
        said.append(round(onecopy.full_param(model.w).item(), 6))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with contextlib.suppress(OneCopyError):
                for _ in range(3):
                    engine(torch.ones(1)).backward()
            said.append("step()" in " ".join(str(one.message) for one in caught))
        out[name] = said
        engine.close()
    return out


def test_a_step_without_backward_and_a_forgotten_step_are_noticed() -> None:
    """step() with nothing to step is refused or a no-op; a window that closes twice without step() is told (row 22)."""
    for run in run_ranks(misused, 2):
        for name, (first, twice, weight, told) in run.items():
            assert first in ("no-op", "refused"), name
            assert twice in ("no-op", "refused"), name
            assert weight == 0.8, name
            assert told, f"{name}: a forgotten step() went unnoticed"


def forgotten_in_a_window(rank: int, world: int) -> dict[str, str]:
    out = {}
    for name, door in doors(world, accumulation=3).items():
        engine = door.open(Toy(), sgd1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(7):
                engine(torch.ones(1)).backward()
        out[name] = " ".join(str(one.message) for one in caught)
        engine.close()
    return out


def test_a_forgotten_step_is_noticed_in_a_window_of_three() -> None:
    """With accumulation over 3, seven backwards without step() are noticed and the window is named (row 22)."""
    for run in run_ranks(forgotten_in_a_window, 2):
        for name, said in run.items():
            assert "step()" in said and "3" in said, f"{name}: {said!r}"


# ------------------------------------------------------------------------------------- recomputation over frozen parameters


class Adapter(nn.Module):
    """A frozen norm and layer with a trained low-rank path beside them, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.base = nn.LayerNorm(7), nn.Linear(7, 7)
        self.a, self.b = nn.Linear(7, 2, bias=False), nn.Linear(2, 7, bias=False)
        for part in (self.norm, self.base):
            part.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return torch.tanh(self.base(x) + self.b(F.dropout(self.a(x), 0.1, self.training)))


class FrozenNorms(nn.Module):
    """Two such blocks, recomputed in backward or not; ``deep`` recomputes both as one."""

    def __init__(self, mode: str, deep: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Adapter() for _ in range(2))
        self.mode, self.deep = mode, deep

    def both(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.mode == "off":
            return F.mse_loss(self.both(x), y)
        # The re-entrant form runs backward only into inputs that need a gradient.
        x = x.clone().requires_grad_()
        for part in (self.both,) if self.deep else self.blocks:
            x = checkpoint(part, x, use_reentrant=self.mode == "re-entrant")  # type: ignore[assignment]
        return F.mse_loss(x, y)


MODES = ("off", "re-entrant", "not re-entrant")


def recomputed(rank: int, world: int, deep: bool, options: dict[str, Any]) -> None:
    accumulation = options.get("accumulation", 1)
    torch.manual_seed(0)
    twin = FrozenNorms("off", deep)
    plain = sgd([p for p in twin.parameters() if p.requires_grad])
    for count in range(3 * accumulation):
        for other in range(world):
            torch.manual_seed(100 * count + other)
            (twin(*feed7(count, other)) / world / accumulation).backward()
        if (count + 1) % accumulation == 0:
            plain.step()
            plain.zero_grad()
    for name, door in doors(world, **options).items():
        seen = {}
        for mode in MODES:
            torch.manual_seed(0)
            engine = door.open(FrozenNorms(mode, deep), sgd)
            grads = []
            for count in range(3 * accumulation):
                torch.manual_seed(100 * count + rank)
                engine(*feed7(count, rank)).backward()
                if (count + 1) % accumulation == 0:
                    trained = [p for p in engine.module.parameters() if p.requires_grad]
                    grads += [onecopy.full_grad(p) for p in trained]
                engine.step()
            assert largest_gap(engine.module, twin) <= 1e-6, f"{name}, {mode}"
            seen[mode] = grads
            engine.close()
        for mode in MODES[1:]:
            assert all(torch.equal(a, b) for a, b in zip(seen["off"], seen[mode], strict=True)), f"{name}, {mode}"


@pytest.mark.parametrize(
    ("world", "deep", "options"),
    [(2, False, {}), (2, True, {"accumulation": 2}), pytest.param(3, True, {}, marks=pytest.mark.long)],
)
def test_recomputation_over_frozen_norms_is_bit_equal(world: int, deep: bool, options: dict[str, Any]) -> None:
    """Frozen LayerNorm, trained adapters, dropout: gradients equal those without checkpointing to the bit (row 23)."""
    run_ranks(recomputed, world, deep, options)


# --------------------------------------------------------------------------------------------------------------- compile


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 7), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(7, 7)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x), y)


def compiled(rank: int, world: int, order: str, frozen: bool) -> None:
    torch.manual_seed(0)
    origin = Compiled()
    origin.blocks[0].requires_grad_(not frozen)
    twin = copy.deepcopy(origin)
    plain = sgd([p for p in twin.parameters() if p.requires_grad])
    for count in range(3):
        for other in range(world):
            (twin(*feed7(count, other)) / world).backward()
        plain.step()
        plain.zero_grad()
    for name, door in each_door(world):
        if name not in ("stage 2", "stage 3", "held", "hybrid 3", "json 3"):
            continue
        torch._dynamo.reset()
        model = copy.deepcopy(origin)
        given: Any = model
        if order == "block, then shard":
            for index, block in enumerate(model.blocks):
                model.blocks[index] = torch.compile(block, backend="aot_eager")  # type: ignore[assignment]
        elif order == "model, then shard":
            given = torch.compile(model, backend="aot_eager")
        engine = door.open(given, sgd)
        call = torch.compile(engine.module, backend="aot_eager") if order == "shard, then model" else engine
        if order == "shard, then block":
            for block in model.blocks:
                block.compile(backend="aot_eager")
        for count in range(3):
            call(*feed7(count, rank)).backward()
            assert engine.step(), name
        full = engine.full_state_dict()
        assert list(full) == list(twin.state_dict()), f"{name}: {list(full)}"
        for key, value in twin.state_dict().items():
            assert (full[key] - value).abs().max() <= 1e-5, f"{name}: {key}"
        engine.close()


ORDERS = ["block, then shard", "model, then shard", "shard, then block", "shard, then model"]


@pytest.mark.parametrize(("order", "frozen"), [*((order, False) for order in ORDERS), (ORDERS[0], True), (ORDERS[3], True)])
def test_compiled_before_or_after_sharding(order: str, frozen: bool) -> None:
    """torch.compile in either order trains as eager does, and names in the state dict stay bare (row 27)."""
    run_ranks(compiled, 2, order, frozen)
