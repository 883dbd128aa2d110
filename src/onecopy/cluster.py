"""Machines to plan for: kinds of accelerators with their memory and speeds, nodes of them, and this machine.

Sizes are bytes and rates bytes or floating-point operations per second, all in decimal units as data sheets print them:
"80 GB" is 80e9 bytes, less than the 80 x 2**30 that such a card has. What lies between is left for the driver's context,
libraries and fragmentation, which no plan counts. Links are rates of one direction.
"""

from __future__ import annotations

import difflib
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import psutil  # type: ignore[import-untyped]
import torch

from onecopy.errors import ConfigError

__all__ = ["GPUS", "Cluster", "Gpu", "gpu", "here", "quantity"]

_GB = 1e9
_TERA = 1e12


@dataclass(frozen=True)
class Gpu:
    """One kind of accelerator.

    ``memory``: bytes. ``bandwidth``: of that memory. ``low``, ``single``: peak dense FLOP/s of bfloat16 or float16 matrices
    with float32 sums, and of float32; ``bfloat16``: where that differs from ``low``. ``link``: to others in its node.
    ``pcie``: to host memory. ``network``: what a node of these has to other nodes, unless the cluster says so. ``shared``:
    its memory is the host's, and all ranks of a node take from it.
    """

    name: str
    memory: int
    bandwidth: float
    low: float
    single: float
    link: float
    pcie: float
    network: float
    bfloat16: float | None = None
    shared: bool = False

    def flops(self, dtype: str | None) -> float:
        """Peak dense FLOP/s with parameters in ``dtype``, the name of a torch dtype (None: float32)."""
        if dtype == "bfloat16":
            return self.bfloat16 if self.bfloat16 is not None else self.low
        return self.low if dtype == "float16" else self.single


def _row(name: str, memory: float, bandwidth: float, flops: tuple[float, ...], links: tuple[float, float, float]) -> Gpu:
    """GB, GB/s, TFLOP/s (low, single and, where it differs, bfloat16) and GB/s (link, PCIe, network)."""
    low, single, *other = (rate * _TERA for rate in flops)
    link, pcie, network = (rate * _GB for rate in links)
    return Gpu(name, int(memory * _GB), bandwidth * _GB, low, single, link, pcie, network, other[0] if other else None)


# Dense rates: a data sheet that prints them with sparsity prints twice as much. NVLink figures are half of the printed sum
# of both directions; x16 PCIe is 16, 32, 64 GB/s for generations 3, 4, 5; cards without NVLink talk across PCIe. The network
# is that of the usual machine: DGX A100 8 x 200 Gb/s, DGX H100 and H200 8 x 400 Gb/s, DGX-1 4 x 100 Gb/s (their data
# sheets), 100 Gb/s for other cards of data centres, 10 Gb/s for desktops; a guess, to be replaced by what is there.
GPUS: Mapping[str, Gpu] = MappingProxyType(
    {
        row.name: row
        for row in (
            # NVIDIA A100 Tensor Core GPU data sheet, SXM4: 312 TFLOPS bf16, 19.5 fp32, 1,555 and 2,039 GB/s, NVLink 600.
            _row("a100-40g", 40, 1555, (312, 19.5), (300, 32, 200)),
            _row("a100-80g", 80, 2039, (312, 19.5), (300, 32, 200)),
            # NVIDIA H100 data sheet, SXM5: 1,979 TFLOPS bf16 with sparsity, 67 fp32, 3.35 TB/s, NVLink 900, PCIe 5.
            _row("h100-80g", 80, 3350, (989.5, 67), (450, 64, 400)),
            # NVIDIA H200 data sheet, SXM: as H100, 141 GB, 4.8 TB/s.
            _row("h200", 141, 4800, (989.5, 67), (450, 64, 400)),
            # NVIDIA L40S data sheet: 48 GB, 864 GB/s, 362.05 TFLOPS bf16 dense, 91.6 fp32, PCIe 4, no NVLink.
            _row("l40s", 48, 864, (362.05, 91.6), (32, 32, 12.5)),
            # NVIDIA A10G data sheet: 24 GB, 600 GB/s, 70 TFLOPS bf16 dense, 35 fp32, PCIe 4.
            _row("a10g", 24, 600, (70, 35), (32, 32, 12.5)),
            # NVIDIA V100 data sheet, SXM2: 32 GB, 900 GB/s, 125 TFLOPS fp16, 15.7 fp32, NVLink 300, PCIe 3; no bf16 units.
            _row("v100-32g", 32, 900, (125, 15.7, 15.7), (150, 16, 50)),
            # NVIDIA Ada architecture paper, RTX 4090: 24 GB, 1,008 GB/s, 165.2 TFLOPS with fp32 sums, 82.6 fp32, PCIe 4.
            _row("4090", 24, 1008, (165.2, 82.6), (32, 32, 1.25)),
            # NVIDIA Ampere GA102 architecture paper, RTX 3090: 24 GB, 936 GB/s, 71 TFLOPS with fp32 sums, 35.6 fp32, PCIe 4.
            _row("3090", 24, 936, (71, 35.6), (32, 32, 1.25)),
            # NVIDIA T4 data sheet: 16 GB, 320 GB/s, 65 TFLOPS fp16, 8.1 fp32, PCIe 3; no bf16 units.
            _row("t4", 16, 320, (65, 8.1, 8.1), (16, 16, 12.5)),
        )
    }
)
_DEFAULT = "a100-80g"
# A rank on the CPU: no data sheet, but two cores of a server of today: 0.1 TFLOP/s, 10 GB/s of memory.
_CPU_RATES = {"bandwidth": 10e9, "low": 0.1e12, "single": 0.1e12, "link": 5e9, "pcie": 5e9, "network": 1.25e9}
_CPU_MEMORY = 16 * 2**30


@dataclass(frozen=True)
class Cluster:
    """``nodes`` machines with ``gpus`` accelerators each, one rank on every accelerator.

    ``host_memory``, ``nvme``: bytes of a node (None: not said, so nothing is checked against it). ``network``: bytes per
    second that a node sends to others (None: the usual machine's). ``host_bandwidth``: of a node's memory in an
    optimizer step; ZeRO-Offload (Ren et al. 2021, table 4) works out at 90 to 127 GB/s on two sockets.
    ``nvme_bandwidth``: of a node's disks, either way.
    """

    gpu: Gpu = field(default_factory=lambda: GPUS[_DEFAULT])
    gpus: int = 1
    nodes: int = 1
    host_memory: int | None = None
    nvme: int | None = None
    network: float | None = None
    host_bandwidth: float = 100e9
    nvme_bandwidth: float = 3e9

    def __post_init__(self) -> None:
        for what in ("gpus", "nodes"):
            if getattr(self, what) < 1:
                raise ConfigError(f"a cluster with {what} {getattr(self, what)} has no ranks; it is a whole number from 1")
        for what in ("host_memory", "nvme", "network", "host_bandwidth", "nvme_bandwidth"):
            value = getattr(self, what)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{what} of a cluster is {value}; it is a number above 0")

    @property
    def ranks(self) -> int:
        """Ranks of the whole cluster."""
        return self.gpus * self.nodes

    @property
    def node_network(self) -> float:
        """Bytes per second from a node to the others."""
        return self.gpu.network if self.network is None else self.network

    def node_of(self, rank: int) -> int:
        """The node that ``rank`` is on; ranks are numbered node by node."""
        return rank // self.gpus


def gpu(name: str) -> Gpu:
    """The accelerator called ``name``: one of :data:`GPUS`, ``"cpu"``, or a size such as ``"24GB"``, which is a card of that
    memory with the speeds of a 3090 (they matter to times, not to bytes). Raises :class:`ConfigError` with the nearest."""
    key = name.strip().lower()
    if key in GPUS:
        return GPUS[key]
    if key == "cpu":
        return Gpu("cpu", _CPU_MEMORY, **_CPU_RATES, shared=True)
    if re.fullmatch(r"[\d.]+ *[gmt](i?b)?", key):  # 3090ti is a card, not 3090 TiB
        return replace(GPUS["3090"], name=key, memory=quantity(key, "--gpu", size=True))
    known = [*GPUS, "cpu"]
    near = [other for other in known if other.split("-")[0] == key]
    if len(near) == 1:
        return GPUS[near[0]]
    near = near or difflib.get_close_matches(key, [*{name.split("-")[0]: "" for name in known}, *known], 1, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ConfigError(f"GPU {name!r} is not known; {hint}Known are {', '.join(known)} and sizes of memory such as 24GB")


_UNITS: dict[str, float] = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_QUANTITY = re.compile(r"([+-]?[\d_,]*\.?\d+\.?(?:E[+-]?\d+)?) *([KMGT]I|[KMGTB])?(B?)")
_BINARY = {"KI": 2.0**10, "MI": 2.0**20, "GI": 2.0**30, "TI": 2.0**40}


def quantity(text: str, what: str, *, size: bool = False) -> int:
    """The whole number that ``text`` says: of a count, ``"7.5e9"``, ``"7.5B"`` and ``"7.5G"`` are 7.5e9; of a ``size``,
    ``"24GB"`` is 24e9 bytes, ``"24GiB"`` and ``"24G"`` are 24 x 2**30. Raises :class:`ConfigError` naming ``what``."""
    match = _QUANTITY.fullmatch(text.strip().upper())
    if match is None:
        form = "a size such as 24GB, 24GiB or 512M" if size else "a number such as 7.5e9, 7B or 125M"
        raise ConfigError(f"{what} {text!r} is not {form}")
    unit = match[2] or ""
    if size and unit == "B":
        unit = ""
    elif size and unit and not match[3] and not unit.endswith("I"):
        unit += "I"
    value = float(match[1].replace(",", "").replace("_", "")) * {**_UNITS, **_BINARY}[unit]
    if not math.isfinite(value) or value < 1:
        raise ConfigError(f"{what} {text}: it is 1 or more")
    return round(value)


def here(nvme: str | Path | None = None) -> Cluster:
    """This machine: its accelerators, memory and, with a folder ``nvme``, the free room of that disk. Speeds are those of the
    table where the accelerator is in it, of the nearest in memory where not, and of the CPU where there is none.

    An accelerator's memory counts as many GB as it has GiB, as in the table, where cards are called by them: the other 7 %
    are for what no plan counts: the driver's context, buffers of NCCL, kernels' workspace and gaps of the allocator."""
    host = int(psutil.virtual_memory().total)
    disk = shutil.disk_usage(nvme).free if nvme is not None else None
    if not torch.accelerator.is_available():
        ranks = 2
        found = replace(gpu("cpu"), memory=host // ranks)
        return Cluster(found, ranks, host_memory=host, nvme=disk, host_bandwidth=found.bandwidth)
    device = torch.get_device_module(torch.accelerator.current_accelerator()).get_device_properties(0)
    counted = device.total_memory * 10**9 // 2**30
    return Cluster(_recognise(device.name, counted), torch.accelerator.device_count(), 1, host, disk)


def _recognise(name: str, memory: int) -> Gpu:
    """The row of the table whose name is in ``name``, as the driver gives it, and whose size is nearest to ``memory``."""
    words = name.lower().replace("-", " ").split()
    rows = [row for row in GPUS.values() if row.name.split("-")[0] in words] or list(GPUS.values())
    nearest = min(rows, key=lambda row: abs(row.memory - memory))
    return replace(nearest, name=name, memory=memory)
