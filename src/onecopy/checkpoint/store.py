"""The directory that checkpoints are kept in: how one becomes visible at once, and how one is found.

::

    directory/
        latest                           the tag of the newest checkpoint
        step00000100/                    manifest.json and rank-*.safetensors
        .step00000200.1f9c02ab.partial/  being written, or left by a save that was killed
        .step00000100.replaced/          the former checkpoint of this tag, while a new one takes its place
        .step00000000.removed/           one that is no longer wanted, while it is removed

A folder gets a tag's name in one rename, after everything in it is durable; ``latest`` is replaced after that. Whenever
a save is killed, what ``latest`` names is complete.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from onecopy.checkpoint.format import MANIFEST, Manifest, NewerFormatError, parse
from onecopy.checkpoint.reader import wrong_size
from onecopy.checkpoint.tensors import sync_folder, write_durably
from onecopy.errors import CheckpointError

__all__ = ["POINTER", "Draft", "Found", "check_tag", "complete_tags", "find", "human", "prune"]

POINTER = "latest"
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-+=@]*")
_NONCE = "meeting-point"
_SHOWN, _HEX = 8, "[0-9a-f]"  # digits of the nonce in the folder's name
_SHARED_WITHIN = 5.0  # seconds that a network file system gets to show another machine's new file


def human(size: int) -> str:
    """``size`` bytes for people: ``"1.50 GiB"``; exact below a KiB."""
    if size < 1024:
        return f"{size} bytes"
    value, unit = size / 1024, "KiB"
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1024 or unit == "PiB":
            break
        value /= 1024
    return f"{value:.2f} {unit}"


def check_tag(tag: str) -> None:
    """Raise :class:`CheckpointError` unless ``tag`` can be the name of one folder that no other file here has."""
    if not isinstance(tag, str) or not _TAG.fullmatch(tag) or tag == POINTER:
        raise CheckpointError(
            f"tag {tag!r} cannot name a checkpoint; use letters, digits and _ . - + = @, no dot first, not {POINTER!r}"
        )


# Writing


@dataclass(frozen=True)
class Draft:
    """A checkpoint that is being written: ``folder`` until :meth:`commit` names it ``target``. ``nonce``: what
    :meth:`open` returned; no two saves share a folder."""

    directory: Path
    tag: str
    nonce: str = ""
    # Folders that :meth:`open` made around it, the innermost first.
    made: list[Path] = field(default_factory=list, compare=False)

    @property
    def folder(self) -> Path:
        return self.directory / f".{self.tag}.{self.nonce[:_SHOWN]}.partial"

    @property
    def target(self) -> Path:
        return self.directory / self.tag

    @property
    def former(self) -> Path:
        return self.directory / f".{self.tag}.replaced"

    def open(self, size: int) -> str:
        """Make an empty folder for ``size`` bytes; on one rank. Returns what :meth:`check_shared` is to be told.

        Raises :class:`CheckpointError` when there is too little space, or something else has the tag's name, and leaves
        nothing behind then.
        """
        self.made[:] = [path for path in (self.directory, *self.directory.parents) if not path.exists()]
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            return self._begin(size)
        except BaseException:
            self.discard()
            raise

    def _begin(self, size: int) -> str:
        self._settle_former()
        if self.target.exists() and not (self.target / MANIFEST).is_file():
            raise CheckpointError(f"{self.target} is no checkpoint, so it is not replaced; choose another tag")
        for left in self.directory.glob(f".{self.tag}.{_HEX * _SHOWN}.partial"):
            _remove(left)
        free = shutil.disk_usage(self.directory).free
        if free < size:
            raise CheckpointError(
                f"no space to save in {self.directory}: the checkpoint needs {human(size)}, {human(free)} are free"
            )
        opened = replace(self, nonce=secrets.token_hex(16))
        try:
            opened.folder.mkdir()
            (opened.folder / _NONCE).write_text(opened.nonce)
        except OSError:
            _remove(opened.folder)
            raise
        return opened.nonce

    def check_shared(self) -> None:
        """Raise :class:`CheckpointError` unless this rank sees the folder that :meth:`open` made."""
        deadline = time.monotonic() + _SHARED_WITHIN
        while True:
            try:
                if (self.folder / _NONCE).read_text() == self.nonce:
                    return
            except OSError:
                pass  # not there (yet): told below
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"ranks see different storage: {self.directory} is not the directory that rank 0 writes to. "
                    "Save to a file system that all ranks share"
                )
            time.sleep(0.05)

    def commit(self, manifest: Manifest) -> None:
        """Make everything durable, then visible at once; on one rank, when all have written.

        A former checkpoint with this tag is set aside first and removed last.
        """
        if not self.folder.exists():
            raise CheckpointError(
                f"another save under the tag {self.tag!r} has begun in {self.directory} before this one was done, which is "
                "given up. Give each its own tag or directory"
            )
        (self.folder / _NONCE).unlink()
        write_durably(self.folder / MANIFEST, manifest.text())
        sync_folder(self.folder)
        replaces = self.target.exists()
        if replaces:
            os.rename(self.target, self.former)
        try:
            os.rename(self.folder, self.target)
        except OSError:
            if replaces:
                os.rename(self.former, self.target)
            raise
        sync_folder(self.directory)
        _remove(self.former)

    def point(self) -> None:
        """From now on this is the newest checkpoint."""
        new = self.directory / f".{POINTER}.{self.tag}.new"
        write_durably(new, self.tag + "\n")
        os.replace(new, self.directory / POINTER)
        sync_folder(self.directory)

    def discard(self) -> None:
        """Remove what is written so far, and the folders that were made for it, as far as nobody else has used them."""
        _remove(self.folder)
        for folder in self.made:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()

    def _settle_former(self) -> None:
        """After a save that was killed while it replaced this tag: bring the former back, or finish removing it."""
        if self.former.exists():
            if self.target.exists():
                _remove(self.former)
            else:
                os.rename(self.former, self.target)


# Removing


def _remove(folder: Path) -> None:
    """Remove a folder with what is in it, where there is one; of a link to one, the link."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)


def prune(directory: Path, keep: int) -> list[str]:
    """Remove checkpoints older than the ``keep`` newest complete ones, and what killed saves left; returns the tags.

    What ``latest`` names stays, and so does everything while fewer than ``keep`` are complete. A folder is renamed before
    it is removed, so that nobody takes what is left of it for a checkpoint.
    """
    pointed = (directory / POINTER).read_text(encoding="utf-8").strip()
    seen = _looked_at(directory)
    complete = [each for each in seen if not each.problem]
    if len(complete) < keep:
        return []
    oldest = complete[-keep]
    gone = [each.tag for each in seen if each.when < oldest.when and each.tag != pointed]
    for tag in gone:
        os.rename(directory / tag, directory / f".{tag}.removed")
    sync_folder(directory)
    for left in (*directory.glob(".*.removed"), *directory.glob(".*.partial")):
        _remove(left)
    for stale in directory.glob(f".{POINTER}.*.new"):
        stale.unlink()
    return gone


# Finding


@dataclass(frozen=True)
class Found:
    """A checkpoint that exists: its folder and the text of its manifest. ``notes``: what was passed over, and why;
    ``damaged``: those of them that are complete no more."""

    folder: Path
    text: str
    notes: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    foreign: bool = False  # another library's, of which the text is made up
    here: bool = False  # the folder is the directory that was searched itself

    @property
    def name(self) -> str:
        """The folder's name in the directory that was searched."""
        return "" if self.here else self.folder.name


@dataclass(frozen=True, order=True)
class _Seen:
    """A folder with a manifest: when it was saved, in seconds, and what it lacks, if anything."""

    when: float
    tag: str
    problem: str
    latest: bool


def _look_at(folder: Path) -> _Seen:
    manifest = folder / MANIFEST
    try:
        found = parse(manifest.read_text(encoding="utf-8"), str(manifest))
    except (CheckpointError, OSError, UnicodeDecodeError) as error:
        when = manifest.stat().st_mtime if manifest.exists() else 0.0
        problem = str(error) if isinstance(error, CheckpointError) else f"{manifest} cannot be read ({error})"
        return _Seen(when, folder.name, "" if isinstance(error, NewerFormatError) else problem, True)
    problems = (wrong_size(folder / name, record) for name, record in found.files.items())
    return _Seen(found.save.at, folder.name, next(filter(None, problems), ""), found.save.latest)


def _looked_at(directory: Path) -> list[_Seen]:
    """Every folder of ``directory`` that has a manifest, oldest first."""
    entries = [entry for entry in directory.iterdir() if not entry.name.startswith(".")] if directory.is_dir() else []
    return sorted(_look_at(entry) for entry in entries if (entry / MANIFEST).is_file())


def complete_tags(directory: Path) -> list[str]:
    """Tags of the checkpoints in ``directory`` whose files are all there with their sizes, oldest first."""
    return [seen.tag for seen in _looked_at(directory) if not seen.problem]


def find(directory: Path, tag: str | None) -> Found:
    """The checkpoint ``tag`` of ``directory``; by default the one that ``latest`` names or, where that has lost a file
    or its manifest, the newest that is complete.

    Raises :class:`CheckpointError` that names the path tried and lists the complete checkpoints there.
    """
    if not directory.is_dir():
        raise CheckpointError(f"nothing to load: {directory} is no directory")
    if (directory / MANIFEST).is_file() and not (directory / POINTER).exists():
        raise CheckpointError(
            f"{directory} is itself a checkpoint; give the directory it is in and its tag: "
            f"load({str(directory.parent)!r}, tag={directory.name!r})"
        )
    named = tag if tag is not None else _pointed(directory)
    if tag is not None:
        try:
            check_tag(named)
        except CheckpointError as error:
            raise CheckpointError(f"nothing to load: {error}. {_listed(directory)}") from error
    folder = directory / named
    if not folder.exists() and Draft(directory, named).former.exists():
        # A save was killed after it set the former checkpoint aside and before the new one was in place.
        folder = Draft(directory, named).former
    why = f"{directory / POINTER} names {named!r}, but " if tag is None else ""
    if not folder.is_dir():
        raise CheckpointError(f"nothing to load: {why}{folder} does not exist. {_listed(directory)}")
    if tag is not None:
        return _read(folder, directory, "")
    chosen = _look_at(folder)
    if not chosen.problem:
        return _read(folder, directory, why, *_passed_over(directory, chosen))
    others = complete_tags(directory)
    if not others:
        raise CheckpointError(f"nothing to load: {why}{chosen.problem}. {_listed(directory)}")
    skipped = (f"{folder} was skipped: {chosen.problem}",)
    return _read(directory / others[-1], directory, why, skipped, skipped)


def _read(folder: Path, directory: Path, why: str, notes: tuple[str, ...] = (), damaged: tuple[str, ...] = ()) -> Found:
    path = folder / MANIFEST
    try:
        return Found(folder, path.read_text(encoding="utf-8"), notes, damaged)
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"nothing to load: {why}{path} cannot be read ({error}). {_listed(directory)}") from error


def _passed_over(directory: Path, chosen: _Seen) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is newer than the checkpoint that ``latest`` names: saves that did not come to their end, and all of it that is
    damaged."""
    since = (directory / POINTER).stat().st_mtime
    begun = [(path.stat().st_mtime, str(path)) for path in directory.glob(".*.partial")]
    torn = max((found for found in begun if found[0] >= since), default=(0, ""))[1]
    newer = [each for each in _looked_at(directory) if each.when > chosen.when and each.latest]
    notes = [f"a later save did not come to its end: {torn}"] if torn else []
    damaged = [f"{directory / each.tag} was skipped: {each.problem}" for each in newer[-1:] if each.problem]
    notes += damaged or [f"{directory / each.tag} is newer and complete" for each in newer[-1:]]
    return tuple(notes), tuple(damaged)


def _pointed(directory: Path) -> str:
    """The tag in ``latest``, which is one line."""
    pointer = directory / POINTER
    try:
        text = pointer.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"nothing to load: {pointer} cannot be read ({error}). {_listed(directory)}") from error
    named = text.removesuffix("\n")
    try:
        check_tag(named)
    except CheckpointError as error:
        said = f"{pointer} says {named!r}, which cannot name a checkpoint"
        raise CheckpointError(f"nothing to load: {said}. {_listed(directory)}") from error
    if named == text:
        raise CheckpointError(
            f"nothing to load: {pointer} is cut off: it says {named!r} and no end of the line. {_listed(directory)}"
        )
    return named


def _listed(directory: Path) -> str:
    tags = complete_tags(directory)
    if not tags:
        return f"{directory} has no complete checkpoint"
    return f"Complete checkpoints in {directory}, oldest first: {', '.join(tags)}; choose one with tag="
