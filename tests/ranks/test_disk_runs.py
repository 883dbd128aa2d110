"""Runs whose states are on disk: what fails there is one clear error, and nothing that was saved is lost."""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import onecopy
from onecopy.errors import CheckpointError, DiskError, EngineError, PlanError
from tests.ranks.harness import run_ranks
from tests.ranks.test_offload import SMALL, TILE, adamw, go_on, placed, same, stack

pytestmark = pytest.mark.ranks


def plan(folder: Path | str, staging: int = 8 << 20) -> onecopy.Plan:
    """Everything on disk."""
    base = onecopy.stage(3, step=TILE, units=SMALL)
    scratch = onecopy.Scratch(str(folder), staging=staging)
    return onecopy.offload(base, "disk", "disk", gradient="disk", scratch=scratch)


def program(body: str, *args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A process of its own, one rank, that has ``stack``, ``go_on`` and ``plan``."""
    head = """
        import json, os, signal, sys
        import torch, onecopy
        from tests.ranks.test_disk_runs import plan
        from tests.ranks.test_offload import adamw, go_on, stack
        folder, saved = sys.argv[1], sys.argv[2]
        engine = onecopy.initialize(stack(), plan(folder), optimizer=adamw)
    """
    code = textwrap.dedent(head) + textwrap.dedent(body)
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{root}/src", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *args], env=environment, capture_output=True, text=True, timeout=120, **options
    )


# ------------------------------------------------------------------------------------------------------------- killed


KILLED = """
    go_on(engine, 0, 3)
    engine.save(saved)
    seen = []

    tiles = engine._core.tiles
    step_tile = tiles._kernel

    def in_the_middle(optimizer):
        step_tile(optimizer)
        seen.append(0)
        if len(seen) == 5:  # some tiles of this step are stepped, some are on their way to the disk, some are not
            os.kill(os.getpid(), signal.SIGKILL)

    tiles._kernel = in_the_middle
    go_on(engine, 0, 1, first=3)
"""

RESUMED = """
    engine.load(saved)
    print(json.dumps([value if isinstance(value, float) else value.tolist() for value in go_on(engine, 0, 2, first=3)]))
"""


def test_killed_in_the_middle_of_a_step_and_resumed(tmp_path: Path) -> None:
    """The resumed run goes on to the bit as one that was never killed, and the dead run's files are gone."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    killed = program(KILLED, str(scratch), str(tmp_path / "saved"))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = {path for path in scratch.rglob("*.bin")}
    assert left
    resumed = program(RESUMED, str(scratch), str(tmp_path / "saved"))
    assert resumed.returncode == 0, resumed.stderr
    assert not list(scratch.rglob("*.bin"))
    engine = onecopy.initialize(stack(), onecopy.stage(3, step=TILE, units=SMALL), optimizer=adamw)
    go_on(engine, 0, 3)
    wanted = [value if isinstance(value, float) else value.tolist() for value in go_on(engine, 0, 2, first=3)]
    engine.close()
    assert json.loads(resumed.stdout) == wanted


# ------------------------------------------------------------------------------------------------- the disk that fails


def refused(rank: int, world: int, folder: str) -> list[str]:
    said = []
    for path in (f"{folder}/absent/deeper", __file__):
        model = stack()
        before = [param.clone() for param in model.parameters()]
        with pytest.raises(onecopy.errors.OneCopyError) as caught:
            onecopy.initialize(model, plan(path), optimizer=adamw)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        said.append(str(caught.value))
    return said


def test_a_folder_that_is_missing_or_none(tmp_path: Path) -> None:
    for absent, no_folder in run_ranks(refused, 2, str(tmp_path)):
        assert "absent" in absent
        assert str(tmp_path) in absent
        assert Path(__file__).name in no_folder


def test_a_disk_without_room_is_refused_at_the_start(tmp_path: Path) -> None:
    """The files get their whole size before the first step, so a full disk does not show in the middle of a run."""
    body = """
    go_on(engine, 0, 1)
    """
    limit = 16 << 10  # bytes a file may have: the system refuses as a full disk does
    done = program(
        body,
        str(tmp_path),
        str(tmp_path),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 1
    assert "DiskError" in done.stderr
    assert str(tmp_path) in done.stderr
    assert not list(tmp_path.rglob("*.bin"))


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    """The second is refused and says who is there; the first goes on. Another engine of one process is no other run."""
    body = """
    import subprocess
    if len(sys.argv) == 3:
        go_on(engine, 0, 1)
        code = "import sys, onecopy; from tests.ranks.test_disk_runs import plan; from tests.ranks.test_offload import *; "
        code += "onecopy.initialize(stack(), plan(sys.argv[1]), optimizer=adamw)"
        other = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True)
        assert other.returncode == 1
        print(other.stderr)
        second = onecopy.initialize(stack(), plan(folder), optimizer=adamw)
        go_on(second, 0, 1)
        go_on(engine, 0, 1)
        print("pid", os.getpid())
    """
    done = program(body, str(tmp_path), str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "DiskError" in done.stdout
    assert done.stdout.split("pid ")[-1].strip() in done.stdout.split("DiskError: ")[1]


def truncated(rank: int, world: int, folder: str, saved: str) -> list[str]:
    """Somebody cuts a file of moments short between two steps."""
    engine = onecopy.initialize(stack(), plan(folder), optimizer=adamw)
    go_on(engine, rank, 2)
    engine.save(saved)
    (file,) = Path(folder).rglob("exp_avg_sq.bin")
    os.truncate(file, 4096)
    said = []
    with pytest.raises(DiskError) as lost:
        go_on(engine, rank, 1, first=2)
    said.append(str(lost.value))
    with pytest.raises(EngineError, match="the last step was interrupted") as refused_step:
        go_on(engine, rank, 1, first=2)
    said.append(str(refused_step.value))
    with pytest.raises(CheckpointError, match="after a step that was interrupted"):
        engine.save(saved)
    engine.discard_gradients()
    with pytest.raises(CheckpointError, match=r"exp_avg_sq\.bin is shorter.*a part of .*step00000002 now$"):
        engine.load(saved)
    engine.close()
    engine = onecopy.initialize(stack(), plan(folder), optimizer=adamw)
    engine.load(saved)
    assert same(go_on(engine, rank, 2, first=2), twin())
    engine.close()
    return said


def one_disk_fails(rank: int, world: int, folder: str) -> list[str]:
    """Rank 0's file of moments is cut short."""
    said = []
    for number in (1, 3):
        base = onecopy.stage(number, step=TILE, units=SMALL)
        engine = onecopy.initialize(stack(), placed(base, "disk", folder), optimizer=adamw)
        go_on(engine, rank, 1)
        if rank == 0:
            (file,) = Path(folder).rglob("rank0/exp_avg.bin")
            os.truncate(file, 0)
        with pytest.raises(onecopy.errors.OneCopyError) as caught:
            go_on(engine, rank, 1, first=1)
        said.append(f"{type(caught.value).__name__}: {caught.value}")
        with pytest.raises(EngineError, match="the last step was interrupted"):
            go_on(engine, rank, 1, first=1)
        engine.close()
    return said


def test_a_disk_that_fails_on_one_rank_fails_the_step_on_all(tmp_path: Path) -> None:
    here, there = run_ranks(one_disk_fails, 2, str(tmp_path))
    for said in here:
        assert said.startswith("DiskError")
        assert "exp_avg.bin" in said
    for said in there:
        assert "rank 0 failed" in said
        assert "exp_avg.bin" in said


def closed(rank: int, world: int, folder: str) -> bool:
    """Parameters that rest on disk outlive their engine and join another."""
    model = stack()
    engine = onecopy.initialize(model, plan(folder), optimizer=adamw)
    before = go_on(engine, rank, 2)[-6:]
    engine.close()
    other = onecopy.initialize(model, onecopy.stage(2), optimizer=adamw)
    after = list(other.full_state_dict().values())
    other.close()
    return same(before, after[-6:])


def test_parameters_on_disk_outlive_their_engine(tmp_path: Path) -> None:
    assert run_ranks(closed, 2, str(tmp_path)) == [True, True]
    gc.collect()
    assert not list(tmp_path.rglob("*.bin"))


def twin() -> list[Any]:
    engine = onecopy.initialize(stack(), onecopy.stage(3, step=TILE, units=SMALL), optimizer=adamw)
    go_on(engine, 0, 2)
    seen = go_on(engine, 0, 2, first=2)
    engine.close()
    return seen


def test_a_file_that_somebody_truncated(tmp_path: Path) -> None:
    """One error with the path; the torn engine neither steps nor saves; a new one resumes from the checkpoint."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    ((lost, refused_step),) = run_ranks(truncated, 1, str(scratch), str(tmp_path / "saved"))
    assert "exp_avg_sq.bin" in lost
    assert "exp_avg_sq.bin" in refused_step
    last = f"such as {tmp_path}/saved/step00000002"
    assert refused_step.endswith(f"initialize() another, and load() a checkpoint into that, {last}"), refused_step


def test_staging_that_a_tile_does_not_fit(tmp_path: Path) -> None:
    """Refused at the start, with the least that would do, which does."""
    with pytest.raises(PlanError, match=r"the least is ([\d,]+)") as caught:
        onecopy.initialize(stack(), plan(tmp_path, staging=16 << 10), optimizer=adamw)
    found = re.search(r"the least is ([\d,]+)", str(caught.value))
    assert found is not None
    least = int(found.group(1).replace(",", ""))
    many = plan(tmp_path, staging=least).with_(units=onecopy.Units(min_numel=0, prefetch=9))
    engine = onecopy.initialize(stack(), many, optimizer=adamw)
    assert same(go_on(engine, 0, 4)[-3:], [*_alone(4)][-3:])
    engine.close()


def _alone(steps: int) -> list[Any]:
    engine = onecopy.initialize(stack(), onecopy.stage(3, step=TILE, units=SMALL), optimizer=adamw)
    seen = go_on(engine, 0, steps)
    engine.close()
    return seen


@pytest.mark.parametrize("where", ["device", "host", "all on disk"])
def test_a_step_that_is_interrupted(tmp_path: Path, where: str) -> None:
    """Ctrl-C in the middle of a step, caught by the caller as in a notebook: the torn engine neither steps nor saves until
    a checkpoint is loaded, and what was lent to the step is given back."""
    base = onecopy.stage(3, step=TILE, units=SMALL)
    engine = onecopy.initialize(stack(), base if where == "device" else placed(base, where, str(tmp_path)), optimizer=adamw)
    go_on(engine, 0, 2)
    engine.save(tmp_path / "saved")
    seen: list[int] = []
    tiles = engine._core.tiles
    assert tiles is not None
    step_tile = tiles._kernel

    def interrupt(optimizer: torch.optim.Optimizer) -> None:
        step_tile(optimizer)
        seen.append(0)
        if len(seen) == 3:
            raise KeyboardInterrupt

    tiles._kernel = interrupt
    for _ in range(5):
        seen.clear()
        with pytest.raises(KeyboardInterrupt):
            go_on(engine, 0, 1, first=2)
        with pytest.raises(EngineError, match="the last step was interrupted: KeyboardInterrupt"):
            go_on(engine, 0, 1, first=2)
        engine.discard_gradients()
        with pytest.raises(CheckpointError, match="after a step that was interrupted"):
            engine.save(tmp_path / "saved")
        engine.load(tmp_path / "saved")
    seen[:] = [0] * 10
    assert same(go_on(engine, 0, 2, first=2)[-3:], _alone(4)[-3:])
    engine.close()


# --------------------------------------------------------------------------------------------------------------- memory


MEMORY = """
    from onecopy.gpt import GPT, GPTConfig
    engine.close()

    def highest():
        line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
        return int(line.split()[1]) << 10

    base = highest()
    with torch.device("meta"):
        model = GPT(GPTConfig(layers=12, heads=4, width=512, context=64, recompute=True))
    cut = onecopy.stage(
        3,
        dtype="bf16",
        units=SMALL,
        step=onecopy.StepPolicy(tile=1 << 18),
        caps=onecopy.Caps(device=32 << 20, host=40 << 20),
    )
    scratch = onecopy.Scratch(folder, staging=24 << 20)
    capped = onecopy.offload(cut, "disk", "disk", gradient="disk", scratch=scratch)
    engine = onecopy.initialize(model, capped, optimizer=adamw)
    for step in range(2):
        tokens = torch.randint(0, 256, (1, 65), generator=torch.Generator().manual_seed(step))
        engine(tokens[:, :-1], tokens[:, 1:]).backward()
        engine.step()
    states = sum(sum(kinds.values()) for kinds in engine.predicted()["resident"].values())
    print(json.dumps([states, highest() - base, engine.predicted() == engine.measured()]))
"""


def test_states_that_are_not_in_memory(tmp_path: Path) -> None:
    """A model of 38M parameters, 680 MB of states and gradients, from the meta device: the process grows by less than half of
    that, most of it scratch memory of torch, and keeps its caps."""
    head = "    from tests.ranks.test_disk_runs import SMALL\n"
    done = program(head + MEMORY, str(tmp_path), str(tmp_path))
    assert done.returncode == 0, done.stderr
    states, grown, predicted = json.loads(done.stdout)
    assert predicted
    assert states > 650 << 20
    assert grown < states / 2, (grown, states)
