"""Tensors to and from safetensors files: written one at a time, read one range at a time.

Files are written here and not by the safetensors package because that builds the whole file in memory first and does
not make it durable. They are read with the package.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from onecopy.checkpoint.format import Span, Stored, dtype_name
from onecopy.errors import CheckpointError
from onecopy.tiers.held import Held

__all__ = ["Later", "Reader", "file_bytes", "header_of", "part_of", "sync_folder", "write_durably", "write_tensors"]

_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "bool": "BOOL",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip

_MAPPED = 64 << 20  # bytes


@dataclass(frozen=True)
class Later:
    """Elements ``[low, high)`` of a state that is not in memory as it is written: read when it is their turn."""

    held: Held
    low: int
    high: int

    @property
    def shape(self) -> tuple[int]:
        return (self.numel(),)

    @property
    def dtype(self) -> torch.dtype:
        return self.held.dtype

    def numel(self) -> int:
        return self.high - self.low

    def element_size(self) -> int:
        return self.held.dtype.itemsize

    def parts(self) -> Iterator[Tensor]:
        """The values, tile by tile."""
        for tile in self.held.grid.meets(self.low, self.high):
            start, stop = self.held.grid.bounds(tile)
            lent = self.held.lend(tile)
            yield lent.wait()[max(self.low, start) - start : min(self.high, stop) - start]
            lent.drop()


def part_of(held: Held, low: int, high: int) -> Tensor | Later:
    """Elements ``[low, high)`` of a state, to be written."""
    return held.plain[low:high] if held.plain is not None else Later(held, low, high)


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
    """The file's header, and the tensors in the order of their bytes."""
    header, starts, _ = header_of((key, tensor.dtype, tensor.shape) for key, tensor in tensors)
    by_key = dict(tensors)
    return header, [by_key[key] for key in starts]


def file_bytes(tensors: Sequence[tuple[str, Tensor | Later]]) -> int:
    """Size of the file that :func:`write_tensors` makes of ``tensors``.

    Raises :class:`CheckpointError` for a dtype that safetensors does not know.
    """
    header, order = _layout(tensors)
    return len(header) + sum(tensor.numel() * tensor.element_size() for tensor in order)


def write_tensors(path: Path, tensors: Sequence[tuple[str, Tensor | Later]]) -> int:
    """Write ``tensors`` as a safetensors file and make it durable; returns its bytes.

    Holds at most one of them beside what is there: a copy on the host where it is on an accelerator or has holes.
    """
    header, order = _layout(tensors)
    with open(path, "wb") as file:
        file.write(header)
        for tensor in order:
            for part in tensor.parts() if isinstance(tensor, Later) else [tensor]:
                if part.numel():
                    file.write(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        _sync(file)
        return file.tell()


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
    """Ranges of the tensors in the files of one checkpoint.

    Files are mapped, so a range costs the pages it is on and nothing else; and as pages that were read count as this
    process's memory until they are needed otherwise, mappings are given back after every 64 MiB.
    """

    def __init__(self, folder: Path, sizes: dict[str, int]) -> None:
        self.folder = folder
        self.sizes = sizes
        self._open: dict[str, Any] = {}
        self._touched = 0
        self._keys: dict[str, frozenset[str]] = {}

    def check_file(self, name: str) -> None:
        """Raise :class:`CheckpointError` when the file is missing or is not as long as it was when it was written."""
        path = self.folder / name
        if name not in self.sizes:
            raise CheckpointError(f"the manifest in {self.folder} refers to {name}, which it does not list")
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; it was {self.sizes[name]} bytes when the checkpoint was made")
        found = path.stat().st_size
        if found != self.sizes[name]:
            raise CheckpointError(f"{path} is damaged: it has {found} bytes, {self.sizes[name]} were written")

    def check(self, source: Span | Stored, shape: Sequence[int], dtype: str) -> None:
        """Raise :class:`CheckpointError` unless the file has the tensor ``source`` names, of that shape and dtype."""
        part = self._slice(source.file, source.key)
        found, expected = (list(part.get_shape()), part.get_dtype()), (list(shape), _CODES.get(dtype))
        if found != expected:
            raise CheckpointError(
                f"{self.folder / source.file} is damaged: {source.key!r} is {found[1]} of shape {found[0]}, the "
                f"manifest says {expected[1]} of shape {expected[0]}"
            )

    def read(self, span: Span, start: int, stop: int) -> Tensor:
        """Elements ``[start, stop)`` of the parameter, which ``span`` has. Do not keep it: it maps the whole file."""
        if self._touched > _MAPPED:
            self.close()
        part: Tensor = self._slice(span.file, span.key)[start - span.start : stop - span.start]
        self._touched += part.numel() * part.element_size()
        return part

    def whole(self, stored: Stored) -> Tensor:
        """A tensor that is stored as it is. Do not keep it: it maps the whole file."""
        value: Tensor = self._file(stored.file).get_tensor(stored.key)
        return value

    def close(self) -> None:
        """Give the mappings back. Reading maps again."""
        self._open.clear()
        self._touched = 0

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self.check_file(name)
            try:
                opened = safe_open(self.folder / name, "pt")
            except (SafetensorError, OSError, ValueError) as error:
                raise CheckpointError(f"{self.folder / name} is damaged: {error}") from error
            self._open[name] = opened
            self._keys[name] = frozenset(opened.keys())  # type: ignore[no-untyped-call]
        return self._open[name]

    def _slice(self, file: str, key: str) -> Any:
        opened = self._file(file)
        if key not in self._keys[file]:
            raise CheckpointError(f"{self.folder / file} is damaged: it has no tensor {key!r}")
        return opened.get_slice(key)
