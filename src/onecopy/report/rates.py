"""What a machine's memory and disk do at most: the limits that an optimizer step off the device is judged against."""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from onecopy.errors import DiskError
from onecopy.tiers.scratch import ALIGN, Filesystem, accepts_direct, page_memory, round_up, system_error

__all__ = ["DISK_BYTES", "STEP_BYTES", "Copy", "DiskRate", "Raw", "Request", "copy_rate", "disk_rate"]

# Bytes of memory that a step of Adam moves for one parameter: a bf16 gradient in, fp32 master weight and two moments in
# and out, a bf16 parameter out.
STEP_BYTES = 2 + 3 * 8 + 2
# Bytes that it reads, and as many that it writes, where those three states are on disk.
DISK_BYTES = 3 * 4

Request = tuple[Callable[..., int], int, int]  # os.preadv or os.pwritev, offset, bytes


class Copy:
    """Copies ``size`` bytes of memory to other memory; a call returns its seconds. It reads and writes ``2 * size`` bytes."""

    def __init__(self, size: int) -> None:
        # Written, so that every page is there.
        self._source, self._target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)

    def __call__(self) -> float:
        began = time.perf_counter()
        self._target.copy_(self._source)
        return time.perf_counter() - began


def copy_rate(size: int, threads: int, repeats: int = 7) -> float:
    """Bytes read and written per second while ``threads`` threads copy ``size`` bytes, the median of ``repeats``."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        copy = Copy(size)
        return 2 * size / statistics.median(copy() for _ in range(repeats))
    finally:
        torch.set_num_threads(before)


class Raw:
    """One file of ``size`` bytes in ``folder``, whose every byte has been written; opened with ``flag`` (O_DIRECT)."""

    def __init__(self, folder: Path, size: int, flag: int = getattr(os, "O_DIRECT", 0), block: int = 4 << 20) -> None:
        self.size = size
        self.path = folder / "raw"
        self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | flag, 0o600)
        os.posix_fallocate(self.file, 0, size)
        self.run(self.order(os.pwritev, block), 2, block)

    def order(self, move: Callable[..., int], block: int, size: int = 0) -> Iterator[Request]:
        """The first ``size`` bytes (0: all), ``block`` at a time."""
        size = size or self.size
        return ((move, offset, min(block, size - offset)) for offset in range(0, size, block))

    def run(self, requests: Iterable[Request], threads: int, block: int) -> float:
        """Seconds for ``requests`` of at most ``block`` bytes, in order, by ``threads`` threads."""
        memories = [page_memory(block) for _ in range(threads)]
        for memory in memories:
            memory.write(os.urandom(ALIGN) * (block // ALIGN))
        lock, coming = threading.Lock(), iter(requests)
        errors: list[Exception] = []

        def work(memory: memoryview) -> None:
            try:
                while not errors:
                    with lock:
                        request = next(coming, None)
                    if request is None:
                        return
                    move, offset, size = request
                    if (moved := move(self.file, [memory[:size]], offset)) != size:
                        raise DiskError(f"{moved} of {size} bytes at {offset} of {self.path} were moved")
            except (OSError, DiskError) as error:
                errors.append(error)

        crew = [threading.Thread(target=work, args=(memoryview(memory),)) for memory in memories]
        began = time.perf_counter()
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join()
        if errors:
            raise errors[0]
        return time.perf_counter() - began

    def close(self) -> None:
        """Remove the file."""
        os.close(self.file)
        self.path.unlink()


@dataclass(frozen=True)
class DiskRate:
    """Bytes per second ``written`` and ``read`` in order, on ``filesystem``. ``direct``: with O_DIRECT, past the page
    cache; ``doubt``: why the place may be a bad one, or nothing."""

    written: float
    read: float
    filesystem: str
    direct: bool
    doubt: str


def disk_rate(path: Path, size: int, threads: int = 2, block: int = 1 << 20, repeats: int = 3) -> DiskRate:
    """Write and read a file of ``size`` bytes in ``path`` by ``threads`` threads in requests of ``block`` bytes, as the
    disk tier does by default; medians of ``repeats``. Raises :class:`DiskError` when there is no room for it, or no such
    folder."""
    if not path.is_dir():
        raise DiskError(f"{path} is no folder")
    system, size = Filesystem(path), round_up(size)
    if system.free() < size:
        raise DiskError(f"{path} ({system}) has {system.free()} bytes free; {size} are written to measure it")
    taken: dict[Callable[..., int], list[float]] = {os.pwritev: [], os.preadv: []}
    try:
        direct = accepts_direct(path)
        with tempfile.TemporaryDirectory(prefix="onecopy-rate-", dir=path) as folder:
            raw = Raw(Path(folder), size, os.O_DIRECT if direct else 0)
            for _ in range(repeats):
                for move, times in taken.items():
                    times.append(raw.run(raw.order(move, block), threads, block))
            raw.close()
    except OSError as error:
        raise system_error(f"writing and reading {size} bytes in {path} failed", error) from error
    written, read = (size / statistics.median(times) for times in taken.values())
    return DiskRate(written, read, str(system), direct, system.doubt)
