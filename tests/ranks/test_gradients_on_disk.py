"""Gradients on disk: the numbers and the bytes of those in memory, whatever a loop does to them, and a disk that fails."""

from __future__ import annotations

import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onecopy
from onecopy.errors import DiskError, PlanError
from onecopy.plan.layout import Layout
from onecopy.plan.plan import State
from tests.ranks.harness import run_ranks
from tests.ranks.test_offload import SMALL, TILE, adamw, go_on, run, same, stack

pytestmark = pytest.mark.ranks

PLACES: dict[str, dict[str, Any]] = {
    "beside states on the host": {"optimizer": "host", "gradient": "disk"},
    "beside states on the device": {"optimizer": "device", "gradient": "disk"},
    "beside states on disk, in part": {"optimizer": "disk", "gradient": "disk", "ratio": 0.5},
    "on the host, states on the device": {"optimizer": "device", "gradient": "host"},
}
SHARDED: dict[str, dict[str, Any]] = {
    "all on disk": {"optimizer": "disk", "parameter": "disk", "gradient": "disk"},
    "all but the states": {"optimizer": "device", "parameter": "disk", "gradient": "disk"},
}


def every_place(rank: int, world: int, folder: str, cases: list[dict[str, Any]]) -> list[str]:
    wrong = []
    for case in cases:
        numbers, steps, group = case.pop("numbers"), case.pop("steps"), case.pop("group", None)
        for number in numbers:
            units = onecopy.Units(min_numel=2500, reduce_ahead=number % 2)
            base = onecopy.stage(number, clip=0.5, step=TILE, units=units, **case).with_(group=group)
            engine, twin = run(rank, base, steps)
            engine.close()
            for where, how in (PLACES if number < 3 else PLACES | SHARDED).items():
                moved = how if number > 1 else {key: tier for key, tier in how.items() if key != "gradient"}
                engine, seen = run(rank, onecopy.offload(base, scratch=folder, **moved), steps)
                if not same(seen, twin):
                    wrong.append(f"stage {number}, {where}, {case}: values")
                if engine.predicted() != engine.measured():
                    wrong.append(f"stage {number}, {where}, {case}: bytes")
                engine.close()
    return wrong


@pytest.mark.filterwarnings("ignore:ratio")
@pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.long)])
def test_gradients_on_disk_change_no_bit(tmp_path: Path, long: bool) -> None:
    """Losses, norms and weights are those of the stage on the device, clipped; every byte is as predicted, peaks included. At
    stages 0 and 1 gradients are whole and stay on the device; the rest moves."""
    cases: list[dict[str, Any]] = [
        {"numbers": (2, 3), "steps": 20 if long else 4, "accumulation": 1},
        {"numbers": (0, 1, 2, 3) if long else (1, 3), "steps": 20 if long else 3, "accumulation": 4},
        {"numbers": (2, 3) if long else (3,), "steps": 3, "accumulation": 1, "dtype": "bf16"},
        {"numbers": (3,), "steps": 3, "accumulation": 3, "dtype": "fp16"},
        {"numbers": (2,), "steps": 2, "accumulation": 2, "group": 1},
    ]
    assert run_ranks(every_place, 2, str(tmp_path), cases) == [[]] * 2
    assert run_ranks(every_place, 1, str(tmp_path), [{"numbers": (3,), "steps": 2, "accumulation": 2}]) == [[]]
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------ what loops do to gradients


def loop(engine: Any, rank: int) -> list[Any]:
    """Three micro-batches a window, and everything that may be done to gradients between a backward pass and its step."""
    params, seen = list(engine.module.parameters()), []

    def backward(step: int, micro: int) -> None:
        generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
        x, y = torch.randn(4, 33, generator=generator), torch.randn(4, 7, generator=generator)
        loss = ((engine(x).float() - y) ** 2).mean()
        loss.backward()
        seen.append(loss.item())

    def window(step: int) -> None:
        for micro in range(2):
            backward(step, micro)
            engine.step()
        backward(step, 2)

    def finish() -> None:
        engine.step()
        seen.append(engine.grad_norm)

    window(0), seen.append(nn.utils.clip_grad_norm_(params, 0.1)), finish()
    window(1), [param.grad.mul_(0.5) for param in params]
    params[1].grad = None
    finish()
    window(2), backward(2, 9), finish()  # a second pass joins what is final
    window(3), onecopy.set_full_grad(params[0], onecopy.full_grad(params[0]).clamp(-1e-3, 1e-3))
    seen.append(onecopy.full_grad(params[0])), finish()
    with engine.no_sync():  # two passes go out with the third
        backward(4, 7), backward(4, 8)
    window(4), finish()
    backward(5, 0), seen.append(onecopy.full_grad(params[2])), engine.step()
    backward(5, 1), engine.step()
    backward(5, 2)  # the window was to end here
    for boundary in (False, True):
        engine.set_boundary(boundary), engine.step()
        backward(5, 3)
    finish(), engine.set_boundary(None)
    engine.discard_gradients()
    window(6), engine.discard_gradients(), window(7), finish()
    engine.optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(params, 1e-2))
    window(8), finish()
    return [*seen, *engine.full_state_dict().values()]


def loops(rank: int, world: int, folder: str) -> list[str]:
    wrong = []
    scratch = onecopy.Scratch(folder, staging=1 << 20)
    for number, dtype in ((2, None), (3, "bf16")):
        base = onecopy.stage(number, accumulation=3, dtype=dtype, clip=0.5, step=TILE, units=SMALL)
        engine = onecopy.initialize(stack(), base, optimizer=adamw)
        twin = loop(engine, rank)
        engine.close()
        plan = onecopy.offload(base, "disk", "disk" if number == 3 else "device", gradient="disk", scratch=scratch)
        engine = onecopy.initialize(stack(), plan, optimizer=adamw)
        if not same(loop(engine, rank), twin):
            wrong.append(f"stage {number}")
        tiers = engine._core.tiers
        assert tiers.disk is not None and tiers.disk._queue is not None
        kept = {kind: size for kind, size in tiers.host.live.items() if size and kind != "staging"}
        if kept or tiers.disk._queue.staging.held:
            wrong.append(f"stage {number}: {kept}, {tiers.disk._queue.staging.held} bytes of staging")
        engine.close()
    return wrong


@pytest.mark.filterwarnings("ignore:.*backward passes in one micro-batch")
def test_what_a_loop_does_to_gradients_on_disk(tmp_path: Path) -> None:
    assert run_ranks(loops, 2, str(tmp_path)) == [[]] * 2


# ------------------------------------------------------------------------------------------------------- the disk that fails


def full_for_a_while(rank: int, world: int, folder: str) -> list[str]:
    """On rank 1 the system refuses to write, as a full disk does, in one micro-batch of the second window."""
    plan = onecopy.stage(2, accumulation=2, step=TILE, units=SMALL)
    twin, _ = run(rank, plan, 1)
    want = go_on(twin, rank, 2, first=1)
    twin.close()
    engine = onecopy.initialize(stack(), onecopy.offload(plan, gradient="disk", scratch=folder), optimizer=adamw)
    go_on(engine, rank, 1)
    before = engine.full_state_dict()
    said = []
    for micro in range(2):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == 1 and micro == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            engine(torch.ones(2, 33)).sum().backward()
            engine.step()
        except DiskError as error:
            said.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    after = engine.full_state_dict()
    said.append(str(all(torch.equal(after[name], value) for name, value in before.items())))
    engine.save(f"{folder}/saved")
    said.append(str(same(go_on(engine, rank, 2, first=1), want)))  # the window is repeated from its beginning
    engine.close()
    return said


def test_a_disk_that_is_full_costs_a_window_of_gradients_and_nothing_else(tmp_path: Path) -> None:
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN  # else the limit would end the process
    for error, unchanged, repeated in run_ranks(full_for_a_while, 2, str(tmp_path)):
        assert "gradient.bin failed: EFBIG" in error
        assert "no state has changed" in error
        assert unchanged == repeated == "True"


def test_gradients_that_cannot_rest_on_disk() -> None:
    whole = onecopy.stage(1).rules[0].row
    layout = Layout(tier="disk")
    plan = onecopy.stage(1).with_(
        rules=(onecopy.Rule("*", replace(whole, gradient=State(layout, layout))),), scratch=onecopy.Scratch("/")
    )
    with pytest.raises(PlanError, match=r"gradient of '0\.weight' is on tier 'disk' and is not sharded.*stage 2 or 3"):
        onecopy.initialize(stack(), plan, optimizer=adamw)
    with pytest.raises(PlanError, match="names no folder"):
        onecopy.initialize(stack(), onecopy.offload(onecopy.stage(2), gradient="disk"), optimizer=adamw)
    delayed = onecopy.stage(2, step=onecopy.StepPolicy(when="delayed"))
    with pytest.raises(PlanError, match="does not keep gradients"):
        onecopy.initialize(stack(), onecopy.offload(delayed, gradient="disk", scratch="/"), optimizer=adamw)
