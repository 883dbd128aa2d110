"""Lightning's DeepSpeed strategies. They admit GPUs only, so a subclass lets the CPU in; all else is Lightning's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.clients.support import become_deepspeed, needs
from tests.ranks.harness import run_ranks

pytestmark = [pytest.mark.clients, needs("lightning", "transformers", "accelerate")]

STEPS = 4


def rows(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def fabric_run(strategy: Any, folder: Path) -> list[float]:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy

    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    with fabric.init_module():
        bare = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    model, optimizer = fabric.setup(bare, torch.optim.AdamW(bare.parameters(), lr=1e-2))
    losses = []
    for step in range(STEPS):
        if step == STEPS - 1 and not isinstance(strategy, DDPStrategy):
            fabric.save(folder, {"model": model, "optimizer": optimizer, "step": step, "kept": torch.ones(2)})
        loss = model(rows(step, fabric.global_rank)).square().mean()
        fabric.backward(loss)
        if isinstance(strategy, DDPStrategy):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if not isinstance(strategy, DDPStrategy):
        state = {"model": model, "optimizer": optimizer, "step": 0, "kept": None}
        fabric.load(folder, state)
        assert state["step"] == STEPS - 1 and torch.equal(state["kept"], torch.ones(2))
        assert model(rows(STEPS - 1, fabric.global_rank)).square().mean().item() == losses[-1]
    return losses


def against_ddp(rank: int, world: int, folder: Path) -> dict[str, list[float]]:
    become_deepspeed()
    from lightning.fabric.strategies import DDPStrategy, DeepSpeedStrategy, Strategy

    torch.cuda.empty_cache = lambda: None  # the strategy calls it without asking whether there is CUDA

    class OnCpu(DeepSpeedStrategy):
        root_device = torch.device("cpu")

        def setup_environment(self) -> None:
            Strategy.setup_environment(self)
            if not self._config_initialized:
                self._set_world_ranks()
                self._init_deepspeed_distributed()
                self._format_config()
                self._config_initialized = True

    found = {"plain": fabric_run(DDPStrategy(), folder)}
    for stage in (2, 3):
        found[f"stage{stage}"] = fabric_run(OnCpu(stage=stage), folder / f"stage{stage}")
    return found


def test_fabric_trains_and_resumes_as_ddp_does(tmp_path: Path) -> None:
    for rank in run_ranks(against_ddp, 2, tmp_path, timeout=120):
        for stage in (2, 3):
            assert rank[f"stage{stage}"] == pytest.approx(rank["plain"], abs=1e-6)
