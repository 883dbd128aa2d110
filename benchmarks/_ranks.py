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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

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

__all__ = ["Job", "Meter", "RankFailed", "Ranks", "Requests"]


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

    ``python`` runs them: an interpreter with the library of the job's mode, torch and what onecopy needs. ``script``: the
    program of a rank, which answers through :class:`Requests`. ``path``: folders for the front of its ``PYTHONPATH``.
    """

    def __init__(self, job: Job, python: str = sys.executable, script: str = __file__, path: Sequence[str] = ()) -> None:
        self.job = job
        port = free_port()
        # Held open for as long as the ranks write to them.
        self._logs = [tempfile.TemporaryFile("w+") for _ in range(job.world)]  # noqa: SIM115
        source = Path(sys.modules["onecopy.gpt"].__file__ or "").parents[1]
        search = os.pathsep.join([*path, str(source)])
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search, "DS_ACCELERATOR": "cpu"}
        self._ranks = [
            subprocess.Popen(
                [python, script, json.dumps({"rank": rank, "port": port, "job": asdict(job)})],
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


class Meter:
    """Memory and time of this rank, from when the object is made: after libraries are loaded, before the model is built."""

    def __init__(self, account: bool) -> None:
        warm_kernels()
        trim()
        self._start, self._allocator = resident(), AllocatorPeak() if account else None
        reset_peak()
        self._setup = 0

    def begin(self) -> None:
        """The untimed steps are done."""
        if not self._setup:
            self._setup = peak() - self._start
            trim()
            reset_peak()
        if self._allocator:
            self._allocator.mark()
        dist.barrier()
        self._times: list[float] = []
        self._work: list[float] = []
        self.lap(keep=False)

    def lap(self, keep: bool = True) -> None:
        """A step ends, and the next begins. ``keep``: the one that ends was timed."""
        now, work = time.perf_counter(), time.process_time()
        if keep:
            self._times.append(now - self._last)
            self._work.append(work - self._last_work)
        self._last, self._last_work = now, work

    def answer(self, losses: list[torch.Tensor], ledger: dict[str, Any] | None) -> dict[str, Any]:
        """What is told of the steps since :meth:`begin`."""
        answer = {
            "times": self._times,
            "work": self._work,
            "losses": [float(loss) for loss in losses],
            "peak_process": peak() - self._start,
            "peak_setup": self._setup,
            "peak_allocator": self._allocator.stop() if self._allocator else None,
            "ledger": ledger,
        }
        self._allocator = None
        return answer


class Requests:
    """A rank's end of the pipes: who it is, and an iterator over ``(steps, warm)`` that waits for each."""

    def __init__(self) -> None:
        # Libraries print to standard output; the answers must not mix with that.
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        said = json.loads(sys.argv[1])
        self.rank, self.port, self.job = int(said["rank"]), int(said["port"]), Job(**said["job"])

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for line in sys.stdin:
            request = json.loads(line)
            yield request["steps"], request["warm"]

    def answer(self, found: dict[str, Any]) -> None:
        print(json.dumps(found), file=self._answers, flush=True)

    def end(self) -> NoReturn:
        """Ranks end together: one that left first would break what its peers still wait for."""
        self._answers.close()
        dist.barrier()
        os._exit(0)


class _Rank:
    """One rank's side: sets its mode up on the first request and trains on each."""

    def __init__(self, rank: int, port: int, job: Job) -> None:
        self.done = 0
        join(rank, job.world, port)
        if job.mode.startswith("deepspeed"):
            import deepspeed  # its own memory is not the mode's

            deepspeed.init_distributed(dist_backend="gloo", verbose=False)
        elif job.mode.startswith("onecopy"):
            import onecopy  # noqa: F401
        self.batch = make_batches(rank, job.world, job.rows, job.context)
        self.meter = Meter(job.account)
        self.trainer: Trainer = build(job.mode, make_model(job.model, job.context), job.dtype)

    def train(self, steps: int, warm: int) -> dict[str, Any]:
        for _ in range(warm):
            self._step()
        self.meter.begin()
        losses = []
        for _ in range(steps):
            losses.append(self._step())
            self.meter.lap()
        return self.meter.answer(losses, self.trainer.ledger())

    def _step(self) -> torch.Tensor:
        loss = self.trainer.step(*self.batch(self.done))
        self.done += 1
        return loss


def _main() -> None:
    requests = Requests()
    rank = _Rank(requests.rank, requests.port, requests.job)
    for steps, warm in requests:
        requests.answer(rank.train(steps, warm))
    requests.end()


if __name__ == "__main__":
    _main()
