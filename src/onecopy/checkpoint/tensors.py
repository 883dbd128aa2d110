"""Tensors to and from safetensors files: written one at a time, read one range at a time.

Both are done here and not by the safetensors package because that builds the whole file in memory before it writes it,
does not make it durable, and knows no checksums.
"""

from __future__ import annotations

import json
import math
import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from zlib import crc32

import torch
from torch import Tensor

from onecopy.checkpoint.format import CHUNK, FileRecord, Span, Stored, dtype_name
from onecopy.errors import CheckpointError
from onecopy.tiers.held import Held

__all__ = [
    "Later",
    "Reader",
    "Writer",
    "file_bytes",
    "header_of",
    "part_of",
    "sync_folder",
    "write_durably",
    "write_tensors",
    "wrong_size",
]

_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "bool": "BOOL",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip

_DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for name, code in _CODES.items()}

_WRITEBACK = 16 << 20  # bytes that the disk is given to write at once
_KEPT = 16  # chunks
_AHEAD = 16 << 20  # bytes that the disk is asked for before they are wanted
_PART = 1 << 20  # elements that are converted at once


class Later(ABC):
    """A one-dimensional tensor that is not in memory as it is written: read when it is its turn."""

    dtype: torch.dtype

    @abstractmethod
    def numel(self) -> int:
        """Number of elements."""

    @abstractmethod
    def parts(self) -> Iterator[Tensor]:
        """The values, a part at a time."""

    @property
    def shape(self) -> tuple[int]:
        return (self.numel(),)

    def element_size(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize


class HeldPart(Later):
    """Elements ``[low, high)`` of a state, tile by tile."""

    def __init__(self, held: Held, low: int, high: int) -> None:
        self.held, self.low, self.high = held, low, high
        self.dtype = held.dtype

    def numel(self) -> int:
        return self.high - self.low

    def parts(self) -> Iterator[Tensor]:
        for tile in self.held.grid.meets(self.low, self.high):
            start, stop = self.held.grid.bounds(tile)
            lent = self.held.lend(tile)
            yield lent.wait()[max(self.low, start) - start : min(self.high, stop) - start]
            lent.drop()


def part_of(held: Held, low: int, high: int) -> Tensor | Later:
    """Elements ``[low, high)`` of a state, to be written."""
    return held.plain[low:high] if held.plain is not None else HeldPart(held, low, high)


def header_of(
    described: Iterable[tuple[str, torch.dtype, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int], int]:
    """The head of a safetensors file of tensors given as (key, dtype, shape); the byte of the file at which each begins, in
    order; and the file's size.

    Wide elements come first, so that each tensor is aligned. Raises :class:`CheckpointError` for a dtype that safetensors
    does not know.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    starts, at = {}, 0
    for key, dtype, shape in sorted(described, key=lambda item: -item[1].itemsize):
        if dtype_name(dtype) not in _CODES:
            raise CheckpointError(f"{key} has dtype {dtype_name(dtype)}, which a safetensors file cannot hold")
        starts[key], stop = at, at + math.prod(shape) * dtype.itemsize
        header[key] = {"dtype": _CODES[dtype_name(dtype)], "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {key: len(head) + start for key, start in starts.items()}, len(head) + at


def _layout(tensors: Sequence[tuple[str, Tensor | Later]]) -> tuple[bytes, list[Tensor | Later]]:
    """The file's header, and the tensors in the order of their bytes: of those equally wide first the ones that are not in
    memory."""
    first = sorted(tensors, key=lambda item: not isinstance(item[1], Later))
    header, starts, _ = header_of((key, tensor.dtype, tensor.shape) for key, tensor in first)
    by_key = dict(tensors)
    return header, [by_key[key] for key in starts]


def file_bytes(tensors: Sequence[tuple[str, Tensor | Later]]) -> int:
    """Size of the file that :func:`write_tensors` makes of ``tensors``.

    Raises :class:`CheckpointError` for a dtype that safetensors does not know.
    """
    header, order = _layout(tensors)
    return len(header) + sum(tensor.numel() * tensor.element_size() for tensor in order)


class Writer:
    """One safetensors file while it is written: the header at once, then the tensors in the order of the header.

    Every chunk's checksum is taken as its bytes go by, while they are in the processor's cache, and the disk is set to
    work on what is written so far, so that the wait for it at the end is short and the page cache holds little.
    """

    def __init__(self, path: Path, tensors: Sequence[tuple[str, Tensor | Later]]) -> None:
        header, self.left = _layout(tensors)
        self._sums: list[str] = []
        self._sum = 0
        self._at = self._started = 0
        # Called after every 16 MiB.
        self.progress: Callable[[], None] = lambda: None
        self._file = open(path, "wb")  # noqa: SIM115 - closed by finish() and close()
        try:
            self._put(memoryview(header))
        except BaseException:
            self.close()
            raise

    def write_later(self) -> None:
        """Write up to the last tensor that is not in memory; what is left then is."""
        last = max((at for at, tensor in enumerate(self.left) if isinstance(tensor, Later)), default=-1)
        self._write(last + 1)

    def finish(self) -> FileRecord:
        """Write what is left and make the file durable.

        Holds at most one tensor beside what is there: a copy on the host where it is on an accelerator or has holes.
        """
        self._write(len(self.left))
        if self._at % CHUNK:
            self._sums.append(f"{self._sum:08x}")
        _sync(self._file)
        self.close()
        return FileRecord(bytes=self._at, chunk=CHUNK, crc32="".join(self._sums))

    def close(self) -> None:
        """Let go of the file as it is. Does nothing after :meth:`finish`."""
        self._file.close()

    def _write(self, count: int) -> None:
        for _ in range(count):
            tensor = self.left.pop(0)
            for part in tensor.parts() if isinstance(tensor, Later) else [tensor]:
                if part.numel():
                    self._put(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def _put(self, data: memoryview) -> None:
        while len(data):
            part = data[: CHUNK - self._at % CHUNK]
            self._file.write(part)
            self._sum = crc32(part, self._sum)
            self._at += len(part)
            if self._at % CHUNK == 0:
                self._sums.append(f"{self._sum:08x}")
                self._sum = 0
                self._start_writeback()
            data = data[len(part) :]

    def _start_writeback(self) -> None:
        if self._at - self._started < _WRITEBACK:
            return
        if hasattr(os, "posix_fadvise"):
            self._file.flush()
            os.posix_fadvise(self._file.fileno(), self._started, self._at - self._started, os.POSIX_FADV_DONTNEED)
        self._started = self._at
        self.progress()


def write_tensors(path: Path, tensors: Sequence[tuple[str, Tensor | Later]]) -> FileRecord:
    """Write ``tensors`` as a safetensors file and make it durable; returns its size and checksums.

    Holds at most one of them beside what is there: a copy on the host where it is on an accelerator or has holes.
    """
    with closing(Writer(path, tensors)) as writer:
        return writer.finish()


def write_durably(path: Path, text: str) -> int:
    """Write ``text`` and make it durable; returns its bytes."""
    with open(path, "wb") as file:
        file.write(text.encode())
        _sync(file)
        return file.tell()


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Make the names in the folder ``path`` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Reader:
    """Ranges of the tensors in the files of one checkpoint, whose bytes are those that were written.

    Reads whole chunks, compares each with its checksum, and gives of it what was asked for. A few chunks at the ends of
    ranges are kept, since the next range often begins where this one ended; beside them nothing is.
    """

    def __init__(self, folder: Path, files: Mapping[str, FileRecord]) -> None:
        self.folder = folder
        self.files = files
        self._open: dict[str, _Opened] = {}
        self._kept: OrderedDict[tuple[str, int], Tensor] = OrderedDict()

    def check_file(self, name: str) -> None:
        """Raise :class:`CheckpointError` when the file is missing or is not as long as it was when it was written."""
        if name not in self.files:
            raise CheckpointError(f"the manifest in {self.folder} refers to {name}, which it does not list")
        problem = wrong_size(self.folder / name, self.files[name])
        if problem:
            raise CheckpointError(problem)

    def check(self, source: Span | Stored, shape: Sequence[int], dtype: str) -> None:
        """Raise :class:`CheckpointError` unless the file has the tensor ``source`` names, of that shape and dtype."""
        entry = self._entry(source.file, source.key)
        found, expected = (entry["shape"], entry["dtype"]), (list(shape), _CODES.get(dtype))
        if found != expected:
            raise CheckpointError(
                f"{self.folder / source.file} is damaged: {source.key!r} is {found[1]} of shape {found[0]}, the "
                f"manifest says {expected[1]} of shape {expected[0]}"
            )

    def read(self, span: Span, start: int, stop: int, out: Tensor) -> None:
        """Fill ``out``, flat, with elements ``[start, stop)`` of the parameter, which ``span`` has.

        They are read to where they belong where that is contiguous memory of the host and of their dtype.
        """
        entry = self._entry(span.file, span.key)
        dtype = _DTYPES[entry["dtype"]]
        first = self._file(span.file).data + entry["data_offsets"][0] + (start - span.start) * dtype.itemsize
        if out.dtype == dtype and out.device.type == "cpu" and out.is_contiguous():
            self._fill(span.file, first, out.detach().view(torch.uint8))
            return
        part = torch.empty(min(stop - start, _PART), dtype=dtype)
        for low in range(0, stop - start, _PART):
            piece = part[: min(_PART, stop - start - low)]
            self._fill(span.file, first + low * dtype.itemsize, piece.view(torch.uint8))
            out[low : low + piece.numel()].copy_(piece)

    def whole(self, stored: Stored) -> Tensor:
        """A tensor that is stored as it is, on the host."""
        entry = self._entry(stored.file, stored.key)
        first, last = entry["data_offsets"]
        out = torch.empty(last - first, dtype=torch.uint8)
        self._fill(stored.file, self._file(stored.file).data + first, out)
        return out.view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])

    def verify(self, name: str) -> None:
        """Read all of the file and raise :class:`CheckpointError` where its bytes are not those that were written."""
        self._file(name)
        for chunk in range(-(-self.files[name].bytes // self.files[name].chunk)):
            self._chunk(name, chunk)

    def close(self) -> None:
        """Give the files and what is kept of them back. Reading opens them again."""
        for opened in self._open.values():
            opened.file.close()
        self._open.clear()
        self._kept.clear()

    def _file(self, name: str) -> _Opened:
        if name not in self._open:
            self.check_file(name)
            try:
                opened = self._open[name] = _Opened(open(self.folder / name, "rb", buffering=0))  # noqa: SIM115 - kept open
                size = int.from_bytes(self._some(name, 0, 8), "little")
                header = json.loads(self._some(name, 8, min(8 + size, self.files[name].bytes)))
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{self.folder / name} is damaged: {error}") from error
            opened.data, opened.header = 8 + size, header
        return self._open[name]

    def _entry(self, file: str, key: str) -> dict[str, Any]:
        header = self._file(file).header
        if key not in header:
            raise CheckpointError(f"{self.folder / file} is damaged: it has no tensor {key!r}")
        entry: dict[str, Any] = header[key]
        return entry

    def _some(self, name: str, start: int, stop: int) -> bytes:
        out = torch.empty(stop - start, dtype=torch.uint8)
        self._fill(name, start, out)
        return out.numpy().tobytes()

    def _fill(self, name: str, start: int, out: Tensor) -> None:
        """Fill ``out`` with the file's bytes from ``start`` on, checked; those of whole chunks are read to it directly."""
        size, stop = self.files[name].chunk, start + out.numel()
        at = ahead = start
        while at < stop:
            if ahead < stop and at + _AHEAD // 2 >= ahead and hasattr(os, "posix_fadvise"):
                # The disk reads on while checksums are taken; of this range and no further.
                os.posix_fadvise(self._open[name].file.fileno(), ahead, min(_AHEAD, stop - ahead), os.POSIX_FADV_WILLNEED)
                ahead += _AHEAD
            chunk = at // size
            end = min((chunk + 1) * size, stop)
            if end - at == size:
                self._chunk(name, chunk, out[at - start : end - start])
            else:
                out[at - start : end - start] = self._edge(name, chunk)[at - chunk * size : end - chunk * size]
            at = end

    def _edge(self, name: str, chunk: int) -> Tensor:
        """A chunk that is kept for the next one who wants a part of it."""
        if (name, chunk) not in self._kept:
            self._kept[name, chunk] = self._chunk(name, chunk)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end((name, chunk))
        return self._kept[name, chunk]

    def _chunk(self, name: str, chunk: int, into: Tensor | None = None) -> Tensor:
        """All bytes of a chunk. Raises :class:`CheckpointError` when they are not those that were written."""
        record = self.files[name]
        low, high = chunk * record.chunk, min((chunk + 1) * record.chunk, record.bytes)
        into = torch.empty(high - low, dtype=torch.uint8) if into is None else into
        buffer, got = into.numpy().data, 0
        while got < high - low:
            count = os.preadv(self._open[name].file.fileno(), [buffer[got:]], low + got)
            if not count:
                raise CheckpointError(f"{self.folder / name} is damaged: it ends at byte {low + got} of {record.bytes}")
            got += count
        found, written = f"{crc32(buffer):08x}", record.sum_of(chunk)
        if found != written:
            raise CheckpointError(
                f"{self.folder / name} is damaged: bytes {low} to {high} have checksum {found}, {written} was written"
            )
        return into


@dataclass
class _Opened:
    """An open file: its header, and the byte at which its tensors begin."""

    file: IO[bytes]
    data: int = 0
    header: dict[str, Any] = field(default_factory=dict)


def wrong_size(path: Path, record: FileRecord) -> str:
    """What is wrong with the file without a look inside: nothing, it is missing, or it has another size."""
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        return f"{path} is missing; it was {record.bytes} bytes when the checkpoint was made"
    return "" if found == record.bytes else f"{path} is damaged: it has {found} bytes, {record.bytes} were written"
