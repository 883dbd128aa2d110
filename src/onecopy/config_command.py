"""The bodies of ``onecopy config check`` and ``onecopy config show``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from onecopy.errors import ConfigError
from onecopy.plan.explain import VERDICTS, Explained, describe, explain
from onecopy.plan.values import shown
from onecopy.templates import NAMES, resolve, template, with_auto

__all__ = ["check_config", "key_values", "show_config"]


def key_values(given: Iterable[str]) -> dict[str, Any]:
    """``KEY=VALUE`` options as a dict: values are JSON, or words where they are no JSON. Raises :class:`ConfigError`."""
    found: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {text!r} is not KEY=VALUE, such as zero_optimization.stage=3 or train_batch_size=8")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return found


def check_config(source: str, ranks: int | None, given: Iterable[str], console: Console) -> tuple[dict[str, Any], bool]:
    """Say on ``console`` what every key of ``source`` means on ``ranks`` ranks. Returns the same as a JSON object (its schema
    is in ``docs/configuration.md``), and whether there was no error."""
    found = explain(resolve(source), ranks, changes=key_values(given))
    _show(source, found, console)
    reading = found.reading
    return {
        "file": source,
        "ok": found.ok,
        "plan": describe(reading.plan) if reading.plan is not None else None,
        "keys": [{"key": line.key, "value": line.value, "verdict": line.verdict, "says": line.says} for line in found.lines],
        "errors": list(reading.problems),
        "auto": list(reading.open),
        "notes": [str(remark) for remark in reading.remarks],
    }, found.ok


def _show(source: str, found: Explained, console: Console) -> None:
    reading = found.reading
    console.print(f"[bold]{source}[/bold]", highlight=False)
    for text in describe(reading.plan) if reading.plan is not None else ():
        console.print(text, highlight=False, soft_wrap=True)
    for verdict, means in VERDICTS.items():
        lines = [line for line in found.lines if line.verdict == verdict]
        if lines:
            table = Table(title=f"{verdict}: {means}", title_justify="left", show_header=False, padding=(0, 1))
            for _ in range(3):
                table.add_column(overflow="fold")
            for line in lines:
                table.add_row(f"{line.key}", shown(line.value), line.says)
            console.print(table)
    for remark in reading.remarks:
        if not remark.keys:
            console.print(f"note: {remark}", highlight=False, soft_wrap=True, markup=False)
    for problem in reading.problems:
        console.print(f"error: {problem}", style="red", highlight=False, soft_wrap=True, markup=False)
    if not reading.problems:
        left = f"; {len(reading.open)} keys are still 'auto'" if reading.open else ""
        console.print(f"no error{left}", highlight=False)


def show_config(name: str | None, auto: bool, write: Path | None) -> str:
    """The text of the template ``name``, or without one the list of all with the first line of their reasons."""
    if name is None:
        if write is not None:
            raise ConfigError(f"--write {write} without a name: say which template, one of {', '.join(NAMES)}")
        return "\n".join(f"{one:14} {template(one)['_why'][0]}" for one in NAMES)
    text = _text(with_auto(template(name)) if auto else template(name))
    if write is not None:
        try:
            write.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--write {write} cannot be written: {error.strerror or error}") from error
    return text


def _text(config: Mapping[str, Any], depth: int = 0) -> str:
    """JSON with short values on one line, as people write such files."""
    if all(not isinstance(value, Mapping) for value in config.values()) and len(json.dumps(config)) < 60:
        return json.dumps(config, ensure_ascii=False)
    pad, rows = "  " * (depth + 1), []
    for key, value in config.items():
        if isinstance(value, Mapping):
            text = _text(value, depth + 1)
        elif isinstance(value, list) and value and isinstance(value[0], str):
            lines = ",\n".join(f"{pad}  {json.dumps(line, ensure_ascii=False)}" for line in value)
            text = f"[\n{lines}\n{pad}]"
        else:
            text = json.dumps(value, ensure_ascii=False)
        rows.append(f"{pad}{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(rows) + "\n" + "  " * depth + "}"
