"""``gathered``: full values to read, edits that become everybody's and survive; getters and setters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import onecopy
from onecopy.errors import EngineError, ShardedReadError
from tests.ranks import models
from tests.ranks.cases.everywhere import everywhere
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import every_plan, sgd
from tests.ranks.test_sharded import Net, net_engine

pytestmark = pytest.mark.ranks


def edit_run(rank: int, world: int, dtype: str | None, writer: int) -> dict[str, Any]:
    """Rank ``writer`` edits inside ``gathered``; the edit is everybody's and survives steps."""
    out = {}
    for name, plan in every_plan(dtype=dtype).items():
        model = models.build("even")
        engine = onecopy.initialize(model, plan, optimizer=lambda params: torch.optim.SGD(params, lr=2**-10))
        for step in range(2):
            if step:
                weight = model.first.weight
                with onecopy.gathered(weight, write_rank=writer), torch.no_grad():
                    assert weight.shape == (16, 16)
                    weight.fill_(-9.0 if rank != writer else 0.25)
                    weight[3, 5] = 4.0
            engine(*models.batch("even", step, 0, rank)).backward()
            engine.step()
        value = onecopy.full_param(model.first.weight).clone()
        with onecopy.gathered(model):
            shown = model.first.weight.detach().float().clone()
        rest = torch.ones(16, 16, dtype=torch.bool)
        rest[3, 5] = False
        near = bool((value[rest] - 0.25).abs().max() < 0.01) and abs(value[3, 5].item() - 4) < 0.01
        moved = bool((value[rest] != 0.25).any())
        out[name] = near, moved or dtype is not None, bool((shown - value).abs().max() < 0.02)
        engine.close()
    return out


@pytest.mark.parametrize("writer", [0, 1])
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_edits_through_gathered_survive(dtype: str | None, writer: int) -> None:
    for run in run_ranks(edit_run, 2, dtype, writer):
        assert run == dict.fromkeys(run, (True, True, True)), run


def gather_shapes(rank: int, world: int) -> None:
    """A parameter, a list, a generator, a module, twice, nested, and an exception inside."""
    for name, plan in every_plan().items():
        model, engine = net_engine(plan)
        torch.manual_seed(0)
        truth = Net()
        targets: list[Any] = [
            model.lin.weight, [model.lin.weight, model.lin.bias], model, list(model.parameters()), model.lin,
            [model.lin.weight, model.lin.weight],
        ]  # fmt: skip
        for target in targets:
            with onecopy.gathered(target):
                assert torch.equal(model.lin.weight, truth.lin.weight), name
        with onecopy.gathered(model), onecopy.gathered(model.lin.weight):
            assert torch.equal(model.lin.weight, truth.lin.weight), name
        with onecopy.gathered(model.lin):
            with onecopy.gathered(model):
                assert torch.equal(model.conv.weight, truth.conv.weight), name
            assert torch.equal(model.lin.weight, truth.lin.weight), f"{name}: the outer context still holds"
        with pytest.raises(KeyError), onecopy.gathered(model):
            raise KeyError("inside")
        with onecopy.gathered(model):
            expected = engine(torch.ones(2, 7)).item()
            assert torch.equal(model.lin.weight, truth.lin.weight), f"{name}: a forward inside kept it"
        assert expected == pytest.approx(truth(torch.ones(2, 7)).item())
        loss = engine(torch.ones(2, 7))
        with onecopy.gathered(model):
            pass
        loss.backward()
        with onecopy.gathered(model):
            pass
        engine.step()
        plain = sgd(truth.parameters())
        truth(torch.ones(2, 7)).backward()
        plain.step()
        with onecopy.gathered(model):
            for p, q in zip(model.parameters(), truth.parameters(), strict=True):
                assert (p - q).abs().max() < 1e-6, name
        engine.close()


def test_gathered_takes_anything_and_nests() -> None:
    run_ranks(gather_shapes, 2)


def released(rank: int, world: int) -> None:
    """After a forward, an eval forward, an exception and a gather the parameter is sharded again."""
    model, engine = net_engine()
    with torch.no_grad():
        engine(torch.ones(2, 7))
    with onecopy.gathered(model):
        pass
    with pytest.raises(RuntimeError):
        engine(torch.ones(2, 3))
    engine.eval()
    engine(torch.ones(2, 7))
    with pytest.raises(ShardedReadError, match=r"lin\.weight"):
        _ = model.lin.weight + 1
    engine.close()


def test_parameters_are_released_after_use() -> None:
    run_ranks(released, 2)


def setters(rank: int, world: int) -> None:
    """``set_full_param`` and ``set_full_state`` are seen by the next step and by every getter."""
    for dtype in (None, "bf16"):
        for name, plan in every_plan(dtype=dtype).items():
            model = models.build("mlp")
            engine = onecopy.initialize(model, plan, optimizer=lambda params: torch.optim.AdamW(params, lr=0.5))
            engine(*models.batch("mlp", 0, 0, rank)).backward()
            engine.step()
            weight = model.layers[2].weight
            value = torch.arange(49.0).reshape(7, 7) / 64
            onecopy.set_full_param(weight, value)
            assert torch.equal(onecopy.full_param(weight), value), name
            with onecopy.gathered(weight):
                assert torch.equal(weight.detach().float(), value.to(weight.dtype).float()), name
            onecopy.set_full_state(weight, "exp_avg", value)
            onecopy.set_full_state(weight, "exp_avg_sq", torch.ones(7, 7))
            assert torch.equal(onecopy.full_state(weight, "exp_avg"), value), name
            engine(*models.batch("mlp", 0, 0, rank)).backward()
            engine.step()
            # m / sqrt(v) with the moments set: close to value * 0.9 / (1 - 0.81), bias corrected
            expected = value * (1 - 0.5 * 0.01) - 0.5 * (0.9 * value / 0.19) / ((0.999 / (1 - 0.999**2)) ** 0.5)
            assert (onecopy.full_param(weight) - expected).abs().max() < 2e-2, name
            for bad in (torch.zeros(7, 6), torch.zeros(49)):
                with pytest.raises((ValueError, RuntimeError)):
                    onecopy.set_full_param(weight, bad)
            with pytest.raises((KeyError, ValueError, RuntimeError)):
                onecopy.full_state(weight, "exp_average")
            engine.close()


def test_setters() -> None:
    run_ranks(setters, 2)


def edited_by_one(rank: int, world: int) -> dict[str, str]:
    """Rank 0 edits without ``write_rank``: whatever happens, ranks may not part in silence."""
    out = {}
    for name, plan in every_plan().items():
        model, engine = net_engine(plan)
        try:
            with onecopy.gathered(model.lin.weight), torch.no_grad():
                if rank == 0:
                    model.lin.weight.fill_(7.0)
            engine(torch.ones(2, 7)).backward()
            engine.step()
            with onecopy.gathered(model.lin.weight):
                out[name] = str(model.lin.weight.detach().double().sum().item())
        except onecopy.errors.OneCopyError as error:
            out[name] = f"refused: {type(error).__name__}"
        engine.close()
    return out


def test_an_edit_by_one_rank_does_not_part_the_ranks() -> None:
    one, two = run_ranks(edited_by_one, 2)
    assert one == two
    assert len(set(one.values())) == 1, f"stages differ in what an edit without write_rank does: {one}"


WRITES: dict[str, Callable[[torch.nn.Parameter], Any]] = {
    "fill_": lambda p: p.detach().fill_(7.0),
    "data.fill_": lambda p: p.data.fill_(7.0),
    "data =": lambda p: setattr(p, "data", torch.full_like(p, 7.0)),
    "rows swapped through numpy": lambda p: np.copyto(p.detach().numpy(), p.detach().numpy()[::-1].copy()),
}


def written_without_write_rank(rank: int, world: int, writers: tuple[int, ...]) -> dict[str, Any]:
    """What each kind of write ends in, and the values after it."""
    out = {}
    for name, plan in every_plan().items():
        for way, write in WRITES.items():
            for frozen in (False, True):
                model = models.build("even")
                weight = model.first.weight.requires_grad_(not frozen)
                engine = onecopy.initialize(model, plan, optimizer=sgd)
                before = onecopy.full_param(weight).clone()
                try:
                    with onecopy.gathered(weight):
                        if rank in writers:
                            write(weight)
                    said = "nothing"
                except EngineError as error:
                    said = str(error)
                after = onecopy.full_param(weight)
                with onecopy.gathered(weight):
                    shown = weight.detach().clone()
                out[f"{name}, {way}, {frozen}"] = said, torch.equal(shown, after), torch.equal(before, after), after.numpy()
                engine.close()
    return out


@pytest.mark.parametrize("writers", [(1,), (0,), (0, 1)])
def test_a_write_without_write_rank_is_refused_on_every_rank_and_parts_none(writers: tuple[int, ...]) -> None:
    one, two = run_ranks(written_without_write_rank, 2, writers)
    for way, (said, whole, restored, after) in one.items():
        assert f"rank {writers[0]} wrote parameter 'first.weight'" in said and "write_rank=" in said, (way, said)
        assert said == two[way][0] and whole and two[way][1], way
        assert (after == two[way][3]).all(), f"{way}: the ranks have parted"
        assert restored or len(writers) == 2, f"{way}: the values of before are lost"


def exchanged(rank: int, world: int) -> dict[str, float]:
    """``param.data = tensor`` with ``write_rank``."""
    out = {}
    for name, plan in every_plan().items():
        model, engine = net_engine(plan)
        with onecopy.gathered(model.lin.weight, write_rank=1):
            model.lin.weight.data = torch.full_like(model.lin.weight, 5.0 + rank)
        engine(torch.ones(2, 7)).backward()
        out[name] = float((onecopy.full_param(model.lin.weight) - 6).abs().max())
        engine.close()
    return out


def test_exchanging_data_is_a_write() -> None:
    for run in run_ranks(exchanged, 2):
        assert run == dict.fromkeys(run, 0.0)


PENALTIES: dict[str, Callable[[torch.nn.Module], torch.Tensor]] = {
    "pow": lambda m: m.first.weight.pow(2).sum(),
    "norm": lambda m: m.first.weight.norm(),
    "product": lambda m: (m.first.weight @ m.first.weight.t()).sum(),
    "view": lambda m: m.first.weight[0].exp().sum(),
    "all": lambda m: sum((p.pow(3).sum() for p in m.parameters()), torch.zeros(())),
    "gradient of the gradient": lambda m: torch.autograd.grad(m.first.weight.pow(3).sum(), m.first.weight, create_graph=True)[
        0
    ].norm(),
}


def penalised(rank: int, world: int, beside: bool) -> dict[str, float]:
    """The largest gap of a gradient to plain torch, of a penalty from gathered parameters, with backward after it.

    ``beside``: the loss has the model's own in it, or else the penalty alone.
    """
    gaps = {}
    plans = {"pairs": onecopy.hsdp(shard=2)} if world == 4 else everywhere(world)
    for name, plan in plans.items():
        for way, penalty in PENALTIES.items():
            model, twin = models.build("even"), models.build("even")
            engine = onecopy.initialize(model, plan, optimizer=sgd)
            for step in range(2):
                loss = engine(*models.batch("even", step, 0, rank)) if beside else torch.zeros(())
                with onecopy.gathered(model):
                    loss = loss + penalty(model)
                loss.backward()
                twin.zero_grad()
                losses = [twin(*models.batch("even", step, 0, other)) if beside else 0.0 for other in range(world)]
                (sum(losses) / world + penalty(twin)).backward()
                for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                    if q.grad is not None:
                        gap = float((onecopy.full_grad(p) - q.grad).abs().max() / q.grad.abs().max())
                        gaps[f"{name}, {way}"] = max(gaps.get(f"{name}, {way}", 0.0), gap if gap == gap else float("inf"))
                assert engine.step(), f"{name}, {way}: the step was skipped"
                sgd(twin.parameters()).step()
            engine.close()
    return gaps


@pytest.mark.parametrize(("world", "beside"), [(2, True), (2, False), (4, True)])
def test_a_loss_from_gathered_parameters_has_the_right_gradient(world: int, beside: bool) -> None:
    for run in run_ranks(penalised, world, beside):
        wrong = {way: gap for way, gap in run.items() if not gap <= 1e-5}
        assert not wrong, wrong


def saved_unseen(rank: int, world: int) -> str:
    """A graph that was recorded out of the sight of the engine's hooks."""
    model, engine = net_engine()
    with torch.no_grad(), onecopy.gathered(model.lin.weight), torch.enable_grad():
        penalty = model.lin.weight.pow(2).sum()
    try:
        penalty.backward()
    except RuntimeError as error:
        return str(error)
    finally:
        engine.close()
    return "nothing"


def test_what_was_saved_without_hooks_is_no_silent_nan() -> None:
    for said in run_ranks(saved_unseen, 2):
        assert "modified by an inplace operation" in said


def not_ours(rank: int, world: int) -> None:
    """Parameters no engine owns: gathering them changes nothing, or says so."""
    stranger = torch.nn.Linear(3, 3)
    before = stranger.weight.detach().clone()
    try:
        with onecopy.gathered(stranger):
            assert torch.equal(stranger.weight, before)
    except onecopy.errors.OneCopyError as error:
        assert "weight" in str(error)


def test_gathering_a_plain_module() -> None:
    run_ranks(not_ours, 2)
