"""What frozen weights cost, how often units are gathered, nothing that grows, and a whole cycle on the CPU."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onecopy
from onecopy.deepspeed import utils
from tests.ranks import models
from tests.ranks.cases.doors import adamw, doors, each_door, feed7, full_weights, truth
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import every_plan, largest_gap
from tests.ranks.test_lifetime import live_tensors

pytestmark = pytest.mark.ranks

# -------------------------------------------------------------------------------------------------------- nothing grows


def use_everything(engine: Any, rank: int, folder: str) -> None:
    """Two steps, and every call that reads, writes, saves or loads whole values."""
    params = [p for p in engine.module.parameters() if p.requires_grad]
    for count in range(2):
        engine(*feed7(count, rank)).backward()
        gradient = onecopy.full_grad(params[0])
        assert gradient is not None
        onecopy.set_full_grad(params[0], gradient)
        engine.step()
        utils.safe_set_full_fp32_param(params[1], onecopy.full_param(params[1]))
        moments = onecopy.full_state(params[0], "exp_avg")
        assert moments is not None
        onecopy.set_full_state(params[0], "exp_avg", moments)
    with torch.no_grad():
        engine(*feed7(9, rank))
    with onecopy.gathered(engine.module, write_rank=0):
        pass
    engine.full_state_dict(rank0_only=True)
    engine.save(folder, tag="only", client_state={"step": engine.global_steps})
    engine.load(folder)


def grows(counts: list[int]) -> bool:
    """Do counts of live tensors rise by one or more each time? Up and down is no growth: a thread of the process group
    may not have let go of its last tensors when they are counted."""
    return min(counts[-3:]) > max(counts[:2])


def steady(rank: int, world: int, folder: str) -> dict[str, list[int]]:
    """Live tensors after each of several rounds of everything, once things have warmed up."""
    out = {}
    for number, (name, door) in enumerate(each_door(world, dtype="bf16")):
        if name not in ("stage 0", "stage 2", "stage 3", "hybrid 3", "json 1", "json 3"):
            continue
        engine = door.open(Typed(), adamw)
        counts = []
        for _ in range(6):
            use_everything(engine, rank, f"{folder}/{number}")
            counts.append(live_tensors())
        out[name] = counts[1:]
        engine.close()
    return out


class Typed(nn.Module):
    """An MLP with a frozen layer and a buffer, whose inputs are brought to its weights' dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))
        self.layers[2].requires_grad_(False)
        self.register_buffer("shift", torch.arange(7.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.to(self.shift.dtype)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss((x + self.shift).float(), y.float())


@pytest.mark.long
def test_reading_writing_saving_and_loading_leave_no_tensors(tmp_path: Path) -> None:
    """Rounds of steps, setters, gathers, saves and loads: the number of live tensors stays the same (row 69)."""
    for run in run_ranks(steady, 2, str(tmp_path)):
        for name, counts in run.items():
            assert not grows(counts), f"{name}: live tensors {counts}"


def dropped(rank: int, world: int) -> dict[str, list[int]]:
    """Five engines one after the other, made by DeepSpeed names, on hybrid groups and from models born sharded."""
    out: dict[str, list[int]] = {}
    for name, door in doors(world).items():
        if name not in ("hybrid 2", "hybrid 3", "json 0", "json 3"):
            continue
        for deferred in (False, True):
            counts = []
            for _ in range(5):
                if deferred:
                    with onecopy.deferred():
                        model = Typed()
                else:
                    model = Typed()
                engine = door.open(model, adamw)
                engine(*feed7(0, rank)).backward()
                engine.step()
                watched = [weakref.ref(engine), weakref.ref(model), weakref.ref(engine.optimizer)]
                del engine, model
                gc.collect()
                assert [one() for one in watched] == [None] * 3, f"{name}: an engine outlives its last reference"
                counts.append(live_tensors())
            out[f"{name}, deferred {deferred}"] = counts
    return out


def test_engines_that_are_dropped_leave_nothing() -> None:
    """Five engines made and dropped leave no tensors behind and are collected (row 69)."""
    for run in run_ranks(dropped, 2):
        for name, counts in run.items():
            assert not grows(counts), f"{name}: live tensors after each engine {counts}"


# ------------------------------------------------------------------------------------------------------- frozen weights


class LowRank(nn.Module):
    """A million frozen weights and a thousand trained ones beside them."""

    def __init__(self, many: bool = False) -> None:
        super().__init__()
        width = 125 if many else 500
        self.base = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(64 if many else 4))
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(width, 1, bias=False), nn.Linear(1, width, bias=False)
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.base:
            x = torch.tanh(layer(x)) + self.up(self.down(x))
        return x.square().mean()


def costs(rank: int, world: int, many: bool) -> dict[str, dict[str, Any]]:
    out = {}
    for dtype in (None, "bf16"):
        for name, door in doors(world, **({"dtype": dtype} if dtype else {})).items():
            model = LowRank(many)
            engine = door.open(model, adamw)
            for _ in range(2):
                x = torch.randn(2, model.width).to(getattr(torch, {None: "float32", "bf16": "bfloat16"}[dtype]))
                engine(x).backward()
                engine.step()
            out[f"{name} {dtype}"] = {"measured": engine.measured(), "predicted": engine.predicted()}
            engine.close()
    return out


@pytest.mark.parametrize("world", [2, 3])
def test_frozen_weights_cost_no_optimizer_memory(world: int) -> None:
    """1 M frozen and 1 K trained weights: states take at most 16 bytes per trained weight, over the ranks (row 70)."""
    trained = 1000
    for run in run_ranks(costs, world, False):
        for name, told in run.items():
            held = told["measured"]["resident"]["device"]
            share = 1 if name.startswith(("stage 0", "json 0", "hybrid")) else world
            limit = 16 * trained / share + 16 * 2 * world
            assert held["master"] + held["moments"] <= limit, f"{name}: {held}"
            assert held["gradient"] <= 4 * trained + 8 * world, f"{name}: {held}"


def test_the_forecast_is_what_is_measured() -> None:
    """Peak bytes within 10 % of the forecast, collectives and resident bytes exactly as forecast (row 70)."""
    for run in run_ranks(costs, 2, True):
        for name, told in run.items():
            measured, predicted = told["measured"], told["predicted"]
            forecast, peak = (ledger["peak"]["device"]["total"] for ledger in (predicted, measured))
            assert abs(forecast - peak) <= 0.1 * peak, f"{name}: forecast {forecast}, measured {peak}"
            assert measured["resident"] == predicted["resident"], name
            if not name.startswith(("stage 3 ", "hybrid 3", "json 3", "one unit")):
                assert measured["collectives"] == predicted["collectives"], name
                continue
            for kind, sent in measured["collectives"].items():
                # A unit that is still there from forward when backward wants it is not gathered again.
                assert predicted["collectives"][kind]["count"] - 1 <= sent["count"], f"{name}: {kind}"
                assert sent["count"] <= predicted["collectives"][kind]["count"], f"{name}: {kind}"


def test_the_peak_of_stage_3_is_not_above_that_of_stage_2() -> None:
    """64 small layers, frozen and trained: sharded parameters lower the peak, whatever is gathered (row 70). Beside it is
    the room for messages, which stage 0 needs less of."""
    for run in run_ranks(costs, 2, True):
        for dtype in (None, "bf16"):
            device = [run[f"stage {n} {dtype}"]["measured"]["peak"]["device"] for n in range(4)]
            peaks = [kinds["total"] - kinds.get("exchange buffer", 0) for kinds in device]
            assert device[3]["total"] <= device[2]["total"] and peaks[2] <= peaks[0], device


# ---------------------------------------------------------------------------------------------------------------- gathers


def count_gathers(rank: int, world: int) -> dict[str, dict[str, dict[str, int]]]:
    """Collectives in one step of a six-block transformer, with and without prefetch, and whether training differs."""
    out, weights = {}, []
    for name in ("stage 3", "stage 3 held", "stage 2"):
        for prefetch in (0, 1, 2):
            plan = every_plan(units=onecopy.Units(min_numel=0, prefetch=prefetch))[name]
            torch.manual_seed(0)
            engine: Any = onecopy.initialize(models.GPT(blocks=6), plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
            for step in range(3):
                engine(*models.batch("gpt", step, 0, rank)).backward()
                engine.step()
            out[f"{name}, prefetch {prefetch}"] = engine.measured()["collectives"]
            weights.append(full_weights(engine.module))
            engine.close()
    assert all(torch.equal(other[key], value) for other in weights for key, value in weights[0].items())
    return out


def test_gathers_are_as_many_as_units() -> None:
    """Six blocks, an embedding that is the head and a norm: about two gathers per unit in a step, not one per tensor;
    prefetching changes neither their number nor the weights (row 71)."""
    units, tensors = 8, sum(1 for _ in models.GPT(blocks=6).parameters())
    assert tensors > 40
    for run in run_ranks(count_gathers, 2):
        for name, sent in run.items():
            gathers = sent.get("gather", {"count": 0})["count"]
            expected = {"stage 3": 2 * units, "stage 3 held": units, "stage 2": 0}[name.split(",")[0]]
            assert expected - units // 2 <= gathers <= expected, f"{name}: {gathers} gathers"
            assert sent["reduce"]["count"] <= units, f"{name}: {sent}"
        for kind in ("stage 3", "stage 3 held"):
            counts = {run[f"{kind}, prefetch {n}"]["gather"]["count"] for n in (0, 1, 2)}
            assert max(counts) - min(counts) <= 1, f"{kind}: prefetching changes the number of gathers: {counts}"


def test_the_step_report_has_the_bytes_that_were_sent() -> None:
    """A user sees how much each kind of collective sent, in elements and bytes (row 71)."""
    for run in run_ranks(count_gathers, 2):
        for sent in run.values():
            for told in sent.values():
                assert told["count"] > 0 and told["bytes"] > 0 and told["elements"] > 0
        whole = sum(p.numel() for p in models.GPT(blocks=6).parameters())
        gathered = run["stage 3 held, prefetch 1"]["gather"]["elements"]
        assert abs(gathered - whole / 2) <= 8, "half of every unit goes from each of two ranks to the other"


# ------------------------------------------------------------------------------------------------------- the CPU as device


def cycle(rank: int, world: int, folder: str, dtype: str | None) -> None:
    """Initialise, three steps, save, load into a new engine, two steps, export into a plain model."""
    options = {"accumulation": 1, "clip": 1.0} | ({"dtype": dtype} if dtype else {})
    right = truth(world, Typed, feed7, optimizer=adamw, steps=5, clip=1.0) if dtype is None else None
    for number, (name, door) in enumerate(each_door(world, **options)):
        engine = door.open(Typed(), adamw)
        assert engine.device == torch.device("cpu"), name
        for count in range(3):
            engine(*feed7(count, rank)).backward()
            assert engine.step(), name
        engine.save(f"{folder}/{number}", client_state={"count": 3})
        saved = full_weights(engine.module)
        engine.close()
        torch.manual_seed(1)
        engine = door.open(Typed(), adamw)
        assert engine.load(f"{folder}/{number}") == {"count": 3}
        loaded = full_weights(engine.module)
        assert all(torch.equal(saved[key], loaded[key]) for key in saved), name
        for count in range(3, 5):
            engine(*feed7(count, rank)).backward()
            assert engine.step(), name
        bare = Typed() if dtype is None else Typed().bfloat16()
        bare.load_state_dict(engine.full_state_dict(), strict=True)
        for key, value in bare.state_dict().items():
            assert torch.isfinite(value).all() and not value.requires_grad, key
        if right is not None:
            assert largest_gap(engine.module, right.twin) <= 5e-6, name
            assert all((a - b).abs().max() <= 5e-6 for a, b in zip(bare.parameters(), right.twin.parameters(), strict=True))
        engine.close()


@pytest.mark.parametrize(("world", "dtype"), [(2, None), (2, "bf16"), (3, None), (4, None)])
def test_a_whole_cycle_on_the_cpu(tmp_path: Path, world: int, dtype: str | None) -> None:
    """Init, three steps, save, load, two more, export, with no accelerator: every stage is green (row 83)."""
    run_ranks(cycle, world, str(tmp_path), dtype)
