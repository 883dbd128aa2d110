"""What the client tests share: a tiny language model, its data, and a process in which ``deepspeed`` is onecopy."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import warnings
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

__all__ = ["TINY", "Tokens", "become_deepspeed", "ds_config", "needs", "take_the_name", "tiny_llama"]

TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def needs(*packages: str) -> Any:
    """The mark that skips a module's tests where a client is missing, or where the real DeepSpeed has the name."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    real = [found.version for found in distributions(name="deepspeed") if "+onecopy" not in found.version]
    why = f"not installed: {', '.join(missing)}" if missing else f"DeepSpeed {real[0]} is installed" if real else ""
    return pytest.mark.skipif(bool(missing or real), reason=why or "everything is there")


def take_the_name() -> None:
    """In a rank, before it imports any client: they look for ``deepspeed`` once, and ranks go from test to test."""
    from onecopy.deepspeed.alias import search_path

    if search_path() not in sys.path:
        sys.path.insert(0, search_path())


def become_deepspeed() -> None:
    """In a rank: the name is onecopy's, nothing is asked of a network, and no client remembers an earlier run."""
    take_the_name()
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1")
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU"):
        os.environ.pop(name, None)
    warnings.simplefilter("ignore")
    for name in ("onecopy", "accelerate", "transformers", "peft", "trl"):
        logging.getLogger(name).setLevel(logging.ERROR)
    import transformers
    from accelerate import PartialState
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    transformers.utils.logging.disable_progress_bar()
    unset_hf_deepspeed_config()
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    PartialState(cpu=True)


def tiny_llama(folder: Path) -> str:
    """A random Llama of 30 thousand parameters in ``folder``, written by this rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(folder)
    return str(folder)


class Tokens(Dataset[dict[str, Any]]):
    """``count`` rows of 12 tokens to be predicted."""

    def __init__(self, count: int) -> None:
        self.rows = torch.randint(3, 64, (count, 12), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        return {"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)}


def ds_config(stage: int, **more: Any) -> dict[str, Any]:
    """The configuration that Transformers' documentation shows, with all that a trainer can fill in left to it."""
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto"}
    if stage == 3:
        zero |= {
            "sub_group_size": 1e9, "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        }  # fmt: skip
    auto = dict.fromkeys(
        ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
    )
    half = {name: {"enabled": "auto"} for name in ("fp16", "bf16")}
    return {**auto, **half, "zero_optimization": zero, "steps_per_print": 2000, "wall_clock_breakdown": False, **more}
