"""Chunks of checkpoint files, read ahead of whoever takes them, in the order in which they were announced."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from onecopy.checkpoint.format import FileRecord
from onecopy.checkpoint.summed import BLOCK, FLIGHT, Summed, make_queue, system_error_of
from onecopy.errors import CheckpointError, DiskError
from onecopy.tiers.blocks import File, Queue
from onecopy.tiers.scratch import ALIGN, round_up

__all__ = ["Chunks"]

_KEPT = 16  # chunks


@dataclass
class _Run:
    """The chunks [first, last) of a file, which are read in one request."""

    name: str
    first: int
    last: int

    def has(self, name: str, chunk: int) -> bool:
        return self.name == name and self.first <= chunk < self.last


@dataclass
class _Block:
    """A run on its way or here. ``upto``: the byte of the file before which somebody took what it has, else -1."""

    run: _Run
    job: Summed
    upto: int = -1
    checked: bool = False

    def bytes(self, low: int, high: int) -> Tensor:
        """Bytes [low, high) of the file."""
        assert self.job.memory is not None
        return self.job.memory.tensor[low - self.job.low : high - self.job.low]


class Chunks:
    """Checked chunks of the files of one checkpoint, which are open in ``files`` by the names that ``records`` has.

    What is taken in another order than it was announced in is read when it is asked for. The chunks at which somebody
    stopped are kept, since the next range often begins there.
    """

    def __init__(self, records: Mapping[str, FileRecord]) -> None:
        self.records = records
        self.files: dict[str, File] = {}
        self._plan: deque[_Run] = deque()
        self._planned: dict[str, int] = {}  # of each file, the chunk after the last that was announced
        self._coming: deque[_Block] = deque()
        self._kept: OrderedDict[tuple[str, int], Tensor] = OrderedDict()
        self._queue: Queue | None = None

    def expect(self, name: str, low: int, high: int) -> None:
        """The bytes [low, high) of the file will be taken, after everything that was announced before."""
        size = self.records[name].chunk
        first, last, most = low // size, -(-high // size), max(BLOCK // size, 1)
        if low >= high:
            return
        if self._planned.get(name) == first + 1:
            first += 1  # it is the last chunk of what comes before
        self._planned[name] = last
        while first < last:
            before = self._plan[-1] if self._plan else None
            if before is not None and before.name == name and before.last == first and first - before.first < most:
                first = before.last = min(last, before.first + most)
            else:
                self._plan.append(_Run(name, first, min(last, first + most)))
                first = self._plan[-1].last

    def walk(self, name: str, start: int, stop: int, take: Callable[[Tensor], object]) -> None:
        """Give ``take`` the bytes [start, stop) of the file in turn, as uint8 that it is not to keep.

        Raises :class:`CheckpointError` where they are not those that were written, ``OSError`` where they cannot be read.
        """
        size, at = self.records[name].chunk, start
        while at < stop:
            chunk = at // size
            kept = self._kept.get((name, chunk))
            if kept is not None:
                end = min(stop, chunk * size + kept.numel())
                take(kept[at - chunk * size : end - chunk * size])
                self._kept.move_to_end((name, chunk))
            else:
                block = self._block(name, chunk, -(-stop // size))
                end = block.upto = min(stop, block.job.stop)
                take(block.bytes(at, end))
            at = end

    def close(self) -> None:
        """Let go of everything; what is on its way is not waited for, but for the requests that have begun."""
        if self._queue is not None:
            self._queue.close()
        self._queue = None
        self.files.clear()
        self._plan.clear()
        self._planned.clear()
        self._coming.clear()
        self._kept.clear()

    def _block(self, name: str, chunk: int, last: int) -> _Block:
        """The block with the chunk, checked; those before it in the order are let go of. Unannounced it is read with the
        chunks after it up to ``last``."""
        found = next((block for block in self._coming if block.run.has(name, chunk)), None)
        if found is not None:
            while self._coming[0] is not found:
                self._leave(self._coming.popleft())
        elif self._plan and self._plan[0].has(name, chunk):
            while self._coming:
                self._leave(self._coming.popleft())
            found = self._begin(self._plan.popleft())
            self._coming.append(found)
        else:
            most = max(BLOCK // self.records[name].chunk, 1)
            found = self._begin(_Run(name, chunk, min(last, chunk + most)))
            self._coming.appendleft(found)
        while self._plan and (block := self._try(self._plan[0])) is not None:
            self._plan.popleft()
            self._coming.append(block)
        self._check(found)
        return found

    def _try(self, run: _Run) -> _Block | None:
        """Begin to read ``run``; None while there is no room."""
        if self._queue is None:
            largest = max(record.chunk for record in self.records.values())
            self._queue = make_queue(max(largest, BLOCK), FLIGHT + 2)
        record = self.records[run.name]
        start, stop = run.first * record.chunk, min(run.last * record.chunk, record.bytes)
        with self._queue.changed:
            memory = self._queue.staging.take(round_up(stop) - start + start % ALIGN)
        if memory is None:
            return None
        job = Summed(False, self.files[run.name], start, stop, record.chunk, memory)
        self._queue.add(job)
        return _Block(run, job)

    def _begin(self, run: _Run) -> _Block:
        """Begin to read ``run``, if need be in the place of what would have come last."""
        while (block := self._try(run)) is None:
            last = self._coming.pop()
            if last.upto < 0:
                self._plan.appendleft(last.run)
            self._leave(last)
        return block

    def _leave(self, block: _Block) -> None:
        """Let go of the block; the chunk in whose midst somebody stopped is kept."""
        assert self._queue is not None
        size = self.records[block.run.name].chunk
        if block.upto % size and 0 <= block.upto < block.job.stop:
            low = block.upto - block.upto % size
            self._kept[block.run.name, low // size] = block.bytes(low, min(low + size, block.job.stop)).clone()
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._queue.wait(block.job)
        self._queue.release(block.job)

    def _check(self, block: _Block) -> None:
        """Wait for the block. Raises :class:`CheckpointError` unless its chunks are those that were written."""
        if block.checked:
            return
        assert self._queue is not None
        job, record = block.job, self.records[block.run.name]
        self._queue.wait(job)
        if isinstance(error := job.error, DiskError) and not isinstance(error.__cause__, OSError):
            raise CheckpointError(str(error)) from error
        if error is not None:
            raise system_error_of(job) from error
        for chunk, found in enumerate(job.sums if record.crc32 else (), block.run.first):
            written = record.sum_of(chunk)
            if found != written:
                low, high = chunk * record.chunk, min((chunk + 1) * record.chunk, record.bytes)
                raise CheckpointError(
                    f"{job.file.path} is damaged: bytes {low} to {high} have checksum {found}, {written} was written"
                )
        block.checked = True
