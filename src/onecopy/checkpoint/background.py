"""Asynchronous saves: training goes on from a copy in host memory while a thread on every rank writes it.

The threads agree through the job's store, as collectives belong to training: each says there what became of its file, rank
0 commits or discards, and says which. One save of an engine is in flight at most.
"""

from __future__ import annotations

import json
import socket
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from torch.distributed import distributed_c10d

from onecopy.checkpoint.format import FileRecord
from onecopy.checkpoint.writer import Writer
from onecopy.comm import meeting, watch
from onecopy.errors import CheckpointError, OneCopyError
from onecopy.tiers.blocks import NEW_ENGINE, Memory
from onecopy.tiers.scratch import page_memory

__all__ = ["Job", "Saves", "check_memory"]

_LEAST_PATIENCE = 30.0  # seconds


@dataclass
class Job:
    """One save on one rank. ``commit`` and ``discard`` are called on rank 0, with what all wrote; ``done`` says whether
    the checkpoint is there, to a rank that lost the others."""

    writer: Writer
    what: str
    prefix: str
    commit: Callable[[list[FileRecord]], None]
    discard: Callable[[], None]
    done: Callable[[], bool]
    error: str = ""

    def __post_init__(self) -> None:
        self.rank, self.world = meeting.my_rank(), meeting.world_size()
        self._served = distributed_c10d._get_default_store() if self.world > 1 else None  # by this process, it may be
        self.store: Any = getattr(self._served, "clone", lambda: self._served)()
        self.patience = max(watch.patience(), _LEAST_PATIENCE)

    def run(self) -> None:
        """Write, agree, and commit or discard; the same ``error`` on every rank."""
        record, problem = self._write()
        try:
            error = self._lead(record, problem) if self.rank == 0 else self._follow(record, problem)
        except Exception as caught:  # the store is gone, say, and with it the process that served it
            error = self._alone(meeting.text_of(caught))
        self.error = f"the asynchronous save of {self.what} failed: {error}" if error else ""

    def _alone(self, problem: str) -> str:
        """Without a word from the others: the disk says whether the checkpoint was committed."""
        try:
            if self.done():
                return ""
            if self.rank == 0:
                self.discard()
        except (OneCopyError, OSError) as error:
            return f"{problem}; {error}"
        return problem

    def _write(self) -> tuple[FileRecord | None, str]:
        self.writer.progress = self._beat
        try:
            with closing(self.writer):
                return self.writer.finish(), ""
        except Exception as error:  # whatever it is, the other ranks must hear of it
            return None, meeting.text_of(error)

    def _beat(self) -> None:
        if self.store is not None:
            self.store.set(f"{self.prefix}/alive/{self.rank}", repr(time.monotonic()))

    def _lead(self, record: FileRecord | None, problem: str) -> str:
        own = {"record": record.model_dump() if record is not None else None, "problem": problem}
        receipts: dict[int, dict[str, Any]] = {0: own}
        for rank in range(1, self.world):
            said = self._wait(f"{self.prefix}/wrote/{rank}", rank)
            receipts[rank] = json.loads(said) if said is not None else {"problem": self._silent(rank)}
        error = meeting.summary([receipts[rank]["problem"] or None for rank in range(self.world)])
        if not error:
            try:
                self.commit([FileRecord(**receipts[rank]["record"]) for rank in range(self.world)])
            except (OneCopyError, OSError) as caught:
                text = meeting.text_of(caught)
                error = self._alone(text) or f"the checkpoint is there, but {text}"
        else:
            error = self._alone(error)
        if self.store is not None:
            self.store.set(f"{self.prefix}/end", json.dumps(error))
        return error

    def _follow(self, record: FileRecord | None, problem: str) -> str:
        receipt = {"record": record.model_dump() if record is not None else None, "problem": problem}
        self.store.set(f"{self.prefix}/wrote/{self.rank}", json.dumps(receipt))
        said = self._wait(f"{self.prefix}/end", 0)
        if said is None:
            return self._alone(self._silent(0))
        if self.store.add(f"{self.prefix}/told", 1) == self.world - 1:  # the last one leaves nothing in the store
            for key in ("end", "told", *(f"{what}/{rank}" for what in ("wrote", "alive") for rank in range(self.world))):
                self.store.delete_key(f"{self.prefix}/{key}")
        return str(json.loads(said))

    def _wait(self, key: str, rank: int) -> str | None:
        """What ``rank`` says under ``key``; None when it gave no sign for too long."""
        alive, seen, since, pause = f"{self.prefix}/alive/{rank}", b"", time.monotonic(), 0.002
        while not self.store.check([key]):
            time.sleep(pause)
            pause = min(2 * pause, 0.2)
            self._beat()
            sign = self.store.get(alive) if self.store.check([alive]) else b""
            if sign != seen:
                seen, since = sign, time.monotonic()
            if time.monotonic() - since > self.patience:
                return None
        return bytes(self.store.get(key)).decode()

    def _silent(self, rank: int) -> str:
        return f"rank {rank} gave no sign for {self.patience:g} s"


class Saves:
    """The asynchronous saves of one engine. Copies go to a buffer of host memory that is kept for the next one."""

    def __init__(self) -> None:
        self._job: Job | None = None
        self._thread: threading.Thread | None = None
        self._memory: Memory | None = None
        self._untold: list[str] = []
        # The folder of the newest checkpoint that this engine is known to have saved or loaded.
        self.last = ""
        # Have all ranks noticed, in the step that they are in, that the save has failed?
        self.agreed = False
        # Says at the interpreter's end what nobody asked for; threads have ended by then.
        self._at_end = weakref.finalize(self, _tell, self._untold)

    def stage(self, writer: Writer, device: torch.device) -> None:
        """Copy what ``writer`` has left to write, so that training may change it."""
        if self._memory is None or self._memory.size < writer.rest:
            self._memory = None  # before there is another
            self._memory = _pinned(writer.rest) if device.type != "cpu" else _paged(writer.rest)
        writer.stage(self._memory)
        if device.type != "cpu":
            torch.accelerator.current_stream().synchronize()

    @property
    def room(self) -> int:
        """Bytes of copies that there is memory for already."""
        return self._memory.size if self._memory is not None else 0

    def start(self, job: Job) -> None:
        """Let ``job`` run beside training. The interpreter does not end before it has."""
        self._job = job
        self._thread = threading.Thread(target=_run, args=(job, self._untold, self._at_end), name="onecopy-save")
        self._thread.start()

    def failure(self) -> str:
        """What went wrong with the save that has ended; empty while one is in flight, and when none failed."""
        return self._job.error if self._job is not None and self._thread is not None and not self._thread.is_alive() else ""

    def wait(self) -> str:
        """Wait for the end of the save in flight; what went wrong, which is told by that."""
        if self._job is None or self._thread is None:
            return ""
        self._thread.join()
        error, self.last = self._job.error, self.last if self._job.error else self._job.what
        self._job = self._thread = None
        self._untold.clear()
        return error

    def remedy(self, torn: str) -> str:
        """What to do about an engine that holds states of two steps, by ``torn``, which says why."""
        last = f", such as {self.last}" if self.last else ""
        return last if torn.endswith(NEW_ENGINE) else f"; load() a checkpoint with its optimizer states{last}"

    def settle(self) -> None:
        """Wait for the end of the save in flight. Raises :class:`CheckpointError` when it failed, on every rank."""
        error = self.wait()
        if error:
            raise CheckpointError(error)

    def raise_agreed(self) -> None:
        """:meth:`settle`, when ranks have agreed that there is something to raise."""
        if self.agreed:
            self.agreed = False
            self.settle()

    def release(self) -> None:
        """Give the memory of copies back."""
        self._memory = None


def _paged(size: int) -> Memory:
    return Memory(size, memoryview(page_memory(size, forked=True)))


def _pinned(size: int) -> Memory:
    return Memory(size, torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy().data)


def _run(job: Job, untold: list[str], at_end: weakref.finalize[..., Saves]) -> None:
    job.run()
    if job.error:
        untold.append(job.error)
        if not at_end.alive:  # the engine is gone, and with it everybody who would ask
            _tell(untold)


def _tell(untold: list[str]) -> None:
    for error in untold:
        warnings.warn(error, stacklevel=2)


def check_memory(size: int, staged: int) -> int:
    """Bytes that all ranks together write, of which this one writes ``size`` and copies ``staged`` first; collective.

    Raises :class:`CheckpointError` on every rank when the copies do not fit into the memory of some host.
    """
    told = meeting.tell((size, staged, socket.gethostname(), psutil.virtual_memory().available))
    for _, _, host, free in told:
        needed = sum(theirs for _, theirs, where, _ in told if where == host)
        if needed > free:
            raise CheckpointError(
                f"an asynchronous save copies {needed:,} bytes on {host}, where {free:,} are free; save without asynchronous="
            )
    return sum(theirs for theirs, *_ in told)
