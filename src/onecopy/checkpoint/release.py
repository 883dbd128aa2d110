"""Files of an export while they are written: safetensors that are filled range by range, and what lies beside them.

Nothing that a reader looks for is there before :meth:`Release.commit`: every file has a hidden name until it is whole and
durable, and the index of several files comes last.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from onecopy.checkpoint.store import human
from onecopy.checkpoint.tensors import header_of, sync_folder, write_durably
from onecopy.errors import CheckpointError

__all__ = ["Content", "Entry", "Release", "writing_to"]

_WEIGHTS = re.compile(r".*\.safetensors|.*\.index\.json|(model|pytorch_model|adapter_model).*\.bin")


@dataclass(frozen=True)
class Entry:
    """A tensor of an export: under ``key`` in the file, called ``source`` where it comes from."""

    key: str
    source: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Content:
    """What one folder of an export is to hold.

    ``stem``: of the names of its tensor files; ``limit``: bytes of the largest of them (one tensor may be larger);
    ``aliases``: further names of tied weights, by the name that is written; ``beside``: other files, by name, as text or
    as a file to copy; ``pickled``: torch's format instead of safetensors.
    """

    entries: Sequence[Entry]
    stem: str = "model"
    limit: int | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, str | Path] = field(default_factory=dict)
    pickled: bool = False
    suffix: str = ""  # of the tensor files; "": that of the format

    def files(self) -> dict[str, list[Entry]]:
        """The entries of each tensor file, in order, by the file's name."""
        groups: list[list[Entry]] = [[]]
        size = 0
        for entry in self.entries:
            if groups[-1] and self.limit is not None and size + entry.bytes > self.limit:
                groups.append([])
                size = 0
            groups[-1].append(entry)
            size += entry.bytes
        suffix = self.suffix or (".bin" if self.pickled else ".safetensors")
        if len(groups) == 1:
            return {f"{self.stem}{suffix}": groups[0]}
        return {f"{self.stem}-{at:05d}-of-{len(groups):05d}{suffix}": group for at, group in enumerate(groups, 1)}

    def index(self) -> str | None:
        """Name of the file that says which tensor is where; None when they are all in one."""
        files = list(self.files())
        return None if len(files) == 1 else f"{self.stem}{self.suffix or Path(files[0]).suffix}.index.json"


class _File:
    """A safetensors file that is filled in any order."""

    def __init__(self, path: Path, entries: Sequence[Entry], metadata: Mapping[str, str]) -> None:
        self.path = path
        described = [(entry.key, entry.dtype, entry.shape) for entry in entries]
        header, self.starts, self.size = header_of(described, metadata)
        self.descriptor = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o666)
        try:
            _write(self.descriptor, memoryview(header), 0)
            os.truncate(self.descriptor, self.size)
        except OSError:
            self.discard()
            raise

    def put(self, entry: Entry, values: Tensor, start: int) -> None:
        if values.numel():
            flat = values.detach().resolve_conj().resolve_neg().to("cpu", entry.dtype).contiguous().reshape(-1)
            at = self.starts[entry.key] + start * entry.dtype.itemsize
            _write(self.descriptor, flat.view(torch.uint8).numpy().data, at)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.fsync(self.descriptor)
            os.close(self.descriptor)
            self.descriptor = -1

    def discard(self) -> None:
        """Remove it as it is."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        self.path.unlink(missing_ok=True)


def _write(descriptor: int, data: memoryview, at: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, at)
        data, at = data[written:], at + written


class Release:
    """An export on its way: :meth:`put` values in any order, then :meth:`commit`, or :meth:`discard`.

    ``folders``: what goes to each folder below ``out``, by its relative path. ``replace``: files of the same names may be
    there. Raises :class:`CheckpointError` when weights are there already that a reader would take for these, and when
    there is too little space.
    """

    def __init__(self, out: Path, folders: Mapping[str, Content], replace: bool = False) -> None:
        self.out = out
        self.folders = folders
        self.bytes = sum(entry.bytes for content in folders.values() for entry in content.entries)
        if not replace:
            self._refuse_weights()
        self._made = [path for path in (out, *out.parents) if not path.exists()]
        out.mkdir(parents=True, exist_ok=True)
        needed = self.bytes * (2 if any(content.pickled for content in folders.values()) else 1)
        free = shutil.disk_usage(out).free
        if free < needed:
            self._remove_made()
            raise CheckpointError(f"no space to export to {out}: it needs {human(needed)}, {human(free)} are free")
        self._open: dict[Path, _File] = {}
        self._places: dict[str, list[tuple[_File, Entry]]] = {}
        try:
            for name, content in folders.items():
                self._open_files(out / name, content)
        except OSError:
            self.discard()
            raise

    def _refuse_weights(self) -> None:
        for name in self.folders:
            found = sorted(path for path in (self.out / name).glob("*") if _WEIGHTS.fullmatch(path.name))
            if found:
                raise CheckpointError(
                    f"{self.out} has weights already ({found[0].name}), which could be taken for the exported ones; remove "
                    "them or export to another folder"
                )

    def _open_files(self, folder: Path, content: Content) -> None:
        folder.mkdir(exist_ok=True)
        metadata = {"format": "pt", **content.aliases}
        for name, entries in content.files().items():
            file = _File(folder / f".{name}.partial", entries, metadata)
            self._open[folder / name] = file
            for entry in entries:
                self._places.setdefault(entry.source, []).append((file, entry))

    def put(self, source: str, values: Tensor, start: int = 0) -> None:
        """Write ``values`` as the elements from ``start`` on of the flattened tensor that is called ``source``."""
        for file, entry in self._places.get(source, []):
            file.put(entry, values, start)

    def commit(self) -> list[str]:
        """Make everything durable and give it its name; returns the names of all files, relative to ``out``."""
        written = []
        for file in self._open.values():
            file.close()
        for name, content in self.folders.items():
            folder = self.out / name
            for beside, given in content.beside.items():
                text = given.read_text(encoding="utf-8") if isinstance(given, Path) and not given.is_file() else given
                if isinstance(text, Path):
                    shutil.copyfile(text, folder / beside)
                else:
                    write_durably(folder / beside, text)
                written.append(beside)
            for file_name in content.files():
                partial = self._open[folder / file_name].path
                if content.pickled:
                    _pickle(partial, content.aliases)
                os.replace(partial, folder / file_name)
                written.append(str(Path(name) / file_name))
            if (index := content.index()) is not None:
                hidden = folder / f".{index}.partial"
                write_durably(hidden, _index_text(content))
                os.replace(hidden, folder / index)
                written.append(str(Path(name) / index))
            sync_folder(folder)
        return written

    def discard(self) -> None:
        """Remove what is written so far."""
        for file in self._open.values():
            file.discard()
        for name in self.folders:
            if name not in ("", ".") and (self.out / name).is_dir() and not any((self.out / name).iterdir()):
                (self.out / name).rmdir()
        self._remove_made()

    def _remove_made(self) -> None:
        for path in self._made:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()


@contextmanager
def writing_to(out: Path) -> Iterator[None]:
    """What the operating system refuses inside is a :class:`CheckpointError` that names ``out``."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error}") from error


def _index_text(content: Content) -> str:
    where = {entry.key: name for name, entries in content.files().items() for entry in entries}
    if content.pickled:
        where |= {alias: where[key] for alias, key in content.aliases.items()}
    total = sum(entry.bytes for entry in content.entries)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True) + "\n"


def _pickle(path: Path, aliases: Mapping[str, str]) -> None:
    """Turn the safetensors file into one that ``torch.load`` reads; its tensors are mapped, not held."""
    with safe_open(path, "pt") as opened:
        state = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 - it is no dict
    state |= {alias: state[key] for alias, key in aliases.items() if key in state}
    hidden = path.with_name(f"{path.name}.torch")
    try:
        with open(hidden, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(hidden, path)
    finally:
        hidden.unlink(missing_ok=True)
