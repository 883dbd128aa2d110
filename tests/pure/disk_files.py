"""What the tests of states on disk share."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onecopy.tiers.disk import Disk, Region


def opened(folder: Path, sizes: dict[str, int], run: str = "run", **options: Any) -> tuple[Disk, dict[str, Region]]:
    """A Disk of rank 0, open, with a region of so many bytes for each state."""
    disk = Disk(folder, run, 0, **options)
    regions = {state: disk.reserve(state, size) for state, size in sizes.items()}
    disk.open()
    return disk, regions


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The system refuses to write beyond ``size`` bytes of any file (EFBIG)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
