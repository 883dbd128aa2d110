"""Steps on a thread beside training: in the backward pass with the same bits, or one window late with the paper's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onecopy
from onecopy.errors import EngineError, OneCopyError, PlanError
from onecopy.plan.plan import When
from tests.ranks.harness import run_ranks
from tests.ranks.test_offload import SMALL, adamw, go_on, same, stack

pytestmark = pytest.mark.ranks


def plan(number: int, when: When, **options: Any) -> onecopy.Plan:
    step = onecopy.StepPolicy(tile=2048, when=when)
    return onecopy.offload(onecopy.stage(number, step=step, units=SMALL, **options))


# ------------------------------------------------------------------------------------------------------ in the backward


def beside_the_boundary(rank: int, world: int, options: list[dict[str, Any]]) -> list[tuple[bool, bool]]:
    found = []
    for chosen in options:
        runs = []
        for when in ("boundary", "backward"):
            engine = onecopy.initialize(stack(), plan(when=when, **chosen), optimizer=adamw)
            runs.append((go_on(engine, rank, 4), engine.predicted(), engine.measured()))
            engine.close()
        (one, _, _), (other, predicted, measured) = runs
        found.append((same(one, other), predicted == measured))
    return found


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_step_in_the_backward_pass_has_the_same_bits(world: int) -> None:
    options: list[dict[str, Any]] = [
        {"number": number, "accumulation": accumulation, "dtype": dtype}
        for number in (2, 3)
        for accumulation in (1, 3)
        for dtype in ("fp32", "bf16")
    ]
    for run in run_ranks(beside_the_boundary, world, options):
        assert run == [(True, True)] * len(options), run


class Parts(nn.Module):
    """Ranks use different parts of it, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(9, 9) for _ in range(4))

    def forward(self, x: Tensor, which: list[int]) -> Tensor:
        for index in which:
            x = self.parts[index](x)
        return x


def parts_run(rank: int, world: int) -> list[bool]:
    found = []
    for number in (2, 3):
        runs = []
        for when in ("boundary", "backward"):
            engine = onecopy.initialize(Parts(), plan(number, when), optimizer=adamw)
            for step in range(3):
                engine(torch.ones(2, 9), [0, 1 + (rank + step) % 2]).square().mean().backward()
                engine.step()
            runs.append([*engine.full_state_dict().values()])
            engine.close()
        found.append(same(*runs))
    return found


def test_parts_that_only_some_ranks_use_wait_for_the_vote() -> None:
    assert run_ranks(parts_run, 2) == [[True, True]] * 2


def refused_in_backward(rank: int, world: int, folder: str, how: str) -> list[str]:
    """What is said when something comes after units were stepped, and that a checkpoint mends it."""
    said = []
    engine = onecopy.initialize(stack(), plan(2, "backward"), optimizer=adamw)
    go_on(engine, rank, 1)
    engine.save(folder)
    x = torch.ones(2, 33)
    weight = next(engine.module.parameters())

    def lose(x: Tensor) -> Tensor:
        return engine(x).float().square().mean()

    try:
        loss = lose(x)
        if how == "twice":
            loss = loss + 0 * lose(x)
            loss.backward(retain_graph=True)
            lose(x).backward()
        elif how == "nan":
            (loss * float("nan")).backward()
        else:
            loss.backward()
        if how == "clipped":
            torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1e-3)
        elif how == "discarded":
            engine.discard_gradients()
            assert not engine._core.stepper.has_gradients()  # type: ignore[union-attr]
        elif how == "written":
            with torch.no_grad():
                weight.mul_(2)
        engine.step()
    except OneCopyError as error:
        said.append(str(error))
    try:
        engine.discard_gradients()
        lose(x).backward()
        engine.step()
    except OneCopyError as error:
        said.append(str(error))
    engine.discard_gradients()
    engine.load(folder)
    after = go_on(engine, rank, 1, first=1)
    twin = onecopy.initialize(stack(), plan(2, "boundary"), optimizer=adamw)
    go_on(twin, rank, 1)
    said.append(str(same(after, go_on(twin, rank, 1, first=1))))
    engine.close(), twin.close()
    return said


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("twice", "gradients came for unit"),
        ("nan", "gradients of step 1 are not finite"),
        ("clipped", "p.grad was changed"),
        ("discarded", "interrupted: gradients were discarded"),
        ("written", "parameters were written"),
    ],
)
def test_what_comes_after_a_unit_was_stepped_is_refused(how: str, words: str, tmp_path: Path) -> None:
    for said in run_ranks(refused_in_backward, 2, str(tmp_path), how):
        assert words in said[0], said
        assert "load() a checkpoint" in said[1] and said[-1] == "True", said


# ------------------------------------------------------------------------------------------------------------- delayed


def delayed_twin(world: int, steps: int, accumulation: int) -> list[Tensor]:
    """One process: gradients are those of parameters that lack the last update (ZeRO-Offload, section 5.2)."""
    shown, master = stack(), stack()
    optimizer = adamw(list(master.parameters()))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(steps):
        total = [torch.zeros_like(param) for param in shown.parameters()]
        for micro in range(accumulation):
            for rank in range(world):
                generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
                x, y = torch.randn(4, 33, generator=generator), torch.randn(4, 7, generator=generator)
                grads = torch.autograd.grad(((shown(x) - y) ** 2).mean(), list(shown.parameters()))
                total = [one + other / (world * accumulation) for one, other in zip(total, grads, strict=True)]
        norm = torch.stack([part.norm() for part in total]).norm()
        with torch.no_grad():
            for param, latest in zip(shown.parameters(), master.parameters(), strict=True):
                param.copy_(latest)
        for param, part in zip(master.parameters(), total, strict=True):
            param.grad = part * min(1.0, 0.5 / (float(norm) + 1e-6))
        optimizer.step()
        schedule.step()
    return [param.detach() for param in master.parameters()]


def delayed_run(rank: int, world: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, accumulation in ((2, 1), (3, 2)):
        chosen = plan(number, "delayed", accumulation=accumulation, clip=0.5)

        def schedule(optimizer: torch.optim.Optimizer) -> Any:
            return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

        engine = onecopy.initialize(stack(), chosen, optimizer=adamw, scheduler=schedule)
        seen = []
        for step in range(5):
            for micro in range(accumulation):
                generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
                x, y = torch.randn(4, 33, generator=generator), torch.randn(4, 7, generator=generator)
                ((engine(x) - y) ** 2).mean().backward()
                engine.step()
            seen.append(engine.predicted() == engine.measured())
        engine.finish_step()
        place = f"{folder}/{number}"
        whole = list(engine.full_state_dict().values())
        engine.save(place)
        on = go_on(engine, rank, 2, first=5)
        second = onecopy.initialize(stack(), chosen, optimizer=adamw, scheduler=schedule)
        go_on(second, rank, 1)
        second.load(place)
        found[f"{number}"] = (whole, seen, same(on, go_on(second, rank, 2, first=5)))
        engine.close(), second.close()
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.filterwarnings("ignore:StepPolicy")
def test_a_delayed_step_beside_a_twin(world: int, tmp_path: Path) -> None:
    for run in run_ranks(delayed_run, world, str(tmp_path)):
        for name, accumulation in (("2", 1), ("3", 2)):
            whole, ledgers, continued = run[name]
            assert continued, "a checkpoint did not go on to the bit"
            assert ledgers[2:] == [True] * 3, ledgers  # until then moments are made
            for ours, theirs in zip(whole, delayed_twin(world, 5, accumulation), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_delayed_step_and_writes_to_parameters() -> None:
    with pytest.warns(UserWarning, match="one step later"):
        engine = onecopy.initialize(stack(), plan(2, "delayed"), optimizer=adamw)
    go_on(engine, 0, 1)
    engine(torch.ones(2, 33)).sum().backward()
    engine.step()
    weight = next(engine.module.parameters())
    with torch.no_grad():
        weight.zero_()
    engine(torch.ones(2, 33)).sum().backward()
    with pytest.raises(EngineError, match=r"'0\.weight' was written.*call engine\.finish_step\(\)"):
        engine.step()
    engine.discard_gradients()
    engine.finish_step()
    before = onecopy.full_param(weight)
    assert before.abs().sum() > 0  # what was written is overwritten, as was said
    onecopy.set_full_param(weight, torch.zeros_like(before))
    engine(torch.ones(2, 33)).sum().backward()
    engine.step()
    with pytest.warns(UserWarning, match=r"close\(\) drops the last update"):
        engine.close()


# --------------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: plan(2, "sideways"), "did you mean"),  # type: ignore[arg-type]
        (lambda: plan(2, "backward", clip=1.0), "clipped to 1"),
        (lambda: plan(2, "backward", dtype="fp16"), "the loss is scaled"),
        (lambda: plan(1, "backward"), "does not keep gradients"),
        (lambda: onecopy.stage(2, step=onecopy.StepPolicy(when="delayed")), "does not keep gradients"),
        (lambda: onecopy.low_precision(plan(2, "delayed")), "does not keep gradients"),
        (lambda: onecopy.offload(plan(2, "delayed"), ratio=0.5), "ratio is 0.5"),
        (lambda: onecopy.offload(plan(3, "backward"), "host", "host"), "no master weights"),
    ],
)
def test_plans_that_cannot_step_beside_training(made: Any, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        onecopy.initialize(stack(), made(), optimizer=adamw)


def test_uneven_data_needs_the_boundary() -> None:
    engine = onecopy.initialize(stack(), plan(2, "backward"), optimizer=adamw)
    with pytest.raises(EngineError, match="uneven"):
        list(engine.uneven([]))
    engine.close()


@pytest.mark.parametrize("when", ["backward", "delayed"])
@pytest.mark.filterwarnings("ignore:StepPolicy")
def test_what_goes_wrong_on_the_thread_is_raised_by_a_step(when: When) -> None:
    engine = onecopy.initialize(stack(), plan(2, when), optimizer=adamw)
    go_on(engine, 0, 1)
    tiles = engine._core.tiles
    assert tiles is not None

    def fail(optimizer: torch.optim.Optimizer) -> None:
        raise ZeroDivisionError("in the kernel")

    tiles._kernel = fail
    with pytest.raises(ZeroDivisionError, match="in the kernel"):
        go_on(engine, 0, 2)
    with pytest.raises(EngineError, match="the last step was interrupted: ZeroDivisionError: in the kernel"):
        engine.step()
    engine.close()
