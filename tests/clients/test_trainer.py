"""Transformers' Trainer with a DeepSpeed configuration trains what it trains without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.clients.support import Tokens, become_deepspeed, ds_config, needs, tiny_llama
from tests.ranks.harness import run_ranks

pytestmark = [pytest.mark.clients, needs("transformers", "accelerate")]

STEPS = 6


def arguments(out: Path, config: dict[str, Any] | None, **more: Any) -> Any:
    from transformers import TrainingArguments

    become_deepspeed()
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": STEPS, "learning_rate": 5e-3,
        "warmup_steps": 2, "logging_steps": 1, "save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps",
        "eval_steps": 3, "max_grad_norm": 0.5, "seed": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True,
        "dataloader_pin_memory": False, "deepspeed": config,
    }  # fmt: skip
    return TrainingArguments(str(out), **(settings | more))


def told(trainer: Any) -> list[float]:
    """Losses, norms, rates and evaluation losses in the order in which they were logged."""
    keys = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return [float(entry[key]) for entry in trainer.state.log_history for key in keys if key in entry]


def whole(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import LlamaForCausalLM

    become_deepspeed()
    return {name: value.clone() for name, value in LlamaForCausalLM.from_pretrained(folder).state_dict().items()}


def one_run(out: Path, model_folder: Path, config: dict[str, Any] | None, resume: bool = False, **more: Any) -> Any:
    from transformers import LlamaForCausalLM, Trainer

    args = arguments(out, config, **more)
    model = LlamaForCausalLM.from_pretrained(model_folder)
    model.resize_token_embeddings(70)
    assert model.get_input_embeddings().weight.shape == (70, 32) and model.config.vocab_size == 70
    trainer = Trainer(model, args, train_dataset=Tokens(16), eval_dataset=Tokens(6))
    trainer.train(resume_from_checkpoint=str(out / "checkpoint-3") if resume else None)
    trainer.save_model(str(out / "final"))
    dist.barrier()
    return trainer


def against_ddp(rank: int, world: int, folder: Path) -> dict[str, Any]:
    become_deepspeed()
    if rank == 0:
        tiny_llama(folder / "model")
    dist.barrier()
    plain = told(one_run(folder / "plain", folder / "model", None))
    found: dict[str, Any] = {"plain": plain, "weights": whole(folder / "plain" / "final")}
    for stage in (2, 3):
        out = folder / f"stage{stage}"
        trainer = one_run(out, folder / "model", ds_config(stage))
        assert trainer.is_deepspeed_enabled and type(trainer.model_wrapped).__module__ == "onecopy.deepspeed.engine"
        assert trainer.model_wrapped.zero_optimization_stage() == stage
        resumed = one_run(out, folder / "model", ds_config(stage), resume=True)
        assert resumed.state.global_step == STEPS
        found[f"stage{stage}"] = told(trainer), told(resumed), whole(out / "final")
    return found


def test_the_same_losses_as_ddp_at_every_step(tmp_path: Path) -> None:
    """Training, evaluation, saving, resuming, accumulation, from_pretrained, resize_token_embeddings, save_pretrained."""
    for rank in run_ranks(against_ddp, 2, tmp_path, timeout=120):
        assert len(rank["plain"]) == 3 * STEPS + 2
        for stage in (2, 3):
            seen, resumed, weights = rank[f"stage{stage}"]
            assert seen == pytest.approx(rank["plain"], abs=1e-5)
            assert resumed == pytest.approx(rank["plain"], abs=1e-5), "the log goes on from the checkpoint's"
            assert weights.keys() == rank["weights"].keys()
            # Adam divides by the gradient's size: where that is a rounding error, its sign alone decides.
            apart = [(weights[name] - value).abs().gt(1e-5).float().mean().item() for name, value in rank["weights"].items()]
            assert max(apart) < 0.02, apart
            names = {path.name for path in (tmp_path / f"stage{stage}" / "checkpoint-6").iterdir()}
            assert {"global_step6", "latest", "model.safetensors", "config.json", "scheduler.pt"} <= names


def from_json(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Optimizer and schedule from the configuration; a model made by from_config; evaluation alone; bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer

    become_deepspeed()
    if rank == 0:
        tiny_llama(folder / "model")
    dist.barrier()
    optimizer = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
    warmup = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"}
    sections = {"optimizer": optimizer, "scheduler": {"type": "WarmupLR", "params": warmup}}
    found: dict[str, Any] = {}
    for stage in (2, 3):
        trainer = one_run(folder / f"json{stage}", folder / "model", ds_config(stage, **sections), save_strategy="no")
        found[f"json{stage}"] = told(trainer)
    trainer = one_run(folder / "bf16", folder / "model", ds_config(3), bf16=True, save_strategy="no")
    assert trainer.model_wrapped.bfloat16_enabled()
    found["bf16"] = told(trainer)
    args = arguments(folder / "eval", ds_config(3))
    model = LlamaForCausalLM.from_pretrained(folder / "model")
    assert hasattr(model.lm_head.weight, "ds_id") and model.lm_head.weight.shape == (64, 32)
    found["eval"] = Trainer(model, args, eval_dataset=Tokens(6)).evaluate()["eval_loss"]
    config = LlamaConfig.from_pretrained(folder / "model")
    born = LlamaForCausalLM._from_config(config)
    assert hasattr(born.lm_head.weight, "ds_id")
    become_deepspeed()
    plain = Trainer(LlamaForCausalLM.from_pretrained(folder / "model"), arguments(folder / "e", None), eval_dataset=Tokens(6))
    found["plain eval"] = plain.evaluate()["eval_loss"]
    return found


def test_optimizer_and_schedule_of_the_configuration(tmp_path: Path) -> None:
    for rank in run_ranks(from_json, 2, tmp_path, timeout=120):
        assert rank["json2"] == pytest.approx(rank["json3"], abs=1e-5)
        assert rank["json2"][2:9:3] == pytest.approx([0.0, 2.5e-3, 5e-3]), "the rate after each step"
        assert rank["bf16"] == pytest.approx(rank["json3"], abs=2.0) and len(rank["bf16"]) == 3 * STEPS + 2
        assert rank["eval"] == pytest.approx(rank["plain eval"], abs=1e-5)
