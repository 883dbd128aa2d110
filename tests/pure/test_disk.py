"""States on disk: right bytes or a clear error, and bounded memory."""

from __future__ import annotations

import errno
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from onecopy.errors import ConfigError, DiskError, EngineError
from onecopy.tiers import disk as disk_module
from onecopy.tiers.disk import Disk, Region
from tests.pure.disk_files import largest_file, opened

pytestmark = [
    pytest.mark.pure,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux"),
    # The folder of the tests may itself lie in a container's layers or in memory.
    pytest.mark.filterwarnings("ignore:states on disk are in", "ignore:.*has no O_DIRECT"),
]

PAGE = os.sysconf("SC_PAGE_SIZE")


def noise(size: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


# Right bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_odd_sizes_come_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    sizes = (1, 513, 2048, 0, 14_412_001)
    disk = Disk(tmp_path, "run", 0, staging=16 << 20)
    regions = [disk.reserve("master", n * dtype.itemsize) for n in sizes]
    assert all(region.offset % 4096 == 0 for region in regions)
    assert disk.reserved == sum(-(-n * dtype.itemsize // 4096) * 4096 for n in sizes)
    disk.open()
    assert (disk._scratch.path / "master.bin").stat().st_size == disk.reserved
    values = [noise(n * dtype.itemsize, n).view(dtype) for n in sizes]
    for region, value in zip(regions, values, strict=True):
        disk.write_from(region, 0, value)
    for region, value in zip(regions, values, strict=True):
        found = torch.empty_like(value)
        disk.read_into(region, 0, found)
        assert torch.equal(found.view(torch.uint8), value.view(torch.uint8))
        if region.size < 10_000:
            read = disk.fetch(region, 0, region.size)
            assert torch.equal(read.wait(), value.view(torch.uint8))
            read.release()
    small = sum(-(-region.size // 4096) * 4096 for region in regions if region.size < 10_000)
    assert disk.moved == {"read": disk.reserved + small, "written": disk.reserved}
    assert 0 < disk.peak_staging <= 16 << 20
    disk.close()


def test_tensors_of_any_shape_and_a_part_of_a_region(tmp_path: Path) -> None:
    disk, regions = opened(tmp_path, {"master": 12_000})
    value = torch.arange(1000, dtype=torch.float32).view(10, 100)
    disk.write_from(regions["master"], 8192, value.view(-1)[:952])
    found = torch.zeros(14, 34, dtype=torch.float64)
    disk.read_into(regions["master"], 8192, found.view(-1)[:476])
    assert torch.equal(found.view(torch.float32).view(-1), value.view(-1)[:952])
    zeros = torch.ones(2048)
    disk.read_into(regions["master"], 0, zeros)
    assert not zeros.any(), "what was never written is zero"
    disk.close()


def test_a_tiled_step_in_bounded_staging(tmp_path: Path) -> None:
    """Reads a tile ahead and writes a tile behind, with room for four tiles; against the same in memory."""
    total, tile = 3_000_001, 100 << 10
    states = ("master", "exp_avg", "exp_avg_sq")
    staging = 4 * len(states) * tile
    disk, regions = opened(tmp_path, {state: total for state in states}, staging=staging, block=32 << 10, threads=3)
    expected = {state: noise(total, index) for index, state in enumerate(states)}
    for state in states:
        disk.write_from(regions[state], 0, expected[state])
    tiles = [(low, min(low + tile, total)) for low in range(0, total, tile)]
    for _ in range(3):
        ahead = {state: disk.fetch(regions[state], *tiles[0]) for state in states}
        for index, (low, _high) in enumerate(tiles):
            now = ahead
            if index + 1 < len(tiles):
                ahead = {state: disk.fetch(regions[state], *tiles[index + 1]) for state in states}
            for state in states:
                now[state].wait().add_(7)
                disk.put(regions[state], low, now[state])
    disk.drain()
    assert disk.peak_staging <= staging
    for state in states:
        found = torch.empty_like(expected[state])
        disk.read_into(regions[state], 0, found)
        assert torch.equal(found, expected[state] + 21)
    assert disk.peak_staging <= staging
    disk.close()


def test_what_overlaps_happens_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read right behind a write sees it, and a write right behind a read does not change what that read sees."""
    disk, regions = opened(tmp_path, {"master": 1 << 20}, block=16 << 10, threads=4, staging=8 << 20)
    region, rng, late = regions["master"], random.Random(0), random.Random(1)

    def slowly(real: Any) -> Any:
        def move(*call: Any) -> int:
            time.sleep(late.choice((0, 0.001)))
            return int(real(*call))

        return move

    monkeypatch.setattr(os, "preadv", slowly(os.preadv))
    monkeypatch.setattr(os, "pwritev", slowly(os.pwritev))
    truth = torch.zeros(1 << 20, dtype=torch.uint8)
    reads = []
    for value in range(1, 200):
        low = rng.randrange(0, 200) * 4096
        size = rng.randrange(1, 50) * 4096
        if rng.random() < 0.5:
            staged = disk.stage(size)
            staged.tensor.fill_(value)
            truth[low : low + size] = value
            disk.put(region, low, staged)
        else:
            reads.append((truth[low : low + size].clone(), disk.fetch(region, low, low + size)))
        if len(reads) == 20:
            for expected, read in reads:
                assert torch.equal(read.wait(), expected)
                read.release()
            reads = []
    disk.drain()
    disk.close()


# Staging


def test_staging_waits_for_writes_and_names_what_would_do(tmp_path: Path) -> None:
    disk, regions = opened(tmp_path, {"master": 64 << 10}, staging=16 << 10)
    with pytest.raises(DiskError, match=f"16385 bytes do not fit in staging of 16384 bytes; the least is {16384 + PAGE}"):
        disk.stage(16385)
    first = disk.fetch(regions["master"], 0, 12 << 10)
    with pytest.raises(DiskError, match=r"the caller keeps 12288 and writes none of them.*set staging to 20480"):
        disk.stage(8 << 10)
    disk.put(regions["master"], 0, first)
    disk.stage(8 << 10).release()
    assert disk.stage(16 << 10).tensor.data_ptr() % PAGE == 0, "buffers of other sizes make way"
    assert disk.peak_staging == 16 << 10
    disk.close()


def test_a_buffer_is_gone_when_it_was_given_away(tmp_path: Path) -> None:
    disk, regions = opened(tmp_path, {"master": 8192}, staging=3 * PAGE)
    read = disk.fetch(regions["master"], 0, 4096)
    write = disk.put(regions["master"], 4096, read)
    assert write.wait().numel() == 0 and write.done
    staged = disk.stage(10)
    assert staged.tensor.numel() == 10
    staged.release()
    staged.release()
    for use in (read.wait, lambda: staged.tensor, lambda: disk.put(regions["master"], 0, write)):
        with pytest.raises(EngineError, match=r"released|given back"):
            use()
    early = disk.fetch(regions["master"], 0, 4096)
    early.release()
    with pytest.raises(EngineError, match="released"):
        early.wait()
    disk.stage(3 * PAGE).release()
    disk.close()


def test_ranges_are_checked(tmp_path: Path) -> None:
    disk, regions = opened(tmp_path, {"master": 10_000})
    region = regions["master"]
    for low, high in ((1, 4096), (0, 10_001), (8192, 4096), (-4096, 0)):
        with pytest.raises(EngineError, match="no range in"):
            disk.fetch(region, low, high)
    with pytest.raises(EngineError, match=r"100 bytes at 0 of .* end at no multiple of 4096"):
        disk.put(region, 0, disk.stage(100))
    with pytest.raises(EngineError, match="was not reserved here"):
        disk.fetch(Region("moments", 0, 4096), 0, 4096)
    with pytest.raises(EngineError, match=r"reserved after open\(\)"):
        disk.reserve("master", 1)
    with pytest.raises(EngineError, match="not contiguous"):
        disk.read_into(region, 0, torch.empty(10, 10).t())
    disk.close()
    with pytest.raises(EngineError, match=r"after close\(\)"):
        disk.fetch(region, 0, 4096)
    with pytest.raises(EngineError, match=r"before open\(\)"):
        Disk(tmp_path, "other", 0).stage(1)


def test_settings_are_checked(tmp_path: Path) -> None:
    for options, said in (({"threads": 0}, "threads is 0"), ({"block": 5000}, "such as 8192"), ({"staging": 1}, "one page")):
        with pytest.raises(ConfigError, match=said):
            Disk(tmp_path, "run", 0, **options)  # type: ignore[arg-type]
    for name in ("", "../x", "a/b", ".hidden"):
        with pytest.raises(DiskError, match="part of a file's name"):
            Disk(tmp_path, name, 0)
        with pytest.raises(DiskError, match="part of a file's name"):
            Disk(tmp_path, "run", 0).reserve(name, 1)


# Failures


def test_a_file_that_somebody_cut(tmp_path: Path) -> None:
    disk, regions = opened(tmp_path, {"master": 1 << 20, "exp_avg": 1 << 20})
    path = disk._scratch.path / "master.bin"
    os.truncate(path, (1 << 19) + 100)
    said = f"{path} is shorter than it should be: 524388 bytes instead of 1048576, found when {{}} 1048576 bytes at offset 0"
    with pytest.raises(DiskError, match=said.format("reading")):
        disk.read_into(regions["master"], 0, torch.empty(1 << 18))
    with pytest.raises(DiskError, match=said.format("writing")):
        disk.write_from(regions["master"], 0, torch.empty(1 << 18))
    disk.write_from(regions["exp_avg"], 0, torch.ones(1 << 18))
    disk.close()


def test_a_file_cut_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, regions = opened(tmp_path, {"master": 1 << 20}, threads=1)
    real = os.preadv

    def preadv(number: int, buffers: list[memoryview], offset: int) -> int:
        os.truncate(disk._scratch.path / "master.bin", 5000)
        return real(number, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(DiskError, match="shorter than it should be: 5000 bytes instead of 1048576"):
        disk.fetch(regions["master"], 0, 1 << 20).wait()
    disk.close()


def test_short_reads_and_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, regions = opened(tmp_path, {"master": 1 << 20}, block=64 << 10)
    read, write, calls = os.preadv, os.pwritev, []

    def short(real: Any) -> Any:
        def move(number: int, buffers: list[memoryview], offset: int) -> int:
            calls.append(offset)
            done = int(real(number, [buffers[0][: 5 * 4096]], offset))
            return done if done == len(buffers[0]) else done - 10  # not even whole blocks

        return move

    monkeypatch.setattr(os, "preadv", short(read))
    monkeypatch.setattr(os, "pwritev", short(write))
    value, found = noise(1 << 20, 1), torch.zeros(1 << 20, dtype=torch.uint8)
    disk.write_from(regions["master"], 0, value)
    disk.read_into(regions["master"], 0, found)
    assert torch.equal(found, value)
    assert len(calls) > 2 * 16
    disk.close()


def test_a_failed_write_is_told_once_and_spoils_nothing_else(tmp_path: Path) -> None:
    """The system really refuses here: the process may not write beyond the first MiB of a file any more."""
    disk, regions = opened(tmp_path, {"master": 2 << 20, "exp_avg": 1 << 20}, staging=1 << 20, block=256 << 10)
    master, half = regions["master"], 1 << 20
    with largest_file(half):
        disk.write_from(master, 0, torch.ones(half // 4))
        disk.write_from(regions["exp_avg"], 0, torch.ones(half // 4))
        for _ in range(3):  # three times the whole of staging: failed writes give it back
            disk.put(master, half, disk.stage(half))
        said = rf"writing 262144 bytes at offset \d+ of .*master.bin failed: EFBIG \({os.strerror(errno.EFBIG)}\)"
        with pytest.raises(DiskError, match=said) as caught:
            disk.drain()
        assert caught.value.errno == errno.EFBIG and isinstance(caught.value.__cause__, OSError)
        disk.drain()
        write = disk.put(master, half, disk.stage(half))
        for _ in range(2):
            with pytest.raises(DiskError, match="EFBIG"):
                write.wait()
        disk.drain()
        with pytest.raises(DiskError, match="EFBIG"):
            disk.fetch(master, half, 2 * half).wait()  # old bytes would be wrong numbers
        found = torch.zeros(half // 4)
        disk.read_into(master, 0, found)
        assert found.eq(1).all()
    disk.write_from(master, half, torch.full((half // 4,), 2.0))
    disk.read_into(master, half, found)
    assert found.eq(2).all()
    disk.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_errors_of_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    disk, regions = opened(tmp_path, {"master": 8192})

    def broken(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", broken)
        read = disk.fetch(regions["master"], 0, 8192)
        with pytest.raises(DiskError, match=rf"reading 8192 bytes at offset 0 of .*: {errno.errorcode[number]} \("):
            read.wait()
    disk.fetch(regions["master"], 0, 8192).wait()
    disk.close()


def test_the_public_names() -> None:
    assert disk_module.__all__ == ["ALIGN", "Disk", "Region", "Staged", "Transfer"]
