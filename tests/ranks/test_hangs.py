"""A rank that does not come ends the job on all ranks within its patience, with one message that says who and where.

Where the end of processes matters a job is a real one: three or two processes under ``onecopy launch``, with a patience of
a few seconds.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

import onecopy
from onecopy.errors import OneCopyError
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.ranks

PATIENCE = 3
# Starting Python and torch, the patience, three seconds for answers, and ending: on a busy machine.
LIMIT = 80

SCRIPT = """
import os, signal, sys, time
import torch
from torch import nn
import onecopy

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
open(f"pid{RANK}", "w").write(str(os.getpid()))
STAGE = int(sys.argv[1])

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        in_block(self, x)
        return torch.tanh(self.linear(x)) + x

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

def in_block(block, x): pass
def before(step): pass
def after_forward(step): pass
def start(): pass
def batches(): return 4

BODY

start()
torch.manual_seed(0)
engine = onecopy.initialize(
    Net(), onecopy.stage(STAGE, units=onecopy.Units(min_numel=0)), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
)
for step in range(batches()):
    before(step)
    loss = engine(torch.randn(2, 8))
    after_forward(step)
    loss.backward()
    engine.step()
print("rank", RANK, "is done", flush=True)
"""


@dataclass
class Ended:
    code: int
    text: str
    seconds: float


def run(tmp_path: Path, body: str, stage: int, ranks: int = 3, *, wire: bool = False, patience: float = PATIENCE) -> Ended:
    """Run the job with ``body`` in place; afterwards none of its processes is left. ``wire``: without shared memory."""
    (tmp_path / "job.py").write_text(SCRIPT.replace("BODY", textwrap.dedent(body)))
    env = {**os.environ, "ONECOPY_PATIENCE": str(patience), "OMP_NUM_THREADS": "1"}
    if wire:
        (tmp_path / "no_shared_memory.py").write_text(
            "from pathlib import Path\nimport onecopy.comm.shared as shared\nshared._FOLDER = Path('/nowhere')\n"
        )
        job = (tmp_path / "job.py").read_text().replace("import onecopy\n", "import onecopy\nimport no_shared_memory\n", 1)
        (tmp_path / "job.py").write_text(job)
    command = [sys.executable, "-m", "onecopy.cli", "launch", "--nproc", str(ranks), "job.py", str(stage)]
    start = time.monotonic()
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT)
    seconds = time.monotonic() - start
    left = [int(path.read_text()) for path in tmp_path.glob("pid*") if psutil.pid_exists(int(path.read_text()))]
    assert not left, f"processes {left} are still there"
    return Ended(done.returncode, done.stdout + done.stderr, seconds)


def test_a_rank_that_raises_is_the_one_that_is_told(tmp_path: Path) -> None:
    body = """
        def before(step):
            if RANK == 1 and step == 2:
                raise ValueError("batch 2 is broken")
    """
    ended = run(tmp_path, body, 3, patience=60)  # it does not end the job here
    assert ended.code == 1, ended.text
    assert "rank 1" in ended.text.split("failed first")[0], ended.text
    assert ended.text.rstrip().endswith("ValueError: batch 2 is broken"), ended.text


def test_a_killed_rank_is_the_one_that_is_told(tmp_path: Path) -> None:
    body = """
        def before(step):
            if RANK == 2 and step == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = run(tmp_path, body, 3, patience=60)
    assert ended.code == 128 + 9, ended.text
    assert re.search(r"rank 2 \(pid \d+\) failed first.*\n?.*SIGKILL.*ran out of memory", ended.text), ended.text


@pytest.mark.long
def test_a_stopped_rank_is_ended_and_those_that_waited_are_told(tmp_path: Path) -> None:
    body = """
        def before(step):
            if RANK == 1 and step == 2:
                os.kill(os.getpid(), signal.SIGSTOP)
    """
    ended = run(tmp_path, body, 2)
    assert ended.code == 1, ended.text
    assert re.search(r"HangError: rank [02] waited .* and rank 1 did not come", ended.text), ended.text


@pytest.mark.parametrize(("stage", "wire"), [(2, False), pytest.param(3, True, marks=pytest.mark.long)])
def test_a_sleeping_rank_is_named_with_its_line(tmp_path: Path, stage: int, wire: bool) -> None:
    body = """
        def before(step):
            if RANK == 1 and step == 1:
                time.sleep(500)
    """
    ended = run(tmp_path, body, stage, wire=wire)
    assert ended.code == 1, ended.text
    assert "HangError" in ended.text and "rank 1 did not come" in ended.text, ended.text
    assert re.search(r"rank 1: is in no collective call; step 1; job.py:\d+ in before: time.sleep\(500\)", ended.text), (
        ended.text
    )


@pytest.mark.long
def test_a_rank_that_sleeps_in_a_module_is_named_with_the_module(tmp_path: Path) -> None:
    body = """
        class Slow(nn.Module):
            pass
        def forward(self, x):
            if RANK == 0 and self is engine.module.blocks[2]:
                time.sleep(500)
            return torch.tanh(self.linear(x)) + x
        Block.forward = forward
    """
    ended = run(tmp_path, body, 3, 2, wire=True)
    assert ended.code == 1, ended.text
    assert re.search(r"rank 0: .*in a forward pass; job.py:\d+ in forward of blocks.2 \(Block\): time.sleep", ended.text), (
        ended.text
    )


def test_a_rank_that_runs_out_of_data_is_named(tmp_path: Path) -> None:
    body = """
        def batches():
            return 2 if RANK == 2 else 4
    """
    ended = run(tmp_path, body, 2)
    assert ended.code == 1 and "HangError" in ended.text, ended.text
    assert "rank 2: has ended its script" in ended.text, ended.text


@pytest.mark.long
def test_ranks_in_different_calls_are_told_apart(tmp_path: Path) -> None:
    """Without shared memory, one rank leaves out a whole unit's call; with it, only the reductions could differ."""
    body = """
        def after_forward(step):
            if RANK == 0 and step == 1:
                torch.distributed.barrier()
    """
    ended = run(tmp_path, body, 3, 2, wire=True)
    assert ended.code == 1 and "HangError" in ended.text, ended.text
    assert "of unit" in ended.text and "torch.distributed.barrier()" in ended.text, ended.text


def test_a_rank_that_never_initializes_is_named(tmp_path: Path) -> None:
    body = """
        def start():
            if RANK == 1:
                torch.distributed.init_process_group("gloo")
                time.sleep(500)
    """
    ended = run(tmp_path, body, 2, 2, patience=1)
    assert ended.code == 1, ended.text
    assert "ranks [1] of 2 did not reach onecopy within 10 s of rank 0" in ended.text, ended.text


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


def write_alone(engine: onecopy.Engine, folder: str) -> None:
    with onecopy.gathered(engine.module, write_rank=0):
        pass


CALLS: dict[str, Callable[[onecopy.Engine, str], object]] = {
    "save": lambda engine, folder: engine.save(folder),
    "full_param": lambda engine, folder: onecopy.full_param(engine.module[0].weight),  # type: ignore[index]
    "rank 0's values of": write_alone,
    "initialize": lambda engine, folder: onecopy.initialize(model(), onecopy.stage(0)),
}


def alone(rank: int, world: int, folder: str, call: str) -> str:
    """Rank 0 makes a call that the others do not make; they go on training."""
    plan = onecopy.stage(3, units=onecopy.Units(min_numel=0))
    engine = onecopy.initialize(model(), plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), patience=PATIENCE)
    try:
        for step in range(4):
            if rank == 0 and step == 2:
                CALLS[call](engine, folder)
            engine(torch.randn(2, 8)).square().mean().backward()
            engine.step()
    except OneCopyError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("call", CALLS)
def test_a_collective_call_on_one_rank_alone(tmp_path: Path, call: str) -> None:
    """The others go on training, and meet a rank that is somewhere else, or has its call refused."""
    said = run_ranks(alone, 2, str(tmp_path), call)
    assert all("Error: " in text for text in said), said
    assert any(("rank 0" in text or "ranks [0]" in text) and call in text for text in said), said
