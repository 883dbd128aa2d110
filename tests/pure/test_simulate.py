"""One rank's engine among 1,024 that are not there: every collective is the predicted one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import onecopy
from onecopy import cli, gpt
from onecopy.cluster import Cluster, gpu
from onecopy.errors import EngineError, PlanError
from onecopy.planner.estimate import Work
from onecopy.planner.report import schedule_for
from onecopy.planner.simulate import Simulation, _check, simulate
from onecopy.planner.sources import guess_inputs
from onecopy.planner.subject import Built, facts, facts_from_model

pytestmark = pytest.mark.pure

MANY = Cluster(gpus=8, nodes=128)
EACH = onecopy.Units(min_numel=0)


def small() -> Built:
    with torch.device("meta"):
        model = gpt.GPT(gpt.config("tiny"))
    return facts_from_model(model, inputs=guess_inputs(model))


class Scaled(nn.Module):
    """The root owns a parameter that is registered first and used in the middle: engines learn another order."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(16))
        self.head = nn.Linear(16, 100)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def run(plan: onecopy.Plan, subject: Built | None = None, **work: Any) -> Simulation:
    return simulate(subject or small(), plan, MANY, Work(1, 16, **work))


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("options", [{}, {"dtype": "bf16", "accumulation": 2}], ids=["fp32", "bf16, accumulated"])
def test_every_collective_at_1024_ranks_is_as_predicted(number: int, options: Any) -> None:
    found = run(onecopy.stage(number, units=EACH, **options))
    assert found.in_order, "then peaks, bytes at rest and moved are equal too"
    kinds = [op.kind for op in found.sent]
    units, micro = 5, options.get("accumulation", 1)
    assert kinds.count("reduce") == units * (micro if number > 1 else 1)
    assert kinds.count("gather") == (2 * units * micro if number > 2 else 0)
    assert kinds.count("spread") == (units if number < 3 else 0)
    assert kinds.count("vote") == 1 and {op.ranks for op in found.sent} == {1024}
    ledger = found.measured["collectives"]
    assert sum(op.bytes for op in found.sent) == sum(entry["bytes"] for entry in ledger.values())
    assert max(op.held for op in found.sent) <= found.measured["peak"]["device"]["total"]
    assert found.python > 0 and not dist.is_initialized()


OTHERS = {
    "hybrid": lambda: onecopy.hsdp(shard=8, dtype="bf16", units=EACH),
    "held": lambda: onecopy.stage(3, reshard_after_forward=False, units=EACH),
    "far ahead": lambda: onecopy.stage(3, units=onecopy.Units(min_numel=0, prefetch=3, reduce_ahead=2)),
    "on the host": lambda: onecopy.offload(onecopy.stage(3, dtype="bf16", units=EACH), "host", "host"),
    "scaled": lambda: onecopy.stage(2, dtype="fp16"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_plans(name: str) -> None:
    assert run(OTHERS[name]()).in_order


def test_recomputed() -> None:
    plain, again = run(onecopy.stage(3, units=EACH)), run(onecopy.stage(3, units=EACH), recompute=True)
    assert again.in_order and [op.bytes for op in again.sent] == [op.bytes for op in plain.sent]


def test_an_order_that_is_learnt() -> None:
    with torch.device("meta"):
        model = Scaled()
    found = run(onecopy.stage(3, units=EACH), facts_from_model(model, inputs=guess_inputs(model)))
    assert not found.in_order
    assert found.measured["peak"]["device"]["total"] == pytest.approx(found.expected, rel=0.15), "tiny, and a buffer apart"


def test_what_differs_is_named() -> None:
    plan, other = onecopy.stage(3, units=EACH), onecopy.stage(3, dtype="bf16", units=EACH)
    found, subject = run(plan), small()
    with pytest.raises(EngineError, match=r"collective 1 of a step: predicted was the gather of embed \(.* x bfloat16 sent"):
        _check(found, schedule_for(other, facts(subject, other, 1024), MANY))
    twice = onecopy.stage(3, accumulation=2, units=EACH)
    with pytest.raises(EngineError, match=r"predicted was the gather of .*, and the engine did not do it"):
        _check(found, schedule_for(twice, facts(subject, twice, 1024), MANY))
    late = onecopy.stage(3, units=onecopy.Units(min_numel=0, prefetch=0))
    assert not _check(found, schedule_for(late, facts(subject, late, 1024), MANY)), "the same collectives in another order"


def test_what_cannot_be_simulated() -> None:
    with pytest.raises(PlanError, match="nothing of it can rest on disk; choose host"):
        run(onecopy.infinity("."))
    with pytest.raises(PlanError, match="CPUs of a host share its memory"):
        simulate(small(), onecopy.stage(2), Cluster(gpu("cpu"), 2), Work(1, 16))
    assert not dist.is_initialized()


MODULE = "from onecopy import gpt\ndef tiny():\n    return gpt.GPT(gpt.config('tiny'))\n"


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "simulated_models.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    args = ["simulated_models:tiny", "--ranks", "1024", "--stage", "3", "--seq", "16", "--simulate"]
    monkeypatch.setattr("sys.argv", ["onecopy", "plan", *args, "--json"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert not end.value.code and found["in_order"] and found["cluster"]["ranks"] == 1024
    assert {"op", "unit", "elements", "dtype", "bytes", "ranks", "held"} == set(found["step"][0])
    assert set(found["python"]) == {"step", "without_engine"} and found["peak"]["device"]["total"] > 0
    assert "collectives are as predicted, and so is their order" in " ".join(shown.err.split())
    for wrong, says in (
        (["--params", "7B", "--simulate"], "--simulate runs a model's engine"),
        ([*args, "--compare"], "--compare and --simulate were given"),
        (["--params", "7B", "--html", "page.html"], "--html page.html without --compare"),
    ):
        monkeypatch.setattr("sys.argv", ["onecopy", "plan", *wrong])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == 2 and says in capsys.readouterr().err
