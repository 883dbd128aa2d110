"""Safetensors files while they are written: bounded memory, checksums of every byte, durable at the end.

It is done here and not by the safetensors package because that builds the whole file in memory before it writes it, does
not make it durable, and knows no checksums.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import torch
from torch import Tensor

from onecopy.checkpoint.format import CHUNK, FileRecord
from onecopy.checkpoint.summed import BLOCK, FLIGHT, Summed, make_queue, open_direct, system_error_of
from onecopy.checkpoint.tensors import Later, layout
from onecopy.tiers.blocks import File, Memory
from onecopy.tiers.scratch import Filesystem, round_up

__all__ = ["STAGING", "Writer", "write_tensors"]

STAGING = (FLIGHT + 1) * BLOCK  # bytes of buffers: those under way, and the one that is filled
_PROGRESS = 4  # blocks


class Writer:
    """One safetensors file while it is written: the header at once, then the tensors in the order of the header.

    Tensors are copied block by block to staging, from where threads write them; checksums are taken beside that.
    """

    def __init__(self, path: Path, tensors: Sequence[tuple[str, Tensor | Later]]) -> None:
        header, self.left = layout(tensors)
        self.size = len(header) + sum(tensor.numel() * tensor.element_size() for tensor in self.left)
        # Called after every 16 MiB.
        self.progress: Callable[[], None] = lambda: None
        self._sums: list[str] = []
        self._under_way: deque[Summed] = deque()
        self._done = 0  # blocks that are written
        self._start = self._filled = 0  # the byte of the file at which the block begins that is filled; bytes in it
        self._file = File(path)
        self._queue = make_queue(BLOCK, FLIGHT + 1)
        try:
            self._file.number = open_direct(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            self._memory: Memory | None = self._take()
            self._fill(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> Path:
        """Where it is written to."""
        return self._file.path

    @property
    def rest(self) -> int:
        """Bytes of the memory that :meth:`stage` needs."""
        return round_up(max(self.size - self._start, 1))

    def write_later(self) -> None:
        """Write up to the last tensor that is not in memory; what is left then is."""
        last = max((at for at, tensor in enumerate(self.left) if isinstance(tensor, Later)), default=-1)
        self._write(last + 1)

    def stage(self, memory: Memory) -> None:
        """Copy what is left to ``memory``, from where :meth:`finish` writes it, so that the tensors may change."""
        former, self._memory = self._memory, memory
        if former is not None:
            memory.tensor[: self._filled].copy_(former.tensor[: self._filled])
            with self._queue.changed:
                self._queue.staging.give(former)
        self._write(len(self.left))

    def finish(self) -> FileRecord:
        """Write what is left and make the file durable."""
        self._write(len(self.left))
        self._submit()
        while self._under_way:
            self._collect()
        if self._file.size != self.size:
            os.ftruncate(self._file.number, self.size)
        os.fsync(self._file.number)
        self.close()
        return FileRecord(bytes=self.size, chunk=CHUNK, crc32="".join(self._sums))

    def close(self) -> None:
        """Let go of the file as it is. Does nothing after :meth:`finish`."""
        self._queue.close()
        if self._file.number >= 0:
            os.close(self._file.number)
            self._file.number = -1

    def _write(self, count: int) -> None:
        for _ in range(count):
            tensor = self.left.pop(0)
            for part in tensor.parts() if isinstance(tensor, Later) else [tensor]:
                self._fill(part.detach().reshape(-1))

    def _fill(self, values: Tensor) -> None:
        """Copy flat ``values`` to the block that is filled, and to those after it."""
        at, width = 0, values.element_size()
        while at < values.numel():
            if self._memory is None:
                self._memory = self._take()
            room = self._memory.tensor[self._filled : self.size - self._start]
            part = values[at : at + room.numel() // width]
            room[: part.numel() * width].view(values.dtype).copy_(part, non_blocking=self._memory.lent)
            at += part.numel()
            self._filled += part.numel() * width
            if self._filled == self._memory.size and not self._memory.lent:
                self._submit()

    def _take(self) -> Memory:
        while True:
            with self._queue.changed:
                memory = self._queue.staging.take(min(BLOCK, round_up(self.size - self._start)))
            if memory is not None:
                return memory
            self._collect()

    def _submit(self) -> None:
        """Hand the block that is filled to the threads; lent memory is many of them."""
        memory, self._memory = self._memory, None
        if memory is None:
            return
        if not self._file.size:  # not before: whoever stages a file does not wait for this
            _reserve(self._file, round_up(self.size))
        for at in range(0, self._filled, BLOCK):
            if len(self._under_way) == FLIGHT:
                self._collect()
            part = Memory(memory.size - at, memory.view[at:]) if memory.lent else memory
            stop = self._start + min(at + BLOCK, self._filled)
            job = Summed(True, self._file, self._start + at, stop, CHUNK, part)
            self._under_way.append(job)
            self._queue.add(job)
        self._start, self._filled = self._start + self._filled, 0

    def _collect(self) -> None:
        """Wait for the block that has been under way for the longest. Raises what went wrong with it."""
        job = self._under_way.popleft()
        self._queue.wait(job)
        if job.error is not None:
            raise system_error_of(job) from job.error
        self._sums += job.sums
        self._done += 1
        if self._done % _PROGRESS == 0:
            self.progress()


def _reserve(file: File, size: int) -> None:
    """Give the file its size, and its bytes where that costs nothing: a full disk shows now, and blocks are written in any
    order."""
    if not hasattr(os, "posix_fallocate") or Filesystem(file.path).shared:
        os.ftruncate(file.number, size)  # a network's may do the other by writing zeros
    else:
        os.posix_fallocate(file.number, 0, size)
    file.size = size


def write_tensors(path: Path, tensors: Sequence[tuple[str, Tensor | Later]]) -> FileRecord:
    """Write ``tensors`` as a safetensors file and make it durable; returns its size and checksums.

    Holds staging beside what is there, and a copy of one tensor while that has holes.
    """
    with closing(Writer(path, tensors)) as writer:
        return writer.finish()
