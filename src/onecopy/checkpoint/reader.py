"""Ranges of the tensors in the safetensors files of one checkpoint, whose bytes are those that were written."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onecopy.checkpoint.ahead import Chunks
from onecopy.checkpoint.format import FileRecord, Span, Stored
from onecopy.checkpoint.summed import open_direct
from onecopy.checkpoint.tensors import CODES, DTYPES
from onecopy.errors import CheckpointError
from onecopy.tiers.blocks import File

__all__ = ["Reader", "wrong_size"]

_PART = 1 << 20  # elements that are converted at once


class Reader:
    """Ranges of the tensors in the files of one checkpoint.

    Reads whole chunks, compares each with its checksum, and gives of it what was asked for. What is announced with
    :meth:`expect` is read ahead. A few chunks at the ends of ranges are kept, since the next range often begins where this
    one ended.

    ``direct``: past the page cache, which suits whoever is alone in reading what it reads.
    """

    def __init__(self, folder: Path, files: Mapping[str, FileRecord], direct: bool = True) -> None:
        self.folder = folder
        self.files = files
        self.direct = direct
        self._open: dict[str, _Opened] = {}
        self._chunks = Chunks(files)

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
        found, expected = (entry["shape"], entry["dtype"]), (list(shape), CODES.get(dtype))
        if found != expected:
            raise CheckpointError(
                f"{self.folder / source.file} is damaged: {source.key!r} is {found[1]} of shape {found[0]}, the "
                f"manifest says {expected[1]} of shape {expected[0]}"
            )

    def expect(self, ranges: Iterable[tuple[Span, int, int]]) -> None:
        """Elements ``[start, stop)`` of the parameter, which the span has, will be read, in this order."""
        for span, start, stop in ranges:
            low, width = self._place(span)
            self._chunks.expect(span.file, low + start * width, low + stop * width)

    def read(self, span: Span, start: int, stop: int, out: Tensor) -> None:
        """Fill ``out``, flat, with elements ``[start, stop)`` of the parameter, which ``span`` has.

        They are copied to where they belong at once where that is contiguous memory of the host and of their dtype.
        """
        low, width = self._place(span)
        dtype = DTYPES[self._entry(span.file, span.key)["dtype"]]
        if out.dtype == dtype and out.device.type == "cpu" and out.is_contiguous():
            self._fill(span.file, low + start * width, out.detach().view(torch.uint8))
            return
        part = torch.empty(min(stop - start, _PART), dtype=dtype)
        for first in range(start, stop, _PART):
            piece = part[: min(_PART, stop - first)]
            self._fill(span.file, low + first * width, piece.view(torch.uint8))
            out[first - start : first - start + piece.numel()].copy_(piece)

    def whole(self, stored: Stored) -> Tensor:
        """A tensor that is stored as it is, on the host."""
        entry = self._entry(stored.file, stored.key)
        first, last = entry["data_offsets"]
        out = torch.empty(last - first, dtype=torch.uint8)
        self._fill(stored.file, self._file(stored.file).data + first, out)
        return out.view(DTYPES[entry["dtype"]]).reshape(entry["shape"])

    def verify(self, name: str) -> None:
        """Read all of the file and raise :class:`CheckpointError` where its bytes are not those that were written."""
        self._file(name)
        size = self.files[name].bytes
        self._chunks.expect(name, 0, size)
        self._chunks.walk(name, 0, size, lambda _: None)

    def close(self) -> None:
        """Give the files and what is kept of them back. Reading opens them again."""
        self._chunks.close()
        for opened in self._open.values():
            os.close(opened.file.number)
        self._open.clear()

    def _place(self, span: Span) -> tuple[int, int]:
        """The byte of the file at which element 0 of the parameter would be, and bytes of an element."""
        entry = self._entry(span.file, span.key)
        width = DTYPES[entry["dtype"]].itemsize
        return self._file(span.file).data + int(entry["data_offsets"][0]) - span.start * width, width

    def _file(self, name: str) -> _Opened:
        if name not in self._open:
            self.check_file(name)
            path = self.folder / name
            try:
                number = open_direct(path, os.O_RDONLY) if self.direct else os.open(path, os.O_RDONLY)
                opened = self._open[name] = _Opened(File(path, self.files[name].bytes, number))
                self._chunks.files[name] = opened.file
                size = int.from_bytes(self._some(name, 0, 8), "little")
                opened.header = json.loads(self._some(name, 8, min(8 + size, self.files[name].bytes)))
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{path} is damaged: {error}") from error
            opened.data = 8 + size
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
        """Fill ``out`` with the file's bytes from ``start`` on, checked."""
        at = 0

        def take(part: Tensor) -> None:
            nonlocal at
            out[at : at + part.numel()].copy_(part)
            at += part.numel()

        self._chunks.walk(name, start, start + out.numel(), take)


@dataclass
class _Opened:
    """An open file: its header, and the byte at which its tensors begin."""

    file: File
    data: int = 0
    header: dict[str, Any] = field(default_factory=dict)


def wrong_size(path: Path, record: FileRecord) -> str:
    """What is wrong with the file without a look inside: nothing, it is missing, or it has another size."""
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        return f"{path} is missing; it was {record.bytes} bytes when the checkpoint was made"
    return "" if found == record.bytes else f"{path} is damaged: it has {found} bytes, {record.bytes} were written"
