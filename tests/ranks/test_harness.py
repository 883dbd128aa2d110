"""The rank harness itself: results in order, failures with their traceback, no hang, no orphan."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks.harness import RankFailure, run_ranks

pytestmark = pytest.mark.ranks


def sum_ranks(rank: int, world: int, factor: int) -> tuple[float, int]:
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    return total.item() * factor, os.getpid()


def fails_on_one(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("here is the culprit")
    dist.barrier()


def dies_on_one(rank: int, world: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()


def sleeps_on_one(rank: int, world: int) -> None:
    if rank == 1:
        time.sleep(60)


def own_group(rank: int, world: int) -> int:
    dist.init_process_group("gloo")
    dist.barrier()  # a rank that leaves while another still connects breaks its connection
    return dist.get_world_size()


def test_results_in_rank_order_and_workers_are_reused() -> None:
    first = run_ranks(sum_ranks, 3, 2)
    second = run_ranks(sum_ranks, 2, 1)
    assert [value for value, _ in first] == [12.0] * 3
    assert [value for value, _ in second] == [3.0] * 2
    assert [pid for _, pid in first[:2]] == [pid for _, pid in second]


def test_a_failing_rank_shows_its_traceback() -> None:
    with pytest.raises(RankFailure, match="here is the culprit"):
        run_ranks(fails_on_one, 2)
    assert run_ranks(sum_ranks, 2, 1)[0][0] == 3.0


def test_a_dying_rank_is_reported() -> None:
    with pytest.raises(RankFailure, match=f"ended with code {-signal.SIGSEGV}"):
        run_ranks(dies_on_one, 2)


def test_a_stuck_rank_is_named_with_its_stack() -> None:
    run_ranks(sum_ranks, 2, 1)  # workers that run already: their start is no part of the two seconds
    with pytest.raises(RankFailure, match=r"(?s)rank 1 of 2.*not done after 2.*sleeps_on_one"):
        run_ranks(sleeps_on_one, 2, timeout=2)


def test_ranks_can_start_their_own_group() -> None:
    assert run_ranks(own_group, 2, init_group=False) == [2, 2]


def test_workers_end_with_their_parent() -> None:
    code = (
        "import os\nfrom tests.ranks.test_harness import run_ranks, sum_ranks\n"
        "print(*[pid for _, pid in run_ranks(sum_ranks, 2, 1)], flush=True)\nos.kill(os.getpid(), 9)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, f"{pids} outlive their parent"
        time.sleep(0.1)
