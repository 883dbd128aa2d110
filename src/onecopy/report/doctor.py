"""``onecopy doctor``: what this machine's memory and disk do, and what an offloaded optimizer step costs with that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from onecopy.report.measure import human_count
from onecopy.report.rates import DISK_BYTES, STEP_BYTES, DiskRate, copy_rate, disk_rate

__all__ = ["HOST_FRACTION", "Cost", "disk_step", "examine", "host_step", "notes", "table"]

# Of the rate at which memory is copied a step on the host reaches this share: see ``benchmarks/step.py``.
HOST_FRACTION = 0.9
# Bytes copied: more than caches hold. Bytes written and read on disk.
COPIED, WRITTEN = 512 << 20, 512 << 20


@dataclass(frozen=True)
class Cost:
    """One optimizer step: ``seconds``, and ``mparams`` million parameters per second."""

    seconds: float
    mparams: float


def host_step(params: int, rate: float) -> Cost:
    """A step whose states are in memory that is copied at ``rate`` bytes read and written per second."""
    return _cost(params, params * STEP_BYTES / (rate * HOST_FRACTION))


def disk_step(params: int, written: float, read: float) -> Cost:
    """A step whose fp32 states are on a disk that does ``written`` and ``read`` bytes per second."""
    return _cost(params, params * DISK_BYTES / written + params * DISK_BYTES / read)


def _cost(params: int, seconds: float) -> Cost:
    return Cost(seconds, params / seconds / 1e6)


def examine(params: int, memory: bool, disk: Path | None) -> dict[str, Any]:
    """Measure; rates are in bytes per second.

    ``memory``: by number of threads (one, and all of torch's), bytes read and written. ``disk``: a :class:`DiskRate`.
    ``step``: by tier, the :class:`Cost` of a step of ``params`` parameters, all of them on this machine.
    """
    found: dict[str, Any] = {"params": params, "memory": None, "disk": None, "step": {}}
    # First, since a folder may be wrong.
    if disk is not None:
        rate: DiskRate = disk_rate(disk, WRITTEN)
        found["disk"] = {"path": str(disk), **asdict(rate)}
        found["step"]["disk"] = asdict(disk_step(params, rate.written, rate.read))
    if memory:
        rates = {threads: copy_rate(COPIED, threads) for threads in sorted({1, torch.get_num_threads()})}
        found["memory"] = {str(threads): rate for threads, rate in rates.items()}
        found["step"]["host"] = asdict(host_step(params, max(rates.values())))
    return found


def table(found: dict[str, Any]) -> Table:
    """What :func:`examine` found, for people."""
    shown = Table(title="This machine", title_justify="left")
    shown.add_column("")
    shown.add_column("measured", justify="right")
    for name, rate in _rates(found):
        shown.add_row(name, f"{rate / 1e9:.2f} GB/s")
    shown.add_section()
    for tier, cost in found["step"].items():
        size = human_count(found["params"]).replace("G", "B")  # people count parameters in billions
        shown.add_row(f"step of {size} parameters, states on {tier}", f"{cost['seconds']:.3g} s")
        shown.add_row("", f"{cost['mparams']:.0f} Mparam/s")
    return shown


def _rates(found: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for threads, rate in (found["memory"] or {}).items():
        yield f"memory copied, {threads} thread{'s' if threads != '1' else ''} (read + written)", rate
    if disk := found["disk"]:
        how = "O_DIRECT" if disk["direct"] else "through the page cache"
        yield f"{disk['path']} ({disk['filesystem']}), {how}: written", disk["written"]
        yield f"{disk['path']}: read", disk["read"]


def notes(found: dict[str, Any]) -> Iterator[str]:
    """How the costs come about, and what to mind."""
    if "host" in found["step"]:
        yield f"host: {STEP_BYTES} B per parameter at {HOST_FRACTION:g} of the copy rate (benchmarks/step.py)"
    if disk := found["disk"]:
        yield f"disk: {DISK_BYTES} B written and {DISK_BYTES} B read per parameter (benchmarks/disk.py)"
        if disk["doubt"]:
            yield f"{disk['path']} is on {disk['doubt']}"
