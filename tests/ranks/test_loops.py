"""Training loops as people write them: plain or engine backward, several backwards, hand-made zero_grad, no_sync."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onecopy
from onecopy.errors import OneCopyError
from tests.ranks import models
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import Case, every_plan, largest_gap, oracle, sgd

pytestmark = pytest.mark.ranks

TOY = {0: (1.0, 3.0), 1: (2.0, 4.0)}  # x of each rank's two micro-batches: gradient 2.5, w = 1 - 0.1 * 2.5


def toy_engine(plan: Any) -> Any:
    return onecopy.initialize(models.Toy(), plan, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))


def weight(engine: Any) -> float:
    return onecopy.full_param(engine.module.w).item()


def toy_loop(rank: int, world: int, how: str) -> dict[str, float]:
    """The toy problem driven in one of the ways users drive it; the weight of each plan afterwards."""
    out = {}
    for name, plan in every_plan(accumulation=2).items():
        engine = toy_engine(plan)
        for micro, x in enumerate(TOY[rank]):
            inputs = torch.tensor([x])
            last = micro == 1
            if how == "no_sync" and not last:
                with engine.no_sync():
                    engine(inputs).backward()
                    engine.step()
                continue
            loss = engine(inputs)
            if how == "engine.backward":
                engine.backward(loss)
            elif how == "non-scalar":
                loss.reshape(1).backward(torch.ones(1))
            elif how == "autograd.backward":
                torch.autograd.backward([loss])
            elif how == "set_boundary":
                engine.set_boundary(last)
                assert engine.is_boundary() is last
                loss.backward()
            else:
                loss.backward()
            engine.step()
            if how == "zero_grad after" and last:
                engine.optimizer.zero_grad()
                engine.module.zero_grad(set_to_none=True)
        out[name] = weight(engine)
        assert engine.global_steps == 1
        assert engine.grad_norm == pytest.approx(2.5)
        engine.close()
    return out


@pytest.mark.parametrize(
    "how",
    ["plain", "engine.backward", "non-scalar", "autograd.backward", "no_sync", "set_boundary", "zero_grad after"],
)
def test_the_toy_problem(how: str) -> None:
    """0.75; 0.875 would be divided twice, 0.5 never."""
    for run in run_ranks(toy_loop, 2, how):
        assert run == dict.fromkeys(run, pytest.approx(0.75)), run


def divided_by_user(rank: int, world: int) -> dict[str, float]:
    out = {}
    for name, plan in every_plan(batch=onecopy.stage(0).batch.__class__(accumulation=2, divide=False)).items():
        engine = toy_engine(plan)
        for x in TOY[rank]:
            (engine(torch.tensor([x])) / 2).backward()
            engine.step()
        out[name] = weight(engine)
        engine.close()
    return out


def test_one_switch_says_who_divides() -> None:
    for run in run_ranks(divided_by_user, 2):
        assert run == dict.fromkeys(run, pytest.approx(0.75)), run


def several_backwards(rank: int, world: int, accumulation: int) -> None:
    """Two backwards in a micro-batch, one forward or two, one ``step``: their gradients add up."""
    for name, plan in every_plan(accumulation=accumulation).items():
        twin, model = models.build("mlp"), models.build("mlp")
        engine = onecopy.initialize(model, plan, optimizer=sgd)
        plain = sgd(twin.parameters())
        for count in range(3 * accumulation):
            one, two = (models.batch("mlp", count, micro, rank) for micro in (0, 1))
            first = engine(*one)
            first.backward(retain_graph=True)
            first.backward()
            (0.5 * engine(*two)).backward()
            engine.step()
            for other in range(world):
                one, two = (models.batch("mlp", count, micro, other) for micro in (0, 1))
                loss = 2 * twin(*one) + 0.5 * twin(*two)
                (loss / world / accumulation).backward()
            if (count + 1) % accumulation == 0:
                plain.step()
                plain.zero_grad()
        assert largest_gap(model, twin) <= 1e-6, name
        assert engine.global_steps == 3
        engine.close()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_several_backwards_in_a_micro_batch(accumulation: int) -> None:
    run_ranks(several_backwards, 2, accumulation)


def summed_forwards(rank: int, world: int) -> None:
    """Two forwards, then one backward of their sum; forwards of different order than backwards."""
    for name, plan in every_plan().items():
        twin, model = models.build("gpt"), models.build("gpt")
        engine = onecopy.initialize(model, plan, optimizer=sgd)
        plain = sgd(twin.parameters())
        for count in range(3):
            losses = [engine(*models.batch("gpt", count, micro, rank)) for micro in (0, 1)]
            if count == 1:
                losses[0].backward()
                losses[1].backward()
            else:
                (losses[0] + losses[1]).backward()
            engine.step()
            for other in range(world):
                total = sum(twin(*models.batch("gpt", count, micro, other)) for micro in (0, 1))
                (total / world).backward()
            plain.step()
            plain.zero_grad()
        assert largest_gap(model, twin) <= 1e-6, name
        engine.close()


def test_two_forwards_before_backward() -> None:
    run_ranks(summed_forwards, 2)


def forwards_without_backward(rank: int, world: int) -> None:
    """Validation in between, with and without no_grad, a forward whose loss is dropped, and train/eval switches."""
    for name, plan in every_plan(accumulation=2).items():
        twin, model = models.build("gpt"), models.build("gpt")
        engine = onecopy.initialize(model, plan, optimizer=sgd)
        plain = sgd(twin.parameters())
        for count in range(4):
            batch = models.batch("gpt", count, 0, rank)
            engine.eval()
            assert not model.training
            with torch.no_grad():
                before = engine(*batch).item()
            with torch.inference_mode():
                assert engine(*batch).item() == before, name
            engine(*batch)  # has a graph nobody uses
            engine.train()
            assert model.training
            loss = engine(*batch)
            assert loss.item() == before, name
            loss.backward()
            engine.step()
            for other in range(world):
                (twin(*models.batch("gpt", count, 0, other)) / world / 2).backward()
            if count % 2:
                plain.step()
                plain.zero_grad()
        assert largest_gap(model, twin) <= 1e-6, name
        engine.close()


def test_forwards_without_backward_change_nothing() -> None:
    run_ranks(forwards_without_backward, 2)


def zero_grad_between(rank: int, world: int, who: str) -> dict[str, list[float]]:
    """``zero_grad`` by hand before every backward, as plain torch loops do, accumulation 1 and 2."""
    out = {}
    for accumulation in (1, 2):
        for name, plan in every_plan(accumulation=accumulation).items():
            engine = toy_engine(plan)
            for x in (1.0 + rank, 3.0 + rank):
                {"optimizer": engine.optimizer, "module": engine.module}[who].zero_grad()
                engine(torch.tensor([x])).backward()
                engine.step()
            out[f"{name} x{accumulation}"] = [weight(engine)]
            engine.close()
    return out


@pytest.mark.parametrize("who", ["optimizer", "module"])
def test_zero_grad_by_hand_loses_nothing(who: str) -> None:
    """Accumulation 1: two steps, 1 - 0.1 * (1.5 + 3.5). Accumulation 2: one step of 2.5."""
    for run in run_ranks(zero_grad_between, 2, who):
        for name, (w,) in run.items():
            assert w == pytest.approx(0.5 if name.endswith("x1") else 0.75), name


def no_sync_run(rank: int, world: int) -> None:
    """Micro-batches under ``no_sync`` are not lost, and it costs no more collectives than without."""
    for name, plan in every_plan(accumulation=3, clip=0.3).items():
        counts = {}
        for quiet in (False, True):
            twin, model = models.build("mlp"), models.build("mlp")
            engine = onecopy.initialize(model, plan, optimizer=sgd)
            plain = sgd(twin.parameters())
            for count in range(6):
                batch = models.batch("mlp", count, 0, rank)
                if quiet and count % 3 != 2:
                    with engine.no_sync():
                        engine(*batch).backward()
                else:
                    engine(*batch).backward()
                engine.step()
                for other in range(world):
                    (twin(*models.batch("mlp", count, 0, other)) / world / 3).backward()
                if count % 3 == 2:
                    nn.utils.clip_grad_norm_(twin.parameters(), 0.3)
                    plain.step()
                    plain.zero_grad()
            assert largest_gap(model, twin) <= 1e-6, f"{name}, no_sync {quiet}"
            counts[quiet] = engine.measured()["collectives"].get("reduce", {"count": 0})["count"]
            engine.close()
        assert counts[True] <= counts[False], name


def test_no_sync_at_each_stage() -> None:
    run_ranks(no_sync_run, 2)


def boundaries_by_hand(rank: int, world: int) -> dict[str, list[float]]:
    """Windows of one, then three micro-batches by ``set_boundary``, then automatic ones again."""
    out = {}
    for name, plan in every_plan(accumulation=2).items():
        engine = toy_engine(plan)
        moved = []
        for boundary in (True, False, False, True, None, None):
            engine.set_boundary(boundary)
            engine(torch.tensor([1.0])).backward()
            moved.append(engine.step())
        out[name] = [*map(float, moved), weight(engine), float(engine.global_steps)]
        engine.close()
    return out


def test_boundaries_by_hand() -> None:
    runs = run_ranks(boundaries_by_hand, 2)
    for run in runs:
        for name, (*moved, w, steps) in run.items():
            assert moved[:4] == [1.0, 0.0, 0.0, 1.0], name
            assert moved == runs[0]["stage 0"][:6], "the same rule at every stage"
            assert w == pytest.approx(runs[0]["stage 0"][6]), name
            assert steps == sum(moved), name


def misuse(rank: int, world: int) -> dict[str, Any]:
    """``step`` without backward, twice, or forgotten."""
    out: dict[str, Any] = {}
    for name, plan in every_plan().items():
        said = []
        engine = toy_engine(plan)
        for when in ("first", "twice"):
            try:
                moved = engine.step()
                said.append(f"{when}: moved" if moved else f"{when}: no-op")
            except OneCopyError as error:
                said.append(f"{when}: {type(error).__name__}")
            if when == "first":
                engine(torch.tensor([1.0])).backward()
                engine.step()
        said.append(str(round(weight(engine), 6)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                for _ in range(4):
                    engine(torch.tensor([1.0])).backward()
            except OneCopyError as error:
                caught.append(error)  # type: ignore[arg-type]
        said.append(
            "noticed" if any("step" in str(getattr(c, "message", c)) for c in caught) else "forgotten in silence"
        )
        out[name] = said
        engine.close()
    return out


def test_misuse_of_step() -> None:
    for run in run_ranks(misuse, 2):
        for name, said in run.items():
            assert said[0] in ("first: no-op", "first: EngineError"), name
            assert said[1] in ("twice: no-op", "twice: EngineError"), name
            assert said[2] == "0.9", name
            assert said[3] == "noticed", name


def failed_forward(rank: int, world: int) -> None:
    """A forward or a loss that raises on every rank, caught by the user: the next steps are right."""
    for name, plan in every_plan().items():
        twin, model = models.build("mlp"), models.build("mlp")
        engine = onecopy.initialize(model, plan, optimizer=sgd)
        plain = sgd(twin.parameters())
        for count in range(3):
            batch = models.batch("mlp", count, 0, rank)
            with pytest.raises(RuntimeError):
                engine(batch[0][:, :3], batch[1])
            with pytest.raises(ZeroDivisionError):
                _ = engine(*batch) / (1 // 0)
            engine(*batch).backward()
            engine.step()
            for other in range(world):
                (twin(*models.batch("mlp", count, 0, other)) / world).backward()
            plain.step()
            plain.zero_grad()
        assert largest_gap(model, twin) <= 1e-6, name
        engine.close()


def test_a_caught_exception_in_the_forward_leaves_the_engine_usable() -> None:
    run_ranks(failed_forward, 2)


def gradients_run(rank: int, world: int) -> dict[str, dict[str, Tensor]]:
    """Full gradients between backward and step, and a gradient set by hand."""
    out = {}
    for name, plan in every_plan().items():
        model = models.build("mlp")
        engine = onecopy.initialize(model, plan, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        engine(*models.batch("mlp", 0, 0, rank)).backward()
        named = dict(model.named_parameters())
        grads = {n: onecopy.full_grad(p).clone() for n, p in named.items()}
        target = named["layers.3.weight"]
        start = onecopy.full_param(target).clone()
        onecopy.set_full_grad(target, torch.ones(7, 7))
        engine.step()
        grads["edited"] = onecopy.full_param(target).clone() - start
        out[name] = grads
        engine.close()
    return out


def test_gradients_gather_whole_and_can_be_set() -> None:
    model = models.build("mlp")
    parts = [models.batch("mlp", 0, 0, rank) for rank in range(2)]
    model(*(torch.cat(t) for t in zip(*parts, strict=True))).backward()
    for run in run_ranks(gradients_run, 2):
        for name, grads in run.items():
            for n, p in model.named_parameters():
                assert grads[n].shape == p.shape, name
                assert (grads[n] - p.grad).abs().max() <= 1e-7, f"{name}: {n}"  # type: ignore[operator]
            assert torch.allclose(grads["edited"], torch.full((7, 7), -0.1), atol=1e-7), name


def token_weighted(rank: int, world: int) -> dict[str, float]:
    """Ranks with 1 and 3 valid tokens: the user weighs the loss by world * own / total; the step is the exact mean."""
    out = {}
    for name, plan in every_plan().items():
        engine = toy_engine(plan)
        own = [4.0] if rank == 0 else [1.0, 2.0, 3.0]
        for x in [torch.tensor(own)]:
            (engine(x) / len(own) * (world * len(own) / 4)).backward()
            engine.step()
        out[name] = weight(engine)
        engine.close()
    return out


def test_token_weighted_loss() -> None:
    for run in run_ranks(token_weighted, 2):
        assert run == dict.fromkeys(run, pytest.approx(1 - 0.1 * 2.5)), run


def hooks_run(rank: int, world: int) -> None:
    """Hooks users put on tensors, modules and parameters still fire, with full shapes."""
    for name, plan in every_plan().items():
        model = models.build("mlp")
        seen: list[Any] = []
        model.layers[0].register_forward_hook(lambda m, i, o, seen=seen: seen.append(("forward", o.shape)))
        model.layers[0].register_full_backward_hook(lambda m, i, o, seen=seen: seen.append(("backward", o[0].shape)))
        engine = onecopy.initialize(model, plan, optimizer=sgd)
        model.layers[2].register_forward_pre_hook(
            lambda m, i, seen=seen: seen.append(("weight", m.weight.sum().item()))
        )
        engine(*models.batch("mlp", 0, 0, rank)).backward()
        engine.step()
        kinds = [kind for kind, _ in seen]
        assert kinds.count("forward") == 1, name
        assert kinds.count("backward") == 1, name
        assert kinds.count("weight") == 1, name
        engine.close()


def test_user_hooks_fire() -> None:
    run_ranks(hooks_run, 2)


def deepcopied(rank: int, world: int) -> str:
    """``copy.deepcopy`` of an engine's module works or explains."""
    model = models.build("mlp")
    engine = onecopy.initialize(model, onecopy.stage(3, units=onecopy.Units(min_numel=0)), optimizer=sgd)
    try:
        twin = copy.deepcopy(model)
    except OneCopyError as error:
        return str(error)
    first = next(iter(twin.parameters()))
    assert first.shape == (7, 7)
    engine(*models.batch("mlp", 0, 0, rank)).backward()
    engine.step()
    with onecopy.gathered(twin):
        loss = twin(*models.batch("mlp", 0, 0, 0))
    return f"copied {loss.item():.6f}"


def test_deepcopy_works_or_explains() -> None:
    said = run_ranks(deepcopied, 2)[0]
    if said.startswith("copied"):
        expected = models.build("mlp")(*models.batch("mlp", 0, 0, 0)).item()
        assert float(said.split()[1]) == pytest.approx(expected, abs=1e-5), "the copy must be a snapshot"
    else:
        assert "gathered" in said or "copy" in said


def divergent_data(rank: int, world: int) -> dict[str, float]:
    """Batches of different size on each rank; the engine averages the ranks' own means."""
    out = {}
    for name, plan in every_plan().items():
        torch.manual_seed(0)
        model = nn.Linear(7, 7)
        engine = onecopy.initialize(model, plan, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        x = torch.randn(8, 7, generator=torch.Generator().manual_seed(rank))[: 3 + 4 * rank]
        F.mse_loss(engine(x), torch.zeros_like(x)).backward()
        engine.step()
        out[name] = onecopy.full_param(model.weight).double().sum().item()
        engine.close()
    return out


def test_batches_of_different_size() -> None:
    torch.manual_seed(0)
    model = nn.Linear(7, 7)
    for rank in range(2):
        x = torch.randn(8, 7, generator=torch.Generator().manual_seed(rank))[: 3 + 4 * rank]
        (F.mse_loss(model(x), torch.zeros_like(x)) / 2).backward()
    expected = (model.weight.detach() - 0.1 * model.weight.grad).double().sum().item()  # type: ignore[operator]
    for run in run_ranks(divergent_data, 2):
        assert run == dict.fromkeys(run, pytest.approx(expected, abs=1e-5)), run


def counters(rank: int, world: int) -> list[Any]:
    engine = toy_engine(onecopy.stage(2, accumulation=2))
    seen: list[Any] = [(engine.grad_norm, engine.loss_scale, engine.global_steps, engine.micro_steps)]
    for _ in range(4):
        engine(torch.tensor([1.0])).backward()
        seen.append(
            (engine.is_boundary(), engine.step(), engine.global_steps, engine.micro_steps, engine.skipped_steps)
        )
    assert engine.device.type == "cpu"
    assert engine.module.w is not None
    engine.close()
    return seen


def test_a_micro_batch_without_a_backward_pass_is_warned_about() -> None:
    """After ``discard_gradients()`` the loop's own ``step()`` would count as a micro-batch with a gradient of zero."""
    engine = onecopy.initialize(
        nn.Linear(2, 1), onecopy.stage(2, accumulation=2), optimizer=lambda params: torch.optim.SGD(params, lr=0.1)
    )
    engine(torch.ones(1, 2)).sum().backward()
    engine.discard_gradients()
    with pytest.warns(UserWarning, match="without a backward pass .* one of the 2 micro-batches .* leave its step"):
        engine.step()
    engine(torch.ones(1, 2)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.step()
    engine.close()


def test_counters() -> None:
    assert oracle(Case("toy", optimizer=("SGD", {"lr": 0.1}), steps=1), 1).losses == [1.0]
    for seen in run_ranks(counters, 2):
        assert seen[0] == (None, 1.0, 0, 0)
        assert seen[1:] == [
            (False, False, 0, 1, 0),
            (True, True, 1, 2, 0),
            (False, False, 1, 3, 0),
            (True, True, 2, 4, 0),
        ]
