"""Checkpoints that DeepSpeed itself wrote, and the losses of its own continued runs: how they were made.

``python tests/data/deepspeed_runs.py`` makes ``deepspeed.tar.xz`` beside this file, with an interpreter that has DeepSpeed
(0.19.8 made the one that is there). The tests unpack it, load each folder here and go on; they need no DeepSpeed.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ARCHIVE", "BEFORE", "RANKS", "ROWS", "RUNS", "Tiny", "batch", "config", "groups"]

ARCHIVE = Path(__file__).with_name("deepspeed.tar.xz")
RANKS, ROWS, BEFORE, AFTER = 2, 8, 3, 4
# name -> (stage, dtype)
RUNS = {
    "stage0-fp32": (0, "fp32"), "stage0-bf16": (0, "bf16"), "stage0-fp16": (0, "fp16"),
    "stage1-bf16": (1, "bf16"), "stage1-fp16": (1, "fp16"),
    "stage2-fp32": (2, "fp32"), "stage2-bf16": (2, "bf16"),
    "stage3-fp32": (3, "fp32"), "stage3-bf16": (3, "bf16"),
}  # fmt: skip
UNIVERSAL = ("stage2-bf16", "stage3-bf16")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Tiny(nn.Module):
    """A tied head, a frozen layer, a float and an integer buffer, and sizes that no number of ranks divides."""

    counted: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 5)
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("counted", torch.tensor([7, 1 << 40]))
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens) * self.scale
        x = x + self.down(torch.tanh(self.up(x))) + self.frozen(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def batch(step: int) -> Tensor:
    """The tokens of step ``step`` for all ranks together, of shape (ROWS, 6)."""
    return torch.randint(0, 11, (ROWS, 6), generator=torch.Generator().manual_seed(100 + step))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, vectors do not."""
    params = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in params if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0},
    ]


def config(stage: int, dtype: str, ranks: int = RANKS) -> dict[str, Any]:
    """The DeepSpeed JSON of a run."""
    found = {
        "train_micro_batch_size_per_gpu": ROWS // ranks,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95], "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.02, "warmup_num_steps": 20}},
        "gradient_clipping": 1.0,
    }
    if dtype == "bf16":
        found["bf16"] = {"enabled": True}
    if dtype == "fp16":
        found["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 2}
    return found


def _run(rank: int, name: str, folder: Path) -> None:
    """One rank of one run: train, save, go on, write down the losses."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # torch computes it on every CPU, if slowly
    stage, dtype = RUNS[name]
    torch.manual_seed(0)
    model = Tiny()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups(model), config=config(stage, dtype))
    each, losses = ROWS // RANKS, []
    for step in range(BEFORE + AFTER):
        if step == BEFORE:
            engine.save_checkpoint(str(folder), client_state={"epoch": 3, "seen": [1, 2.5, "x"]})
        loss = engine(batch(step)[rank * each : (rank + 1) * each].to(engine.device))
        engine.backward(loss)
        engine.step()
        torch.distributed.all_reduce(loss := loss.detach().double())
        losses.append(loss.item() / RANKS)
    if rank == 0:
        facts = {"losses": losses, "lr": engine.get_lr(), "scale": getattr(engine.optimizer, "cur_scale", None)}
        (folder / "run.json").write_text(json.dumps(facts))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _launch(name: str, folder: Path) -> None:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": "29517", "WORLD_SIZE": str(RANKS)}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, name, str(folder)], env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(RANKS)
    ]
    if any([process.wait() for process in ranks]):
        raise SystemExit(f"{name}: a rank failed")


def main() -> None:
    """Make the archive."""
    with tempfile.TemporaryDirectory() as top:
        for name in RUNS:
            _launch(name, Path(top) / name)
        for name in UNIVERSAL:
            folder = Path(top) / name / f"global_step{BEFORE}"
            tool = ["-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state", "--input_folder", str(folder)]
            subprocess.run([sys.executable, *tool, "--output_folder", f"{folder}_universal"], check=True)
        with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
            for path in sorted(Path(top).rglob("*")):
                if path.is_file() and path.suffix != ".py":
                    content, entry = path.read_bytes(), tarfile.TarInfo(str(path.relative_to(top)))
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))
    print(f"{ARCHIVE} has {ARCHIVE.stat().st_size} bytes")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        _run(int(os.environ["RANK"]), sys.argv[1], Path(sys.argv[2]))
    else:
        main()
