"""Checkpoints of ``torch.distributed.checkpoint`` (FSDP's and others'), as manifests of ours; and writing them.

What is in one is a nested dict that its writer chose. Read is what torch's own ``get_model_state_dict`` and
``get_optimizer_state_dict`` give, under any names: weights by name, and beside them ``state`` by name and ``param_groups``.
The index is a pickle: it is read by an unpickler that builds the records of the index and nothing else.
"""

from __future__ import annotations

import functools
import io
import json
import math
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onecopy.checkpoint.format import FileRecord, Span, Stored, dtype_name
from onecopy.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

__all__ = ["INDEX", "DcpReader", "Piece", "Tree", "read_index"]

INDEX = ".metadata"


@functools.cache
def _records() -> dict[tuple[str, str], Any]:
    """What an index may be built of. Importing torch's module takes a second, which only its checkpoints are to cost."""
    from torch.distributed.checkpoint import filesystem, metadata

    names = (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties",
        "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )  # fmt: skip
    return {("torch.distributed.checkpoint.metadata", name): getattr(metadata, name) for name in names} | {
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
        ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): metadata.TensorProperties,
        ("torch", "Size"): torch.Size,
        ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
        ("collections", "OrderedDict"): OrderedDict,
    }


class _Unpickler(pickle.Unpickler):
    """Builds the records of an index; paths become text."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _records():
            return _records()[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.startswith("pathlib") and name.endswith("Path"):
            return lambda *parts: "/".join(parts)
        raise CheckpointError(f"it holds objects of {module}.{name}, which are not built here")


@dataclass(frozen=True)
class Piece:
    """A box of a tensor (``offsets`` and ``sizes`` by dimension) that is ``length`` bytes of ``file`` from ``at`` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    at: int
    length: int

    def runs(self, shape: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """(first element of the tensor, first of the box, how many) of each stretch that is contiguous in both."""
        if not shape:
            yield 0, 0, 1
            return
        whole = len(shape)  # dimensions from here on are whole, so that a run spans them
        while whole > 1 and self.sizes[whole - 1] == shape[whole - 1]:
            whole -= 1
        run = math.prod(self.sizes[whole - 1 :])
        strides = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
        outer = self.sizes[: whole - 1]
        base = sum(offset * stride for offset, stride in zip(self.offsets, strides, strict=True))
        for number in range(math.prod(outer)):
            first, rest = base, number
            for at in reversed(range(len(outer))):
                rest, place = divmod(rest, outer[at])
                first += place * strides[at]
            yield first, number * run, run


@dataclass(frozen=True)
class Tree:
    """What a checkpoint holds: by the path of each leaf, tensors (shape, dtype and pieces) and other values."""

    tensors: dict[tuple[str, ...], tuple[tuple[int, ...], torch.dtype, tuple[Piece, ...]]]
    values: dict[tuple[str, ...], Piece]

    def spans(self, path: tuple[str, ...]) -> list[Span]:
        """Where the elements of a tensor are."""
        shape, _, pieces = self.tensors[path]
        found = []
        for piece in pieces:
            for first, inside, numel in piece.runs(shape):
                key = json.dumps([piece.at, piece.length, inside])
                if numel:
                    found.append(Span(file=piece.file, key=key, start=first, stop=first + numel))
        return found

    def stored(self, path: tuple[str, ...]) -> Stored:
        """A tensor that is in one piece. Raises :class:`CheckpointError` when it is not."""
        shape, dtype, pieces = self.tensors[path]
        if len(pieces) != 1:
            raise CheckpointError(f"buffer {'.'.join(path)!r} is in {len(pieces)} pieces; a buffer is whole")
        key = json.dumps([pieces[0].at, pieces[0].length, 0])
        return Stored(file=pieces[0].file, key=key, shape=shape, dtype=dtype_name(dtype))


def read_index(folder: Path) -> Tree:
    """The contents of the checkpoint in ``folder``. Raises :class:`CheckpointError` for an index that is damaged or holds
    anything else."""
    from torch.distributed.checkpoint.metadata import Metadata

    path = folder / INDEX
    try:
        with open(path, "rb") as file:
            index = _Unpickler(file).load()
        if not isinstance(index, Metadata):
            raise CheckpointError(f"it is a {type(index).__name__}")
        return _tree(index)
    except (
        CheckpointError,
        pickle.UnpicklingError,
        EOFError,
        OSError,
        AttributeError,
        TypeError,
        ValueError,
        KeyError,
    ) as error:
        raise CheckpointError(f"{path} is not an index that is read here: {error}") from error


def _tree(index: Metadata) -> Tree:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    paths = {name: tuple(map(str, path)) for name, path in (index.planner_data or {}).items()}
    pieces: dict[str, dict[tuple[int, ...] | None, Piece]] = {}
    for key, info in index.storage_data.items():
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{key.fqn!r} is stored transformed ({info.transform_descriptors}), which is not read here")
        offset = tuple(key.offset) if key.offset is not None else None
        at = Piece(offset or (), (), info.relative_path, info.offset, info.length)
        pieces.setdefault(key.fqn, {})[offset] = at
    tree = Tree({}, {})
    for name, record in index.state_dict_metadata.items():
        path, held = paths.get(name, (name,)), pieces.get(name, {})
        if isinstance(record, TensorStorageMetadata):
            boxes = []
            for chunk in record.chunks:
                at = held.get(tuple(chunk.offsets)) or held[None]
                boxes.append(Piece(tuple(chunk.offsets), tuple(chunk.sizes), at.file, at.at, at.length))
            tree.tensors[path] = (tuple(record.size), record.properties.dtype, tuple(boxes))
        else:
            tree.values[path] = next(iter(held.values()))
    return tree


class DcpReader:
    """Ranges of the pieces of a checkpoint. The key of a span is where its piece is in the file, and an element of it."""

    def __init__(self, folder: Path, files: Mapping[str, int]) -> None:
        self.folder = folder
        self.sizes = files
        self._last: tuple[tuple[str, int], Any] | None = None

    def check_file(self, name: str) -> None:
        """Raise :class:`CheckpointError` when the file is missing or has another length than when it was looked at."""
        path = self.folder / name
        if not path.is_file() or path.stat().st_size != self.sizes.get(name):
            raise CheckpointError(f"{path} is missing or damaged: {self.sizes.get(name)} bytes are expected")

    def check(self, source: Span | Stored, shape: Sequence[int], dtype: str) -> None:
        """Raise :class:`CheckpointError` unless the file is long enough to hold what ``source`` names."""
        at, length, _ = json.loads(source.key)
        self.check_file(source.file)
        if at + length > self.sizes[source.file]:
            raise CheckpointError(f"{self.folder / source.file} is damaged: it ends before byte {at + length}")

    def expect(self, ranges: Iterable[tuple[Span, int, int]]) -> None:
        """Nothing is read ahead here."""

    def read(self, span: Span, start: int, stop: int, out: Tensor) -> None:
        """Fill ``out``, flat, with elements ``[start, stop)`` of the parameter, which ``span`` has. The piece it is in is
        read whole."""
        tensor, inside = self._find(span)
        first = inside - span.start
        out.copy_(tensor.reshape(-1)[first + start : first + stop])

    def whole(self, stored: Stored) -> Tensor:
        """A tensor that is stored as it is."""
        tensor, _ = self._find(stored)
        return tensor.reshape(stored.shape)

    def value(self, piece: Piece) -> Any:
        """What is stored in a piece that is no tensor."""
        return self._load(piece.file, piece.at, piece.length)

    def close(self) -> None:
        """Let go of the piece that was read last."""
        self._last = None

    def _find(self, source: Span | Stored) -> tuple[Tensor, int]:
        at, length, inside = json.loads(source.key)
        found = self._load(source.file, at, length)
        if not isinstance(found, Tensor):
            raise CheckpointError(f"{self.folder / source.file} is damaged: there is no tensor at byte {at}")
        return found.detach(), inside

    def _load(self, name: str, at: int, length: int) -> Any:
        if self._last is None or self._last[0] != (name, at):
            try:
                with open(self.folder / name, "rb") as file:
                    file.seek(at)
                    content = file.read(length)
                value = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
                line = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise CheckpointError(f"{self.folder / name} cannot be read at byte {at}: {line}") from error
            self._last = (name, at), value
        return self._last[1]


def files_of(folder: Path, tree: Tree) -> dict[str, FileRecord]:
    """The files that ``tree`` refers to. Raises :class:`CheckpointError` when one is missing."""
    pieces = [piece for _, _, boxes in tree.tensors.values() for piece in boxes] + list(tree.values.values())
    found = {}
    for name in sorted({piece.file for piece in pieces}):
        if "/" in name or not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing, which {folder / INDEX} refers to")
        found[name] = FileRecord(bytes=(folder / name).stat().st_size)
    return found
