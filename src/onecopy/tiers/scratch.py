"""A run's own corner of a scratch folder: who owns it, what dead runs left behind, and what filesystem it is on.

``<folder>/onecopy-<run>/rank<r>/``. A rank holds a lock (``flock``) on the file ``lock`` in its corner for as long as it
lives, so the kernel knows who is alive, whatever way a process ended. Corners are made and removed under one more lock,
a file in ``folder`` that exists only meanwhile. Nothing is removed but files of ours in folders with our marker.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from onecopy.codecs import ALIGN
from onecopy.errors import DiskError

__all__ = ["ALIGN", "Filesystem", "Scratch", "accepts_direct", "page_memory", "rate", "round_up", "system_error"]

_MARKER, _LOCK, _SUFFIX = "onecopy-scratch", "lock", ".bin"
_PATIENCE = 120.0  # seconds that somebody may take to remove leftovers
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_NETWORK = {
    "9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs",
    "pvfs2", "smb3", "smbfs", "virtiofs", "wekafs",
}  # fmt: skip
_PROBE = 32 << 20  # bytes written and read to learn a rate


def round_up(size: int, grain: int = ALIGN) -> int:
    """The least multiple of ``grain`` that is not below ``size`` bytes."""
    return -(-size // grain) * grain


def page_memory(size: int, forked: bool = False) -> mmap.mmap:
    """``size`` bytes of page-aligned memory outside the heap; it goes with its last reference. Nothing is read from a disk
    to it if it is ``forked``: if processes that this one forks have it, too."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A fork during a read would leave this process another copy of the page than the one the device writes to. Huge
    # pages make fewer entries to pin per request. Kernels without either go on without.
    for advice in ("MADV_HUGEPAGE",) if forked else ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError, AttributeError):
            memory.madvise(getattr(mmap, advice))
    return memory


def system_error(what: str, error: OSError) -> DiskError:
    """``what`` failed because the system said ``error``."""
    number = error.errno or 0
    return DiskError(f"{what}: {errno.errorcode.get(number, 'errno ' + str(number))} ({error.strerror})", number)


def checked_name(kind: str, name: str) -> str:
    """``name`` if it can be part of a file's name, else :class:`DiskError`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise DiskError(f"the {kind} is called {name!r}; letters, digits and _ - . can be part of a file's name")
    return name


class Filesystem:
    """What holds a path: ``kind`` ("ext4", "nfs", "tmpfs", ...; "unknown" without /proc) and ``mount``, where it begins."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.kind, self.mount = "unknown", "/"
        with contextlib.suppress(OSError):
            self._find(Path("/proc/self/mountinfo").read_text(errors="surrogateescape"))

    def _find(self, mountinfo: str) -> None:
        best = -1
        for line in mountinfo.splitlines():
            front, _, back = line.partition(" - ")
            mount = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), front.split()[4])
            # Of mounts on one place the last is what one sees.
            if self.path.is_relative_to(mount) and len(mount) >= best:
                best, self.mount, self.kind = len(mount), mount, back.split()[0]

    def __str__(self) -> str:
        return f"{self.kind} at {self.mount}"

    @property
    def shared(self) -> bool:
        """Can other hosts have it mounted?"""
        return self.kind in _NETWORK or self.kind == "fuse" or self.kind.startswith("fuse.")

    @property
    def doubt(self) -> str:
        """Why it may be a bad place for states; empty when there is no reason."""
        if self.kind in ("tmpfs", "ramfs"):
            return "memory and no disk: what is kept there takes host memory"
        if self.kind == "overlay":
            return "the layered filesystem of a container: mount a disk of the host instead"
        return "a network filesystem: a disk of this host is faster" if self.shared else ""

    def free(self) -> int:
        """Bytes that this user may still write."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize


def accepts_direct(folder: Path) -> bool:
    """Does the filesystem of ``folder`` do O_DIRECT? Found by writing and reading one block."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return False
    try:
        with _probe_file(folder, flag) as file:
            memory = page_memory(ALIGN)
            os.pwritev(file, [memory], 0)
            os.preadv(file, [memory], 0)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise system_error(f"writing and reading {ALIGN} bytes in {folder} failed", error) from error
    return True


def rate(file: int, size: int) -> tuple[int, float, float]:
    """Bytes tried, at most 32 MiB, and bytes per second (written, read) of the beginning of an open ``file`` of ``size``
    bytes, a multiple of 4096, which takes no room beside it. It is zeros afterwards. ``OSError`` where that fails."""
    size = min(size, _PROBE)
    block = min(size, 1 << 20)
    memory, times = page_memory(block), []
    size -= size % block
    memory.write(os.urandom(block))
    for move in (os.pwritev, os.preadv):
        began = time.perf_counter()
        for offset in range(0, size, block):
            move(file, [memory], offset)
        if move is os.pwritev:
            os.fsync(file)
        times.append(time.perf_counter() - began)
    zeros = page_memory(block)
    for offset in range(0, size, block):
        os.pwritev(file, [zeros], offset)
    return size, size / times[0], size / times[1]


@contextlib.contextmanager
def _probe_file(folder: Path, flag: int) -> Iterator[int]:
    path = folder / f"probe{_SUFFIX}"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | flag, 0o600)
        try:
            yield file
        finally:
            os.close(file)
    finally:
        # Some filesystems make the file and refuse the flag then.
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


class Scratch:
    """One rank's corner of ``folder``: :meth:`claim` it, keep files ``*.bin`` in :attr:`path`, :meth:`leave` it."""

    def __init__(self, folder: str | Path, run: str, rank: int) -> None:
        self.folder = Path(folder).absolute()
        self.run_path = self.folder / f"onecopy-{checked_name('run', run)}"
        self.path = self.run_path / f"rank{rank}"
        self._lock = -1

    def claim(self) -> Filesystem:
        """Check the folder, remove what dead runs left in it and make the corner.

        :class:`DiskError` when the folder is not there, is no folder or cannot be written, or the corner is taken.
        """
        self._check()
        system = Filesystem(self.folder)
        with _alone(self.folder, system):
            for entry in sorted(os.scandir(self.folder), key=lambda entry: entry.name):
                if entry.name.startswith("onecopy-") and entry.is_dir(follow_symlinks=False):
                    with contextlib.suppress(OSError):  # what cannot be removed is in nobody's way
                        _remove_leftovers(Path(entry.path), system)
            try:
                self._settle()
            except OSError as error:
                raise system_error(f"{self.path} cannot be made", error) from error
        return system

    def leave(self) -> None:
        """Remove the corner's files, and the run's folder when no other rank is in it. What others put there stays."""
        if self._lock < 0:
            return
        with contextlib.suppress(OSError):
            _remove_files(self.path)
        try:
            with _alone(self.folder, None):
                _remove_corner(self.path)
                _remove_run(self.run_path)
                self._unlock()
        except (DiskError, OSError):  # the next run removes what is left: it is nobody's once the lock is free
            self._unlock()

    def _unlock(self) -> None:
        lock, self._lock = self._lock, -1
        if lock >= 0:
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_UN)  # closing alone would not: forked children have the file open too
            os.close(lock)

    def _check(self) -> None:
        if not self.folder.exists():
            parent = next(path for path in self.folder.parents if path.exists())
            raise DiskError(f"{self.folder}, where states are to be kept on disk, does not exist ({parent} does): make it")
        if not self.folder.is_dir():
            raise DiskError(f"{self.folder}, where states are to be kept on disk, is a file: name a folder")

    def _settle(self) -> None:
        """Make the corner and lock it."""
        self.run_path.mkdir(mode=0o700, exist_ok=True)
        if not _is_ours(self.run_path):
            owner = self.run_path.lstat().st_uid
            if owner != os.geteuid() or not self.run_path.is_dir() or any(self.run_path.iterdir()):
                whose = f"belongs to user {owner}" if owner != os.geteuid() else "was not made by onecopy"
                raise DiskError(f"{self.run_path} exists and {whose}: name another folder")
            marker = self.run_path / _MARKER
            marker.write_text("Scratch files of a run of onecopy, which removes them, or the next run does.\n")
        self.path.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        if not _try_lock(lock):
            owner_text = _owner(lock)
            os.close(lock)
            raise DiskError(f"{self.path} is in use by {owner_text}: name another folder")
        self._lock = lock
        os.ftruncate(lock, 0)
        os.pwrite(lock, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)


def _is_ours(run: Path) -> bool:
    """Did this user's onecopy make the folder ``run``?"""
    try:
        folder, marker = run.lstat(), (run / _MARKER).lstat()
    except OSError:
        return False
    mine = folder.st_uid == marker.st_uid == os.geteuid()
    return mine and stat.S_ISDIR(folder.st_mode) and stat.S_ISREG(marker.st_mode)


def _remove_leftovers(run: Path, system: Filesystem) -> None:
    """Remove the corners of ``run`` whose lock nobody holds, and ``run`` with the last of them."""
    if not _is_ours(run):
        return
    for corner in sorted(run.iterdir()):
        if not re.fullmatch(r"rank\d+", corner.name) or corner.is_symlink() or not corner.is_dir():
            continue
        try:
            lock = os.open(corner / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            with contextlib.suppress(OSError):
                corner.rmdir()  # its process died before it had a lock, hence files
            continue
        try:
            # Another host may not see locks of this one, so what it left there is for itself to remove.
            foreign = system.shared and _read_owner(lock).get("host") != socket.gethostname()
            if not foreign and _try_lock(lock):
                with contextlib.suppress(OSError):
                    _remove_files(corner)
                    _remove_corner(corner)
        finally:
            os.close(lock)
    _remove_run(run)


def _remove_files(corner: Path) -> None:
    for entry in list(os.scandir(corner)):
        if entry.name.endswith(_SUFFIX) and entry.is_file(follow_symlinks=False):
            os.unlink(entry.path)


def _remove_corner(corner: Path) -> None:
    (corner / _LOCK).unlink(missing_ok=True)
    corner.rmdir()


def _remove_run(run: Path) -> None:
    if {entry.name for entry in os.scandir(run)} <= {_MARKER}:
        (run / _MARKER).unlink(missing_ok=True)
        run.rmdir()


@contextlib.contextmanager
def _alone(folder: Path, system: Filesystem | None) -> Iterator[None]:
    """One process of this user at a time makes and removes corners of ``folder``."""
    path = folder / f".onecopy-{os.geteuid()}.lock"
    deadline, lock = time.monotonic() + _PATIENCE, -1
    while lock < 0:
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise system_error(f"the folder {folder} for states on disk cannot be written", error) from error
        try:
            # Whoever had it before us removed the file: then this is a lock on nothing.
            if _try_lock(lock) and os.path.samestat(os.fstat(lock), path.stat()):
                break
        except FileNotFoundError:
            pass
        except OSError as error:
            os.close(lock)
            where = f"{folder} ({system})" if system else str(folder)
            raise system_error(f"{where} cannot lock files, so two runs could write the same; name another", error) from error
        os.close(lock)
        lock = -1
        if time.monotonic() > deadline:
            raise DiskError(f"somebody has held {path} for {_PATIENCE:.0f} s: is a process of another run stopped?")
        time.sleep(0.01)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(lock)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_owner(lock: int) -> dict[str, object]:
    try:
        found = json.loads(os.pread(lock, 4096, 0))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _owner(lock: int) -> str:
    said = _read_owner(lock)
    return f"the process with pid {said['pid']} on {said.get('host')}" if "pid" in said else "another process"
