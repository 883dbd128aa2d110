"""Reports for people: tables, bars and verdicts in the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from onecopy.cluster import Cluster
from onecopy.planner.report import STATES, human_gb
from onecopy.planner.search import Found
from onecopy.planner.simulate import Simulation
from onecopy.report.measure import human_count

__all__ = ["show_comparison", "show_report", "show_simulation"]

_BAR = 15
_TIMES = {
    "compute": "computation",
    "communication": "communication",
    "exposed": "  of it waited for",
    "offload": "between tiers, in passes",
    "offload_exposed": "  of it waited for",
    "optimizer": "optimizer step",
    "step": "a step",
}


def show_report(report: Mapping[str, Any], console: Console) -> None:
    """One plan: memory by kind, traffic, time, and whether it fits."""
    name, parameters = report["model"]["name"], f"{report['model']['parameters']:,} parameters"
    title = f"[bold]{name}[/bold]" if parameters == name else f"[bold]{name}[/bold], {parameters},"
    console.print(f"{title} on {report['cluster']['text']}\n{report['plan']['text']}\n", highlight=False)
    console.print(_memory(report))
    console.print(_traffic_and_time(report))
    for line in report["why"]:
        console.print(f"[red]{line}[/red]" if "does not fit" in line else line, highlight=False)
    if report.get("change"):
        console.print(f"It would fit with {report['change']['text']}", highlight=False)
    for line in report.get("chosen", []):
        console.print(f"- {line}", highlight=False)
    for line in report["others"]:
        console.print(f"[dim]{line}[/dim]", highlight=False)
    for line in report["assumptions"]:
        console.print(f"[dim]assumed: {line}[/dim]", highlight=False)


def _memory(report: Mapping[str, Any]) -> Table:
    ranks = report["per_rank"]
    table = Table(title="Memory of a rank", title_justify="left")
    table.add_column("")
    for tier in ranks:
        table.add_column(tier, justify="right")
    kinds = [*STATES, *dict.fromkeys(kind for found in ranks.values() for kind in found if kind not in (*STATES, "peak"))]
    for kind in kinds:
        if any(found.get(kind) for found in ranks.values()):
            table.add_row(kind.replace("_", " "), *(human_gb(found.get(kind, 0)) for found in ranks.values()))
    table.add_section()
    table.add_row("peak", *(human_gb(found["peak"]) for found in ranks.values()))
    table.add_row("in", *(report["peak"][tier]["at"] for tier in ranks))
    return table


def _traffic_and_time(report: Mapping[str, Any]) -> Table:
    table = Table(title="One optimizer step of a rank", title_justify="left")
    table.add_column("")
    table.add_column("", justify="right")
    names = {"intra_node": "sent inside the node", "inter_node": "sent to other nodes", "pcie": "across PCIe"}
    for key, size in report["traffic"].items():
        if isinstance(size, int) and size:
            table.add_row(names.get(key, key.replace("_", " ")), human_gb(size))
    time = report["time"]
    if time:
        table.add_section()
        for key, name in _TIMES.items():
            if time[key]:
                table.add_row(name, f"{time[key]:.3g} s")
        table.add_row("tokens per second, all ranks", human_count(time["tokens_per_second"]))
    return table


def show_comparison(found: Iterable[Found], memory: int, console: Console) -> None:
    """Variants side by side, with a bar of device memory against the ``memory`` of a rank."""
    found = list(found)
    batch = found[0].choice.batch if found else 1
    title = f"Memory of a rank at micro-batch {batch}; | marks the {human_gb(memory)} of its device"
    table = Table(title=title, title_justify="left", padding=(0, 0, 0, 1))
    for name in ("", "device", " ", "host", "disk", "tokens/s", "lacks"):
        numbers = name in ("device", "host", "disk", "tokens/s")
        table.add_column(name, justify="right" if numbers else "left", no_wrap=name in ("device", " "))
    for one in found:
        peaks = {tier: peak.total for tier, peak in one.costs.peak.items()}
        lacks = ", ".join(f"{tier} {human_gb(size)}" for tier, size in one.costs.over.items())
        table.add_row(
            one.choice.settings,
            human_gb(peaks["device"]),
            _bar(peaks["device"], memory),
            *(human_gb(peaks[tier]) if peaks.get(tier) else "" for tier in ("host", "disk")),
            human_count(one.speed) if one.speed else "",
            f"[red]{lacks}[/red]" if lacks else "nothing: fits",
        )
    console.print(table)


_SHOWN = 12  # collectives at the start and at the end of a step that are shown


def show_simulation(found: Simulation, cluster: Cluster, console: Console) -> None:
    """A simulated step: its collectives in order with the memory that was held, and that all was as predicted."""
    table = Table(title=f"One step of rank 0 of {cluster.ranks}", title_justify="left")
    for name in ("", "collective", "unit", "sent", "ranks", "held"):
        table.add_column(name, justify="left" if name in ("collective", "unit") else "right")
    for at, op in enumerate(found.sent, 1):
        if _SHOWN < at <= len(found.sent) - _SHOWN:
            if at == _SHOWN + 1:
                table.add_row("...")
            continue
        table.add_row(str(at), op.kind, op.unit, human_gb(op.bytes), f"{op.ranks:,}", human_gb(op.held))
    console.print(table)
    order = "and so is their order" if found.in_order else "in the order that the engine learnt from the model"
    peak, said = human_gb(found.measured["peak"]["device"]["total"]), human_gb(found.expected)
    console.print(
        f"All {len(found.sent)} collectives are as predicted, {order}. States and buffers at the peak: {peak}, and {said} "
        f"predicted.\n"
        f"Python: {found.python:.3g} s for a step, {found.bare:.3g} s of them for the same passes without an engine",
        highlight=False,
    )


def _bar(size: int, memory: int) -> str:
    """A bar whose mark, two thirds along, is ``memory``."""
    mark = _BAR * 2 // 3
    filled = min(_BAR, round(size / memory * mark))
    cells = ["█" if at < filled else " " for at in range(_BAR)]
    cells[mark] = "|" if filled <= mark else "┃"
    return "".join(cells)
