"""Tables of a ledger: what each rank holds and sends, predicted beside measured.

A ledger is what ``engine.predicted()`` and ``engine.measured()`` return: ``resident`` and ``peak`` bytes by tier and
kind, ``collectives`` by op with count, elements, bytes and group, and bytes ``moved`` between tiers by link.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

__all__ = ["Line", "compare_table", "human_bytes", "human_count", "lines", "plan_table"]

Ledger = Mapping[str, Any]

_TITLES = {
    "resident": "held between steps",
    "peak": "highest inside a step",
    "moved": "moved between tiers in one step",
}


@dataclass(frozen=True)
class Line:
    """One quantity of a ledger. ``measured`` is None where nothing was measured.

    ``exact``: bytes held and sent must be equal; a peak is the allocator's and only bounded, and the first step reads less
    from disk than the others.
    """

    section: str
    name: str
    predicted: int
    measured: int | None
    unit: str
    exact: bool = True

    @property
    def verdict(self) -> str:
        """``"equal"``, the signed difference in percent of the prediction, or nothing without a measurement."""
        if self.measured is None:
            return ""
        if self.measured == self.predicted:
            return "equal"
        if not self.predicted:
            return "not predicted"
        return f"{(self.measured - self.predicted) / self.predicted:+.2%}"


def human_bytes(count: int | float) -> str:
    """``count`` bytes in the largest binary unit that leaves at least 1: ``human_bytes(1536) == "1.50 KiB"``."""
    value, sign = abs(float(count)), "-" if count < 0 else ""
    if value < 1024:
        return f"{sign}{value:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        value /= 1024
        if value < 1024 or unit == "PiB":
            break
    return f"{sign}{value:.2f} {unit}"


def human_count(count: int | float) -> str:
    """``count`` with a decimal suffix: ``human_count(25_482_240) == "25.5M"``."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.1f}{unit}"
    return f"{count:.0f}"


def lines(predicted: Ledger, measured: Ledger | None = None) -> Iterator[Line]:
    """Every quantity that either ledger has, in the order of the prediction; those that are 0 in both are left out."""
    for line in _all_lines(predicted, measured):
        if line.predicted or line.measured:
            yield line


def _all_lines(predicted: Ledger, measured: Ledger | None) -> Iterator[Line]:
    measured = measured or {}
    for section in ("resident", "peak"):
        ours, theirs = predicted.get(section, {}), measured.get(section, {})
        for tier in _keys(ours, theirs):
            for kind in _keys(ours.get(tier, {}), theirs.get(tier, {})):
                found = theirs.get(tier, {}).get(kind, 0) if measured else None
                yield Line(
                    section, f"{tier}: {kind}", ours.get(tier, {}).get(kind, 0), found, "bytes", section != "peak"
                )
    ours, theirs = predicted.get("collectives", {}), measured.get("collectives", {})
    for op in _keys(ours, theirs):
        for unit in ("count", "elements", "bytes"):
            found = theirs.get(op, {}).get(unit, 0) if measured else None
            yield Line("collectives", f"{op}: {unit}", ours.get(op, {}).get(unit, 0), found, unit)
    ours, theirs = predicted.get("moved", {}), measured.get("moved", {})
    for link in _keys(ours, theirs):
        name = link.replace("_", " ")
        yield Line("moved", name, ours.get(link, 0), theirs.get(link, 0) if measured else None, "bytes", False)


def _keys(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    return [*first, *(key for key in second if key not in first)]


def plan_table(predicted: Ledger, title: str = "Predicted, per rank") -> Table:
    """What one rank will hold and send in a step."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("predicted", justify="right")
    _fill(table, [line for line in lines(predicted) if line.unit != "elements"], measured=False)
    return table


def compare_table(predicted: Ledger, measured: Ledger, title: str = "Predicted beside measured, rank 0") -> Table:
    """The same quantities, measured, and the difference."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in ("predicted", "measured", "difference"):
        table.add_column(name, justify="right")
    _fill(table, list(lines(predicted, measured)), measured=True)
    return table


def _fill(table: Table, found: list[Line], measured: bool) -> None:
    section = None
    for line in found:
        if line.section != section:
            section = line.section
            table.add_section()
            table.add_row(f"[bold]{_TITLES.get(section, 'sent in one step')}[/bold]")
        cells = [f"  {line.name}", _show(line.predicted, line.unit)]
        if measured:
            off = line.exact and line.verdict != "equal"
            cells += [_show(line.measured or 0, line.unit), f"[red]{line.verdict}[/red]" if off else line.verdict]
        table.add_row(*cells)


def _show(value: int, unit: str) -> str:
    return human_bytes(value) if unit == "bytes" else f"{value:,}"
