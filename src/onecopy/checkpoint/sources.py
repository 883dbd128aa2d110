"""Checkpoints of any kind as one thing: a manifest, and a reader of the ranges it names.

Another library's checkpoint is described by a manifest of ours whose spans lie in that library's files. So it is loaded,
exported and converted by the code that does it with our own, and each rank reads the ranges it needs and no others.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from onecopy.checkpoint import dcp_manifest, deepspeed, store
from onecopy.checkpoint.dcp import DcpReader
from onecopy.checkpoint.foreign import Hints
from onecopy.checkpoint.format import MANIFEST, Manifest, Span, State, Stored, parse
from onecopy.checkpoint.reader import Reader
from onecopy.checkpoint.torchfiles import TorchReader
from onecopy.errors import CheckpointError

__all__ = ["OURS", "Ranges", "Source", "find", "open_source", "reader_for"]

OURS = "onecopy"


class Ranges(Protocol):
    """Reads what spans of a manifest name, in files of ``folder``."""

    folder: Path

    def check_file(self, name: str) -> None:
        """Raise :class:`CheckpointError` when the file is missing or has another length than the manifest says."""

    def check(self, source: Span | Stored, shape: Sequence[int], dtype: str) -> None:
        """Raise :class:`CheckpointError` unless what ``source`` names is there, with that many elements of that dtype."""

    def expect(self, ranges: Iterable[tuple[Span, int, int]]) -> None:
        """These will be read, in this order, as (span, start, stop): whoever can do so reads them ahead."""

    def read(self, span: Span, start: int, stop: int, out: Tensor) -> None:
        """Fill ``out``, flat, with elements ``[start, stop)`` of the parameter, which ``span`` has."""

    def whole(self, stored: Stored) -> Tensor:
        """A tensor that is stored as it is. Do not keep it."""

    def close(self) -> None:
        """Give back what is held. Reading opens again."""


@dataclass(frozen=True)
class Source:
    """A checkpoint to read: its folder, what is in it and where; ``damaged``: newer ones that were skipped for it."""

    folder: Path
    manifest: Manifest
    reader: Ranges
    damaged: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Whose format it is."""
        return str(self.manifest.plan.get("source", OURS))

    @property
    def checksums(self) -> bool:
        """Does it have checksums of its files?"""
        return self.kind == OURS and not self.manifest.unverified

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
        self.reader.expect(spans)
        for span, low, high in spans:
            for start in range(low, high, chunk):
                stop = min(start + chunk, high)
                part = torch.empty(stop - start, dtype=getattr(torch, state.dtype))
                self.reader.read(span, start, stop, part)
                yield part, start


def reader_for(folder: Path, manifest: Manifest, alone: bool = True) -> Ranges:
    """A reader of the files that ``manifest`` names. ``alone``: nobody else on this host reads the same ranges."""
    if "source" not in manifest.plan:
        return Reader(folder, manifest.files, direct=alone)
    sizes = {name: record.bytes for name, record in manifest.files.items()}
    return DcpReader(folder, sizes) if manifest.plan["source"] == dcp_manifest.KIND else TorchReader(folder, sizes)


def find(directory: Path, tag: str | None, hints: Hints) -> store.Found:
    """The checkpoint ``tag`` of ``directory``, by default its latest, ours or another library's.

    Raises :class:`CheckpointError` when there is none.
    """
    folder = _foreign(directory, tag)
    if folder is None:
        return store.find(directory, tag)
    describe = deepspeed.describe if deepspeed.is_one(folder) else dcp_manifest.describe
    manifest = describe(folder, hints)
    notes = tuple(manifest.plan["notes"])
    return store.Found(folder, manifest.text(), notes, foreign=True, here=folder == directory)


def _foreign(directory: Path, tag: str | None) -> Path | None:
    """The folder of another library's checkpoint, when that is what is asked for."""
    named = [tag] if tag is not None else [""]
    for pointer in (store.POINTER, "latest_universal") if tag is None else ():
        if (directory / pointer).is_file():
            named.append((directory / pointer).read_text(encoding="utf-8", errors="replace").strip())
    for name in named:
        if "/" not in name and ".." not in name and _is_foreign(directory / name):
            return directory / name
    return None


def _is_foreign(folder: Path) -> bool:
    return not (folder / MANIFEST).exists() and (deepspeed.is_one(folder) or dcp_manifest.is_one(folder))


def open_source(path: Path, tag: str | None = None, optimizer_states: bool = True, complete: bool = True) -> Source:
    """The checkpoint ``tag`` of the directory ``path``, by default its latest, or that ``path`` itself is.

    ``optimizer_states``: will they be asked for. Raises :class:`CheckpointError` when there is none and, with ``complete``,
    when a file of it is missing or has another length.
    """
    if tag is None and (path / MANIFEST).is_file():
        found = store.Found(path, (path / MANIFEST).read_text(encoding="utf-8"))
    else:
        found = find(path, tag, Hints(optimizer_states=optimizer_states))
    manifest = parse(found.text, str(found.folder / MANIFEST))
    notes = [] if found.foreign else [*found.notes, *filter(None, [manifest.unverified])]
    if notes:
        warnings.warn(f"reading {found.folder}; {'; '.join(notes)}", stacklevel=2)
    reader = reader_for(found.folder, manifest)
    for name in manifest.files if complete else ():
        reader.check_file(name)
    return Source(found.folder, manifest, reader, found.damaged)
