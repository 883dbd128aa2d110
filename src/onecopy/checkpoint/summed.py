"""Blocks of checkpoint files on their way to or from the disk; the threads that move them take their checksums.

They go past the page cache where the filesystem has that (O_DIRECT), several at once, as those of the disk tier do. So
a checksum is taken, and memory copied, while the disk works on other blocks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from pathlib import Path
from zlib import crc32

from onecopy.errors import DiskError
from onecopy.tiers.blocks import File, Job, Memory, Queue, Staging
from onecopy.tiers.scratch import ALIGN, round_up

__all__ = ["BLOCK", "FLIGHT", "Summed", "make_queue", "open_direct", "system_error_of"]

BLOCK = 4 << 20  # bytes of a request
FLIGHT = 4  # requests under way: two keep the disk at work, while others have their checksums taken


class Summed(Job):
    """The bytes [start, stop) of a file to or from ``memory``; ``sums`` of each ``chunk`` of them in turn, once it is done.

    In ``memory`` they begin :attr:`skip` bytes behind its beginning, as requests begin at multiples of 4096.
    """

    __slots__ = ("chunk", "start", "stop", "sums")

    def __init__(self, write: bool, file: File, start: int, stop: int, chunk: int, memory: Memory) -> None:
        super().__init__(write, file, start - start % ALIGN, round_up(stop), memory)
        self.start, self.stop, self.chunk = start, stop, chunk
        self.sums: list[str] = []

    @property
    def skip(self) -> int:
        """Bytes of the request before those that are wanted."""
        return self.start - self.low

    def move(self, low: int, high: int) -> None:
        """Move all of it, in one request."""
        if self.write:
            self._sum()
        try:
            super().move(low, high)
        except OSError as error:
            if error.errno != errno.EINVAL or not _leave_direct(self.file.number):
                raise
            super().move(low, high)
        if not self.write:
            self._sum()
        elif hasattr(os, "posix_fadvise"):
            # Where it went to the page cache the disk begins with it now, so that the wait at the end is short.
            os.posix_fadvise(self.file.number, low, high - low, os.POSIX_FADV_DONTNEED)

    def _sum(self) -> None:
        assert self.memory is not None
        view = self.memory.view[self.skip : self.skip + self.stop - self.start]
        self.sums = [f"{crc32(view[at : at + self.chunk]):08x}" for at in range(0, len(view), self.chunk)]

    def too_short(self, low: int, high: int) -> DiskError:
        size = os.fstat(self.file.number).st_size
        return DiskError(f"{self.file.path} is damaged: it has {size} bytes, {self.file.size} were written")


def make_queue(block: int, count: int) -> Queue:
    """Threads that move blocks, and ``count`` buffers of up to ``block`` bytes."""
    # Each job is one request; both ends of one may be rounded to ALIGN.
    return Queue(FLIGHT, sys.maxsize, Staging(count * (round_up(block) + 2 * ALIGN)))


def open_direct(path: Path, flags: int) -> int:
    """A descriptor past the page cache where the filesystem has that, else one through it."""
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o666)


def _leave_direct(number: int) -> bool:
    """Go on through the page cache, on a filesystem that has O_DIRECT for other alignments only. False if it was so
    already."""
    flags, direct = fcntl.fcntl(number, fcntl.F_GETFL), getattr(os, "O_DIRECT", 0)
    fcntl.fcntl(number, fcntl.F_SETFL, flags & ~direct)
    return bool(flags & direct)


def system_error_of(job: Job) -> Exception:
    """Why ``job`` failed: what the system said, with the file's name, or the error itself."""
    assert job.error is not None
    cause = job.error.__cause__
    if isinstance(cause, OSError):
        return OSError(cause.errno, cause.strerror, str(job.file.path))
    return job.error
