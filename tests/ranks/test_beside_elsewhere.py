"""Steps on a thread beside training whose states rest on disk or in a codec."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import onecopy
from onecopy.errors import DiskError, EngineError, OneCopyError
from onecopy.plan.plan import When
from tests.ranks.harness import run_ranks
from tests.ranks.test_beside import plan
from tests.ranks.test_offload import SMALL, adamw, go_on, same, stack

pytestmark = pytest.mark.ranks

PLACES: dict[str, Callable[[onecopy.Plan, str], onecopy.Plan]] = {
    "disk": lambda base, folder: onecopy.offload(base, "disk", scratch=folder),
    "int8": lambda base, folder: onecopy.low_precision(onecopy.offload(base), "int8"),
    "bf16 on disk": lambda base, folder: onecopy.low_precision(onecopy.offload(base, "disk", scratch=folder), "bfloat16_sr"),
}


def elsewhere(rank: int, world: int, folder: str, cases: list[dict[str, Any]]) -> list[str]:
    """A step beside training whose states rest on disk or in a codec: its bytes, and the bits of the step that waits; of a
    delayed one, those of the same run again, and of states in memory where they are the same numbers."""
    wrong = []
    for case in cases:
        for where in case.pop("places"):
            place = PLACES[where]
            runs: dict[str, list[list[Any]]] = {"boundary": [], "backward": [], "delayed": []}
            for when in ("boundary", "backward", "delayed", *(() if where == "disk" else ("delayed",))):
                step = onecopy.StepPolicy(tile=2048, when=when)  # type: ignore[arg-type]
                engine = onecopy.initialize(
                    stack(), place(onecopy.stage(step=step, units=SMALL, **case), folder), optimizer=adamw
                )
                runs[when].append(go_on(engine, rank, 4))
                if engine.predicted() != engine.measured():
                    wrong.append(f"{case}, {where}, {when}: bytes")
                engine.close()
            if where == "disk":
                engine = onecopy.initialize(stack(), plan(when="delayed", **case), optimizer=adamw)
                runs["delayed"].append(go_on(engine, rank, 4))
                engine.close()
            late = runs["delayed"]
            if not same(runs["boundary"][0], runs["backward"][0]) or not all(same(late[0], other) for other in late[1:]):
                wrong.append(f"{case}, {where}: values")
    return wrong


@pytest.mark.filterwarnings("ignore:StepPolicy")
def test_steps_beside_training_of_states_on_disk_and_in_codecs(tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [
        {"places": list(PLACES), "number": 2},
        {"places": ["bf16 on disk"], "number": 3, "dtype": "bf16", "accumulation": 2},
    ]
    assert run_ranks(elsewhere, 2, str(tmp_path), cases) == [[]] * 2
    assert not list(tmp_path.iterdir())


def one_disk_fails(rank: int, world: int, folder: str) -> list[str]:
    """Rank 0's file of moments is cut short, and a thread finds it; a new engine goes on from the checkpoint."""
    said = []
    whens: tuple[When, ...] = ("backward", "delayed")
    for when in whens:
        step = onecopy.StepPolicy(tile=2048, when=when)
        chosen = PLACES["disk"](onecopy.stage(2, step=step, units=SMALL), folder)
        engine = onecopy.initialize(stack(), chosen, optimizer=adamw)
        go_on(engine, rank, 2)
        engine.save(f"{folder}/saved-{when}")
        if rank == 0:
            (file,) = Path(folder).rglob("rank0/exp_avg.bin")
            os.truncate(file, 0)
        with pytest.raises(OneCopyError) as caught:
            go_on(engine, rank, 2, first=2)
        said.append(f"{type(caught.value).__name__}: {caught.value}")
        with pytest.raises(EngineError, match="the last step was interrupted"):
            engine.step()
        engine.close()
        engine = onecopy.initialize(stack(), chosen, optimizer=adamw)
        engine.load(f"{folder}/saved-{when}")
        twin = onecopy.initialize(stack(), plan(2, when), optimizer=adamw)
        go_on(twin, rank, 2)
        twin.finish_step()
        said.append(str(same(go_on(engine, rank, 2, first=2), go_on(twin, rank, 2, first=2))))
        engine.close(), twin.close()
    return said


@pytest.mark.filterwarnings("ignore:StepPolicy")
def test_a_disk_that_fails_beside_training_fails_the_step_on_all(tmp_path: Path) -> None:
    here, there = run_ranks(one_disk_fails, 2, str(tmp_path))
    for said in here[::2]:
        assert said.startswith(DiskError.__name__) and "exp_avg.bin is shorter" in said
    for said in there[::2]:
        assert "rank 0 failed" in said and "exp_avg.bin is shorter" in said
    assert here[1::2] == there[1::2] == ["True"] * 2
