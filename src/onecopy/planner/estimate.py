"""How long a step takes, by rates that are stated: an estimate with its assumptions, never a measurement.

    compute   6 N T floating-point operations for N parameters and T tokens, 8 N T where blocks are computed again
              (Kaplan et al. 2020, section 2.1), and 12 L h s T, or 16, for attention where the shape is known
              (Narayanan et al. 2021, appendix), at ``utilisation`` of the dense peak
    links     bytes a rank sends / rate of the slowest link on its ring
    step      bytes that the optimizer reads and writes / rate of the memory they rest in, or of PCIe, or of the disk
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from onecopy.cluster import Cluster
from onecopy.plan.layout import Mesh, Tier
from onecopy.planner.subject import Shape
from onecopy.schedule.lower import Schedule
from onecopy.schedule.ops import Group
from onecopy.schedule.predict import each_op, link
from onecopy.schedule.rest import moments, resident

__all__ = ["Work", "crossing", "estimate", "split"]

# Collectives that a step waits for: nothing is left to compute under them.
_WAITED = ("spread", "vote")


@dataclass(frozen=True)
class Work:
    """What a rank computes: micro-batches of ``batch`` sequences of ``seq`` tokens (None: not known, no time is estimated).

    ``utilisation``: of the peak; 0.4 is what large runs report (PaLM 0.46, MT-NLG 0.3; Chowdhery et al. 2022, table 3).
    """

    batch: int = 1
    seq: int | None = None
    recompute: bool = False
    attention: str = "flash"
    utilisation: float = 0.4


@lru_cache
def crossing(mesh: Mesh, group: Group, gpus: int) -> Fraction:
    """The share of the hops of a ring around ``group`` that go from a node of ``gpus`` ranks to another."""
    hops = 0
    for rank in range(mesh.world):
        inside, outside = rank % mesh.within, rank // mesh.within
        if group == "within":
            after = outside * mesh.within + (inside + 1) % mesh.within
        elif group == "across":
            after = (outside + 1) % mesh.across * mesh.within + inside
        else:
            after = (rank + 1) % mesh.world
        hops += rank // gpus != after // gpus
    return Fraction(hops, mesh.world)


def split(mesh: Mesh, group: Group, sent: int, cluster: Cluster) -> tuple[int, int]:
    """Of ``sent`` bytes, those inside a node and those between nodes: an average over the ranks, as in a ring only the last
    rank of each node sends to another."""
    between = -(-sent * crossing(mesh, group, cluster.gpus) // 1)
    return sent - int(between), int(between)


def _seconds(mesh: Mesh, group: Group, sent: int, cluster: Cluster) -> float:
    """A ring is as fast as its slowest link; the ranks of a node share its network."""
    inside, between = split(mesh, group, sent, cluster)
    return max(sent / cluster.gpu.link if inside else 0.0, between * cluster.gpus / cluster.node_network)


def flops(parameters: int, shape: Shape | None, work: Work) -> int:
    """Floating-point operations of forward and backward of one micro-batch."""
    assert work.seq is not None
    times = 8 if work.recompute else 6
    attention = 2 * times * shape.layers * shape.hidden * work.seq if shape is not None else 0
    return (times * parameters + attention) * work.batch * work.seq


def estimate(schedule: Schedule, cluster: Cluster, work: Work, shape: Shape | None) -> dict[str, Any]:
    """Seconds of one optimizer step: ``compute``, ``communication`` and the part of it that is ``exposed``, ``offload`` of
    which ``offload_exposed``, ``optimizer``, ``step`` (the sum of what is waited for) and ``tokens_per_second``; and the
    ``assumptions`` behind them."""
    plan, mesh = schedule.plan, schedule.facts.mesh
    if work.seq is None:
        return {"assumptions": ["no time is estimated without a sequence length (--seq)"]}
    count = sum(param.numel for unit in schedule.facts.units for param in unit.params)
    peak = cluster.gpu.flops(plan.precision.dtype)
    compute = plan.batch.accumulation * flops(count, shape, work) / (peak * work.utilisation)
    hidden = waited = 0.0
    for op, times in each_op(schedule):
        if op.group != "none" and times:
            seconds = times * _seconds(mesh, op.group, op.wire_bytes, cluster)
            waited, hidden = (waited + seconds, hidden) if op.kind in _WAITED else (waited, hidden + seconds)
    units = max(len(schedule.facts.units), 1)
    # The first gather and the last reduce have nothing beside them.
    exposed = waited + max(hidden / units, hidden - compute) if hidden else waited
    streamed, optimizer = _off_device(schedule, cluster)
    left = max(streamed - compute, 0.0)
    step = compute + exposed + left + optimizer
    tokens = work.batch * work.seq * plan.batch.accumulation * mesh.world
    return {
        "compute": compute,
        "communication": hidden + waited,
        "exposed": exposed,
        "offload": streamed,
        "offload_exposed": left,
        "optimizer": optimizer,
        "step": step,
        "tokens_per_second": tokens / step,
        "assumptions": _assumptions(cluster, work, shape, peak, count),
    }


def _off_device(schedule: Schedule, cluster: Cluster) -> tuple[float, float]:
    """Seconds that forward and backward stream between tiers, beside the computation; and those of the optimizer step: its
    memory, PCIe and the disk work at the same time, so the slowest of them."""
    host, disk = cluster.host_bandwidth / cluster.gpus, cluster.nvme_bandwidth / cluster.gpus
    rates = {"to_device": cluster.gpu.pcie, "to_host": cluster.gpu.pcie, "disk_read": disk, "disk_write": disk}
    phases = {"pass": dict.fromkeys(rates, 0.0), "step": dict.fromkeys(rates, 0.0)}
    for (_, event), ops in schedule.ops.items():
        phase = phases["step" if event == "step" else "pass"]
        micro = schedule.plan.batch.accumulation
        times = {"grads_ready": micro - 1, "boundary": 1, "step": 1, "grads_arrive": 0, "post_forward": 0}.get(event, micro)
        for op in ops:
            if op.kind in ("fetch", "evict"):
                phase[link(op)] += times * op.bytes / rates[link(op)]
    memory = {"device": cluster.gpu.bandwidth, "host": host, "disk": host}
    stepped = {"device": 0.0, "host": 0.0, "disk": 0.0}
    for buffer in schedule.buffers:
        if not buffer.trainable:
            continue
        tier: Tier = buffer.row.optimizer.tier
        stepped[tier] += _stepped_bytes(schedule, buffer) / memory[tier]
        if buffer.row.moment.tier == "disk":
            size = moments(schedule, buffer, 0)
            phases["step"]["disk_read"] += size / disk
            phases["step"]["disk_write"] += size / disk
    passes, step = phases["pass"], phases["step"]
    both = ("disk_read", "disk_write")
    streamed = max(passes["to_device"], passes["to_host"], sum(passes[name] for name in both))
    waits = max(stepped["host"] + stepped["disk"], step["to_device"], step["to_host"], sum(step[name] for name in both))
    return streamed, stepped["device"] + waits


def _stepped_bytes(schedule: Schedule, buffer: Any) -> int:
    """Bytes that a step reads and writes: the gradient once, master weights and moments twice, new parameters once (28 for
    each element in mixed precision: ZeRO-Offload, Ren et al. 2021)."""
    one = resident_of(schedule, buffer)
    return one["gradient"] + 2 * (one["master"] + one["moments"]) + one["parameter"] * (1 if one["master"] else 2)


def resident_of(schedule: Schedule, buffer: Any) -> dict[str, int]:
    """Bytes of this rank's piece of ``buffer`` by state, wherever they rest."""
    alone = Schedule(schedule.plan, schedule.facts, (buffer,), {}, ())
    found: dict[str, int] = {}
    for kinds in resident(alone, 0).values():
        for kind, size in kinds.items():
            found[kind] = found.get(kind, 0) + size
    pieces = buffer.elements(buffer.row.optimizer)
    for kind, layout in (("gradient", buffer.row.gradient.rest), ("parameter", buffer.row.parameter.rest)):
        found[kind] = found[kind] * pieces // max(buffer.elements(layout), 1)
    return found


def _assumptions(cluster: Cluster, work: Work, shape: Shape | None, peak: float, count: int) -> list[str]:
    again = "8" if work.recompute else "6"
    rate = f"{work.utilisation:.0%} of {peak / 1e12:.1f} TFLOP/s ({cluster.gpu.name})"
    said = [
        f"{again} x {count:,} x tokens operations at {rate}",
        f"links of {cluster.gpu.link / 1e9:g} GB/s inside a node",
        "gathers and reduces run under the computation but for the first and the last unit's; a step's are waited for",
    ]
    if cluster.nodes > 1:
        said.append(f"{cluster.node_network / 1e9:g} GB/s from a node to the others, shared by its ranks")
    if shape is None:
        said.append("attention's operations are not counted: the model's shape is not known")
    said.append(
        f"the optimizer at the rate of memory: device {cluster.gpu.bandwidth / 1e9:g} GB/s, host "
        f"{cluster.host_bandwidth / 1e9:g} GB/s and disk {cluster.nvme_bandwidth / 1e9:g} GB/s a node, PCIe "
        f"{cluster.gpu.pcie / 1e9:g} GB/s a rank"
    )
    return said
