"""Who divides by the accumulation count, no_sync, what micro-batches add up in, and stages that must agree."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onecopy
import onecopy.deepspeed as deepspeed
from onecopy.plan.plan import Batch
from tests.ranks import models
from tests.ranks.cases.doors import beside_twin, doors, full_weights, json_config, offloaded, sgd1
from tests.ranks.cases.test_backward import INPUTS, Toy, expected_weight
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import every_plan, sgd

pytestmark = pytest.mark.ranks

# ---------------------------------------------------------------------------------------------------------- who divides


def weight(engine: Any) -> float:
    return onecopy.full_param(engine.module.w).item()


def engine_divides(rank: int, world: int) -> dict[str, float]:
    out = {}
    for name, door in doors(world, accumulation=2).items():
        engine = door.open(Toy(), sgd1)
        for x in INPUTS[rank]:
            engine.backward(engine(torch.tensor([x])))
            engine.step()
        out[name] = weight(engine)
        engine.close()
    return out


def caller_divides(rank: int, world: int) -> dict[str, float]:
    """The loss is divided in user code, and the one switch says so."""
    out = {}
    for name, plan in every_plan(batch=Batch(accumulation=2, divide=False)).items():
        engine: Any = onecopy.initialize(Toy(), plan, optimizer=sgd1)
        for x in INPUTS[rank]:
            (engine(torch.tensor([x])) / 2).backward()
            engine.step()
        out[name] = weight(engine)
        engine.close()
    for stage in range(4):
        engine = deepspeed.initialize(model=Toy(), config=json_config(stage, 2), optimizer=sgd1)[0]
        for x in INPUTS[rank]:
            engine.backward(engine(torch.tensor([x])) / 2, scale_wrt_gas=False)
            engine.step()
        out[f"json {stage}"] = weight(engine)
        engine.close()
    return out


@pytest.mark.parametrize("run", [engine_divides, caller_divides], ids=lambda run: run.__name__)
@pytest.mark.parametrize("world", [2, 3])
def test_gradients_are_divided_once(run: Any, world: int) -> None:
    """w = 0.75 whoever divides by the accumulation count: 0.875 would be twice, 0.5 never (row 29)."""
    if world == 2:
        assert expected_weight(2) == pytest.approx(0.75)
    for got in run_ranks(run, world):
        assert got == dict.fromkeys(got, pytest.approx(expected_weight(world))), got


# Valid tokens of each rank's two micro-batches.
TOKENS = {0: ([3.0], [1.0, 2.0]), 1: ([1.0, 2.0, 6.0], [5.0]), 2: ([2.0, 2.0], [7.0, 1.0, 1.0])}


def by_tokens(rank: int, world: int) -> dict[str, float]:
    """Each micro-batch's sum over its tokens, over the tokens of the whole step: an exact mean over tokens."""
    total = sum(len(part) for other in range(world) for part in TOKENS[other])
    out = {}
    for name, door in doors(world, accumulation=2).items():
        engine = door.open(Toy(), sgd1)
        for part in TOKENS[rank]:
            # The engine averages over ranks and micro-batches, so the sum is brought up by their number.
            (engine(torch.tensor(part)) * world * 2 / total).backward()
            engine.step()
        out[name] = weight(engine)
        engine.close()
    return out


def test_a_loss_weighted_by_tokens_is_the_mean_over_tokens() -> None:
    """Ranks with 1 and 3 valid tokens: the step follows the mean over all tokens, not the mean of means (row 29)."""
    for world in (2, 3):
        flat = [x for rank in range(world) for part in TOKENS[rank] for x in part]
        expected = 1 - 0.1 * sum(flat) / len(flat)
        for got in run_ranks(by_tokens, world):
            assert got == dict.fromkeys(got, pytest.approx(expected)), got


# -------------------------------------------------------------------------------------------------------------- no_sync


def quiet(rank: int, world: int, with_step: bool) -> dict[str, tuple[float, int, int]]:
    """The same window inside and outside no_sync: the weight, and the reductions of both."""
    out = {}
    for name, door in doors(world, accumulation=2).items():
        counts = []
        for silent in (False, True):
            engine = door.open(Toy(), sgd1)
            first, last = (torch.tensor([x]) for x in INPUTS[rank])
            if silent:
                with engine.no_sync():
                    engine(first).backward()
                    if with_step:
                        engine.step()
            else:
                engine(first).backward()
                engine.step()
            if silent and not with_step:
                engine.set_boundary(True)
            engine(last).backward()
            assert engine.step(), name
            kinds = engine.measured()["collectives"]
            counts.append(sum(kinds[kind]["count"] for kind in ("reduce", "sum") if kind in kinds))
            got = weight(engine)
            engine.close()
        out[name] = got, counts[0], counts[1]
    return out


@pytest.mark.parametrize("world", [2, 3])
def test_no_sync_gives_the_same_step_with_fewer_collectives(world: int) -> None:
    """no_sync for all but the last micro-batch works at every stage and reduces no more often (row 30)."""
    for run in run_ranks(quiet, world, True):
        for name, (got, loud, silent) in run.items():
            assert got == pytest.approx(expected_weight(world)), name
            assert silent <= loud, name
            if name in ("stage 2", "stage 3", "json 2", "json 3"):
                assert silent == loud // 2, f"{name}: {silent} reductions, {loud} without no_sync"


def test_no_sync_without_step_in_between() -> None:
    """As accelerate drives it: micro-batches inside no_sync without a step() of their own (row 30)."""
    for run in run_ranks(quiet, 2, False):
        for name, (got, _, _) in run.items():
            assert got == pytest.approx(expected_weight(2)), name


# ---------------------------------------------------------------------------------------------------------- accumulators


class Ones(nn.Module):
    """A weight whose every gradient is exactly ``x``."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(8, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


def sum_up(rank: int, world: int, count: int, wide: str | None) -> dict[str, tuple[float, float]]:
    """``count`` micro-batches of gradient 1.0 in bf16: the average that one step of rate 1 takes, and the norm."""
    out = {}
    for name, door in doors(world, accumulation=count, dtype="bf16").items():
        if name == "one unit" or name.startswith("hybrid"):
            continue
        if wide is not None:
            if door.config is None:
                continue
            door.config["data_types"] = {"grad_accum_dtype": wide}
            door.config["communication_data_type"] = wide
        engine = door.open(Ones(), lambda params: torch.optim.SGD(params, lr=1.0))
        for _ in range(count):
            engine(torch.ones(8, dtype=torch.bfloat16)).backward()
            engine.step()
        assert engine.plan.precision.accumulate == {None: "float32", "fp32": "float32", "bf16": "bfloat16"}[wide]
        out[name] = -onecopy.full_param(engine.module.w)[0].item(), engine.grad_norm
        engine.close()
    return out


@pytest.mark.parametrize(
    ("world", "count", "wide"),
    [
        (2, 512, None),
        (2, 384, "fp32"),
        pytest.param(1, 512, None, marks=pytest.mark.long),
        pytest.param(3, 300, None, marks=pytest.mark.long),
    ],
)
def test_bf16_gradients_add_up_in_fp32(world: int, count: int, wide: str | None) -> None:
    """512 micro-batches of gradient 1.0 average to 1.0; added up in bf16 they would stick at 0.5 (row 34).

    300 micro-batches on 3 ranks: a share of a third has no bf16, so what is sent may be off by one rounding; summed in
    bf16 it would be 256/300. With an fp32 wire 384 micro-batches are off by the
    rounding of 384 additions in fp32 at most.
    """
    stuck = torch.zeros((), dtype=torch.bfloat16)
    for _ in range(512):
        stuck += 1
    assert stuck.item() / 512 == 0.5
    for run in run_ranks(sum_up, world, count, wide):
        for name, (mean, norm) in run.items():
            assert mean == pytest.approx(1.0, abs={300: 2**-8, 384: 1e-5}.get(count, 1e-6)), name
            assert norm == pytest.approx(mean * math.sqrt(8), rel=1e-6), name


def test_bf16_accumulators_are_there_on_request_only() -> None:
    """grad_accum_dtype bf16 is obeyed and shows in the plan: below stage 2 the sum of 512 ones sticks (row 34)."""
    for run in run_ranks(sum_up, 1, 512, "bf16"):
        assert run["json 0"][0] == pytest.approx(0.5), run


# -------------------------------------------------------------------------------------------------------- stages agree


class EightLayers(models.MLP):
    """Eight layers with one tied pair, as seed 42 makes them."""

    def __init__(self) -> None:
        torch.manual_seed(42)
        super().__init__()


def mlp_feed(count: int, rank: int) -> tuple[Tensor, ...]:
    return models.batch("mlp", count, 0, rank)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1)


@pytest.mark.parametrize(
    ("optimizer", "world"),
    [pytest.param(sgd, 2, marks=pytest.mark.long), (adamw, 2), (adamw, 4)],
    ids=["sgd-2", "adamw-2", "adamw-4"],
)
def test_stages_agree_with_each_other_and_with_one_process(optimizer: Any, world: int) -> None:
    """Eight layers, a tied pair, accumulation 2, clip 1.0, 20 steps: every stage within 1e-6 of torch (row 35)."""
    options = {"accumulation": 2, "clip": 1.0, "steps": 20, "optimizer": optimizer}
    only = "" if world == 2 else "stage 0,stage 1,2,3"
    runs = run_ranks(beside_twin, world, EightLayers, mlp_feed, only=only, **options)
    assert all(max(run.values()) <= 1e-6 for run in runs), runs


@pytest.mark.parametrize(
    ("optimizer", "only", "places"),
    [(sgd, "host", 9), pytest.param(adamw, "", 22, marks=pytest.mark.long)],
    ids=["sgd", "adamw"],
)
def test_offload_agrees_with_one_process(optimizer: Any, only: str, places: int, tmp_path: Path) -> None:
    """The same run with the states on the host and on disk at every stage, by plan and by JSON (row 35)."""
    options = {"accumulation": 2, "clip": 1.0, "steps": 20, "optimizer": optimizer, "only": only}
    through = partial(offloaded, folder=str(tmp_path))
    for run in run_ranks(beside_twin, 2, EightLayers, mlp_feed, through=through, **options):
        assert len(run) == places and max(run.values()) <= 1e-6, run
    assert not list(tmp_path.iterdir())


def losses_of(rank: int, world: int) -> dict[str, tuple[list[float], list[float]]]:
    out = {}
    for name, door in doors(world, accumulation=2, clip=0.1).items():
        engine = door.open(EightLayers(), adamw)
        losses, norms = [], []
        for count in range(20):
            loss = engine(*mlp_feed(count, rank))
            loss.backward()
            if engine.step():
                norms.append(engine.grad_norm)
            losses.append(loss.item())
        out[name] = losses, norms
        assert full_weights(engine.module)
        engine.close()
    return out


def test_stages_report_the_same_losses_and_norms() -> None:
    """The losses and the norms of all stages are the same numbers, clipped hard, on two and three ranks (row 35)."""
    for world in (2, 3):
        for run in run_ranks(losses_of, world):
            losses, norms = run["stage 0"]
            assert min(norms) > 0.1, "nothing was clipped"
            for name, (other_losses, other_norms) in run.items():
                assert other_losses == pytest.approx(losses, abs=1e-6), name
                assert other_norms == pytest.approx(norms, rel=1e-5), name
