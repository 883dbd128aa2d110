"""The folder of states on disk: checked at the start, shared with other runs, and nothing left behind in it."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from onecopy.errors import DiskError
from onecopy.tiers import scratch
from onecopy.tiers.disk import Disk
from tests.pure.disk_files import largest_file, opened

pytestmark = [
    pytest.mark.pure,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux"),
    # The folder of the tests may itself lie in a container's layers or in memory.
    pytest.mark.filterwarnings("ignore:states on disk are in", "ignore:.*has no O_DIRECT"),
]

ROOT = os.geteuid() == 0


def start(folder: Path, body: str, wait: bool = False) -> subprocess.Popen[str]:
    """A process with ``disk`` open in ``folder`` and 8 MB in it; then it runs ``body``."""
    code = f"""if True:
        import os, sys, time, signal
        from onecopy.tiers.disk import Disk
        import torch
        disk = Disk({str(folder)!r}, "run", 0)
        region = disk.reserve("master", 8_000_000)
        disk.open()
        disk.write_from(region, 0, torch.arange(2_000_000, dtype=torch.float32))
        print("open", flush=True)
        {body}
    """
    pipe, command = subprocess.PIPE, [sys.executable, "-W", "ignore", "-c", code]
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n", process.communicate()[1]
    if wait:
        process.wait(30)
    return process


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cases = {
        tmp_path / "no" / "such": rf"does not exist \({tmp_path} does\)",
        tmp_path / "file": "is a file",
    }
    for folder, said in cases.items():
        with pytest.raises(DiskError, match=said):
            opened(folder, {"master": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(ROOT, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(DiskError, match=r"cannot be written: EACCES \(Permission denied\)"):
        opened(tmp_path, {"master": 1})
    tmp_path.chmod(0o700)


def test_a_filesystem_that_takes_no_files() -> None:
    with pytest.raises(DiskError, match="cannot be written: E"):
        opened(Path("/proc"), {"master": 1})


def test_too_little_room_is_seen_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=rf"need {1 << 60} bytes .* on disk, and {tmp_path.resolve()} .* has \d+ free"):
        opened(tmp_path, {"master": 1 << 60})
    # Room that goes while the files are made: here a limit of the process takes the part of a full disk.
    said = r"exp_avg.bin of 2097152 bytes cannot be made: EFBIG"
    with largest_file(1 << 20), pytest.raises(DiskError, match=said) as caught:
        opened(tmp_path, {"master": 1 << 20, "exp_avg": 2 << 20})
    assert caught.value.errno == errno.EFBIG
    assert not list(tmp_path.iterdir()), "and what was made is gone"


def test_two_live_runs_of_one_name(tmp_path: Path) -> None:
    disk, _ = opened(tmp_path, {"master": 1})
    with pytest.raises(DiskError, match=f"rank0 is in use by the process with pid {os.getpid()} on "):
        opened(tmp_path, {"master": 1})
    other, _ = opened(tmp_path, {"master": 1}, run="run-2")
    beside = Disk(tmp_path, "run", 1)
    beside.open()
    disk.close()
    assert beside._scratch.path.exists(), "the other rank's"
    again, _ = opened(tmp_path, {"master": 1})
    for one in (beside, again, other, disk):
        one.close()
    assert not list(tmp_path.iterdir())


def test_another_live_process_is_named(tmp_path: Path) -> None:
    process = start(tmp_path, "time.sleep(60)")
    with pytest.raises(DiskError, match=f"in use by the process with pid {process.pid} on "):
        opened(tmp_path, {"master": 1})
    process.kill()
    process.communicate()
    disk, regions = opened(tmp_path, {"master": 8192})
    found = torch.ones(2048)
    disk.read_into(regions["master"], 0, found)
    assert not found.any(), "nothing of the dead run is taken for ours"
    disk.close()


def test_only_what_dead_runs_of_ours_left_is_removed(tmp_path: Path) -> None:
    start(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", wait=True).communicate()
    assert (tmp_path / "onecopy-run" / "rank0" / "master.bin").stat().st_size > 8_000_000 - 4096
    kept = {
        tmp_path / "onecopy-results" / "rank0" / "weights.bin": "no marker: a user's own",
        tmp_path / "onecopy-results" / "rank0" / "lock": "",
        tmp_path / "data.bin": "not in a corner",
        tmp_path / "onecopy-run" / "notes.txt": "not a state",
    }
    for path, text in kept.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "onecopy-link").symlink_to(tmp_path / "onecopy-results")
    alive, _ = opened(tmp_path, {"master": 1}, run="alive")
    assert not (tmp_path / "onecopy-run" / "rank0").exists()
    another, _ = opened(tmp_path, {"master": 1}, run="another")
    assert alive._scratch.path.exists()
    with pytest.raises(DiskError, match="exists and was not made by onecopy"):
        opened(tmp_path, {"master": 1}, run="results")
    alive.close()
    another.close()
    assert {path: path.read_text() for path in kept} == kept
    assert (tmp_path / "onecopy-link").is_symlink()


@pytest.mark.parametrize("end", ["pass", "raise ValueError"])
def test_a_process_leaves_nothing(tmp_path: Path, end: str) -> None:
    process = start(tmp_path, end, wait=True)
    assert process.stderr is not None
    assert "Error" not in process.stderr.read().replace("ValueError", "")
    process.communicate()
    assert not list(tmp_path.iterdir())


def test_a_forked_child_deletes_nothing(tmp_path: Path) -> None:
    disk, _ = opened(tmp_path, {"master": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        disk.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert (disk._scratch.path / "master.bin").exists()
    disk.close()


def test_ranks_that_start_and_end_at_once(tmp_path: Path) -> None:
    errors: list[Exception] = []

    def rank(number: int) -> None:
        try:
            for _ in range(10):
                disk = Disk(tmp_path, "run", number)
                disk.reserve("master", 10)
                disk.open()
                disk.close()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert not list(tmp_path.iterdir())


def test_no_thread_descriptor_or_file_stays(tmp_path: Path) -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    gc.collect()
    before = count()
    for index in range(50):
        disk, regions = opened(tmp_path, {"master": 100_000, "exp_avg": 1}, threads=4)
        disk.put(regions["master"], 0, disk.fetch(regions["master"], 0, 100_000))  # still under way when it is closed
        if index % 2:
            disk.close()
            disk.close()
        del disk
    gc.collect()
    deadline = time.monotonic() + 5
    while count() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert count() == before
    assert not list(tmp_path.iterdir())


# Filesystems


def test_without_o_direct_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.warns(UserWarning, match=r"^\w+ at / ?.* has no O_DIRECT: states in .* go through the page cache") as said:
        disk, regions = opened(tmp_path, {"master": 4 * 513})
    assert len([one for one in said if "O_DIRECT" in str(one.message)]) == 1
    value, found = torch.randn(513), torch.empty(513)
    disk.write_from(regions["master"], 0, value)
    disk.read_into(regions["master"], 0, found)
    assert torch.equal(found, value)
    disk.close()


def test_memory_is_no_disk(tmp_path: Path) -> None:
    """And its rate is found in the room that the states take: there may be no other."""
    shm = Path("/dev/shm")
    if scratch.Filesystem(shm).kind != "tmpfs" or not os.access(shm, os.W_OK) or scratch.Filesystem(shm).free() < 1 << 26:
        pytest.skip("no tmpfs to write to")
    folder = shm / f"onecopy-test-{os.getpid()}"
    folder.mkdir()
    try:
        said = r"on tmpfs at /dev/shm, memory and no disk.*\d GB/s written, .*\d GB/s read"
        with largest_file(1 << 16), pytest.warns(UserWarning, match=said):
            disk, regions = opened(folder, {"master": 10000})
        found = torch.ones(10000, dtype=torch.uint8)
        disk.read_into(regions["master"], 0, found)
        assert not found.any()
        disk.close()
    finally:
        folder.rmdir()


@pytest.mark.parametrize(
    ("path", "expected", "doubt"),
    [
        ("/data/runs", "xfs at /data", ""),
        ("/database", "overlay at /", "layered"),
        ("/net/a b/c", "nfs4 at /net/a b", "network"),
        ("/s/x", "fuse.sshfs at /s", "network"),
        ("/data/ram/x", "tmpfs at /data/ram", "memory"),
    ],
)
def test_filesystems_are_found_in_mountinfo(path: str, expected: str, doubt: str) -> None:
    table = "\n".join([
        "1 0 0:1 / / rw - overlay overlay rw",
        "2 1 8:1 / /data rw,relatime shared:1 - ext4 /dev/sda1 rw",
        "3 1 8:2 / /data rw - xfs /dev/sdb1 rw",
        r"4 1 0:9 / /net/a\040b rw master:3 - nfs4 host:/x rw",
        "5 1 0:8 / /s rw - fuse.sshfs host:/y rw",
        "6 3 0:7 / /data/ram rw - tmpfs tmpfs rw",
    ])  # fmt: skip
    system = scratch.Filesystem(Path("/"))
    system.path = Path(path)
    system._find(table)
    assert str(system) == expected
    assert doubt in system.doubt and bool(doubt) == bool(system.doubt)
