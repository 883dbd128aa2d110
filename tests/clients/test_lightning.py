"""Lightning's DeepSpeed strategies. They admit GPUs only, so a subclass lets the CPU in; all else is Lightning's own."""

from __future__ import annotations

import logging
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


def lightning_run(strategy: Any, epochs: int, resume: Path | None = None, save: Path | None = None) -> dict[str, Any]:
    """Lightning's Trainer with clipping, accumulation, a schedule and validation; the losses of each micro-batch."""
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader, TensorDataset

    class Regression(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = None
            self.losses: list[float] = []

        def configure_model(self) -> None:
            if self.net is None:
                torch.manual_seed(0)
                self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss = self.net(batch[0]).square().mean()
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("seen", self.net(batch[0]).abs().mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    data = DataLoader(TensorDataset(torch.cat([rows(step, 0) for step in range(6)])), batch_size=3)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=epochs, accumulate_grad_batches=2, gradient_clip_val=0.5,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Regression()
    trainer.fit(model, data, data, ckpt_path=None if resume is None else str(resume))
    if save is not None:
        trainer.save_checkpoint(save)
    seen = trainer.validate(model, data, verbose=False)[0]["seen"]
    return {"losses": model.losses, "seen": seen, "stepped": trainer.global_step, "optimizers": trainer.optimizers}


def trainer_against_ddp(rank: int, world: int, folder: Path) -> dict[str, Any]:
    become_deepspeed()
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
    from lightning.fabric.utilities.seed import reset_seed
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.cuda.empty_cache = lambda: None

    class OnCpu(DeepSpeedStrategy):
        root_device = torch.device("cpu")

        def setup_environment(self) -> None:
            DDPStrategy.setup_environment(self)

        def setup_distributed(self) -> None:
            reset_seed()
            self.set_world_ranks()
            self._init_deepspeed_distributed()

    found: dict[str, Any] = {"plain": lightning_run(DDPStrategy(), 2)}
    for stage, kind in ((2, DeepSpeedZeroOptimizer), (3, DeepSpeedZeroOptimizer_Stage3)):
        found[f"stage{stage}"] = straight = lightning_run(OnCpu(stage=stage), 2)
        assert [type(optimizer) for optimizer in straight.pop("optimizers")] == [kind]
        kept = folder / f"kept{stage}"
        lightning_run(OnCpu(stage=stage), 1, save=kept)
        found[f"resumed{stage}"] = lightning_run(OnCpu(stage=stage), 2, resume=kept)
        for run in (found["plain"], found[f"resumed{stage}"]):
            run.pop("optimizers", None)
    return found


def test_trainer_trains_and_resumes_as_ddp_does(tmp_path: Path) -> None:
    for rank in run_ranks(trainer_against_ddp, 2, tmp_path, timeout=120):
        plain = rank["plain"]
        assert len(plain["losses"]) == 8 and plain["stepped"] == 4
        for stage in (2, 3):
            assert rank[f"stage{stage}"]["losses"] == pytest.approx(plain["losses"], abs=1e-5)
            assert rank[f"resumed{stage}"]["losses"] == pytest.approx(plain["losses"][4:], abs=1e-5)
            for run in (rank[f"stage{stage}"], rank[f"resumed{stage}"]):
                assert run["seen"] == pytest.approx(plain["seen"], abs=1e-5) and run["stepped"] == plain["stepped"]
