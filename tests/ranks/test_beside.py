"""Steps on a thread beside training: in the backward pass with the same bits, or one window late with the paper's numbers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
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


def _write(weight: Any, rank: int) -> None:
    with torch.no_grad():
        weight.mul_(2)


def _halve_rates(engine: Any, *_: Any) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] /= 2


AFTER: dict[str, Callable[[Any, Any, int], Any]] = {
    "nothing": lambda engine, weight, rank: None,
    "clipped": lambda engine, weight, rank: nn.utils.clip_grad_norm_(engine.module.parameters(), 1e-3),
    "discarded": lambda engine, weight, rank: engine.discard_gradients(),
    "written": lambda engine, weight, rank: _write(weight, rank),
    "looked at": lambda engine, weight, rank: weight.data.norm() if rank == 0 else None,
    "another rate": _halve_rates,
    "another rate by a hook": lambda engine, weight, rank: engine.optimizer.register_step_pre_hook(
        lambda *_: _halve_rates(engine)
    ),
}


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
        handle = AFTER.get(how, AFTER["nothing"])(engine, weight, rank)
        assert how != "discarded" or not engine._core.stepper.has_gradients()  # type: ignore[union-attr]
        engine.step()
    except OneCopyError as error:
        said.append(str(error))
    try:
        engine.discard_gradients()
        lose(x).backward()
        engine.step()
    except OneCopyError as error:
        said.append(str(error))
    if "hook" in how:
        handle.remove()
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
        ("looked at", "parameters were written"),  # on rank 0 alone
        ("another rate", "its learning rate, were changed"),
        ("another rate by a hook", "its learning rate, were changed"),
    ],
)
def test_what_comes_after_a_unit_was_stepped_is_refused(how: str, words: str, tmp_path: Path) -> None:
    for said in run_ranks(refused_in_backward, 2, str(tmp_path), how):
        assert words in said[0], said
        assert "load() a checkpoint" in said[1] and said[-1] == "True", said


# What meets the states themselves, which are half stepped.
MEETS: dict[str, Callable[[Any, Any, str], Any]] = {
    "full_param": lambda engine, weight, folder: onecopy.full_param(weight),
    "set_full_param": lambda engine, weight, folder: onecopy.set_full_param(weight, torch.zeros(weight.shape)),
    "set_full_grad": lambda engine, weight, folder: onecopy.set_full_grad(weight, torch.zeros(weight.shape)),
    "full_state": lambda engine, weight, folder: onecopy.full_state(weight, "exp_avg"),
    "set_full_state": lambda engine, weight, folder: onecopy.set_full_state(weight, "exp_avg", torch.zeros(weight.shape)),
    "state_dict": lambda engine, weight, folder: engine.optimizer.state_dict(),
    "load_state_dict": lambda engine, weight, folder: engine.optimizer.load_state_dict({"state": {}, "param_groups": []}),
    "export": lambda engine, weight, folder: engine.export(folder + "/exported", "fp32"),
    "gathered": lambda engine, weight, folder: onecopy.gathered([weight], write_rank=0).__enter__(),
}


def half_stepped(rank: int, world: int, folder: str) -> dict[str, str]:
    """What each says between the backward pass and the step; and the step goes on as if nobody had asked."""
    said = {}
    for number in (2, 3):
        engine = onecopy.initialize(stack(), plan(number, "backward"), optimizer=adamw)
        go_on(engine, rank, 1)
        generator = torch.Generator().manual_seed(1000 + rank)
        x, y = torch.randn(4, 33, generator=generator), torch.randn(4, 7, generator=generator)
        ((engine(x) - y) ** 2).mean().backward()
        for name, call in MEETS.items():
            try:
                call(engine, next(engine.module.parameters()), folder)
                said[f"{name} {number}"] = "nothing"
            except OneCopyError as error:
                said[f"{name} {number}"] = str(error)
        engine.step()
        twin = onecopy.initialize(stack(), plan(number, "boundary"), optimizer=adamw)
        go_on(twin, rank, 2)
        said[f"same {number}"] = str(same([*engine.full_state_dict().values()], [*twin.full_state_dict().values()]))
        engine(x).sum().backward()
        with torch.no_grad():
            engine.load_state_dict({name: value / 2 for name, value in engine.full_state_dict().items()})
        try:
            engine.step()
        except OneCopyError as error:
            said[f"written {number}"] = str(error)
        engine.close(), twin.close()
    return said


def test_states_that_are_half_stepped_are_not_met(tmp_path: Path) -> None:
    """Nothing reads or writes a mixture of states before and after a step; a write to a sharded parameter is refused too."""
    for said in run_ranks(half_stepped, 2, str(tmp_path)):
        assert said.pop("same 2") == said.pop("same 3") == "True"
        for number in (2, 3):
            assert "parameters were written" in said.pop(f"written {number}")
        assert len(said) == 2 * len(MEETS)
        assert not [name for name, text in said.items() if "between the backward pass and engine.step()" not in text], said
    assert not list(tmp_path.iterdir())


def hooks_beside(rank: int, world: int) -> list[str]:
    """Step hooks that change the gradients, or the rate, against the loop doing the same before the step."""
    wrong = []
    for number in (0, 2, 3):
        for when in ("boundary", "delayed") if number else ("boundary",):
            runs = []
            for by_hook in (True, False):
                made = plan(number, when) if number else onecopy.stage(0, units=SMALL)  # type: ignore[arg-type]
                engine = onecopy.initialize(stack(), made, optimizer=adamw)
                params = list(engine.module.parameters())

                def change(*_: Any, params: Any = params, engine: Any = engine) -> None:
                    nn.utils.clip_grad_value_(params, 1e-3)
                    params[1].grad = None
                    _halve_rates(engine)

                if by_hook:
                    assert engine.optimizer is not None
                    engine.optimizer.register_step_pre_hook(change)
                norms = []
                for step in range(3):
                    generator = torch.Generator().manual_seed(1000 * step + rank)
                    engine(torch.randn(4, 33, generator=generator)).square().mean().backward()
                    if not by_hook:
                        change()
                    engine.step()
                    norms.append(engine.grad_norm)
                engine.finish_step()
                runs.append([*norms, *engine.full_state_dict().values()])
                engine.close()
            if not same(*runs):
                wrong.append(f"stage {number}, {when}")
    return wrong


@pytest.mark.filterwarnings("ignore:StepPolicy")
def test_what_a_step_hook_changes_counts_in_its_step() -> None:
    assert run_ranks(hooks_beside, 2) == [[], []]


# ------------------------------------------------------------------------------------------------------------- delayed


def looked_at_by_one(rank: int, world: int, folder: str) -> list[Any]:
    """Rank 0 alone looks at ``.data`` while a step is delayed; and an export has the last update."""
    engine = onecopy.initialize(stack(), plan(2, "delayed"), optimizer=adamw)
    go_on(engine, rank, 1)
    engine(torch.ones(2, 33)).sum().backward()
    engine.step()
    engine.export(folder)
    exported = load_file(f"{folder}/model.safetensors")
    found: list[Any] = [all(torch.equal(exported[name], value) for name, value in engine.full_state_dict().items())]
    engine(torch.ones(2, 33)).sum().backward()
    engine.step()
    if rank == 0:
        next(engine.module.parameters()).data.norm()
    engine(torch.ones(2, 33)).sum().backward()
    try:
        engine.step()
    except OneCopyError as error:
        found.append(str(error))
    return found


@pytest.mark.filterwarnings("ignore:StepPolicy")
def test_every_rank_says_what_one_did_while_a_step_is_delayed(tmp_path: Path) -> None:
    for exported, said in run_ranks(looked_at_by_one, 2, str(tmp_path)):
        assert exported and "'0.weight' was written, or its .data was taken" in said, said


def tensor_rate(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=torch.tensor(1e-2), weight_decay=0.1)


@pytest.mark.filterwarnings("ignore:StepPolicy")
def test_a_delayed_step_keeps_a_rate_that_is_changed_in_place() -> None:
    engine = onecopy.initialize(stack(), plan(2, "delayed"), optimizer=tensor_rate)
    engine(torch.ones(2, 33)).sum().backward()
    begun, going = threading.Event(), threading.Event()
    tiles = engine._core.tiles
    assert tiles is not None
    kernel = tiles._kernel

    def slow(optimizer: torch.optim.Optimizer) -> None:
        begun.set()
        assert going.wait(60)
        kernel(optimizer)

    tiles._kernel = slow
    engine.step()
    assert begun.wait(60) and engine.optimizer is not None
    engine.optimizer.param_groups[0]["lr"].fill_(0.0)
    going.set()
    engine.finish_step()
    twin = onecopy.initialize(stack(), plan(2, "boundary"), optimizer=tensor_rate)
    twin(torch.ones(2, 33)).sum().backward()
    twin.step()
    assert same([*engine.full_state_dict().values()], [*twin.full_state_dict().values()])
    engine.close(), twin.close()


@pytest.mark.filterwarnings("ignore:StepPolicy")
def test_a_wait_for_a_delayed_step_that_is_interrupted_goes_on_with_the_next() -> None:
    """Ctrl-C in ``finish_step()``, as in a notebook: the step goes on on its thread, and nothing is lost."""
    engine = onecopy.initialize(stack(), plan(2, "delayed"), optimizer=adamw)
    engine(torch.ones(2, 33)).sum().backward()
    going, tiles = threading.Event(), engine._core.tiles
    assert tiles is not None
    kernel = tiles._kernel

    def slow(optimizer: torch.optim.Optimizer) -> None:
        assert going.wait(60)
        kernel(optimizer)

    tiles._kernel = slow
    engine.step()
    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background ignore it
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        engine.finish_step()
    signal.signal(signal.SIGINT, former)
    going.set()
    engine.finish_step()
    twin = onecopy.initialize(stack(), plan(2, "boundary"), optimizer=adamw)
    twin(torch.ones(2, 33)).sum().backward()
    twin.step()
    assert same([*engine.full_state_dict().values()], [*twin.full_state_dict().values()])
    assert same(go_on(engine, 0, 1)[:1], go_on(twin, 0, 1)[:1])
    engine.close(), twin.close()


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
        (lambda: onecopy.low_precision(plan(2, "delayed"), master="bfloat16_sr"), "steps parameters where they rest"),
        (lambda: onecopy.offload(plan(3, "backward"), "disk", "disk", scratch="/"), "keeps parameters on 'disk'"),
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
