"""The disk tier: training states in scratch files while a run lasts. They are no checkpoint.

A rank has one file per state, with every region of it at a fixed offset, reserved in full before the first step.
Bytes move between a file and *staging*, a bounded pool of page-aligned buffers, past the page cache (O_DIRECT): a
transfer is cut into blocks, which a few threads move at once with ``preadv`` and ``pwritev``.

    disk = Disk("/local/nvme", "run-1", rank)
    moments = disk.reserve("exp_avg", 4 * elements)
    disk.open()
    read = disk.fetch(moments, 0, 1 << 24)                # returns at once
    values = read.wait().view(torch.float32)
    ...                                                   # change them in place
    disk.put(moments, 0, read)                            # returns at once and takes the buffer with it
    disk.drain()

One thread of the caller uses a Disk. Transfers that overlap, at least one of them a write, take effect in the order in
which they were asked for; others in any order.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
import weakref
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch

from onecopy.errors import ConfigError, DiskError, EngineError
from onecopy.tiers.blocks import PAGE, File, Job, Memory, Queue, Staging, close_files
from onecopy.tiers.scratch import ALIGN, Filesystem, Scratch, accepts_direct, checked_name, rate, round_up, system_error

__all__ = ["ALIGN", "Disk", "Region", "Staged", "Transfer"]


@dataclass(frozen=True)
class Region:
    """``size`` bytes of ``state`` that begin ``offset`` bytes into its file. ``offset`` is a multiple of 4096."""

    state: str
    offset: int
    size: int


class Staged:
    """A buffer of staging that :meth:`Disk.stage` gave out, to be filled and given to :meth:`Disk.put`."""

    def __init__(self, disk: Disk, memory: Memory, size: int) -> None:
        self._disk, self._memory, self.size = disk, memory, size  # the files stay as long as a buffer is in use
        self._gone = False

    @property
    def tensor(self) -> torch.Tensor:
        """``size`` bytes as uint8, page-aligned, contents undefined. Not to be used once the buffer is given away."""
        if self._gone:
            raise EngineError("this buffer of staging has been given back")
        return self._memory.tensor[: self.size]

    def release(self) -> None:
        """Give the buffer back unused. Does nothing when it is gone."""
        if not self._gone:
            memory = self._take()
            queue = self._disk._live()
            with queue.changed:
                queue.staging.give(memory)
                queue.changed.notify_all()

    def _take(self) -> Memory:
        """The buffer, which is the taker's from here on."""
        if self._gone:
            raise EngineError("this buffer of staging has been given back")
        self._gone = True
        return self._memory


class Transfer:
    """``size`` bytes on their way between a file and a buffer of staging."""

    def __init__(self, disk: Disk, job: Job, size: int) -> None:
        self._disk, self._job, self.size = disk, job, size
        self._queue = disk._live()

    @property
    def done(self) -> bool:
        """Is it over, whether it worked or not?"""
        return self._job.done

    def wait(self) -> torch.Tensor:
        """Wait for the end. Of a read: exactly the bytes asked for, uint8, page-aligned, to be changed in place at will
        until :meth:`release` or :meth:`Disk.put`. Of a write: an empty tensor, since the buffer has been given back.

        :class:`DiskError` when it failed (and the buffer is given back), every time it is called.
        """
        job = self._job
        self._queue.wait(job)
        if job.error is not None:
            raise _again(job.error)
        if job.write:
            return torch.empty(0, dtype=torch.uint8)
        if job.memory is None:
            raise EngineError("this transfer has been released, and its buffer with it")
        return job.memory.tensor[: self.size]

    def release(self) -> None:
        """Give the buffer back; at the end of a read that is still on its way. Does nothing when it is gone."""
        self._queue.release(self._job)

    def _take(self) -> Memory:
        """The buffer of a read, with its bytes; it is the taker's from here on."""
        self.wait()
        memory, self._job.memory = self._job.memory, None
        if memory is None:
            raise EngineError("a write has no buffer to be written again: its buffer has been given back")
        return memory


def _again(error: DiskError) -> DiskError:
    """``error`` to be raised once more: one object raised twice would grow a traceback of both."""
    found = DiskError(str(error), error.errno)
    found.__cause__ = error.__cause__
    return found


class Disk:
    """Files of states on one filesystem for one rank of one run.

    ``folder``: where the runs of a host keep their files; it has to exist. ``run``: a name that no other live run in
    that folder has, the same on every rank. ``staging``: bytes of buffers at most, this rank's share of host memory.
    ``threads``: blocks in flight. ``block``: bytes of one request, a multiple of 4096.
    """

    def __init__(
        self, folder: str | Path, run: str, rank: int, *, staging: int = 256 << 20, threads: int = 2, block: int = 1 << 20
    ) -> None:
        if threads < 1:
            raise ConfigError(f"threads is {threads}; moving bytes takes at least 1")
        if block < ALIGN or block % ALIGN:
            raise ConfigError(f"block is {block} bytes; it is a multiple of {ALIGN}, such as {round_up(max(block, 1))}")
        if staging < PAGE:
            raise ConfigError(f"staging is {staging} bytes; the least is {PAGE}, one page")
        self.threads, self.block, self.staging = threads, block, staging
        self._scratch = Scratch(folder, run, rank)
        self._files: dict[str, File] = {}
        self._queue: Queue | None = None
        self._finalizer: weakref.finalize[[Queue, list[File], Scratch, int], Disk] | None = None

    @property
    def reserved(self) -> int:
        """Bytes of all files, with the padding of each region to a multiple of 4096."""
        return sum(file.size for file in self._files.values())

    @property
    def moved(self) -> dict[str, int]:
        """Bytes that were "read" and "written" since :meth:`open`, with padding."""
        return dict(self._queue.moved) if self._queue is not None else {"read": 0, "written": 0}

    @property
    def peak_staging(self) -> int:
        """Most bytes of staging that existed at once since :meth:`open`."""
        return self._queue.staging.peak if self._queue is not None else 0

    def reserve(self, state: str, size: int) -> Region:
        """A region of ``size`` bytes, behind those already reserved for ``state``. Before :meth:`open`."""
        if self._queue is not None:
            raise EngineError(f"{size} bytes of {state!r} were reserved after open(), when the files have their sizes")
        if size < 0:
            raise EngineError(f"{size} bytes of {state!r} were reserved; a size is at least 0")
        file = self._files.setdefault(state, File(self._scratch.path / f"{checked_name('state', state)}.bin"))
        region = Region(state, file.size, size)
        file.size += round_up(size)
        return region

    def open(self) -> None:
        """Check the folder, remove what dead runs left in it, and create the files at their full size, filled with zeros.

        :class:`DiskError` when the folder is missing, cannot be written, has too little room or is used by a live run of
        the same name. Warns when the folder is on a network, in memory or in a container's layers, with its rate, and
        when its filesystem has no O_DIRECT.
        """
        if self._queue is not None:
            raise EngineError("open() was called twice")
        if not sys.platform.startswith("linux"):
            raise DiskError(f"states on disk need Linux; this is {sys.platform}")
        system = self._scratch.claim()
        files = list(self._files.values())
        try:
            self._check_room(system)
            flag = _direct_flag(self._scratch.path, system)
            for file in files:
                _create(file, flag)
            _say_doubt(system, max(files, key=lambda file: file.size, default=None))
        except BaseException:
            close_files(files)
            self._scratch.leave()
            raise
        self._queue = Queue(self.threads, self.block, Staging(self.staging))
        self._finalizer = weakref.finalize(self, _end, self._queue, files, self._scratch, os.getpid())

    def stage(self, size: int) -> Staged:
        """A buffer of ``size`` bytes; waits for writes under way to give theirs back.

        :class:`DiskError` when that cannot happen: staging is too small, or full of buffers that the caller keeps.
        """
        return Staged(self, self._memory(size), size)

    def fetch(self, region: Region, low: int, high: int) -> Transfer:
        """Begin to read the bytes [low, high) of ``region``; ``low`` is a multiple of 4096. Waits only as :meth:`stage`."""
        start, end = self._range(region, low, high)
        job = Job(False, self._files[region.state], start, end, self._memory(end - start))
        self._live().add(job)
        return Transfer(self, job, high - low)

    def put(self, region: Region, low: int, data: Transfer | Staged) -> Transfer:
        """Begin to write all of ``data`` to ``region`` from its byte ``low``, a multiple of 4096. Takes the buffer.

        The size is a multiple of 4096 too, unless the region ends with it. A read still on its way is waited for.
        """
        high = low + data.size
        if high % ALIGN and high != region.size:
            raise EngineError(f"{data.size} bytes at {low} of {region} end at no multiple of {ALIGN}, nor with the region")
        start, end = self._range(region, low, high)
        job = Job(True, self._files[region.state], start, end, data._take())
        self._live().add(job)
        return Transfer(self, job, data.size)

    def read_into(self, region: Region, low: int, tensor: torch.Tensor) -> None:
        """Fill ``tensor`` (contiguous, any dtype and device) from the byte ``low`` on; returns when it is full."""
        flat = _flat_bytes(tensor)
        reads: deque[tuple[int, Transfer]] = deque()

        def finish() -> None:
            at, read = reads.popleft()
            flat[at : at + read.size].copy_(read.wait())
            read.release()

        try:
            for at, size in self._chunks(flat.numel()):
                while len(reads) == 3 or (reads and not self.has_room(size)):
                    finish()
                reads.append((at, self.fetch(region, low + at, low + at + size)))
            while reads:
                finish()
        finally:
            for _, read in reads:
                read.release()

    def write_from(self, region: Region, low: int, tensor: torch.Tensor) -> None:
        """Write ``tensor`` (contiguous, any dtype and device) from the byte ``low`` on; returns when it is written.

        Its size in bytes is a multiple of 4096, unless the region ends with it.
        """
        flat = _flat_bytes(tensor)
        self._range(region, low, low + flat.numel())
        writes = []
        for at, size in self._chunks(flat.numel()):
            staged = self.stage(size)
            staged.tensor.copy_(flat[at : at + size])
            writes.append(self.put(region, low + at, staged))
        for write in writes:
            write.wait()

    def drain(self) -> None:
        """Wait for all writes. :class:`DiskError` when one failed that no ``wait()`` has told of: the first of them."""
        queue = self._live()
        with queue.changed:
            while any(job.write for job in queue.active):
                queue.changed.wait()
            untold, queue.untold = queue.untold, []
        if untold and untold[0].error is not None:
            raise _again(untold[0].error)

    def close(self) -> None:
        """Delete the files of this rank; what is still to be moved is dropped. Calling it again does nothing.

        It also happens when the last reference goes and at the end of the interpreter. What is left by a process that
        was killed is removed by the next :meth:`open` in the same folder.
        """
        if self._finalizer is not None:
            self._finalizer()

    def _live(self) -> Queue:
        if self._queue is None:
            raise EngineError("the disk tier is used before open()")
        if self._queue.closed:
            raise EngineError("the disk tier is used after close()")
        return self._queue

    def _range(self, region: Region, low: int, high: int) -> tuple[int, int]:
        """[low, high) of ``region`` as bytes of its file, with the padding."""
        if not 0 <= low <= high <= region.size or low % ALIGN:
            raise EngineError(f"[{low}, {high}) is no range in {region} that begins at a multiple of {ALIGN}")
        if region.state not in self._files or region.offset + round_up(region.size) > self._files[region.state].size:
            raise EngineError(f"{region} was not reserved here")
        return region.offset + low, region.offset + round_up(high)

    def _memory(self, size: int) -> Memory:
        queue = self._live()
        with queue.changed:
            staging = queue.staging
            while (memory := staging.take(size)) is None:
                if size > staging.limit - staging.limit % PAGE:
                    least = round_up(size, PAGE)
                    raise DiskError(f"{size} bytes do not fit in staging of {staging.limit} bytes; the least is {least}")
                if all(job.keep for job in queue.active):
                    raise DiskError(
                        f"{size} more bytes do not fit in staging of {staging.limit} bytes: the caller keeps {staging.held} "
                        f"and writes none of them. Release some, or set staging to {staging.held + round_up(size, PAGE)}"
                    )
                queue.changed.wait()
            return memory

    def has_room(self, size: int) -> bool:
        """Can staging give out ``size`` bytes more without waiting?"""
        queue = self._live()
        with queue.changed:
            return queue.staging.held + round_up(size, PAGE) <= queue.staging.limit

    def _chunks(self, size: int) -> list[tuple[int, int]]:
        """(offset, bytes) of pieces that leave room for several in staging."""
        most = max(PAGE, min(8 * self.block, self.staging // 4) // PAGE * PAGE)
        return [(at, min(most, size - at)) for at in range(0, size, most)]

    def _check_room(self, system: Filesystem) -> None:
        need, free = self.reserved, system.free()
        if need > free:
            raise DiskError(
                f"the states of {self._scratch.path.name} need {need} bytes ({need / 1e9:.1f} GB) on disk, and {system.path} "
                f"({system}) has {free} free ({free / 1e9:.1f} GB): name another folder, or free {need - free} bytes"
            )


def _direct_flag(corner: Path, system: Filesystem) -> int:
    """O_DIRECT, or 0, with a warning, where there is none."""
    flag = os.O_DIRECT if accepts_direct(corner) else 0
    if not flag:
        warnings.warn(
            f"{system} has no O_DIRECT: states in {system.path} go through the page cache, which takes host memory",
            stacklevel=3,
        )
    return flag


def _say_doubt(system: Filesystem, file: File | None) -> None:
    """Says aloud what will be slow, as measured in ``file``, whose room is taken: a probe beside it could find none."""
    if not system.doubt or file is None or not file.size:
        return
    try:
        size, written, read = rate(file.number, file.size)
    except OSError as error:
        raise system_error(f"writing and reading {file.path} failed", error) from error
    warnings.warn(
        f"states on disk are in {system.path}, on {system}, {system.doubt}. "
        f"Measured with {size / 2**20:.3g} MiB: {written / 1e9:.2f} GB/s written, {read / 1e9:.2f} GB/s read",
        stacklevel=3,
    )


def _create(file: File, flag: int) -> None:
    """Make ``file`` at its full size, with its bytes taken from what is free: a full disk shows now, not in a step."""
    try:
        # Without O_DIRECT, since the C library's stand-in for a missing fallocate writes single bytes.
        file.number = os.open(file.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        if file.size:
            os.posix_fallocate(file.number, 0, file.size)
        if flag:
            number, file.number = file.number, -1
            os.close(number)
            file.number = os.open(file.path, os.O_RDWR | flag)
    except OSError as error:
        raise system_error(f"{file.path} of {file.size} bytes cannot be made", error) from error


def _end(queue: Queue, files: list[File], scratch: Scratch, process: int) -> None:
    if os.getpid() != process:
        return  # a forked child has this finalizer too, and the files are not its own
    if queue.is_mine():
        # Collected by a thread of the queue, which cannot wait for itself.
        threading.Thread(target=_end, args=(queue, files, scratch, process)).start()
        return
    queue.close()
    close_files(files)
    scratch.leave()


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        raise EngineError(f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous")
    return tensor.detach().reshape(-1).view(torch.uint8)
