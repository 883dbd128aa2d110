"""Several models in one process, integer base weights under adapters, and experts on every rank."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onecopy
import onecopy.deepspeed as deepspeed
from onecopy.errors import EngineError, OneCopyError
from onecopy.plan.plan import LossScale, Precision
from tests.ranks.cases.everywhere import everywhere, json_plans
from tests.ranks.checkpoints import SMALL
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import largest_gap, sgd

pytestmark = pytest.mark.ranks


def feed(count: int, rank: int, width: int = 7) -> Tensor:
    return torch.randn(4, width, generator=torch.Generator().manual_seed(100 * count + rank))


# --------------------------------------------------------------------------------- row 78: several models in one process


class Policy(nn.Module):
    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.body:
            x = torch.tanh(layer(x))
        return self.head(x)


def preference(policy: Any, reference: Any, x: Tensor, grad: bool) -> Tensor:
    """A likelihood and a distance to the reference, as preference training has them; ``grad``: no ``no_grad`` around it."""
    if grad:
        theirs = reference(x)
    else:
        with torch.no_grad():
            theirs = reference(x)
    ours = policy(x).log_softmax(-1)
    return -ours[:, 0].mean() + 0.5 * F.kl_div(ours, theirs.log_softmax(-1), log_target=True, reduction="batchmean")


def with_reference(rank: int, world: int, how: str) -> dict[str, float]:
    """``how``: who makes the reference a copy and when; the policy's gap to plain torch under all pairs of plans."""
    out = {}
    plans = everywhere(world)
    pairs = [(name, name) for name in plans] + [("stage 3", "stage 2"), ("stage 1", "stage 3"), ("stage 0", "stage 3")]
    for mine, theirs in pairs:
        torch.manual_seed(0)
        model = Policy()
        twin, twin_reference = copy.deepcopy(model), copy.deepcopy(model).requires_grad_(False)
        if how == "frozen copy first":
            other = copy.deepcopy(model).requires_grad_(False)
            policy = onecopy.initialize(model, plans[mine], optimizer=sgd)
        elif how == "copy inside gathered":
            policy = onecopy.initialize(model, plans[mine], optimizer=sgd)
            with onecopy.gathered(model):
                other = copy.deepcopy(model).requires_grad_(False)
        else:
            other = copy.deepcopy(model)  # not frozen: only its engine has no optimizer
            policy = onecopy.initialize(model, plans[mine], optimizer=sgd)
        reference = onecopy.initialize(other, plans[theirs])
        plain = sgd(twin.parameters())
        grad = how == "frozen copy first"
        for count in range(3):
            preference(policy, reference, feed(count, rank), grad).backward()
            policy.step()
            for peer in range(world):
                (preference(twin, twin_reference, feed(count, peer), grad) / world).backward()
            plain.step()
            plain.zero_grad()
        assert largest_gap(other, twin_reference) == 0, "the reference moved"
        out[f"{mine} beside {theirs}"] = largest_gap(model, twin)
        policy.close(), reference.close()
    return out


@pytest.mark.parametrize(
    ("world", "how"), [(2, "frozen copy first"), (2, "copy inside gathered"), (3, "unfrozen copy first")]
)
def test_a_policy_beside_its_reference(world: int, how: str) -> None:
    """A reference copied from the policy, before it is sharded or from its gathered weights, in an engine without
    an optimizer, at the same stage or another: the policy is plain torch's and the reference keeps its bits. (row 78)"""
    for run in run_ranks(with_reference, world, how):
        assert all(gap <= 1e-6 for gap in run.values()), run


def deepcopied(rank: int, world: int) -> dict[str, str]:
    out = {}
    for name, plan in everywhere(world).items():
        torch.manual_seed(0)
        model = Policy()
        truth = copy.deepcopy(model)
        engine = onecopy.initialize(model, plan, optimizer=sgd)
        for what in ("module", "engine"):
            try:
                made = copy.deepcopy(engine.module if what == "module" else engine)
            except OneCopyError as error:
                out[f"{name}, {what}"] = "explained" if "gathered" in str(error) or "copy" in str(error) else str(error)
                continue
            except Exception as error:
                out[f"{name}, {what}"] = f"{type(error).__name__}: {error}"
                continue
            bare = made if what == "module" else made.module
            whole = all(torch.equal(p.detach(), q) for p, q in zip(bare.parameters(), truth.parameters(), strict=True))
            out[f"{name}, {what}"] = "copied" if whole else "copied without its values"
        # The copy must leave the first one alone.
        engine(feed(0, rank)).square().mean().backward()
        engine.step()
        engine.close()
    return out


def test_a_deep_copy_is_whole_or_explained() -> None:
    """``copy.deepcopy`` of a sharded model or of its engine: the whole values, or an error that says how. (row 78)"""
    for run in run_ranks(deepcopied, 2):
        assert set(run.values()) <= {"copied", "explained"}, run


class Critic(nn.Module):
    """The other trained model: what the policy says is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 6), nn.Linear(6, 1)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](torch.tanh(self.layers[0](x)))


def joint(first: Any, second: Any, x: Tensor, order: str) -> Tensor:
    if order == "one feeds the other":
        return second(first(x)).float().square().mean()
    if order == "side by side":
        return first(x).float().square().mean() + second(x[:, :5]).float().square().mean()
    said = second(x[:, :5])  # called in the other order, and twice
    return (first(x).float() * said.float()).mean() + second(first(x)).float().square().mean()


def two_trained(rank: int, world: int, order: str) -> dict[str, float]:
    out = {}
    plans = everywhere(world)
    pairs = [(name, name) for name in plans] + [("stage 3", "stage 1"), ("stage 0", "stage 3"), ("stage 2", "stage 3 held")]
    for one, two in pairs:
        torch.manual_seed(0)
        models = Policy(), Critic()
        twins = tuple(copy.deepcopy(model) for model in models)
        engines = [onecopy.initialize(m, plans[name], optimizer=sgd) for m, name in zip(models, (one, two), strict=True)]
        plain = [sgd(twin.parameters()) for twin in twins]
        for count in range(3):
            joint(*engines, feed(count, rank), order).backward()
            for engine in engines if count % 2 else reversed(engines):
                assert engine.step()
            for peer in range(world):
                (joint(*twins, feed(count, peer), order) / world).backward()
            for optimizer in plain:
                optimizer.step()
                optimizer.zero_grad()
        out[f"{one} and {two}"] = max(largest_gap(m, t) for m, t in zip(models, twins, strict=True))
        for engine in engines:
            engine.close()
    return out


@pytest.mark.parametrize(
    ("world", "order"), [(2, "one feeds the other"), (3, "side by side"), (2, "both, twice"), (4, "both, twice")]
)
def test_two_trained_models_in_one_loss(world: int, order: str) -> None:
    """Two trainable engines in one loss, side by side, one behind the other, or called twice, under the same plan
    or two: one ``loss.backward()`` gives both the gradients of plain torch. (row 78)"""
    for run in run_ranks(two_trained, world, order):
        assert all(gap <= 1e-6 for gap in run.values()), run


class Scalar(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((4,), value))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def scaled_together(rank: int, world: int, who: str) -> dict[str, Any]:
    """Two fp16 engines with different loss scales in one loss, whose gradient is exact in fp16."""
    out = {}
    for name in everywhere(world):
        engines = []
        for value, scale in ((1.0, 8.0), (2.0, 32.0)):
            precision = Precision("float16", loss_scale=LossScale(initial=scale))
            plan = everywhere(world, precision=precision)[name]
            engines.append(onecopy.initialize(Scalar(value), plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.5)))
        x = torch.ones(4)
        loss = engines[0](x).float().sum() * 0.5 + engines[1](x).float().sum() * 0.25
        try:
            if who == "loss.backward":
                loss.backward()
            else:
                engines[0].backward(loss)
            for engine in engines:
                engine.step()
            out[name] = [onecopy.full_param(engine.module.w)[0].item() for engine in engines]
        except EngineError as error:
            out[name] = str(error)
        for engine in engines:
            engine.close()
    return out


@pytest.mark.parametrize("who", ["loss.backward", "first engine's backward"])
def test_two_loss_scales_in_one_loss(who: str) -> None:
    """Gradients 0.5 and 0.25, rate 0.5, loss scales 8 and 32: the weights become 0.75 and 1.875, whoever calls
    backward; or it is refused. The second model must not be scaled by both. (row 78)"""
    for run in run_ranks(scaled_together, 2, who):
        for name, got in run.items():
            assert isinstance(got, str) or got == [0.75, 1.875], f"{name}: {got}"


def by_json(rank: int, world: int) -> dict[str, float]:
    out = {}
    sgd_json = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}}
    trained, frozen = json_plans(world, optimizer=sgd_json), json_plans(world)
    for mine in trained:
        for theirs in ("json 0", "json 3"):
            torch.manual_seed(0)
            model = Policy()
            twin, twin_reference = copy.deepcopy(model), copy.deepcopy(model)
            reference, nothing, *_ = deepspeed.initialize(model=copy.deepcopy(model), config=frozen[theirs])
            assert nothing is None
            reference.eval()
            policy, *_ = deepspeed.initialize(model=model, config=trained[mine])
            plain = sgd(twin.parameters())
            for count in range(3):
                policy.backward(preference(policy, reference, feed(count, rank), False))
                policy.step()
                for peer in range(world):
                    (preference(twin, twin_reference, feed(count, peer), False) / world).backward()
                plain.step()
                plain.zero_grad()
            out[f"{mine} beside {theirs}"] = largest_gap(model, twin)
            policy.destroy(), reference.destroy()
    return out


def test_a_policy_beside_its_reference_by_json() -> None:
    """The reference's JSON has a stage from 0 to 3 and no optimizer, which is no error. (row 78)"""
    for run in run_ranks(by_json, 2):
        assert all(gap <= 1e-6 for gap in run.values()), run


# ---------------------------------------------------------------------------- row 80: packed base weights under adapters


class Packed(nn.Module):
    """Two 4-bit numbers in each byte of a frozen weight, a scale for each row, and an adapter beside them."""

    def __init__(self, width: int = 8, out: int = 6, dtype: torch.dtype = torch.uint8) -> None:
        super().__init__()
        top = 2 if dtype is torch.bool else 100
        self.packed = nn.Parameter(torch.randint(0, top, (out, width // 2)).to(dtype), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(out), requires_grad=False)
        self.A = nn.Parameter(torch.randn(3, width) / 4)
        self.B = nn.Parameter(torch.zeros(out, 3))

    def forward(self, x: Tensor) -> Tensor:
        whole = self.packed.to(torch.int64)
        unpacked = torch.stack([whole & 15, whole >> 4], -1).flatten(1).to(x.dtype) - 8
        return F.linear(x, unpacked * self.scale.unsqueeze(1) / 8) + x @ self.A.t() @ self.B.t()


class TwoPacked(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.uint8) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Packed(8, 6, dtype), Packed(6, 5, dtype)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](torch.tanh(self.layers[0](x))).float().square().mean()


def packed_run(rank: int, world: int, folder: str, dtype: torch.dtype) -> list[str]:
    wrong = []
    build = lambda: TwoPacked(dtype)  # noqa: E731
    torch.manual_seed(0)
    twin = build()
    plain = sgd([p for p in twin.parameters() if p.requires_grad])
    for count in range(3):
        for peer in range(world):
            (twin(feed(count, peer, 8)) / world).backward()
        plain.step()
        plain.zero_grad()
    truth = twin.state_dict()
    options = {"plain": {}, "bf16": {"dtype": "bf16"}}
    for kind, extra in options.items():
        for name, plan in everywhere(world, **extra).items():
            where = f"{kind} {name}"
            torch.manual_seed(0)
            with onecopy.deferred():
                model = build()
            engine = onecopy.initialize(model, plan, optimizer=sgd)
            for count in range(3):
                engine(feed(count, rank, 8)).backward()
                assert engine.step()
            state = engine.full_state_dict()
            for key, value in truth.items():
                if "packed" in key:
                    good = state[key].dtype == dtype and torch.equal(state[key], value)
                else:
                    good = (state[key].float() - value).abs().max() <= (1e-6 if kind == "plain" else 5e-2)
                wrong += [] if good else [f"{where}: {key} is off"]
            grads = [p.grad is not None or p.requires_grad for key, p in model.named_parameters() if "packed" in key]
            trained = {key for group in engine.optimizer.param_groups for key in group["params"]}
            wrong += [f"{where}: an integer weight is trained"] if any(grads) or len(trained) > 4 else []
            wrong += [f"{where}: a moment of integers"] if any(not p.is_floating_point() for p in trained) else []
            build().load_state_dict(state, strict=True)
            engine.save(f"{folder}/{where}")
            engine.close()
            torch.manual_seed(9)
            second = onecopy.initialize(build(), onecopy.stage(3 if "stage 3" not in name else 1, **extra), optimizer=sgd)
            second.load(f"{folder}/{where}")
            again = second.full_state_dict()
            wrong += [f"{where}: {key} differs after loading" for key in state if not torch.equal(state[key], again[key])]
            second.close()
    return wrong


@pytest.mark.parametrize(("world", "dtype"), [(2, torch.uint8), (3, torch.int8), (4, torch.uint8), (2, torch.bool)])
def test_packed_weights_train_adapters_and_keep_their_bits(tmp_path: Path, world: int, dtype: torch.dtype) -> None:
    """Born sharded, integer weights unpacked in the forward pass: adapters are plain torch's, the integers keep
    dtype and bits, get no gradient and no moment, and go through a strict state dict and a checkpoint to another stage.
    (row 80)"""
    for wrong in run_ranks(packed_run, world, str(tmp_path), dtype):
        assert not wrong, wrong


def own_bytes() -> int:
    """Bytes of uint8 tensors that are alive here, each storage once."""
    found = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor) and item.dtype == torch.uint8 and item.device.type == "cpu":
            with torch._C.DisableTorchFunctionSubclass():
                storage = item.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def packed_bytes(rank: int, world: int) -> list[int]:
    before = own_bytes()
    with onecopy.deferred():
        model = nn.Sequential(Packed(2000, 1000), nn.Linear(1000, 4).requires_grad_(False))
    gc.collect()
    homes = [p.__dict__["_onecopy_home"].local()[0] for p in model.parameters() if "_onecopy_home" in p.__dict__]
    born = sum(tensor.numel() * tensor.element_size() for tensor in homes if tensor.dtype == torch.uint8)
    alive = own_bytes() - before
    engine = onecopy.initialize(model, onecopy.stage(3), optimizer=sgd)
    engine(torch.ones(1, 2000)).sum().backward()
    engine.step()
    device = engine.measured()["resident"]["device"]
    floats = sum(4 * -(-p.numel() // world) for p in model.parameters() if p.is_floating_point())
    small = [device[kind] for kind in ("gradient", "master", "moments")]
    engine.close()
    return [born, alive, device["parameter"] - floats, max(small)]


@pytest.mark.parametrize("world", [2, 4])
def test_a_million_packed_bytes_are_cut(world: int) -> None:
    """1 M of uint8 on two ranks: 0.5 MB on each from the moment it is built, and no more with an optimizer; what
    gradients and moments take is that of the adapters. (row 80)"""
    share = 1_000_000 // world
    for born, alive, resident, trained in run_ranks(packed_bytes, world):
        assert born == share
        assert alive <= share + 4096, "the whole weight is alive somewhere"
        assert resident <= share + 4096
        assert trained <= 4 * 9000 + 4096


# ----------------------------------------------------------------------------------------- row 81: experts on every rank


class Experts(nn.Module):
    """Four experts behind a router of its own; ``skip``: an expert without tokens is not called."""

    def __init__(self, skip: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(6, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)) for _ in range(4))
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        best = scores.argmax(-1)
        out = torch.zeros_like(x)
        for at, expert in enumerate(self.experts):
            mine = best == at
            if self.skip and not mine.any():
                continue
            out = out.index_put((mine.nonzero()[:, 0],), expert(x[mine]) * scores[mine, at : at + 1])
        return (x + out).square().mean()


def expert_run(rank: int, world: int, skip: bool) -> dict[str, list[float]]:
    """(largest gap of a gradient, of a weight after three steps) for each plan and JSON."""
    out = {}

    def beside(engine: Any, model: nn.Module) -> list[float]:
        torch.manual_seed(0)
        twin = Experts(skip)
        plain = sgd(twin.parameters())
        worst = 0.0
        for count in range(3):
            for peer in range(world):
                (twin(feed(count, peer, 6)) / world).backward()
            engine.backward(engine(feed(count, rank, 6)))
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                if count == 1:
                    continue  # the weights after three steps tell of it
                found = onecopy.full_grad(p)
                assert found is not None
                worst = max(worst, (found - (q.grad if q.grad is not None else 0)).abs().max().item())
            engine.step()
            plain.step()
            plain.zero_grad()
        return [worst, largest_gap(model, twin)]

    # Where parameters are cut and an expert may be skipped, one unit for all: whether units may differ is another matter.
    for name, plan in everywhere(world, units=onecopy.Units() if skip else SMALL).items():
        torch.manual_seed(0)
        model = Experts(skip)
        engine = onecopy.initialize(model, plan, optimizer=sgd)
        out[name] = beside(engine, model)
        engine.close()
    optimizer = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}}
    for name, setup in json_plans(world, optimizer=optimizer).items():
        torch.manual_seed(0)
        model = Experts(skip)
        other, *_ = deepspeed.initialize(model=model, config=setup)
        out[name] = beside(other, model)
        other.destroy()
    return out


@pytest.mark.parametrize(("world", "skip"), [(4, False), (3, True)])
def test_expert_gradients_on_data_parallel_ranks(world: int, skip: bool) -> None:
    """Four experts, all on each of four ranks: gradients and updates are those of one process on all tokens, not
    divided by fewer or more. Layouts that spread experts over ranks are for later. Adds three ranks, hybrid
    sharding, and experts without tokens. (row 81)"""
    for run in run_ranks(expert_run, world, skip):
        assert all(max(gaps) <= 1e-6 for gaps in run.values()), run


def routed(rank: int) -> list[int]:
    """How the tokens of the case above fall on the experts; a case in which all go to one would show nothing."""
    torch.manual_seed(0)
    router = Experts().router
    counts = torch.zeros(4, dtype=torch.int64)
    for count in range(3):
        counts += torch.bincount(router(feed(count, rank, 6)).argmax(-1), minlength=4)
    return counts.tolist()


def test_the_tokens_do_spread_over_the_experts() -> None:
    """Each expert gets tokens from some rank. (row 81)"""
    counts = [routed(rank) for rank in range(3)]
    assert all(sum(column) > 0 for column in zip(*counts, strict=True)), counts
