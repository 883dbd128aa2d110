"""``run_ranks(fn, world, *args)``: call ``fn(rank, world, *args)`` on ``world`` gloo ranks of this machine.

Starting a process and importing torch costs seconds, so worker processes are forked from a server that has torch
imported and are kept between calls: worker ``i`` is rank ``i`` of every task. Each task gets a process group of its
own (and a store of its own to meet in) that is destroyed afterwards. A failure, a death or a timeout ends all workers;
the next task starts new ones. Workers end when their parent does, however it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from onecopy.comm.watch import set_patience

__all__ = ["RankFailure", "run_ranks"]

GRACE = 5.0  # seconds other ranks get to report too, once one has failed


class RankFailure(AssertionError):
    """One or more ranks raised, died or did not finish. The message holds every rank's traceback or stack."""


@dataclass(frozen=True)
class Task:
    """One call on one rank. ``port`` is that of the call's store, which the parent serves."""

    call: bytes  # pickled (fn, args, kwargs)
    rank: int
    world: int
    port: int
    timeout: float
    init_group: bool


def run_ranks(
    fn: Callable[..., Any], world: int, *args: Any, timeout: float = 300, init_group: bool = True, **kwargs: Any
) -> list[Any]:
    """Results of ``fn(rank, world, *args, **kwargs)`` for each rank, in rank order.

    ``fn`` is a module-level function; arguments and results are pickled by value (keep tensors small). The ranks see
    the environment torchrun would give them (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), so with
    ``init_group=False`` an ``env://`` initialisation of their own works too. Raises :class:`RankFailure`.
    """
    return _workers().run(fn, world, args, kwargs, timeout, init_group)


# What a healthy rank may be late by: a busy machine leaves it without a core for a while. Tests of hangs say less.
PATIENCE = os.environ["ONECOPY_PATIENCE"]
# Importing these takes seconds; the fork server does it once for all workers.
PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "onecopy"]


class Worker:
    """A process that waits for tasks on a pipe."""

    def __init__(self, index: int, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        self.stack_file = folder / f"stack{index}-{time.monotonic_ns()}"
        self.stack_file.touch()
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, str(self.stack_file)), daemon=True)
        self.process.start()
        theirs.close()

    def stack(self) -> str:
        """Where every thread of the process is now; also what faulthandler wrote when it crashed."""
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.3)
        return self.stack_file.read_text(errors="replace") or "(no Python stack)"

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)
        self.pipe.close()


class Workers:
    """All worker processes of this test process."""

    def __init__(self) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self.workers: list[Worker] = []

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.workers.clear()

    def run(
        self, fn: Callable[..., Any], world: int, args: tuple[Any, ...], kwargs: Any, timeout: float, init_group: bool
    ) -> list[Any]:
        # A store for each call: two groups that met in one store could take each other's addresses for their own.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        call = pickle.dumps((fn, args, kwargs))
        if not all(worker.process.is_alive() for worker in self.workers):
            self.close()
        while len(self.workers) < world:
            self.workers.append(Worker(len(self.workers), Path(self.folder.name)))
        for rank, worker in enumerate(self.workers[:world]):
            task = Task(call, rank, world, store.port, timeout, init_group)
            worker.pipe.send_bytes(pickle.dumps(task))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        self._collect(world, timeout, results, failures)
        if failures:
            self.close()
            said = "\n".join(f"---- rank {rank} of {world} ----\n{text}" for rank, text in failures.items())
            raise RankFailure(f"{getattr(fn, '__name__', fn)}: ranks {list(failures)} failed, first one first\n{said}")
        return [results[rank] for rank in range(world)]

    def _collect(self, world: int, timeout: float, results: dict[int, Any], failures: dict[int, str]) -> None:
        """Fill ``results`` and ``failures``; a rank that neither answers nor dies in time is a failure too."""
        deadline = time.monotonic() + timeout
        waiting = dict(enumerate(self.workers[:world]))
        while waiting:
            pipes = {worker.pipe: rank for rank, worker in waiting.items()}
            ready = multiprocessing.connection.wait(list(pipes), max(deadline - time.monotonic(), 0))
            if not ready:
                for rank, worker in waiting.items():
                    what = "waited for the ranks above" if failures else f"not done after {timeout} s"
                    failures[rank] = f"{what}; it is at:\n{worker.stack()}"
                return
            for pipe in ready:
                rank = pipes[pipe]  # type: ignore[index]
                worker = waiting.pop(rank)
                try:
                    fine, payload = pickle.loads(worker.pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    worker.process.join(10)
                    failures[rank] = f"process ended with code {worker.process.exitcode}\n{worker.stack()}"
                    fine = None
                if fine:
                    results[rank] = payload
                elif fine is not None:
                    failures[rank] = payload
                if failures:
                    deadline = min(deadline, time.monotonic() + GRACE)


_pool: Workers | None = None


def _workers() -> Workers:
    global _pool
    if _pool is None:
        _pool = Workers()
        atexit.register(_pool.close)
    return _pool


# ------------------------------------------------------------------------------------------------ inside a worker


def _serve(pipe: Connection, stack_file: str) -> None:
    """Answer tasks until the pipe closes."""
    # Kept open on purpose for the life of the process: faulthandler writes to its descriptor.
    stacks = open(stack_file, "w")  # noqa: SIM115
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    # What the imports made stays out of every collection, so that tests can count live tensors often and cheaply.
    gc.collect()
    gc.freeze()
    while True:
        try:
            task: Task = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        # RankFailure's text is made here, so an exception that cannot be pickled is no problem.
        try:
            answer = pickle.dumps((True, _do(task)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _do(task: Task) -> Any:
    """Run one task inside a process group and a clean global state."""
    os.environ.update(
        RANK=str(task.rank), LOCAL_RANK=str(task.rank), WORLD_SIZE=str(task.world), LOCAL_WORLD_SIZE=str(task.world),
        MASTER_PORT=str(task.port), TORCHELASTIC_USE_AGENT_STORE="True", ONECOPY_PATIENCE=PATIENCE,
    )  # fmt: skip
    set_patience(None)  # what the task before said
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    fn, args, kwargs = pickle.loads(task.call)
    if task.init_group:
        store = dist.TCPStore("127.0.0.1", task.port, is_master=False)
        dist.init_process_group(
            "gloo", store=store, rank=task.rank, world_size=task.world,
            timeout=timedelta(seconds=task.timeout + 60),
        )  # fmt: skip
    try:
        return fn(task.rank, task.world, *args, **kwargs)
    finally:
        with contextlib.suppress(Exception):  # a group whose peer died cannot always be destroyed cleanly
            if dist.is_initialized():
                dist.destroy_process_group()
        gc.collect()
