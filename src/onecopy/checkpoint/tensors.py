"""Tensors as they lie in safetensors files, of which ``writer.py`` writes and ``reader.py`` reads them; durable files."""

from __future__ import annotations

import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from onecopy.checkpoint.format import dtype_name
from onecopy.errors import CheckpointError
from onecopy.tiers.held import Held

__all__ = [
    "CODES",
    "DTYPES",
    "Later",
    "file_bytes",
    "header_of",
    "layout",
    "part_of",
    "sync_folder",
    "write_durably",
]

CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "bool": "BOOL",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip

DTYPES: dict[str, torch.dtype] = {code: getattr(torch, name) for name, code in CODES.items()}


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
        if dtype_name(dtype) not in CODES:
            raise CheckpointError(f"{key} has dtype {dtype_name(dtype)}, which a safetensors file cannot hold")
        starts[key], stop = at, at + math.prod(shape) * dtype.itemsize
        header[key] = {"dtype": CODES[dtype_name(dtype)], "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {key: len(head) + start for key, start in starts.items()}, len(head) + at


def layout(tensors: Sequence[tuple[str, Tensor | Later]]) -> tuple[bytes, list[Tensor | Later]]:
    """The file's header, and the tensors in the order of their bytes: of those equally wide first the ones that are not in
    memory."""
    first = sorted(tensors, key=lambda item: not isinstance(item[1], Later))
    header, starts, _ = header_of((key, tensor.dtype, tensor.shape) for key, tensor in first)
    by_key = dict(tensors)
    return header, [by_key[key] for key in starts]


def file_bytes(tensors: Sequence[tuple[str, Tensor | Later]]) -> int:
    """Size of the file that :func:`onecopy.checkpoint.writer.write_tensors` makes of ``tensors``.

    Raises :class:`CheckpointError` for a dtype that safetensors does not know.
    """
    header, order = layout(tensors)
    return len(header) + sum(tensor.numel() * tensor.element_size() for tensor in order)


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
