"""Every number of ranks and every plan to every other: saved, loaded, and continued as the run that was never stopped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import onecopy
from tests.ranks import models
from tests.ranks.checkpoints import SMALL, adamw, everything, start, steps
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.ranks

PARTS = 24  # of the global batch, so that 1, 2, 3, 4 and 8 ranks share it evenly
STATES = ("exp_avg", "exp_avg_sq")
# The long version: ONECOPY_MATRIX=1 (1024 cells, some minutes).
LONG = bool(os.environ.get("ONECOPY_MATRIX"))


def plans(world: int, nvme: str) -> dict[str, Any]:
    """Plans by a name that is a tag."""
    found = {f"stage{number}": onecopy.stage(number, units=SMALL) for number in range(4)}
    if world in (4, 8):
        found["hsdp"] = onecopy.hsdp(shard=2, units=SMALL)
    found["host"] = onecopy.offload(onecopy.stage(2, units=SMALL))
    found["disk"] = onecopy.infinity(nvme, units=SMALL)
    if not LONG:
        kept = {1: ("host",), 2: ("stage1",), 3: ("disk",), 4: ("hsdp",)}[world]
        found = {name: found[name] for name in kept}
    return {f"{world}-{name}": plan for name, plan in found.items()}


def save_all(rank: int, world: int, folder: str, nvme: str) -> list[str]:
    for name, plan in plans(world, nvme).items():
        engine = start(models.build("mlp"), plan)
        steps(engine, "mlp", rank, world, range(2), parts=PARTS)
        engine.save(folder, tag=name, latest=False)
        engine.close()
    return list(plans(world, nvme))


def load_all(rank: int, world: int, folder: str, nvme: str, tags: list[str], truth: list[dict[str, Tensor]]) -> list[Any]:
    """(cell, how far states are off after the load, and after two more steps), of each cell."""
    found = []
    for name, plan in plans(world, nvme).items():
        engine = start("mlp", plan)
        for tag in tags:
            engine.load(folder, tag)
            off = gap(everything(engine, STATES), truth[0])
            steps(engine, "mlp", rank, world, range(2, 4), parts=PARTS)
            found.append((f"{tag} -> {name}", off, gap(everything(engine, STATES), truth[1])))
        engine.close()
    return found


def gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def straight() -> list[dict[str, Tensor]]:
    """Plain torch on the whole batch: weights and moments after two steps and after four."""
    model = models.build("mlp")
    optimizer, found = adamw(model.parameters()), []
    for number in range(4):
        pieces = [models.batch("mlp", number, 0, part) for part in range(PARTS)]
        model(*(torch.cat(tensors) for tensors in zip(*pieces, strict=True))).backward()
        optimizer.step()
        optimizer.zero_grad()
        named = [(name, p) for name, p in model.named_parameters() if p.numel()]
        states = {f"{key} {name}": optimizer.state[p][key] for key in STATES for name, p in named if p in optimizer.state}
        found.append({name: p.detach().clone() for name, p in named} | {key: value.clone() for key, value in states.items()})
    return found[1::2]


def test_every_plan_on_every_number_of_ranks_continues_every_other(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    where, worlds, tags = (str(tmp_path / "saves"), str(tmp_path / "nvme")), (1, 2, 3, 4, 8) if LONG else (1, 2, 3, 4), []
    for world in worlds:
        tags += run_ranks(save_all, world, *where, timeout=300)[0]
    truth, cells, worst = straight(), 0, [0.0, 0.0]
    for world in worlds:
        for rank, run in enumerate(run_ranks(load_all, world, *where, tags, truth, timeout=3000)):
            wrong = [cell for cell in run if cell[1] > 1e-6 or cell[2] > 1e-6]
            assert not wrong, f"{len(wrong)} of {len(run)}: {wrong[:5]}"
            worst = [max(worst[at], *(cell[at + 1] for cell in run)) for at in range(2)]
            cells += len(run) * (rank == 0)
    assert cells == len(tags) ** 2
    print(f"{cells} cells, at most {worst[0]:.1e} off after the load and {worst[1]:.1e} two steps later")
