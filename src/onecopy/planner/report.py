"""``plan_report``: bytes, traffic and time of a plan on a cluster, folded from the schedule that the engine runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from onecopy.cluster import Cluster
from onecopy.plan.check import check
from onecopy.plan.plan import Plan
from onecopy.planner.activations import Activations
from onecopy.planner.estimate import Work, estimate, split
from onecopy.planner.subject import Shape
from onecopy.report.measure import human_count
from onecopy.schedule.lower import Facts, Schedule, lower
from onecopy.schedule.messages import exchange_bytes
from onecopy.schedule.predict import moved, peaks, traffic
from onecopy.schedule.rest import resident
from onecopy.schedule.walk import Peak, Saved

__all__ = ["Costs", "costs", "human_gb", "plan_report", "schedule_for", "traffic_on"]

_WORK = Work()
STATES = ("parameter", "gradient", "master", "moments")


def human_gb(count: int | float) -> str:
    """``count`` bytes in decimal units, as memory is sold: ``human_gb(31_406_250_000) == "31.41 GB"``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"


def schedule_for(plan: Plan, facts: Facts, cluster: Cluster) -> Schedule:
    """The schedule of ``plan`` on ``cluster``, with the slots through which ranks on CPUs of one host exchange messages.
    Raises :class:`~onecopy.errors.PlanError` where the engine would."""
    check(plan, facts.units, cluster.ranks)
    schedule = lower(plan, replace(facts, mesh=plan.mesh(cluster.ranks)))
    if cluster.gpu.shared and cluster.nodes == 1:
        schedule = replace(schedule, facts=replace(schedule.facts, exchange=exchange_bytes(schedule)))
    return schedule


@dataclass(frozen=True)
class Costs:
    """Memory of one plan on one cluster: ``at_rest`` and ``peak`` of the rank that holds most, by tier; ``over``: by tier
    what is lacking, in bytes of a rank (device) or of a node (host, disk)."""

    at_rest: Mapping[str, Mapping[str, int]]
    peak: Mapping[str, Peak]
    over: Mapping[str, int]

    @property
    def fits(self) -> bool:
        return not self.over


def costs(schedule: Schedule, cluster: Cluster, saved: Saved) -> Costs:
    """Fold the memory of ``schedule`` and hold it against ``cluster``."""
    found: dict[str, Peak] = {tier: peak for tier, peak in peaks(schedule, 0, saved).items()}
    needs = {tier: peak.total for tier, peak in found.items()}
    node = {tier: _host(needs, cluster) if tier == "host" else needs.get(tier, 0) * cluster.gpus for tier in ("host", "disk")}
    rooms = {"device": cluster.gpu.memory, "host": cluster.host_memory, "disk": cluster.nvme}
    takes = {"device": needs.get("device", 0), **node}
    over = {tier: takes[tier] - room for tier, room in rooms.items() if room is not None and takes[tier] > room}
    return Costs({tier: kinds for tier, kinds in resident(schedule, 0).items()}, found, over)


def _host(needs: Mapping[str, int], cluster: Cluster) -> int:
    """Host memory that the ranks of a node take; a CPU's device is the host as well."""
    return cluster.gpus * (needs.get("host", 0) + (needs.get("device", 0) if cluster.gpu.shared else 0))


def plan_report(
    facts: Facts,
    plan: Plan,
    cluster: Cluster,
    work: Work = _WORK,
    activations: Activations | None = None,
    shape: Shape | None = None,
) -> dict[str, Any]:
    """Everything about ``plan`` on ``cluster`` in one dict, whose schema ``docs/planner.md`` has: ``per_rank``, ``per_node``,
    ``traffic``, ``time``, ``fits``, ``why``. Bytes are integers, of the rank that holds most, and of one optimizer step."""
    schedule = schedule_for(plan, facts, cluster)
    saved = activations.saved(work.batch, work.recompute) if activations is not None else Saved()
    found = costs(schedule, cluster, saved)
    ranks: dict[str, dict[str, int]] = {}
    for tier, peak in found.peak.items():
        kinds = {kind: found.at_rest.get(tier, {}).get(kind, 0) for kind in STATES}
        kinds |= {kind.replace(" ", "_"): size for kind, size in peak.kinds.items() if kind not in STATES and size}
        ranks[tier] = {**kinds, "peak": peak.total}
    time = estimate(schedule, cluster, work, shape)
    return {
        "per_rank": ranks,
        "peak": {tier: {"at": peak.at, "holds": peak.then} for tier, peak in found.peak.items()},
        "per_node": {tier: _per_node(ranks, tier, cluster) for tier in ("host", "disk")},
        "traffic": traffic_on(schedule, cluster),
        "time": {name: value for name, value in time.items() if name != "assumptions"},
        "assumptions": [*_counted(activations), *time["assumptions"]],
        "fits": found.fits,
        "why": _why(found, ranks, cluster, counted=activations is not None),
    }


def _per_node(ranks: Mapping[str, Mapping[str, int]], tier: str, cluster: Cluster) -> dict[str, int]:
    found = {kind: size * cluster.gpus for kind, size in ranks.get(tier, {}).items()}
    if tier == "host" and cluster.gpu.shared:
        for kind, size in ranks["device"].items():
            found[kind] = found.get(kind, 0) + size * cluster.gpus
    return found or dict.fromkeys((*STATES, "peak"), 0)


def traffic_on(schedule: Schedule, cluster: Cluster) -> dict[str, Any]:
    """What a rank sends and moves in a step, by link."""
    collectives, links = traffic(schedule), moved(schedule, 0)
    inside = between = 0
    for entry in collectives.values():
        near, far = split(schedule.facts.mesh, entry["group"], entry["bytes"], cluster)
        inside, between = inside + near, between + far
    return {
        "intra_node": inside,
        "inter_node": between,
        "pcie": links.get("to_device", 0) + links.get("to_host", 0),
        "disk_read": links.get("disk_read", 0),
        "disk_write": links.get("disk_write", 0),
        "collectives": collectives,
    }


def _counted(activations: Activations | None) -> list[str]:
    if activations is None:
        return []  # the verdict says so
    if activations.how == "formula":
        return ["activations by a closed formula (Korthikanti et al. 2022)"]
    return ["activations traced through the model's forward and backward; what kernels take for themselves is not counted"]


def _why(found: Costs, ranks: Mapping[str, Mapping[str, int]], cluster: Cluster, counted: bool) -> list[str]:
    """One line for every tier: fits with how much left, or does not fit by how much and what is largest then. ``counted``:
    are activations in it?"""
    said = []
    for tier, of, room in (
        ("device", "a rank", cluster.gpu.memory), ("host", "a node", cluster.host_memory), ("disk", "a node", cluster.nvme)
    ):  # fmt: skip
        need = ranks["device"]["peak"] if tier == "device" else _per_node(ranks, tier, cluster)["peak"]
        if not need:
            continue
        if room is None:
            option = {"host": "--host-memory", "disk": "--nvme"}[tier]
            said.append(f"{tier}: {human_gb(need)} needed on {of}; not checked, as {option} was not given")
        elif tier in found.over:
            peak = found.peak.get(tier) or found.peak["device"]
            largest = sorted(peak.then.items(), key=lambda item: -item[1])[:3]
            held = ", ".join(f"{kind} {human_gb(size)}" for kind, size in largest)
            said.append(
                f"{tier}: does not fit by {human_gb(found.over[tier])}: {human_gb(need)} needed on {of} of {human_gb(room)}, "
                f"in {peak.at}: {held}"
            )
        else:
            without = "" if counted or tier != "device" else ", ACTIVATIONS NOT COUNTED"
            said.append(f"{tier}: fits, {human_gb(need)} of {human_gb(room)} on {of}{without}")
    return said


def headline(report: Mapping[str, Any]) -> str:
    """``report`` in one line."""
    speed = report["time"].get("tokens_per_second")
    rate = f", about {human_count(speed)} tokens/s" if speed else ""
    return f"{'fits' if report['fits'] else 'does not fit'}: {human_gb(report['per_rank']['device']['peak'])} on a rank{rate}"
