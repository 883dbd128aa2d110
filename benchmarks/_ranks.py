"""Ranks of one mode as processes that sleep until they are asked to train a few steps.

The parent writes one JSON line per request to each rank's standard input and reads one JSON line back. A rank that waits
for its next request blocks on that pipe and takes no processor time, so modes can take turns while all stay alive.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from _common import (
    CONTEXT,
    AllocatorPeak,
    free_port,
    join,
    make_batches,
    make_model,
    peak,
    reset_peak,
    resident,
    trim,
    warm_kernels,
)
from modes import Trainer, build

__all__ = ["Job", "RankFailed", "Ranks"]


class RankFailed(RuntimeError):
    """A rank ended or could not be set up; the message carries the end of its output."""


@dataclass(frozen=True)
class Job:
    """What one mode trains. ``rows``: sequences per rank and step. ``account``: count the allocator's bytes (slow)."""

    mode: str
    model: str
    dtype: str
    world: int
    rows: int = 1
    context: int = CONTEXT
    account: bool = False


class Ranks:
    """The processes of one :class:`Job`, as a context manager: ``train(steps)`` runs them, leaving ends them.

    ``python`` runs them: an interpreter with the library of the job's mode, torch and what onecopy needs.
    """

    def __init__(self, job: Job, python: str = sys.executable) -> None:
        self.job = job
        port = free_port()
        # Held open for as long as the ranks write to them.
        self._logs = [tempfile.TemporaryFile("w+") for _ in range(job.world)]  # noqa: SIM115
        source = Path(sys.modules["onecopy.gpt"].__file__ or "").parents[1]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(source), "DS_ACCELERATOR": "cpu"}
        self._ranks = [
            subprocess.Popen(
                [python, __file__, json.dumps({"rank": rank, "port": port, "job": asdict(job)})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._logs[rank],
                env=environment,
                text=True,
            )
            for rank in range(job.world)
        ]

    def train(self, steps: int, warm: int = 0) -> list[dict[str, Any]]:
        """Each rank's answer to training ``warm`` untimed and then ``steps`` timed steps.

        Raises :class:`RankFailed` when one of them cannot.
        """
        for process in self._ranks:
            _pipe(process.stdin).write(json.dumps({"steps": steps, "warm": warm}) + "\n")
            _pipe(process.stdin).flush()
        return [self._answer(rank) for rank in range(self.job.world)]

    def _answer(self, rank: int) -> dict[str, Any]:
        line = _pipe(self._ranks[rank].stdout).readline()
        if not line:
            raise RankFailed(f"rank {rank} of {self.job.mode} ended before it answered:\n{self._tail(rank)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _tail(self, rank: int) -> str:
        self._logs[rank].seek(0)
        return self._logs[rank].read()[-3000:]

    def close(self) -> None:
        """Let the ranks end together; raises :class:`RankFailed` when one does not within a minute."""
        for process in self._ranks:
            _pipe(process.stdin).close()
        for rank, process in enumerate(self._ranks):
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self.kill()
                raise RankFailed(f"rank {rank} of {self.job.mode} did not end:\n{self._tail(rank)}") from None

    def kill(self) -> None:
        for process in self._ranks:
            process.kill()
            process.wait()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            self.kill()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    if pipe is None:
        raise RankFailed("the rank was started without pipes")
    return pipe


class _Rank:
    """One rank's side: sets its mode up on the first request and trains on each."""

    def __init__(self, rank: int, port: int, job: Job) -> None:
        self.rank, self.job, self.done = rank, job, 0
        join(rank, job.world, port)
        if job.mode.startswith("deepspeed"):
            import deepspeed  # its own memory is not the mode's

            deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        elif job.mode.startswith("onecopy"):
            import onecopy  # noqa: F401
        self.batch = make_batches(rank, job.world, job.rows, job.context)
        warm_kernels()
        trim()
        self.start, self.allocator = resident(), AllocatorPeak() if job.account else None
        reset_peak()
        self.trainer: Trainer = build(job.mode, make_model(job.model, job.context), job.dtype)
        self.setup_peak = 0

    def train(self, steps: int, warm: int) -> dict[str, Any]:
        for _ in range(warm):
            self._step()
        if not self.setup_peak:
            self.setup_peak = peak() - self.start
            trim()
            reset_peak()
        if self.allocator:
            self.allocator.mark()
        dist.barrier()
        times, work, losses = [], [], []
        for _ in range(steps):
            begin, begin_work = time.perf_counter(), time.process_time()
            losses.append(self._step())
            times.append(time.perf_counter() - begin)
            work.append(time.process_time() - begin_work)
        answer = {
            "times": times,
            "work": work,
            "losses": [float(loss) for loss in losses],
            "peak_process": peak() - self.start,
            "peak_setup": self.setup_peak,
            "peak_allocator": self.allocator.stop() if self.allocator else None,
            "ledger": self.trainer.ledger(),
        }
        self.allocator = None
        return answer

    def _step(self) -> torch.Tensor:
        loss = self.trainer.step(*self.batch(self.done))
        self.done += 1
        return loss


def _main() -> None:
    # Libraries print to standard output; the answers must not mix with that.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    said = json.loads(sys.argv[1])
    rank = _Rank(said["rank"], said["port"], Job(**said["job"]))
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(rank.train(request["steps"], request["warm"])), file=answers, flush=True)
    answers.close()
    # Ranks end together: one that left first would break what its peers still wait for.
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    _main()
