"""The disk tier beside the disk itself: a step's reads and writes through ``onecopy.tiers.disk`` and done plainly.

    python benchmarks/disk.py --path /local/nvme --params 100_000_000

**raw** writes and then reads the bytes of three fp32 states in order with ``os.pwritev`` and ``os.preadv``, O_DIRECT,
from as many threads and in as large blocks as turn out fastest in a trial of each. **ours** runs the input and output of
an optimizer step on them, 24 bytes per parameter: for each tile it waits for master, exp_avg and exp_avg_sq, whose reads
were begun a tile before, and begins to write the three back, with no computing between. **mixed** does by plain calls
what ours does, in the same order and with the threads and blocks that serve it best: it is what the disk gives when reads
and writes meet.

The three take turns, and every number is a median over the repeats. ``fio``, where it is installed, says what it gets with
raw's block size and number of threads.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from onecopy.report.rates import Raw, Request
from onecopy.tiers.disk import ALIGN, Disk, Region
from onecopy.tiers.scratch import Filesystem, round_up

STATES = ("master", "exp_avg", "exp_avg_sq")
BLOCKS = (256 << 10, 1 << 20, 4 << 20)
THREADS = (1, 2, 4)


@dataclass
class Result:
    """Rates in bytes per second, medians. ``raw``: bytes written and read by the time both took. ``ratio``: ours / raw."""

    filesystem: str
    params: int
    tile: int
    staging: int
    peak_staging: int
    threads: int
    block: int
    raw_threads: int
    raw_block: int
    raw_write: float
    raw_read: float
    raw: float
    mixed_threads: int
    mixed_block: int
    mixed: float
    ours: float
    ratio: float
    ratios: list[float]
    processor: float
    fio: dict[str, float]


def mix(size: int, tile: int, block: int) -> Iterator[Request]:
    """The requests of a step over a file of ``size`` bytes: a tile's reads, then the writes of the tile before it."""
    for low in range(0, size + tile, tile):
        for move, start in ((os.preadv, low), (os.pwritev, low - tile)):
            end = min(start + tile, size) if start >= 0 else start
            yield from ((move, offset, min(block, end - offset)) for offset in range(start, end, block))


def best(raw: Raw, tile: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(threads, block) with the highest rate in order, and in the mix of a step."""
    size = min(raw.size, 512 << 20)
    plain: dict[tuple[int, int], float] = {}
    mixed: dict[tuple[int, int], float] = {}
    for _ in range(2):
        for threads, block in itertools.product(THREADS, BLOCKS):
            taken = sum(raw.run(raw.order(move, block, size), threads, block) for move in (os.pwritev, os.preadv))
            plain[threads, block] = min(taken, plain.get((threads, block), taken))
            taken = raw.run(itertools.islice(mix(raw.size, tile, block), 2 * size // block), threads, block)
            mixed[threads, block] = min(taken, mixed.get((threads, block), taken))
    return min(plain, key=lambda key: plain[key]), min(mixed, key=lambda key: mixed[key])


class Step:
    """The input and output of an optimizer step over ``params`` parameters in tiles of ``tile`` parameters."""

    def __init__(self, disk: Disk, params: int, tile: int) -> None:
        self.disk, self.params, self.tile = disk, params, tile
        self.regions = [disk.reserve(state, 4 * params) for state in STATES]
        disk.open()
        self.run()  # the first writes give the files their blocks

    def run(self) -> float:
        """Seconds of one step, until its last byte is written."""
        size = 4 * self.params

        def begin(low: int) -> list[tuple[Region, int, object]]:
            high = min(low + 4 * self.tile, size)
            return [(region, low, self.disk.fetch(region, low, high)) for region in self.regions]

        began = time.perf_counter()
        ahead = begin(0)
        for low in range(4 * self.tile, size + 4 * self.tile, 4 * self.tile):
            now, ahead = ahead, begin(low) if low < size else []
            for region, at, read in now:
                read.wait()
                self.disk.put(region, at, read)
        self.disk.drain()
        return time.perf_counter() - began


def fio(folder: Path, size: int, threads: int, block: int) -> dict[str, float]:
    """Bytes per second by ``fio``, of writing and reading; empty where it is not installed."""
    program = shutil.which("fio")
    found: dict[str, float] = {}
    for kind in ("write", "read") if program else ():
        command = [
            str(program), "--name=raw", f"--filename={folder / 'fio'}", f"--size={size}", f"--rw={kind}", f"--bs={block}",
            "--direct=1", "--ioengine=io_uring", f"--iodepth={threads}", "--output-format=json",
        ]  # fmt: skip
        answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        found[kind] = float(answer["jobs"][0][kind]["bw_bytes"])
    return found


def measure(args: argparse.Namespace) -> Result:
    size = round_up(4 * args.params)
    tile = args.tile or max(ALIGN, min(args.params, args.staging // (3 * 12) // ALIGN * ALIGN))
    taken: dict[str, list[float]] = {"write": [], "read": [], "mixed": [], "ours": [], "processor": []}
    with tempfile.TemporaryDirectory(prefix="disk-", dir=args.path) as name:
        folder = Path(name)
        raw = Raw(folder, 3 * size)
        (threads, block), (mixed_threads, mixed_block) = best(raw, 12 * tile)
        disk = Disk(folder, "benchmark", 0, staging=args.staging, threads=args.threads, block=args.block)
        step = Step(disk, args.params, tile)
        for _ in range(args.repeats):
            taken["write"].append(raw.run(raw.order(os.pwritev, block), threads, block))
            taken["read"].append(raw.run(raw.order(os.preadv, block), threads, block))
            before = time.process_time()
            taken["ours"].append(step.run())
            taken["processor"].append(time.process_time() - before)
            taken["mixed"].append(raw.run(mix(raw.size, 12 * tile, mixed_block), mixed_threads, mixed_block))
        peak = disk.peak_staging
        disk.close()
        raw.close()
        by_fio = fio(folder, 3 * size, threads, block)
    middle = {what: statistics.median(times) for what, times in taken.items()}
    ratios = [(write + read) / ours for write, read, ours in zip(taken["write"], taken["read"], taken["ours"], strict=True)]
    return Result(
        filesystem=str(Filesystem(Path(args.path))),
        params=args.params,
        tile=tile,
        staging=args.staging,
        peak_staging=peak,
        threads=args.threads,
        block=args.block,
        raw_threads=threads,
        raw_block=block,
        raw_write=3 * size / middle["write"],
        raw_read=3 * size / middle["read"],
        raw=6 * size / (middle["write"] + middle["read"]),
        mixed_threads=mixed_threads,
        mixed_block=mixed_block,
        mixed=6 * size / middle["mixed"],
        ours=6 * size / middle["ours"],
        ratio=statistics.median(ratios),
        ratios=ratios,
        processor=middle["processor"],
        fio=by_fio,
    )


def report(found: Result) -> str:
    lines = [
        f"{found.params:,} parameters, 24 B each per step, on {found.filesystem}; GB/s, medians",
        f"  raw    {found.raw / 1e9:6.2f}   written {found.raw_write / 1e9:.2f}, read {found.raw_read / 1e9:.2f} "
        f"({found.raw_threads} threads, blocks of {found.raw_block >> 10} KiB)",
        f"  mixed  {found.mixed / 1e9:6.2f}   plain calls in the order of a step "
        f"({found.mixed_threads} threads, blocks of {found.mixed_block >> 10} KiB)",
        f"  ours   {found.ours / 1e9:6.2f}   {found.threads} threads, blocks of {found.block >> 10} KiB, "
        f"tiles of {found.tile:,}, staging {found.peak_staging / 1e6:.0f} MB, {found.processor:.2f} s of processor",
        f"  ours / raw {found.ratio:.2f} ({min(found.ratios):.2f} to {max(found.ratios):.2f})",
    ]
    lines += [f"  fio {kind} {speed / 1e9:.2f}" for kind, speed in found.fio.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=tempfile.gettempdir(), help="a folder on the disk to measure")
    parser.add_argument("--params", type=int, default=100_000_000, help="takes 24 bytes of disk for each")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tile", type=int, help="parameters in a tile; by default what staging holds three times")
    parser.add_argument("--staging", type=int, default=256_000_000, help="bytes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--block", type=int, default=1 << 20, help="bytes of a request")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measure(args)
    print(json.dumps(asdict(found)) if args.json else report(found))


if __name__ == "__main__":
    main()
