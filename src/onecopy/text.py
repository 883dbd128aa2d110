"""Text as bytes: files become rows of token ids in an order that depends on the seed and the row number alone.

Nothing is copied or tokenised: files are laid end to end in name order and read through memory maps. A row is a
window of ``context + 1`` bytes. Row ``n`` of a run is the same for any number of ranks, micro-batches and restarts.
"""

from __future__ import annotations

import hashlib
import sysconfig
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from onecopy.errors import ConfigError

__all__ = ["Corpus", "Piece", "Rows", "find_files", "open_corpora", "python_sources", "shuffled"]

DEFAULT_BYTES = 16 << 20
HELD_OUT = 0.05
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
_OPEN_MAPS = 128


@dataclass(frozen=True)
class Piece:
    """Bytes ``[start, stop)`` of a file."""

    path: Path
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


@lru_cache(maxsize=_OPEN_MAPS)  # bounds the open file descriptors; the page cache keeps what was read
def _map(path: Path) -> npt.NDArray[np.uint8]:
    return np.memmap(path, dtype=np.uint8, mode="r")


@dataclass(frozen=True)
class Corpus:
    """Pieces of files laid end to end, read as one array of bytes."""

    pieces: tuple[Piece, ...]

    @cached_property
    def _stops(self) -> list[int]:
        return list(accumulate(piece.size for piece in self.pieces))

    def __len__(self) -> int:
        return self._stops[-1] if self.pieces else 0

    def read(self, start: int, count: int) -> npt.NDArray[np.uint8]:
        """``count`` bytes from offset ``start``. Raises ``IndexError`` when they do not all exist."""
        if start < 0 or start + count > len(self):
            raise IndexError(f"bytes [{start}, {start + count}) of a corpus of {len(self)} bytes")
        parts: list[npt.NDArray[np.uint8]] = []
        index = bisect_right(self._stops, start)
        while count:
            piece = self.pieces[index]
            offset = piece.size - (self._stops[index] - start)
            taken = min(count, piece.size - offset)
            part = _map(piece.path)[piece.start + offset : piece.start + offset + taken]
            if len(part) < taken:
                raise ConfigError(f"{piece.path} became shorter while it was read: it had {piece.stop} bytes")
            parts.append(part)
            start, count, index = start + taken, count - taken, index + 1
        return np.concatenate(parts) if len(parts) != 1 else parts[0]

    @cached_property
    def fingerprint(self) -> str:
        """Changes when a file is added, removed, renamed or resized: enough to refuse another corpus on resuming."""
        total = zlib.crc32(b"")
        for piece in self.pieces:
            total = zlib.crc32(f"{_short(piece.path)}:{piece.start}:{piece.stop}\n".encode(), total)
        return f"{total:08x}-{len(self)}"


def _short(path: Path) -> str:
    """A file's name that survives moving its folder, and tells the many ``__init__.py`` apart."""
    return "/".join(path.parts[-2:])


def python_sources(limit: int = DEFAULT_BYTES) -> list[Path]:
    """The Python sources of the running interpreter's standard library without its tests, in name order, until
    ``limit`` bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found, total = [], 0
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED.isdisjoint(path.relative_to(root).parts):
            total += path.stat().st_size
            if total > limit:
                break
            found.append(path)
    if not found:
        raise ConfigError(f"no Python sources under {root} to train on; name your own text with --data PATH")
    return found


def find_files(paths: Sequence[str | Path]) -> list[Path]:
    """The files named by ``paths``: files as they are, folders as every file below them whose name and folder names do
    not start with a dot. Name order, each file once.

    Raises :class:`ConfigError` for a path that does not exist.
    """
    found: set[Path] = set()
    for path in map(Path, paths):
        if path.is_dir():
            below = (p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts))
            found.update(p.resolve() for p in below if p.is_file())
        elif path.is_file():
            found.add(path.resolve())
        else:
            raise ConfigError(f"data {str(path)!r} is neither a file nor a folder")
    return sorted(found)


def _split(files: Iterable[Path]) -> tuple[Corpus, Corpus]:
    """(training, held out): whole files are held out, picked by a hash of their names while they stay within 5 % of
    all bytes. Where no file is small enough (one big file) the end of the largest is held out instead."""
    pieces = [Piece(path, 0, path.stat().st_size) for path in files]
    pieces = [piece for piece in pieces if piece.size]
    budget = int(sum(piece.size for piece in pieces) * HELD_OUT)
    held: set[Piece] = set()
    for piece in sorted(pieces, key=lambda p: (zlib.crc32(_short(p.path).encode()), str(p.path))):
        if piece.size <= budget:
            held.add(piece)
            budget -= piece.size
    if held:
        return Corpus(tuple(p for p in pieces if p not in held)), Corpus(tuple(p for p in pieces if p in held))
    if not pieces:
        return Corpus(()), Corpus(())
    largest = max(pieces, key=lambda p: p.size)
    cut = largest.stop - budget
    kept = tuple(Piece(p.path, 0, cut) if p is largest else p for p in pieces)
    return Corpus(kept), Corpus((Piece(largest.path, cut, largest.stop),))


def open_corpora(data: Sequence[str | Path], context: int) -> tuple[Corpus, Corpus]:
    """(training, held out) text of ``data``, or of the standard library's sources when ``data`` is empty.

    Raises :class:`ConfigError` when either part is shorter than one row of ``context`` + 1 bytes.
    """
    train, held = _split(find_files(data) if data else python_sources())
    for what, corpus in (("training", train), ("held-out", held)):
        if len(corpus) < context + 1:
            named = ", ".join(map(str, data)) or "the standard library"
            raise ConfigError(
                f"{what} text of {named} has {len(corpus)} bytes, fewer than one row of {context + 1} "
                f"({HELD_OUT:.0%} is held out); give more --data or a smaller --context"
            )
    return train, held


def shuffled(index: int, size: int, key: str) -> int:
    """Image of ``index`` under a permutation of ``range(size)`` that ``key`` picks.

    Needs no memory, so a corpus of any size can be shuffled: a Feistel network over the next even power of two, walked
    until it lands inside the range (at most 4 rounds of it on average).
    """
    if not 0 <= index < size:
        raise IndexError(f"index {index} outside range({size})")
    half = max(1, -(-(size - 1).bit_length() // 2))
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            digest = hashlib.blake2b(f"{key}:{turn}:{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        index = left << half | right
        if index < size:
            return index


@dataclass(frozen=True)
class Rows:
    """Training rows of ``corpus``: an endless sequence in which every pass visits each window once, shuffled.

    ``context``: bytes of a row's input; its targets are the same bytes one later.
    """

    corpus: Corpus
    context: int
    seed: int = 0

    @property
    def windows(self) -> int:
        """Rows of one pass over the corpus."""
        return (len(self.corpus) - 1) // self.context

    def row(self, number: int) -> npt.NDArray[np.uint8]:
        """Row ``number``, ``context`` + 1 bytes."""
        turn, position = divmod(number, self.windows)
        window = shuffled(position, self.windows, f"{self.seed}:{turn}")
        return self.corpus.read(window * self.context, self.context + 1)

    def batch(self, first: int, size: int) -> tuple[Tensor, Tensor]:
        """Rows ``first`` to ``first + size - 1`` as (inputs, targets), each (size, context) int64."""
        rows = np.stack([self.row(first + i) for i in range(size)])
        return _pair(rows)

    def micro_batch(self, consumed: int, micro: int, rank: int, world: int, size: int) -> tuple[Tensor, Tensor]:
        """What ``rank`` of ``world`` ranks feeds its micro-batch number ``micro`` of an optimizer step that starts
        after ``consumed`` rows: no two (micro, rank) share a row, and together they are the next rows in order."""
        return self.batch(consumed + (micro * world + rank) * size, size)

    def spread(self, rank: int, world: int, size: int, batches: int) -> Iterator[tuple[Tensor, Tensor]]:
        """``batches`` batches of ``size`` rows for ``rank``, evenly spaced over the corpus, the same on every call:
        held-out rows to validate on. A corpus with fewer windows repeats some."""
        total = batches * size * world
        for number in range(batches):
            first = (number * world + rank) * size
            offsets = [(first + i) * self.windows // total * self.context for i in range(size)]
            yield _pair(np.stack([self.corpus.read(offset, self.context + 1) for offset in offsets]))


def _pair(rows: npt.NDArray[np.uint8]) -> tuple[Tensor, Tensor]:
    tokens = torch.from_numpy(rows.astype(np.int64))
    return tokens[:, :-1], tokens[:, 1:]
