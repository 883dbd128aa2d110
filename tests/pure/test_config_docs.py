"""``docs/configuration.md`` has a row for every key, in the words of the schema."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onecopy.plan import schema
from onecopy.plan.config import load_config
from onecopy.plan.explain import meaning
from onecopy.plan.keys import Means, Note
from onecopy.plan.recipe import OPTIMIZERS, SCHEDULES, TORCH_SCHEDULES
from onecopy.plan.values import shown
from onecopy.templates import NAMES
from tests.pure.test_config import KEYS
from tests.pure.test_config_keys import info_of

pytestmark = pytest.mark.pure

TEXT = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()


def leaves() -> Iterator[tuple[str, Any, Any]]:
    """(key, field, kind of value) of every key that is no section."""
    for key in KEYS:
        info, section = info_of(key)
        if section is None:
            yield key, info, next((mark.func.__self__ for mark in info.metadata if hasattr(mark, "func")), None)


def translated() -> str:
    """The table of keys that are honoured."""
    rows = ["| key | legal | when absent | what it does |", "|---|---|---|---|"]
    for key, info, kind in leaves():
        if (means := schema.mark_of(info, Means)) is not None:
            absent = "" if info.default is None or repr(info.default) == "PydanticUndefined" else shown(info.default)
            rows.append(f"| `{key}` | {kind.legal if kind else 'a section'} | {absent} | {means.says} |")
    return "\n".join(rows)


def grouped(verdict: str, heading: str) -> str:
    """The table of keys of one verdict, by what is said of them."""
    said: dict[str, list[str]] = {}
    for key, info, kind in leaves():
        found, says = meaning(info)
        if found == verdict and (verdict != "no effect" or schema.mark_of(info, Note) is not None):
            words = says.removeprefix("off, as in every run here: ")
            said.setdefault(f"{words} | {kind.legal}" if verdict == "off" else words, []).append(f"`{key}`")
    rows = [f"| {heading} |", "|" + "---|" * (heading.count("|") + 1)]
    return "\n".join([*rows, *(f"| {', '.join(keys)} | {words} |" for words, keys in sorted(said.items()))])


TABLES = {
    "honoured": translated(),
    "no effect": grouped("no effect", "keys | why they do nothing"),
    "off": grouped("off", "keys | what does not exist (what there is) | legal"),
}


@pytest.mark.parametrize("verdict", TABLES)
def test_every_key_has_its_row(verdict: str) -> None:
    missing = [row for row in TABLES[verdict].splitlines() if row not in TEXT]
    assert not missing, "\n".join(missing)


def test_every_name_is_in_the_documentation() -> None:
    missing = [name for name in (*OPTIMIZERS, *SCHEDULES, *TORCH_SCHEDULES, *NAMES) if f"`{name}`" not in TEXT]
    assert not missing
    assert set(re.findall(r"^\| `([\w.]+)`", TEXT, re.MULTILINE)) & set(KEYS)


def test_the_message_in_the_documentation_is_the_message() -> None:
    with pytest.raises(ValueError) as caught:
        load_config({"zero_optimization": {"stge": 2}, "fp16": {"loss_scale": float("nan")}, "model_parallel_size": 2})
    assert all(line in TEXT for line in str(caught.value).splitlines()), str(caught.value)
