"""The planner's bytes are those of the engine that would run: what it holds, its peaks, what it sends and moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import onecopy
from onecopy.cluster import Cluster, gpu
from onecopy.planner.report import plan_report, schedule_for
from onecopy.planner.subject import facts, facts_from_model
from onecopy.schedule.predict import predict
from tests.ranks import models
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.ranks

PLACES: dict[str, tuple[Any, ...]] = {
    "device": ("device", "device"),
    "host": ("host", "device"),
    "disk": ("disk", "device"),
    "all on host": ("host", "host"),
    "all on disk": ("disk", "disk"),
}


def plans(folder: str, dtype: str | None, **options: Any) -> dict[str, onecopy.Plan]:
    """Every stage with its states everywhere they may be."""
    found = {}
    for number in range(4):
        base = onecopy.stage(number, dtype=dtype, **options)
        for where, (optimizer, parameter) in PLACES.items():
            if parameter == "device" or number == 3:
                found[f"stage {number}, {where}"] = onecopy.offload(base, optimizer, parameter, scratch=folder)
    return found


def engines(rank: int, world: int, model: str, asked: dict[str, onecopy.Plan]) -> dict[str, Any]:
    """What engines predict and measure after two steps."""
    out = {}
    for name, plan in asked.items():
        engine = onecopy.initialize(models.build(model), plan, optimizer=lambda params: torch.optim.AdamW(params, fused=True))
        for step in range(2):
            for _ in range(plan.batch.accumulation):
                engine(*models.batch(model, step, 0, rank)).backward()
                engine.step()
        out[name] = {"predicted": engine.predicted(), "measured": engine.measured()}
        engine.close()
    return out


CLUSTER = Cluster(gpu("cpu"), 2)


@pytest.mark.parametrize("model", ["gpt", "mlp"])
@pytest.mark.parametrize("options", [{}, {"accumulation": 2, "units": onecopy.Units(min_numel=0)}], ids=["", "accumulated"])
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_the_planner_says_what_the_engine_says(tmp_path: Path, dtype: str | None, options: Any, model: str) -> None:
    """Every byte of 14 plans on 2 ranks, from the model on the meta device alone."""
    asked = plans(str(tmp_path), dtype, **options)
    with torch.device("meta"):
        subject = facts_from_model(models.build(model))
    said = run_ranks(engines, 2, model, asked)[0]
    assert len(said) == 14
    for name, plan in asked.items():
        theirs = said[name]["predicted"]
        assert predict(schedule_for(plan, facts(subject, plan, 2), CLUSTER)) == theirs, name
        report = plan_report(facts(subject, plan, 2), plan, CLUSTER)
        for tier, kinds in theirs["resident"].items():
            assert {kind: report["per_rank"][tier][kind] for kind in kinds} == kinds, name
        for tier, kinds in theirs["peak"].items():
            assert report["per_rank"][tier]["peak"] == kinds["total"], name
        if name.endswith(", device"):
            found = said[name]["measured"]["peak"]["device"]["total"]
            assert theirs["peak"]["device"]["total"] == pytest.approx(found, rel=0.02), name
            assert theirs["resident"] == said[name]["measured"]["resident"], name
        sent = sum(op["bytes"] for op in said[name]["measured"]["collectives"].values())
        assert report["traffic"]["intra_node"] + report["traffic"]["inter_node"] == sent, name
        moved = said[name]["measured"]["moved"]
        assert report["traffic"]["pcie"] == moved.get("to_device", 0) + moved.get("to_host", 0), name
        for link in ("disk_read", "disk_write"):
            assert report["traffic"][link] == moved.get(link, 0), name
