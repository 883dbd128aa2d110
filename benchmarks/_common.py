"""What the benchmarks share: the model and its text, a rank's process group, and the probes of memory."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onecopy.gpt import GPT, config
from onecopy.text import Rows, open_corpora

PAGE = os.sysconf("SC_PAGE_SIZE")
CONTEXT = 256


def make_model(name: str, context: int = CONTEXT) -> nn.Module:
    """The GPT called ``name`` in float32 on the CPU, the same weights in every process."""
    torch.manual_seed(0)
    return GPT(config(name, context=context))


def make_batches(rank: int, world: int, rows: int, context: int = CONTEXT) -> Callable[[int], tuple[Tensor, Tensor]]:
    """``batch(step)`` -> (inputs, targets), each (rows, context) int64: the same text in every mode."""
    corpus, _ = open_corpora((), context)
    source = Rows(corpus, context)
    return lambda step: source.micro_batch(step * world * rows, 0, rank, world, rows)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def join(rank: int, world: int, port: int) -> None:
    """Make this process rank ``rank`` of ``world`` gloo ranks on this machine, with one thread of compute."""
    torch.set_num_threads(1)
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in ranks.items()}, MASTER_ADDR="127.0.0.1")
    dist.init_process_group("gloo")


def warm_kernels() -> None:
    """Train a tiny GPT once, so that libraries loaded on first use are not counted as a mode's memory."""
    model = GPT(config("tiny"))
    x = torch.zeros(1, 8, dtype=torch.int64)
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)(x, x).backward()
        torch.optim.AdamW(model.parameters(), fused=True).step()
        model.zero_grad()
    if dist.is_initialized():
        dist.all_reduce(torch.zeros(1))


def trim() -> None:
    """Give memory that is free back to the system, so that what stays resident is in use."""
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def reset_peak() -> None:
    """Start the system's record of this process's peak memory anew (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Most bytes of this process in memory since :func:`reset_peak` (the ``VmHWM`` of Linux)."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    if found is None:
        raise RuntimeError("this system keeps no VmHWM; the benchmark measures memory on Linux only")
    return int(found[1]) * 1024


class Others:
    """Processor time that other programs took since the object was made, in seconds (Linux). ``own``: the process ids of
    the benchmark itself. Counted in ticks of the system, usually 0.01 s."""

    def __init__(self, *own: int) -> None:
        self._own = own
        self._tick = os.sysconf("SC_CLK_TCK")
        self._began = self._now()

    def _now(self) -> float:
        user, nice, system, _idle, _waiting, irq, soft, steal, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
        stats = (Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split() for process in self._own)
        own = sum(int(stat[11]) + int(stat[12]) for stat in stats)
        return (user + nice + system + irq + soft + steal - own) / self._tick

    def taken(self) -> float:
        return self._now() - self._began


class AllocatorPeak:
    """Bytes handed out by torch's CPU allocator, read from the profiler's memory events.

    Start it before the model exists. :meth:`stop` returns the most bytes that were allocated at once after the last
    :meth:`mark`; memory that libraries take behind the allocator's back (gloo's own buffers, Python) is not in it.
    """

    def __init__(self) -> None:
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._profiler.__enter__()

    def mark(self) -> None:
        with torch.profiler.record_function("allocator_peak_mark"):
            pass

    def stop(self) -> int:
        import json

        self._profiler.__exit__(None, None, None)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        marks = [event["ts"] for event in events if event.get("name") == "allocator_peak_mark"]
        since = max(marks, default=0.0)
        totals = [(e["ts"], int(e["args"]["Total Allocated"])) for e in events if e.get("name") == "[memory]"]
        before = max(((ts, total) for ts, total in totals if ts < since), default=(0.0, 0))[1]
        return max((total for ts, total in totals if ts >= since), default=before)
