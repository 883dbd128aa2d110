"""What user code does around an engine: every habit is right or refused, none is ignored in silence."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onecopy
from onecopy.errors import OneCopyError
from tests.ranks import models
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import every_plan, largest_gap

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.head = nn.Linear(7, 7)
        self.head.weight.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return F.mse_loss(self.head(x), y)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def feed(count: int, rank: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(1000 * rank + count)
    x, y = (torch.randn(4, 7, generator=source) for _ in range(2))
    return x, y


class Pair:
    """An engine and its plain twin, which averages over the ranks. A habit drives both."""

    def __init__(self, plan: Any, rank: int, world: int) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.twin = copy.deepcopy(self.model)
        self.engine = onecopy.initialize(self.model, plan, optimizer=sgd)
        self.plain = sgd(self.twin.parameters())
        self.rank, self.world = rank, world

    def plain_backward(self, count: int, loss: Callable[[Any, Tensor, Tensor], Tensor] | None = None) -> None:
        for other in range(self.world):
            x, y = feed(count, other)
            ((loss(self.twin, x, y) if loss else self.twin(x, y)) / self.world).backward()

    def plain_step(self) -> None:
        self.plain.step()
        self.plain.zero_grad()

    def gap(self) -> float:
        return largest_gap(self.model, self.twin)


Habit = Callable[[Pair], None]


def call_module_itself(pair: Pair) -> None:
    for count in range(2):
        pair.model(*feed(count, pair.rank)).backward()
        pair.engine.step()
        pair.plain_backward(count)
        pair.plain_step()


def clip_by_hand(pair: Pair) -> None:
    """``clip_grad_norm_`` on the module's parameters between backward and step."""
    pair.engine(*feed(0, pair.rank)).backward()
    nn.utils.clip_grad_norm_(pair.model.parameters(), 0.01)
    pair.engine.step()
    pair.plain_backward(0)
    nn.utils.clip_grad_norm_(pair.twin.parameters(), 0.01)
    pair.plain_step()


def scale_grads_by_hand(pair: Pair) -> None:
    pair.engine(*feed(0, pair.rank)).backward()
    for p in pair.model.parameters():
        if p.requires_grad:
            p.grad.mul_(0.5)  # type: ignore[union-attr]
    pair.engine.step()
    pair.plain_backward(0)
    for p in pair.twin.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)
    pair.plain_step()


def step_the_optimizer_itself(pair: Pair) -> None:
    pair.engine(*feed(0, pair.rank)).backward()
    pair.engine.optimizer.step()
    pair.plain_backward(0)
    pair.plain_step()


def unfreeze_later(pair: Pair) -> None:
    for side in (pair.model, pair.twin):
        side.head.weight.requires_grad_(True)
    for count in range(2):
        pair.engine(*feed(count, pair.rank)).backward()
        pair.engine.step()
        pair.plain_backward(count)
        pair.plain_step()


def freeze_later(pair: Pair) -> None:
    for side in (pair.model, pair.twin):
        side.blocks[1].requires_grad_(False)
    for count in range(2):
        pair.engine(*feed(count, pair.rank)).backward()
        pair.engine.step()
        pair.plain_backward(count)
        pair.plain_step()


def add_group_later(pair: Pair) -> None:
    extra = nn.Parameter(torch.ones(3))
    pair.engine.optimizer.add_param_group({"params": [extra], "lr": 0.1})
    pair.engine(*feed(0, pair.rank)).backward()
    pair.engine.step()
    pair.plain_backward(0)
    pair.plain_step()


def replace_a_module(pair: Pair) -> None:
    """A block exchanged for a new one, as adapters do, is neither trained nor known."""
    torch.manual_seed(1)
    fresh = nn.Linear(7, 7)
    for side in (pair.model, pair.twin):
        side.blocks[1] = copy.deepcopy(fresh)
    pair.plain.add_param_group({"params": list(pair.twin.blocks[1].parameters())})
    pair.engine(*feed(0, pair.rank)).backward()
    pair.engine.step()
    pair.plain_backward(0)
    pair.plain_step()
    with onecopy.gathered(pair.model):
        assert pair.model.blocks[1].weight.shape == (7, 7)
    if not torch.equal(pair.model.blocks[1].weight.detach(), fresh.weight.detach()):
        return
    raise AssertionError("the new block did not move and nobody said so")


def load_with_assign(pair: Pair) -> None:
    torch.manual_seed(2)
    other = Net()
    pair.model.load_state_dict(other.state_dict(), assign=True)
    pair.twin.load_state_dict(other.state_dict())
    pair.engine(*feed(0, pair.rank)).backward()
    pair.engine.step()
    pair.plain_backward(0)
    pair.plain_step()


def to_same_device(pair: Pair) -> None:
    """Harmless: the model is there already."""
    pair.model.to("cpu").float().requires_grad_(True)
    pair.model.head.weight.requires_grad_(False)
    call_module_itself(pair)


def to_double(pair: Pair) -> None:
    pair.model.double()
    x, y = feed(0, pair.rank)
    pair.engine(x.double(), y.double()).backward()
    pair.engine.step()
    pair.plain_backward(0)
    pair.plain_step()


def hook_on_parameter(pair: Pair) -> None:
    """A gradient hook that doubles, on a weight in the middle."""
    for side in (pair.model, pair.twin):
        side.blocks[1].weight.register_hook(lambda g: 2 * g)
    for count in range(2):
        pair.engine(*feed(count, pair.rank)).backward()
        pair.engine.step()
        pair.plain_backward(count)
        pair.plain_step()


def hook_after_accumulation(pair: Pair) -> None:
    """``register_post_accumulate_grad_hook`` sees the whole local gradient."""
    seen: dict[bool, Tensor] = {}
    for mine, side in ((True, pair.model), (False, pair.twin)):
        side.blocks[1].weight.register_post_accumulate_grad_hook(
            lambda p, mine=mine: seen.__setitem__(mine, p.grad.detach().clone())  # type: ignore[union-attr]
        )
    pair.engine(*feed(0, pair.rank)).backward()
    pair.twin(*feed(0, pair.rank)).backward()
    assert True in seen, "the hook did not run and nobody said so"
    assert torch.allclose(seen[True], seen[False], atol=1e-7), "the hook saw another gradient"
    pair.engine.step()
    pair.plain.zero_grad()
    pair.plain_backward(0)
    pair.plain_step()


def backward_to_some(pair: Pair) -> None:
    """``backward(inputs=...)`` fills the named gradients only."""
    chosen = [pair.model.blocks[0].weight, pair.model.blocks[2].bias]
    pair.engine(*feed(0, pair.rank)).backward(inputs=chosen)
    pair.engine.step()
    for other in range(pair.world):
        loss = pair.twin(*feed(0, other)) / pair.world
        loss.backward(inputs=[pair.twin.blocks[0].weight, pair.twin.blocks[2].bias])
    pair.plain_step()


def penalty_on_parameter_gradients(pair: Pair) -> None:
    """The loss holds the norm of a gradient with respect to a weight."""

    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        first = model(x, y)
        net = pair.model if model is pair.engine else model
        (slope,) = torch.autograd.grad(first, net.blocks[1].weight, create_graph=True)
        return first + 0.1 * slope.square().sum()

    loss(pair.engine, *feed(0, pair.rank)).backward()
    pair.engine.step()
    pair.plain_backward(0, loss)
    pair.plain_step()


def interrupted_backward(pair: Pair) -> None:
    """A hook raises in the middle of backward; the user catches it and goes on."""

    def stop(gradient: Tensor) -> None:
        raise ZeroDivisionError

    x, y = feed(0, pair.rank)
    x.requires_grad_().register_hook(stop)
    with pytest.raises(ZeroDivisionError):
        pair.engine(x, y).backward()
    try:
        pair.engine.step()
        raise AssertionError("a step with half a gradient")
    except OneCopyError:
        pair.engine.discard_gradients()
    for count in range(2):
        pair.engine(*feed(count, pair.rank)).backward()
        pair.engine.step()
        pair.plain_backward(count)
        pair.plain_step()


def edit_gradient_then_norm(pair: Pair) -> None:
    """A gradient set through the API is what the norm is of, and what is stepped."""
    pair.engine(*feed(0, pair.rank)).backward()
    pair.plain_backward(0)
    for side in (pair.model, pair.twin):
        for p in side.parameters():
            if p.requires_grad:
                value = torch.full(p.shape, 0.25)
                onecopy.set_full_grad(p, value) if side is pair.model else p.grad.copy_(value)  # type: ignore[union-attr,func-returns-value]
    pair.engine.step()
    count = sum(p.numel() for p in pair.twin.parameters() if p.requires_grad)
    assert pair.engine.grad_norm == pytest.approx(0.25 * count**0.5, rel=1e-6)
    pair.plain_step()


def read_grad(pair: Pair) -> None:
    """``p.grad`` between backward and step, as loggers read it: the averaged gradient or an error, not None."""
    pair.engine(*feed(0, pair.rank)).backward()
    pair.plain_backward(0)
    for p, q in zip(pair.model.parameters(), pair.twin.parameters(), strict=True):
        if q.grad is not None:
            assert p.grad is not None, "no gradient, and nobody said so"
            assert p.grad.shape == q.grad.shape
            assert torch.allclose(p.grad, q.grad, atol=1e-7), "another gradient than the averaged one"
    pair.engine.step()
    pair.plain_step()


HABITS: list[Habit] = [
    call_module_itself, step_the_optimizer_itself, unfreeze_later, freeze_later, add_group_later, replace_a_module,
    load_with_assign, to_same_device, to_double, hook_on_parameter, hook_after_accumulation, backward_to_some,
    penalty_on_parameter_gradients, interrupted_backward, edit_gradient_then_norm,
]  # fmt: skip
# Habits that must work, not merely be refused.
MUST_WORK = {
    call_module_itself, freeze_later, hook_on_parameter, interrupted_backward, edit_gradient_then_norm,
}  # fmt: skip
GRADIENT_HABITS: list[Habit] = [clip_by_hand, scale_grads_by_hand, read_grad]


def try_habits(rank: int, world: int, habits: list[Habit]) -> dict[str, str]:
    out = {}
    for habit in habits:
        for name, plan in every_plan().items():
            pair = Pair(plan, rank, world)
            try:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    habit(pair)
                gap = pair.gap()
                said = [str(w.message) for w in caught if "onecopy" in str(w.message)]
                right = "right" if gap <= 1e-6 else f"silently off by {gap}"
                out[f"{habit.__name__}, {name}"] = f"refused: {said[0]}" if said and gap > 1e-6 else right
            except OneCopyError as error:
                out[f"{habit.__name__}, {name}"] = f"refused: {error}"
            except (AttributeError, TypeError, RuntimeError) as error:
                out[f"{habit.__name__}, {name}"] = f"refused by torch: {type(error).__name__}: {error}"
            except AssertionError as error:
                out[f"{habit.__name__}, {name}"] = f"wrong: {error}"
            pair.engine.close()
    return out


@pytest.mark.parametrize("habit", HABITS, ids=lambda h: h.__name__)
def test_habits_are_right_or_refused(habit: Habit) -> None:
    for run in run_ranks(try_habits, 2, [habit]):
        wrong = {k: v for k, v in run.items() if not v.startswith(("right", "refused"))}
        assert not wrong, wrong
        if habit in MUST_WORK:
            assert run == dict.fromkeys(run, "right"), run


@pytest.mark.parametrize("habit", GRADIENT_HABITS, ids=lambda h: h.__name__)
def test_gradients_handled_by_hand_are_right_or_refused(habit: Habit) -> None:
    for run in run_ranks(try_habits, 2, [habit]):
        wrong = {k: v for k, v in run.items() if not v.startswith(("right", "refused"))}
        assert not wrong, wrong


# ----------------------------------------------------------------------------------------------------- unusual tensors


class SparseGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(9, 7, sparse=True)
        self.lin = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(self.emb(x)).square().mean()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.lin = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return (self.lin(x) * self.w).abs().square().mean()


def unusual(rank: int, world: int, kind: str) -> dict[str, str]:
    out = {}
    for name, plan in every_plan().items():
        torch.manual_seed(0)
        model = {"sparse": SparseGrad, "complex": Complex}[kind]()
        twin = copy.deepcopy(model)
        plain = sgd(twin.parameters())

        def data(other: int) -> Tensor:
            source = torch.Generator().manual_seed(other)
            return torch.randint(9, (4,), generator=source) if kind == "sparse" else torch.randn(4, 5, generator=source)

        try:
            engine = onecopy.initialize(model, plan, optimizer=sgd)
            for _ in range(2):
                engine(data(rank)).backward()
                engine.step()
                for other in range(world):
                    (twin(data(other)) / world).backward()
                plain.step()
                plain.zero_grad()
            with onecopy.gathered(model):
                pairs = zip(model.parameters(), twin.parameters(), strict=True)
                gap = max((p - q).abs().max().item() for p, q in pairs)
            out[name] = "right" if gap < 1e-6 else f"silently off by {gap}"
            engine.close()
        except (OneCopyError, RuntimeError, NotImplementedError) as error:
            out[name] = f"refused: {error}"
    return out


@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_unusual_tensors_are_right_or_refused(kind: str) -> None:
    for run in run_ranks(unusual, 2, kind):
        wrong = {k: v for k, v in run.items() if not v.startswith(("right", "refused"))}
        assert not wrong, wrong


class Nested(nn.Module):
    """Asserts that floating inputs arrive in the compute dtype wherever they hide, and integers as they were."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(7, 7)

    def forward(self, batch: dict[str, Any], *rest: Any, extra: Any = None) -> Tensor:
        assert batch["x"].dtype == batch["deep"][0].dtype == rest[0].dtype == extra["z"].dtype == self.lin.weight.dtype
        assert batch["ids"].dtype == torch.int64
        assert batch["text"] == "words"
        return self.lin(batch["x"] + batch["deep"][0] + rest[0] + extra["z"]).float().square().mean()


def cast_everywhere(rank: int, world: int, dtype: str) -> None:
    for name, plan in every_plan(dtype=dtype).items():
        engine = onecopy.initialize(Nested(), plan, optimizer=sgd)
        x = torch.randn(2, 7)
        batch = {"x": x, "deep": [x, (x,)], "ids": torch.arange(3), "text": "words"}
        engine.backward(engine(batch, x, extra={"z": x}))
        engine.step()
        assert batch["x"].dtype == torch.float32, f"{name}: the caller's own batch was changed"
        engine.close()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_inputs_are_cast_wherever_they_are(dtype: str) -> None:
    run_ranks(cast_everywhere, 2, dtype)


def integer_bytes(rank: int, world: int) -> tuple[int, bool]:
    """A frozen million bytes beside a small adapter: cut, never given a gradient, gathered bit for bit."""
    torch.manual_seed(0)
    model = models.Toy()
    model.packed = nn.Parameter(torch.randint(0, 255, (1000, 1000), dtype=torch.uint8), requires_grad=False)
    truth = model.packed.detach().clone()
    engine = onecopy.initialize(model, onecopy.stage(3), optimizer=sgd)
    engine(torch.ones(1)).backward()
    engine.step()
    size = engine.measured()["resident"]["device"]["parameter"]
    with onecopy.gathered(model):
        same = torch.equal(model.packed, truth)
    engine.close()
    return size, same


def test_integer_weights_are_cut_and_come_back() -> None:
    for size, same in run_ranks(integer_bytes, 2):
        assert size <= 500_000 + 16
        assert same
