"""TRL's SFTTrainer and DPOTrainer: a policy, and a frozen reference that has an engine of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.clients.support import become_deepspeed, ds_config, needs, tiny_llama
from tests.ranks.harness import run_ranks

pytestmark = [pytest.mark.clients, needs("transformers", "accelerate", "trl", "datasets")]

STEPS = 3


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    words = [*special.values(), *(f"w{i}" for i in range(60))]
    inner = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def told(trainer: Any) -> list[float]:
    return [float(entry[key]) for entry in trainer.state.log_history for key in ("loss", "grad_norm") if key in entry]


def both(folder: Path, out: Path, config: dict[str, Any] | None) -> list[float]:
    from datasets import Dataset
    from transformers import LlamaForCausalLM
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    common: dict[str, Any] = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": STEPS, "learning_rate": 5e-3,
        "logging_steps": 1, "save_strategy": "no", "report_to": [], "seed": 1, "use_cpu": True, "bf16": False,
        "dataloader_pin_memory": False, "disable_tqdm": True, "gradient_checkpointing": False, "deepspeed": config,
        "max_length": 16,
    }  # fmt: skip
    draw = torch.Generator().manual_seed(0)

    def text(words: int) -> str:
        return " ".join(f"w{i}" for i in torch.randint(0, 60, (words,), generator=draw).tolist())

    become_deepspeed()
    rows = Dataset.from_dict({"text": [text(10) for _ in range(16)]})
    args = SFTConfig(str(out), **common)
    model = LlamaForCausalLM.from_pretrained(folder)
    trainer = SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer())
    trainer.train()
    found = told(trainer)
    become_deepspeed()
    rows = Dataset.from_list([{"prompt": text(4), "chosen": text(5), "rejected": text(5)} for _ in range(16)])
    args = DPOConfig(str(out), **common)
    policy, reference = (LlamaForCausalLM.from_pretrained(folder) for _ in range(2))
    trainer = DPOTrainer(policy, ref_model=reference, args=args, train_dataset=rows, processing_class=tokenizer())
    trainer.train()
    if config is not None:
        engine = trainer.ref_model
        assert type(engine).__module__ == "onecopy.deepspeed.engine" and engine.optimizer is None
        resident = engine.measured()["resident"]["device"]
        assert resident["moments"] == resident["master"] == resident["gradient"] == 0
    return found + told(trainer)


def against_ddp(rank: int, world: int, folder: Path) -> dict[str, list[float]]:
    os.environ["HF_HOME"] = os.environ["HF_DATASETS_CACHE"] = str(folder / f"cache{rank}")
    become_deepspeed()
    import datasets

    datasets.disable_progress_bars()
    if rank == 0:
        tiny_llama(folder / "model")
    dist.barrier()
    kinds = {"plain": None, "stage2": ds_config(2), "stage3": ds_config(3)}
    return {name: both(folder / "model", folder / name, config) for name, config in kinds.items()}


def test_the_same_losses_as_ddp(tmp_path: Path) -> None:
    for rank in run_ranks(against_ddp, 2, tmp_path, timeout=180):
        assert len(rank["plain"]) == 4 * STEPS
        for stage in (2, 3):
            assert rank[f"stage{stage}"] == pytest.approx(rank["plain"], abs=1e-5)
