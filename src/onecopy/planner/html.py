"""What ``--compare`` found as one page of HTML: plots in SVG and a table, with nothing to be fetched from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from onecopy.errors import ConfigError
from onecopy.planner.report import human_gb
from onecopy.report.measure import human_count

__all__ = ["Variant", "page", "write_page"]

# Okabe and Ito's colours, which people with any colour vision tell apart, and two shades.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999", "#5D3A9B", "#44AA99")
_LABEL, _PLOT, _ROW, _BAR = 300, 560, 26, 18
_TIMES = {"compute": "computation", "exposed": "communication waited for", "offload_exposed": "moves waited for",
          "optimizer": "optimizer step"}  # fmt: skip
_LINKS = {"intra_node": "inside a node", "inter_node": "between nodes", "pcie": "across PCIe", "disk_read": "disk, read",
          "disk_write": "disk, written"}  # fmt: skip
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 960px; margin: 2em auto; padding: 0 1em; }
h1 { font-size: 1.3em; } h2 { font-size: 1.05em; margin-top: 2em; }
table { border-collapse: collapse; font-size: 13px; } th, td { padding: 3px 10px; border-bottom: 1px solid #ddd; }
td + td, th + th { text-align: right; } td:last-child, th:last-child { text-align: left; }
.over { color: #b00020; } svg text { font: 12px system-ui, sans-serif; fill: #222; } .note { color: #666; font-size: 13px; }
"""


@dataclass(frozen=True)
class Variant:
    """One plan: ``memory`` of the device by kind at its peak, ``elsewhere`` the peaks of other tiers, ``lacks`` by tier;
    bytes of a step by link and seconds by what takes them."""

    name: str
    memory: Mapping[str, int]
    elsewhere: Mapping[str, int]
    lacks: Mapping[str, int]
    traffic: Mapping[str, Any]
    time: Mapping[str, float]


def page(title: str, subtitle: str, variants: Sequence[Variant], room: int, notes: Iterable[str]) -> str:
    """A whole HTML document. ``room``: bytes of a rank's device, which a line marks."""
    memory = [(one.name, {kind: float(size) for kind, size in one.memory.items()}) for one in variants]
    host = [(one.name, {tier: float(size) for tier, size in one.elsewhere.items()}) for one in variants]
    links = [(one.name, {name: float(one.traffic[key]) for key, name in _LINKS.items()}) for one in variants]
    times = [(one.name, {name: one.time.get(key, 0.0) for key, name in _TIMES.items()}) for one in variants]
    parts = [
        f"<h1>{escape(title)}</h1><p>{escape(subtitle)}</p>",
        _section("Device memory of a rank at its peak", _plot(memory, human_gb, room)),
        _section("Host memory and disk of a rank", _plot(host, human_gb)),
        _section("What a rank sends and moves in a step", _plot(links, human_gb)),
        _section("Estimated time of a step", _plot(times, _seconds)),
        _section("In numbers", _table(variants)),
        "".join(f'<p class="note">assumed: {escape(note)}</p>' for note in notes),
    ]
    head = f'<meta charset="utf-8"/><title>{escape(title)}</title><style>{_STYLE}</style>'
    body = "\n".join(part for part in parts if part)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def write_page(path: Path, text: str) -> None:
    """Write the page; raises :class:`ConfigError` where that cannot be."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path} cannot be written: {error.strerror or error}") from error


def _section(title: str, content: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{content}" if content else ""


def _seconds(value: float) -> str:
    return f"{value:.3g} s"


def _plot(rows: Sequence[tuple[str, Mapping[str, float]]], unit: Any, mark: float | None = None) -> str:
    """Stacked bars, a row each, with a legend above; nothing where all is 0."""
    kinds = [kind for kind in dict.fromkeys(kind for _, row in rows for kind in row) if any(row.get(kind) for _, row in rows)]
    if not kinds:
        return ""
    colours = {kind: _COLOURS[at % len(_COLOURS)] for at, kind in enumerate(kinds)}
    most = max([mark or 0.0, *(sum(row.values()) for _, row in rows)]) or 1.0
    drawn, top = [_legend(colours)], 20 * -(-len(kinds) // 5) + 16
    for at, (name, row) in enumerate(rows):
        y, x = top + at * _ROW, float(_LABEL)
        drawn.append(f'<text x="{_LABEL - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>')
        for kind in kinds:
            width = row.get(kind, 0.0) / most * _PLOT
            tip = f"<title>{escape(f'{name}: {kind} {unit(row.get(kind, 0.0))}')}</title>"
            if width:
                drawn.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{colours[kind]}">{tip}</rect>'
                )
            x += width
        drawn.append(f'<text x="{x + 6:.1f}" y="{y + 13}">{unit(sum(row.values()))}</text>')
    bottom = top + len(rows) * _ROW
    if mark:
        x = _LABEL + mark / most * _PLOT
        drawn.append(f'<line x1="{x:.1f}" y1="{top - 6}" x2="{x:.1f}" y2="{bottom}" stroke="#b00020"/>')
        drawn.append(f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{unit(mark)} there are</text>')
    size = f"0 0 {_LABEL + _PLOT + 90} {bottom + 20}"
    return f'<svg viewBox="{size}" width="100%" role="img">{"".join(drawn)}</svg>'


def _legend(colours: Mapping[str, str]) -> str:
    drawn = []
    for at, (kind, colour) in enumerate(colours.items()):
        x, y = 10 + at % 5 * 185, at // 5 * 20
        drawn.append(f'<rect x="{x}" y="{y + 2}" width="11" height="11" fill="{colour}"/>')
        drawn.append(f'<text x="{x + 16}" y="{y + 12}">{escape(kind)}</text>')
    return "".join(drawn)


def _table(variants: Sequence[Variant]) -> str:
    heads = ("", "device", "host", "disk", "sent", "a step", "tokens/s", "lacks")
    rows = []
    for one in variants:
        lacks = ", ".join(f"{tier} {human_gb(size)}" for tier, size in one.lacks.items())
        sent = one.traffic["intra_node"] + one.traffic["inter_node"]
        cells = [
            escape(one.name), human_gb(sum(one.memory.values())),
            *(human_gb(one.elsewhere[tier]) if one.elsewhere.get(tier) else "" for tier in ("host", "disk")), human_gb(sent),
            _seconds(one.time["step"]) if one.time else "", human_count(one.time["tokens_per_second"]) if one.time else "",
            f'<span class="over">{escape(lacks)}</span>' if lacks else "nothing: fits",
        ]  # fmt: skip
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
