"""Construction: sharded from birth or on the meta device, bit-equal to the whole model, in a rank's share of memory."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onecopy
from onecopy.errors import OneCopyError
from tests.ranks import harness, models
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import every_plan, sgd
from tests.ranks.test_ledger import live_bytes

pytestmark = pytest.mark.ranks


class Zoo(nn.Module):
    """Modules whose constructors do more than one in-place draw."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 6, padding_idx=2)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.rnn = nn.GRU(6, 6, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(6)
        self.bilinear = nn.Bilinear(6, 6, 3)
        self.act = nn.PReLU()
        self.free = nn.Parameter(torch.randn(3, 5))
        self.zero = nn.Parameter(torch.zeros(()))
        self.head = nn.Linear(6, 11)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.constant_(self.head.bias, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        h = self.norm(self.conv(h.transpose(1, 2))).transpose(1, 2)
        h, _ = self.rnn(h)
        h = self.act(self.attention(h, h, h)[0])
        return self.head(h).logsumexp(-1).mean() + self.bilinear(h, h).square().mean() + self.free.sum() * self.zero


class Customary(nn.Module):
    """What transformer code does in ``__init__``: tie, apply an init function, scale by depth, copy a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.emb.weight
        self.apply(self.init)
        for name, p in self.named_parameters():
            if name.startswith("blocks") and name.endswith("weight"):
                nn.init.normal_(p, std=0.02 / 6**0.5)
        with torch.no_grad():
            self.blocks[0].bias.fill_(0.5)
            self.emb.weight.data.uniform_(-0.1, 0.1)

    @staticmethod
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        for block in self.blocks:
            h = torch.tanh(block(h))
        return self.head(h).square().mean()


BUILDERS: dict[str, Any] = {
    "gpt": models.GPT,
    "gpt untied": lambda: models.GPT(tied=False),
    "zoo": Zoo,
    "customary": Customary,
    "exact": models.Exact,
    "transformer": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))),
    "spectral norm": lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))),
    "orthogonal": lambda: (layer := nn.Linear(6, 6), nn.init.orthogonal_(layer.weight))[0],
    "scaled by hand": lambda: (layer := nn.Linear(6, 6), layer.weight.data.mul_(0.5))[0],
}
SURE = ("gpt", "gpt untied", "zoo", "customary", "exact")


def build_deferred(rank: int, world: int, names: list[str]) -> dict[str, str]:
    """Build each model whole and deferred from the same seed; compare all values and the random state afterwards."""
    out = {}
    for name in names:
        torch.manual_seed(7)
        whole = BUILDERS[name]()
        random = torch.rand(1)
        try:
            torch.manual_seed(7)
            with onecopy.deferred():
                model = BUILDERS[name]()
            random_deferred = torch.rand(1)
            plan = onecopy.stage(3, units=onecopy.Units(min_numel=0))
            shapes = [tuple(p.shape) for p in model.parameters()]
            assert shapes == [tuple(p.shape) for p in whole.parameters()]
            engine = onecopy.initialize(model, plan, optimizer=sgd)
            full = engine.full_state_dict()
            assert list(full) == list(whole.state_dict()), set(full) ^ set(whole.state_dict())
            wrong = [k for k, v in whole.state_dict().items() if not torch.equal(v, full[k])]
            out[name] = f"wrong: {wrong}" if wrong else "right"
            out[name] += "" if torch.equal(random, random_deferred) else ", random state differs"
            engine.close()
        except OneCopyError as error:
            out[name] = f"refused: {error}"
    return out


def test_deferred_models_are_bit_equal() -> None:
    for said in run_ranks(build_deferred, 2, list(SURE)):
        assert said == dict.fromkeys(SURE, "right")


def test_deferred_models_on_three_ranks() -> None:
    for said in run_ranks(build_deferred, 3, list(SURE)):
        assert said == dict.fromkeys(SURE, "right")


def test_constructors_that_read_are_right_or_refused() -> None:
    for said in run_ranks(build_deferred, 2, [name for name in BUILDERS if name not in SURE]):
        assert not {k: v for k, v in said.items() if v != "right" and not v.startswith("refused")}, said


def train_deferred(rank: int, world: int) -> dict[str, Any]:
    out = {}
    for way in ("whole", "deferred", "meta"):
        for name, plan in every_plan(accumulation=2, clip=0.5).items():
            torch.manual_seed(0)
            if way == "deferred":
                with onecopy.deferred():
                    model: nn.Module = models.GPT(tied=False)
            elif way == "meta":
                with torch.device("meta"):
                    model = models.GPT(tied=False)
                torch.manual_seed(0)
            else:
                model = models.GPT(tied=False)
            engine = onecopy.initialize(model, plan, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3))
            assert not any(p.is_meta for p in model.parameters())
            losses = []
            for count in range(4):
                loss = engine(*models.batch("gpt", count, 0, rank))
                loss.backward()
                engine.step()
                losses.append(loss.item())
            out[f"{way} {name}"] = losses, {n: onecopy.full_param(p).clone() for n, p in model.named_parameters()}
            engine.close()
    return out


def test_deferred_and_meta_models_train_the_same_weights() -> None:
    for run in run_ranks(train_deferred, 2):
        losses, weights = run["whole stage 0"]
        assert len(set(losses)) > 1
        for name, (other_losses, other) in run.items():
            assert other.keys() == weights.keys(), name
            unequal = [k for k, v in weights.items() if not torch.allclose(v, other[k], atol=1e-7, rtol=0)]
            assert not unequal, f"{name}: {unequal}"
            assert other_losses == pytest.approx(losses, abs=1e-6), name


def meta_run(rank: int, world: int) -> None:
    """Meta tensors with buffers, and a parameter no ``reset_parameters`` makes: refused by name, never garbage."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    torch.manual_seed(3)
    engine = onecopy.initialize(model, onecopy.stage(3), optimizer=sgd)
    torch.manual_seed(3)
    whole = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    full = engine.full_state_dict()
    for key, value in whole.state_dict().items():
        assert torch.equal(full[key], value), key
    engine(torch.randn(3, 4)).sum().backward()
    engine.step()
    engine.close()
    with torch.device("meta"):
        orphan = models.Toy()
    with pytest.raises(OneCopyError, match=r"\bw\b.*(meta|reset_parameters)|(meta|reset_parameters).*\bw\b"):
        onecopy.initialize(orphan, onecopy.stage(3), optimizer=sgd)


def test_meta_models() -> None:
    run_ranks(meta_run, 2)


LAYERS = 16


class Wide(nn.Module):
    """64 MB in sixteen equal layers."""

    LAYER = 1024 * 1024 * 4

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def high_water() -> int:
    """Highest resident bytes of this process since the last ``clear_high_water``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM")


def clear_high_water() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def memory_run(rank: int, world: int, how: str) -> tuple[int, int, int]:
    """Live bytes after construction and after initialize, and how far resident memory rose."""
    for place in ("cpu", "meta"):  # first uses import things, which would be counted as the model's
        with torch.device(place), onecopy.deferred():
            small = nn.Linear(4, 4)
        onecopy.initialize(small, onecopy.stage(3)).close()
    gc.collect()
    start, usable = live_bytes(), clear_high_water()
    resident = high_water()
    if how == "deferred":
        with onecopy.deferred():
            model: nn.Module = Wide()
    elif how == "meta":
        with torch.device("meta"):
            model = Wide()
    else:
        model = Wide()
    built = live_bytes() - start
    engine = onecopy.initialize(model, onecopy.stage(3))
    # Beside the weights: the exchange buffers of both ranks, sized by a unit, and the other ranks' shards, which are mapped.
    predicted = engine.predicted()
    mapped = 2 * predicted["peak"]["device"].get("exchange buffer", 0)
    mapped += (world - 1) * predicted["resident"]["device"]["parameter"]
    ready = live_bytes() - start - mapped
    risen = high_water() - resident if usable else 0
    engine.close()
    return built, ready, risen


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs /proc")
def test_construction_takes_a_ranks_share() -> None:
    harness._workers().close()  # new processes: what malloc kept of earlier models would blur the high-water mark
    whole = LAYERS * Wide.LAYER
    for built, ready, risen in run_ranks(memory_run, 2, "deferred"):
        assert built <= whole // 2 + Wide.LAYER
        assert ready <= whole // 2 + Wide.LAYER
        assert risen <= whole // 2 + 7 * Wide.LAYER, f"resident memory rose by {risen / Wide.LAYER:.1f} layers"
    for built, ready, risen in run_ranks(memory_run, 2, "meta"):
        assert built <= 4096
        assert ready <= whole // 2 + Wide.LAYER
        assert risen <= whole // 2 + 7 * Wide.LAYER, f"resident memory rose by {risen / Wide.LAYER:.1f} layers"
    assert run_ranks(memory_run, 2, "whole")[0][0] >= whole, "the measure sees a whole model"
    assert all(ready <= whole // 2 + 4096 for _, ready, _ in run_ranks(memory_run, 2, "whole"))


def seeds_differ(rank: int, world: int, how: str) -> dict[str, str]:
    """Every rank has its own seed: all ranks end with rank 0's weights and buffers."""
    out = {}
    for name, plan in every_plan().items():
        torch.manual_seed(rank)
        try:
            if how == "deferred":
                with onecopy.deferred():
                    model = models.GPT()
            else:
                model = models.GPT()
            engine = onecopy.initialize(model, plan, optimizer=sgd)
        except OneCopyError as error:
            out[name] = f"refused: {error}"
            continue
        torch.manual_seed(0)
        truth = models.GPT().state_dict()
        full = engine.full_state_dict()
        out[name] = "rank 0's" if all(torch.equal(truth[k], full[k]) for k in truth) else "mixed"
        engine.close()
    return out


@pytest.mark.parametrize("how", ["whole", "deferred"])
def test_ranks_with_their_own_seeds(how: str) -> None:
    for said in run_ranks(seeds_differ, 2, how):
        assert not [v for v in said.values() if v != "rank 0's" and not v.startswith("refused")], said
        assert how == "deferred" or set(said.values()) == {"rank 0's"}


def rank0_loads(rank: int, world: int) -> dict[str, str]:
    """Rank 0 has real weights, the others meta tensors: all get rank 0's values, persistent or not."""
    out = {}
    for name, plan in every_plan().items():
        with torch.device("cpu" if rank == 0 else "meta"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 4))
            model.register_buffer("kept", torch.arange(8.0))
            model.register_buffer("lost", torch.arange(8), persistent=False)
        try:
            engine = onecopy.initialize(model, plan, optimizer=sgd)
        except OneCopyError as error:
            out[name] = f"refused: {type(error).__name__}"
            continue
        torch.manual_seed(0)
        truth = nn.Linear(4, 4)
        right = torch.equal(onecopy.full_param(model[0].weight), truth.weight.detach())
        right &= torch.equal(model.kept, torch.arange(8.0)) and torch.equal(model.lost, torch.arange(8))
        out[name] = "right" if right else "garbage"
        engine.close()
    return out


def test_rank_0_loads_and_the_others_are_on_meta() -> None:
    for said in run_ranks(rank0_loads, 2):
        assert set(said.values()) <= {"right", "refused: EngineError", "refused: RankMismatchError"}, said


def deferred_at(rank: int, world: int) -> None:
    """Before the process group exists, the environment's world size counts; a size-1 world is quiet."""
    with onecopy.deferred():
        model = Wide()
    local = live_bytes()
    engine = onecopy.initialize(model, onecopy.stage(3))
    assert local <= LAYERS * Wide.LAYER // world + 2 * Wide.LAYER, f"{local} bytes on rank {rank}"
    assert world == 1 or torch.distributed.get_world_size() == world
    engine.close()


def test_deferred_before_the_process_group() -> None:
    run_ranks(deferred_at, 2, init_group=False)
    run_ranks(deferred_at, 1, init_group=False)


def engine_starts_group(rank: int, world: int) -> int:
    engine = onecopy.initialize(models.build("even"), onecopy.stage(2), optimizer=sgd)
    engine(*models.batch("even", 0, 0, rank)).backward()
    engine.step()
    size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    engine.close()
    return size


def test_initialize_starts_the_group() -> None:
    assert run_ranks(engine_starts_group, 2, init_group=False) == [2, 2]


def different_models(rank: int, world: int, what: str) -> str:
    """Ranks that disagree get the same clear error within seconds."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(4, 5 if what == "shape" and rank else 4)
    if what == "dtype" and rank:
        model = model.bfloat16()
    if what == "names":
        model = nn.ModuleDict({f"part{rank}": model})
    if what == "frozen" and rank:
        model.weight.requires_grad_(False)
    plan = onecopy.stage(1 + rank if what == "stage" else 2, clip=1.0 + rank if what == "clip" else None)
    if what == "accumulation":
        plan = onecopy.stage(2, accumulation=1 + rank)
    rate = 0.1 + rank if what == "lr" else 0.1
    try:
        onecopy.initialize(model, plan, optimizer=lambda params: torch.optim.SGD(params, lr=rate))
    except OneCopyError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.parametrize("what", ["shape", "dtype", "names", "frozen", "stage", "clip", "accumulation", "lr"])
def test_ranks_that_disagree(what: str) -> None:
    said = run_ranks(different_models, 2, what)
    assert all(text.startswith(("RankMismatchError", "PlanError")) for text in said), said
