"""States in narrow formats: on every tier the same bits, the bytes that were predicted, and what a format cannot hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import onecopy
from tests.ranks.harness import run_ranks
from tests.ranks.test_offload import SMALL, TILE, adamw, go_on, placed, run, same, stack

pytestmark = pytest.mark.ranks


def low(rank: int, world: int, folder: str) -> dict[str, tuple[bool, bool, float]]:
    found = {}
    for number in (0, 2, 3):
        base = onecopy.stage(number, dtype="bf16", step=TILE, units=SMALL)
        engine, twin = run(rank, base, 8)
        engine.close()
        for moments in ("bfloat16_sr", "int8", "int4"):
            plan = onecopy.low_precision(base, moments)
            engine, here = run(rank, plan, 8)
            engine.close()
            for where in ("host", "disk"):
                engine, seen = run(rank, placed(plan, where, folder), 8)
                gap = max(abs(a - b) for a, b in zip(seen[:16:2], twin[:16:2], strict=True))
                found[f"{number} {moments} {where}"] = same(seen, here), engine.predicted() == engine.measured(), gap
                engine.close()
        engine, seen = run(rank, onecopy.low_precision(base, "bfloat16_sr", "bfloat16_sr"), 8)
        gap = max(abs(a - b) for a, b in zip(seen[:16:2], twin[:16:2], strict=True))
        found[f"{number} without master"] = True, engine.predicted() == engine.measured(), gap
        engine.close()
    return found


def test_low_precision_states_combine_with_every_tier(tmp_path: Path) -> None:
    """The same bits on the device, the host and the disk; bytes as predicted; losses near those of fp32 states."""
    one, other = run_ranks(low, 2, str(tmp_path))
    assert {name: row[:2] for name, row in one.items() if row[:2] != (True, True)} == {}
    assert max(gap for _, _, gap in one.values()) < 0.1
    assert one.keys() == other.keys()


def exact_cap(rank: int, world: int) -> str:
    """A cap of just what is predicted is enough from the first step on, for decoded moments too."""
    plan = onecopy.offload(onecopy.low_precision(onecopy.stage(2, dtype="bf16", step=TILE)))
    engine, _ = run(rank, plan, 1)
    caps = {tier: kinds["total"] for tier, kinds in engine.predicted()["peak"].items()}
    engine.close()
    engine, _ = run(rank, plan.with_(caps=onecopy.Caps(caps["device"], caps["host"])), 2)
    engine.close()
    with pytest.raises(onecopy.errors.PlanError) as caught:
        run(rank, plan.with_(caps=onecopy.Caps(caps["device"], caps["host"] - 1)), 1)
    return str(caught.value)


def test_a_cap_of_what_is_predicted_is_enough() -> None:
    for said in run_ranks(exact_cap, 2):
        assert "bytes of host memory on this rank and the cap is" in said


def refused(rank: int, world: int, folder: str) -> list[str]:
    """What a codec cannot hold, and dicts that would lack states."""
    said = []
    doubles = stack().double()
    with pytest.raises(onecopy.errors.PlanError) as caught:
        onecopy.initialize(doubles, onecopy.low_precision(onecopy.stage(2)), optimizer=adamw)
    said.append(str(caught.value))
    pure = onecopy.stage(2, precision=onecopy.Precision("bfloat16", master=None))
    with pytest.raises(onecopy.errors.PlanError) as caught:
        onecopy.initialize(stack(), onecopy.low_precision(pure), optimizer=adamw)
    said.append(str(caught.value))
    engine, _ = run(rank, placed(onecopy.stage(2), "disk", folder), 1)
    for use in (lambda: engine.optimizer.state_dict(), lambda: engine.optimizer.load_state_dict({"state": {}})):
        with pytest.raises(onecopy.errors.EngineError) as lost:
            use()
        said.append(str(lost.value))
    engine.close()
    return said


def test_what_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    for double, pure, read, loaded in run_ranks(refused, 2, str(tmp_path)):
        assert "are float64, and their codec 'int8' holds float32" in double
        assert "are bfloat16, and their codec 'int8' holds float32" in pure
        assert "engine.save()" in read
        assert "engine.save()" in loaded


def rounded(rank: int, world: int, folder: str) -> list[str]:
    """Frozen parts, and parameters of other dtypes, in a plan whose bfloat16 parameters are stepped where they rest."""
    wrong = []
    for number in (0, 2, 3):
        plan = onecopy.low_precision(onecopy.stage(number, step=TILE, units=SMALL), "int8", "bfloat16_sr")
        model = stack()
        model[2].bfloat16()
        model[0].requires_grad_(False)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        engine = onecopy.initialize(model, plan, optimizer=adamw)
        if not all(torch.equal(value, before[name]) for name, value in engine.full_state_dict().items()):
            wrong.append(f"stage {number}: the beginning")
        frozen = onecopy.full_param(model[0].weight)
        if not torch.equal(frozen, before["0.weight"]):
            wrong.append(f"stage {number}: a frozen parameter")
        masters = {buffer.name: buffer.master for buffer in engine._core.schedule.buffers}
        if any(masters.values()):
            wrong.append(f"stage {number}: {masters}")
        engine.close()

        base = onecopy.stage(number, dtype="bf16", step=TILE, units=SMALL)
        engine, _ = run(rank, base, 2)
        engine.save(f"{folder}/{number}")
        engine.close()
        other = onecopy.initialize(stack(), onecopy.low_precision(base, "int8", "bfloat16_sr"), optimizer=adamw)
        other.load(f"{folder}/{number}")
        digest = [float(value.double().sum()) for value in other.full_state_dict().values()]
        told: list[Any] = [None] * world
        torch.distributed.all_gather_object(told, digest)
        if told[0] != told[1]:
            wrong.append(f"stage {number}: replicas differ after a load")
        go_on(other, rank, 2, first=2)
        other.close()
    return wrong


def test_parameters_stepped_where_they_rest(tmp_path: Path) -> None:
    assert run_ranks(rounded, 2, str(tmp_path)) == [[]] * 2


def resumed_low(rank: int, world: int, folder: str) -> list[str]:
    apart = []
    for number in (0, 3):
        base = onecopy.stage(number, dtype="bf16", step=TILE, units=SMALL)
        for moments, master in (("bfloat16_sr", "bfloat16_sr"), ("int8", None), ("int4", None)):
            plan = onecopy.low_precision(base, moments, master)
            engine, _ = run(rank, plan, 3)
            engine.save(f"{folder}/{number}{moments}")
            want = go_on(engine, rank, 3, first=3)
            engine.close()
            other = onecopy.initialize(stack(), plan, optimizer=adamw)
            other.load(f"{folder}/{number}{moments}")
            if not same(go_on(other, rank, 3, first=3), want):
                apart.append(f"stage {number}, {moments}")
            other.close()
    return apart


def test_low_precision_resumes_to_the_bit(tmp_path: Path) -> None:
    """Random bits are those of the step, so a resumed run rounds as the one that went on."""
    assert run_ranks(resumed_low, 2, str(tmp_path)) == [[]] * 2
