"""``docs/offload.md`` is true: its examples run, its commands parse, its bytes are those that are predicted."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn

import onecopy
from onecopy.cli import app
from onecopy.plan.layout import Mesh, ParamFact, UnitFact
from onecopy.schedule.lower import Facts, lower
from onecopy.schedule.predict import predict

pytestmark = pytest.mark.pure

TEXT = (Path(__file__).parents[2] / "docs" / "offload.md").read_text()
NVME = "/local/nvme"


def blocks(kind: str) -> list[str]:
    return [body for word, body in re.findall(r"```(\w*)\n(.*?)```", TEXT, re.DOTALL) if word == kind]


@pytest.mark.filterwarnings("ignore:states on disk", "ignore:.* has no O_DIRECT")
@pytest.mark.parametrize("code", blocks("python"))
def test_examples_run(code: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    names: dict[str, Any] = {"onecopy": onecopy, "model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}
    exec(code.replace(NVME, str(tmp_path)), names)
    assert isinstance(names["plan"], onecopy.Plan)
    engine = names.get("engine")
    if engine is not None:
        engine(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
        engine.close()


def test_the_configuration_is_read() -> None:
    (text,) = blocks("json")
    plan = onecopy.load_config(json.loads(text), world_size=1)
    row = plan.row("x")
    assert (row.optimizer.tier, row.parameter.rest.tier) == ("disk", "host")
    assert plan.scratch == onecopy.Scratch(NVME, threads=4)
    assert len(plan.notes) == 3


def test_commands_have_the_options_they_show() -> None:
    command: Any = typer.main.get_command(app)
    lines = [line for block in blocks("") for line in block.splitlines() if line.startswith("onecopy train")]
    assert len(lines) == 3
    for line in lines:
        command.commands["train"].make_context("train", shlex.split(line)[2:])


ROWS = re.findall(r"^\| `(\w+\(.*?\))`[^|]*\| ([^|]*[N\d]) \| ([^|]*[N\d]) \| ([^|]*[N\d]) \|$", TEXT, re.MULTILINE)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_bytes_are_those_that_are_predicted(row: tuple[str, ...]) -> None:
    expression, *cells = row
    plan = eval(expression, {name: getattr(onecopy, name) for name in ("stage", "offload", "infinity", "low_precision")})
    elements = 1 << 24
    unit = UnitFact("unit", (ParamFact(("weight",), (elements,), plan.precision.dtype or "float32"),))
    for ranks in (1, 2, 4):
        facts = Facts((unit,), Mesh(within=ranks), {"weight": (("exp_avg", None), ("exp_avg_sq", None))})
        found = predict(lower(plan, facts))["resident"]
        for tier, cell in zip(("device", "host", "disk"), cells, strict=True):
            held = sum(found.get(tier, {}).values()) / elements
            assert held == pytest.approx(eval(cell, {"N": ranks}), abs=0.005), (tier, ranks)


def test_the_table_has_rows() -> None:
    assert len(ROWS) == 16
