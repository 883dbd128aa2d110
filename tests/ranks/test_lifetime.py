"""Engines without optimizers, several at once, and engines that leave nothing behind."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onecopy
from onecopy.errors import OneCopyError
from tests.ranks import models
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import every_plan, largest_gap, sgd

pytestmark = pytest.mark.ranks


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


# ---------------------------------------------------------------------------------------------------- forward only


def forward_only(rank: int, world: int) -> None:
    for name, plan in every_plan().items():
        model = models.build("gpt")
        truth = [models.build("gpt")(*models.batch("gpt", i, 0, rank)).item() for i in range(3)]
        engine = onecopy.initialize(model, plan)
        for way in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with way():
                assert [engine(*models.batch("gpt", i, 0, rank)).item() for i in range(3)] == truth, name
        engine.eval()
        assert engine(*models.batch("gpt", 0, 0, rank)).item() == truth[0], name
        with pytest.raises(OneCopyError, match="optimizer"):
            engine.step()
        engine.close()


def test_forward_only_at_every_stage() -> None:
    run_ranks(forward_only, 2)


def different_lengths(rank: int, world: int) -> list[float]:
    """Rank 0 generates 3 tokens and rank 1 seven, then both train a step."""
    model = models.build("gpt")
    engine = onecopy.initialize(model, onecopy.stage(3, units=onecopy.Units(min_numel=0)), optimizer=sgd)
    out = []
    with torch.no_grad():
        for i in range(3 if rank == 0 else 7):
            out.append(engine(*models.batch("gpt", i, 0, rank)).item())
    engine(*models.batch("gpt", 0, 0, rank)).backward()
    assert engine.step()
    return out


@pytest.mark.skip(reason="forwards in different numbers per rank belong to the uneven-data mode, which is yet to come")
def test_generation_of_different_lengths() -> None:
    model = models.build("gpt")
    outs = run_ranks(different_lengths, 2)
    for rank, out in enumerate(outs):
        assert out == pytest.approx([model(*models.batch("gpt", i, 0, rank)).item() for i in range(len(out))])


# --------------------------------------------------------------------------------------------------- several engines


def policy_and_reference(rank: int, world: int) -> None:
    """A trained policy and a frozen reference copied from it, in one loss; then two trained engines in one loss."""
    for name, plan in every_plan().items():
        policy, reference = models.build("gpt"), models.build("gpt")
        twin, fixed = copy.deepcopy(policy), copy.deepcopy(reference)
        reference.requires_grad_(False)
        engine, frozen = onecopy.initialize(policy, plan, optimizer=sgd), onecopy.initialize(reference, plan)
        plain = sgd(twin.parameters())
        for count in range(3):
            batch = models.batch("gpt", count, 0, rank)
            with torch.no_grad():
                base = frozen(*batch)
            (engine(*batch) - 0.5 * base).square().backward()
            engine.step()
            for other in range(world):
                batch = models.batch("gpt", count, 0, other)
                ((twin(*batch) - 0.5 * fixed(*batch).detach()).square() / world).backward()
            plain.step()
            plain.zero_grad()
        assert largest_gap(policy, twin) <= 1e-6, name
        assert largest_gap(reference, fixed) == 0, name
        engine.close()
        frozen.close()


def test_policy_and_reference() -> None:
    run_ranks(policy_and_reference, 2)


def joint_loss(rank: int, world: int) -> None:
    """Two trained engines in one loss, at different stages too; one feeds the other."""
    plans = list(every_plan().items())
    pairs = [(plan, plan) for _, plan in plans] + [(plans[3][1], plans[1][1]), (plans[0][1], plans[3][1])]
    for one_plan, two_plan in pairs:
        torch.manual_seed(0)
        one, two = nn.Linear(7, 7), nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7))
        twins = copy.deepcopy(one), copy.deepcopy(two)
        engines = (
            onecopy.initialize(one, one_plan, optimizer=sgd),
            onecopy.initialize(two, two_plan, optimizer=sgd),
        )
        plain = sgd([p for t in twins for p in t.parameters()])
        for count in range(3):
            x, y = (models.batch("mlp", count, micro, rank)[0] for micro in (0, 1))
            (F.mse_loss(engines[1](engines[0](x)), y) + engines[0](y).square().mean()).backward()
            for engine in engines:
                assert engine.step()
            for other in range(world):
                x, y = (models.batch("mlp", count, micro, other)[0] for micro in (0, 1))
                ((F.mse_loss(twins[1](twins[0](x)), y) + twins[0](y).square().mean()) / world).backward()
            plain.step()
            plain.zero_grad()
        assert largest_gap(one, twins[0]) <= 1e-6
        assert largest_gap(two, twins[1]) <= 1e-6
        for engine in engines:
            engine.close()


def test_joint_loss() -> None:
    run_ranks(joint_loss, 2)


def twice(rank: int, world: int) -> str:
    """The same module given to two engines: refused (or the first closed), not two optimizers on one weight."""
    model = models.build("even")
    first = onecopy.initialize(model, onecopy.stage(3), optimizer=sgd)
    try:
        onecopy.initialize(model, onecopy.stage(2), optimizer=sgd)
    except OneCopyError as error:
        first.close()
        return str(error)
    return "accepted"


def test_one_module_in_two_engines() -> None:
    assert "accepted" not in run_ranks(twice, 2)


# ------------------------------------------------------------------------------------------------------ what remains


def use(engine: Any, rank: int) -> None:
    for step in range(2):
        engine(*models.batch("even", step, 0, rank)).backward()
        engine.step()
    with onecopy.gathered(engine.module):
        pass
    engine.full_state_dict()


def collected(rank: int, world: int, close: bool) -> dict[str, Any]:
    out = {}
    for name, plan in every_plan(dtype="bf16", clip=1.0).items():
        counts = []
        for _ in range(3):
            model = models.build("even")
            engine = onecopy.initialize(model, plan, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3))
            use(engine, rank)
            watched = [weakref.ref(engine), weakref.ref(model), weakref.ref(engine.optimizer)]
            if close:
                engine.close()
            del engine, model
            gc.collect()
            counts.append(live_tensors())
            assert [w() is None for w in watched] == [True] * 3, f"{name}: engine, module, optimizer collected?"
        out[name] = counts
    return out


@pytest.mark.parametrize("close", [True, False], ids=["closed", "dropped"])
def test_engines_are_collectable(close: bool) -> None:
    for run in run_ranks(collected, 2, close):
        for name, counts in run.items():
            assert counts[2] <= counts[0] + 16, f"{name}: live tensors after each engine {counts}"


def after_close(rank: int, world: int) -> None:
    """After ``close`` the engine refuses to work; closing twice is fine."""
    for name, plan in every_plan().items():
        engine = onecopy.initialize(models.build("even"), plan, optimizer=sgd)
        use(engine, rank)
        engine.close()
        engine.close()
        with pytest.raises(OneCopyError, match="closed"):
            engine(*models.batch("even", 0, 0, rank))
        with pytest.raises(OneCopyError, match="closed"):
            engine.step()
        assert name


def test_a_closed_engine_says_so() -> None:
    run_ranks(after_close, 2)


def steady(rank: int, world: int, folder: str, all_plans: bool) -> dict[str, Any]:
    """300 steps, 20 saves, 20 gathers: tensors counted and resident bytes read along the way."""
    out = {}
    process = psutil.Process(os.getpid())
    for name, plan in every_plan(accumulation=2, clip=1.0).items():
        if not all_plans and name not in ("stage 1", "stage 3"):
            continue
        engine = onecopy.initialize(models.build("even"), plan, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3))
        counts, resident = [], []
        for step in range(300):
            engine(*models.batch("even", step % 10, 0, rank)).backward()
            engine.step()
            if step % 14 == 13:
                with onecopy.gathered(engine.module):
                    pass
                engine.save(f"{folder}/{name.replace(' ', '-')}", tag="only" if step < 150 else "other")
            if step in (59, 149, 299):
                counts.append(live_tensors())
                resident.append(process.memory_info().rss)
        out[name] = counts, resident
        engine.close()
        del engine
    return out


@pytest.mark.parametrize("all_plans", [False, pytest.param(True, marks=pytest.mark.long)])
def test_nothing_grows(tmp_path: Any, all_plans: bool) -> None:
    for run in run_ranks(steady, 2, str(tmp_path), all_plans):
        assert {"stage 1", "stage 3"} <= set(run)
        for name, (counts, resident) in run.items():
            # What a step left behind would be there 240 times; one more or less is alive by chance of the moment.
            assert max(counts) - min(counts) < 8, f"{name}: live tensors {counts}"
            assert resident[2] - resident[1] < 150 * 1024 * 8, f"{name}: resident {resident}"
