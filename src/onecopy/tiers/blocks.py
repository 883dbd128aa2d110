"""Moving blocks between files and staging: buffers, the transfers under way, and the threads that carry them out."""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch

from onecopy.errors import DiskError, EngineError
from onecopy.tiers.scratch import ALIGN, page_memory, round_up, system_error

__all__ = ["NEW_ENGINE", "PAGE", "File", "Job", "Memory", "Queue", "Staging", "close_files"]

NEW_ENGINE = "close() this engine, initialize() another, and load() a checkpoint into that"

PAGE = os.sysconf("SC_PAGE_SIZE")  # bytes; a multiple of ALIGN


@dataclass
class File:
    """A file of a rank: open when ``number``, its descriptor, is not negative."""

    path: Path
    size: int = 0  # bytes; of the disk tier's, and while one is written, a multiple of ALIGN
    number: int = -1


class Memory:
    """A buffer, page-aligned: the same bytes for the system and for torch. ``lent``: of somebody else than staging."""

    __slots__ = ("lent", "size", "tensor", "view")

    def __init__(self, size: int, lent: memoryview | None = None) -> None:
        self.size, self.lent = size, lent is not None
        self.view = memoryview(page_memory(size)) if lent is None else lent[:size]
        with torch.inference_mode(False):  # whoever makes it: it is written in other modes, too
            self.tensor = torch.frombuffer(self.view, dtype=torch.uint8)


class Staging:
    """Buffers of exactly the sizes asked for, so that what fits by its sum fits. Its users hold the queue's lock."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0  # bytes that somebody uses
        self.mapped = self.peak = 0  # bytes of memory, with what waits to be used again
        self._free: list[Memory] = []  # the longest unused first

    def take(self, size: int) -> Memory | None:
        """A buffer of at least ``size`` bytes, or None while there is no room."""
        size = round_up(max(size, 1), PAGE)
        if self.held + size > self.limit:
            return None
        # Buffers that come back are used again: a new one costs the kernel a clearing of all its pages.
        index = next((i for i in reversed(range(len(self._free))) if self._free[i].size == size), None)
        if index is not None:
            memory = self._free.pop(index)
        else:
            while self.mapped + size > self.limit:
                self.mapped -= self._free.pop(0).size
            memory = Memory(size)
            self.mapped += size
            self.peak = max(self.peak, self.mapped)
        self.held += size
        return memory

    def give(self, memory: Memory) -> None:
        if not memory.lent:
            self.held -= memory.size
            self._free.append(memory)


class Job:
    """Bytes [low, high) of a file to be moved from or to ``memory``, by blocks."""

    __slots__ = ("after", "done", "error", "file", "high", "keep", "low", "memory", "next", "running", "write")

    def __init__(self, write: bool, file: File, low: int, high: int, memory: Memory) -> None:
        self.write, self.file, self.low, self.high = write, file, low, high
        self.memory: Memory | None = memory
        self.next = low  # blocks before it have been begun
        self.running = 0  # blocks that threads are moving now
        self.done = False
        self.keep = not write  # does the caller still want the buffer?
        self.after: list[Job] = []  # what has to be done before
        self.error: DiskError | None = None

    def overlaps(self, other: Job | _Lost) -> bool:
        return self.file is other.file and self.low < other.high and other.low < self.high

    def move(self, low: int, high: int) -> None:
        """Move the block [low, high)."""
        assert self.memory is not None
        operation, at = (os.pwritev if self.write else os.preadv), low
        # A file that somebody shortened would be made longer by a write, with zeros in the place of what was lost.
        if low == self.low and os.fstat(self.file.number).st_size < self.file.size:
            raise self.too_short(low, high)
        stop = min(high, self.file.size)
        while at < stop:
            end = at + operation(self.file.number, [self.memory.view[at - self.low : high - self.low]], at)
            before, at = at, end if end >= stop else end - end % ALIGN
            if at == before:
                if not self.write:
                    raise self.too_short(low, high)
                raise OSError(errno.EIO, "the system wrote nothing and gave no reason")

    def too_short(self, low: int, high: int) -> DiskError:
        """The error for a file that does not have the bytes [low, high) any more."""
        size = os.fstat(self.file.number).st_size
        doing = "writing" if self.write else "reading"
        return DiskError(
            f"{self.file.path} is shorter than it should be: {size} bytes instead of {self.file.size}, found when {doing} "
            f"{high - low} bytes at offset {low}. Something outside this run cut it, and what was in it is lost: {NEW_ENGINE}"
        )

    def failed(self, low: int, high: int, error: Exception) -> DiskError:
        if isinstance(error, DiskError):
            return error
        doing = "writing" if self.write else "reading"
        what = f"{doing} {high - low} bytes at offset {low} of {self.file.path} failed"
        found = system_error(what, error) if isinstance(error, OSError) else DiskError(f"{what}: {error!r}")
        found.__cause__ = error
        return found


@dataclass
class _Lost:
    """Bytes [low, high) of ``file`` that are not what the caller wrote."""

    file: File
    low: int
    high: int
    error: DiskError

    def without(self, job: Job) -> list[_Lost]:
        """What is left of it when ``job`` has been written."""
        if self.file is not job.file:
            return [self]
        parts = ((self.low, min(self.high, job.low)), (max(self.low, job.high), self.high))
        return [_Lost(self.file, low, high, self.error) for low, high in parts if low < high]


class Queue:
    """Jobs in the order they were given, and the threads that do them. Every field belongs to the lock in ``changed``."""

    def __init__(self, threads: int, block: int, staging: Staging) -> None:
        self.changed = threading.Condition()
        self.block, self.staging = block, staging
        self.active: list[Job] = []  # in order
        self.untold: list[Job] = []  # writes that failed, until the caller has heard of it
        self.lost: list[_Lost] = []  # what failed writes left, until it is written again
        self.moved = {"read": 0, "written": 0}  # bytes
        self.closed = False
        self._waiting: deque[Job] = deque()  # those with blocks that nobody has begun
        names = (f"onecopy-disk-{number}" for number in range(threads))
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for name in names]
        for thread in self._threads:
            thread.start()

    def add(self, job: Job) -> None:
        with self.changed:
            if self.closed:
                raise EngineError("the disk tier is closed")
            job.after = [other for other in self.active if (job.write or other.write) and job.overlaps(other)]
            self.active.append(job)
            if job.low < job.high:
                self._waiting.append(job)
                self.changed.notify_all()
            else:
                self._finish(job)

    def close(self) -> None:
        """Finish the blocks that are being moved and drop all others. Ends the threads."""
        with self.changed:
            self.closed = True
            for job in list(self._waiting):
                self._stop(job, DiskError(f"{job.file.path} was closed before all of it was moved"))
                if not job.running:
                    self._finish(job)
            self.changed.notify_all()
        for thread in self._threads:
            thread.join()

    def wait(self, job: Job) -> None:
        """Return when ``job`` is done, whether it worked or not."""
        with self.changed:
            while not job.done:
                self.changed.wait()
            if job in self.untold:
                self.untold.remove(job)

    def release(self, job: Job) -> None:
        """Give the buffer of ``job`` back, at its end where it is on its way. Does nothing when it is gone."""
        with self.changed:
            job.keep = False
            if job.done:
                self.give_back(job)
                self.changed.notify_all()

    def is_mine(self) -> bool:
        """Is the calling thread one of the queue's?"""
        return threading.current_thread() in self._threads

    def _work(self) -> None:
        while True:
            with self.changed:
                while (found := self._begin()) is None:
                    if self.closed:
                        return
                    self.changed.wait()
            job, low, high = found
            error: DiskError | None = None
            try:
                job.move(low, high)
            except Exception as caught:  # told to the caller, who waits for it in another thread
                error = job.failed(low, high, caught)
            with self.changed:
                job.running -= 1
                if error is not None:
                    self._stop(job, error)
                if job.next == job.high and not job.running:
                    self._finish(job)
            del found, job, error  # or an idle thread keeps a buffer

    def _begin(self) -> tuple[Job, int, int] | None:
        """The next block of the first job that need not wait for another."""
        for job in list(self._waiting):
            if job.after and not all(other.done for other in job.after):
                continue
            job.after = []
            lost = next((part for part in self.lost if not job.write and job.overlaps(part)), None)
            if lost is not None:
                self._stop(job, lost.error)
                self._finish(job)
                continue
            low, job.next = job.next, min(job.next + self.block, job.high)
            job.running += 1
            if job.next == job.high:
                self._waiting.remove(job)
            return job, low, job.next
        return None

    def _stop(self, job: Job, error: DiskError) -> None:
        job.error = job.error or error
        job.next = job.high
        if job in self._waiting:
            self._waiting.remove(job)

    def _finish(self, job: Job) -> None:
        job.done, job.after = True, []
        self.active.remove(job)
        if job.error is None:
            self.moved["written" if job.write else "read"] += job.high - job.low
        if job.write:
            self.lost = [part for lost in self.lost for part in lost.without(job)]
            if job.error is not None:
                self.untold.append(job)
                self.lost.append(_Lost(job.file, job.low, job.high, job.error))
        if not job.keep or job.error is not None:
            self.give_back(job)
        self.changed.notify_all()

    def give_back(self, job: Job) -> None:
        memory, job.memory = job.memory, None
        if memory is not None:
            self.staging.give(memory)


def close_files(files: list[File]) -> None:
    """Close those that are open."""
    for file in files:
        if file.number >= 0:
            os.close(file.number)
        file.number = -1
