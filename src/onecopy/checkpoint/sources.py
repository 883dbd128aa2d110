"""Checkpoints of any kind as one thing: a manifest, and a reader of the ranges it names.

Another library's checkpoint is described by a manifest of ours whose spans lie in that library's files. So it is loaded,
exported and converted by the code that does it with our own, and each rank reads the ranges it needs and no others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from onecopy.checkpoint import store
from onecopy.checkpoint.format import MANIFEST, Manifest, Span, State, Stored, parse
from onecopy.checkpoint.tensors import Reader
from onecopy.errors import CheckpointError

__all__ = ["Ranges", "Source", "open_source"]


class Ranges(Protocol):
    """Reads what spans of a manifest name."""

    def check_file(self, name: str) -> None:
        """Raise :class:`CheckpointError` when the file is missing or has another length than the manifest says."""

    def read(self, span: Span, start: int, stop: int) -> Tensor:
        """Elements ``[start, stop)`` of the parameter, which ``span`` has. Do not keep it."""

    def whole(self, stored: Stored) -> Tensor:
        """A tensor that is stored as it is. Do not keep it."""

    def close(self) -> None:
        """Give back what is held. Reading opens again."""


@dataclass(frozen=True)
class Source:
    """A checkpoint to read: its folder, what is in it and where. ``kind``: whose format it is."""

    folder: Path
    manifest: Manifest
    reader: Ranges
    kind: str = "onecopy"

    def values(self, chunk: int) -> Iterator[tuple[str, Tensor, int]]:
        """The parameters' values by first name, at most ``chunk`` elements at once, and the element each begins at."""
        for record in self.manifest.parameters.values():
            yield from ((record.names[0], part, start) for part, start in self.parts(record.weight, record.numel, chunk))

    def parts(self, state: State, numel: int, chunk: int) -> Iterator[tuple[Tensor, int]]:
        """The elements of ``state``, which has ``numel`` of them, ``chunk`` at a time, and where each part begins."""
        try:
            spans = list(state.covering(0, numel))
        except ValueError as error:
            raise CheckpointError(f"{self.folder / MANIFEST} is damaged: {error}") from error
        for span, low, high in spans:
            for start in range(low, high, chunk):
                yield self.reader.read(span, start, min(start + chunk, high)), start


def open_source(path: Path, tag: str | None) -> Source:
    """The checkpoint ``tag`` of the directory ``path``, by default its latest, or that ``path`` itself is.

    Raises :class:`CheckpointError` when there is none, or a file of it is missing or damaged.
    """
    if tag is None and (path / MANIFEST).is_file():
        found = store.Found(path, (path / MANIFEST).read_text(encoding="utf-8"))
    else:
        found = store.find(path, tag)
    manifest = parse(found.text, str(found.folder / MANIFEST))
    reader = Reader(found.folder, {name: facts["bytes"] for name, facts in manifest.files.items()})
    for name in manifest.files:
        reader.check_file(name)
    return Source(found.folder, manifest, reader)
