"""PEFT's LoRA under Trainer: the frozen base costs no state, adapters are saved whole, and bytes are as predicted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.clients.support import TINY, Tokens, become_deepspeed, ds_config, needs, tiny_llama
from tests.ranks.harness import run_ranks

pytestmark = [pytest.mark.clients, needs("transformers", "accelerate", "peft")]

STEPS = 4
BASE = 22688 * 4  # bytes of the frozen base in fp32
ADAPTERS = 2 * 2 * 4 * 32 + 2 * 4 * 32 + 2 * 4 * 16  # elements: A and B of q_proj and v_proj in two layers, r = 4


def lora(folder: Path, dtype: torch.dtype | None = None) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    base = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    torch.manual_seed(5)
    return get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


def one_run(out: Path, model: Path, config: dict[str, Any] | None, resume: bool = False, **kinds: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    become_deepspeed()
    args = TrainingArguments(
        str(out), per_device_train_batch_size=2, max_steps=STEPS, learning_rate=5e-2, logging_steps=1, save_steps=2,
        seed=1, report_to=[], use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False, deepspeed=config,
    )  # fmt: skip
    trainer = Trainer(lora(model, **kinds), args, train_dataset=Tokens(16))
    trainer.train(resume_from_checkpoint=str(out / "checkpoint-2") if resume else None)
    trainer.save_model(str(out / "adapter"))
    dist.barrier()
    return trainer


def told(trainer: Any) -> list[float]:
    return [float(entry[key]) for entry in trainer.state.log_history for key in ("loss", "grad_norm") if key in entry]


def adapters(rank: int, world: int, folder: Path) -> dict[str, Any]:
    become_deepspeed()
    from safetensors.torch import load_file

    if rank == 0:
        tiny_llama(folder / "model")
    dist.barrier()
    found: dict[str, Any] = {"plain": told(one_run(folder / "plain", folder / "model", None))}
    host = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    for name, stage in (("stage2", 2), ("stage3", 3), ("offloaded", 3)):
        config = ds_config(stage, zero_force_ds_cpu_optimizer=False)
        config["zero_optimization"] |= host if name == "offloaded" else {}
        trainer = one_run(folder / name, folder / "model", config)
        engine = trainer.model_wrapped
        assert engine.measured()["resident"] == engine.predicted()["resident"]
        assert engine.measured()["collectives"] == engine.predicted()["collectives"]
        saved = load_file(folder / name / "adapter" / "adapter_model.safetensors")
        shapes = {tuple(value.shape) for value in saved.values()}
        assert len(saved) == 8 and shapes == {(4, 32), (32, 4), (16, 4)}, "whole and under the adapter's own names"
        assert all(name.startswith("base_model.model.model.layers.") for name in saved)
        manifest = json.loads((folder / name / "checkpoint-2" / "global_step2" / "manifest.json").read_text())
        assert len(manifest["parameters"]) == 8, "the base is not in the checkpoint"
        resumed = told(one_run(folder / name, folder / "model", config, resume=True))
        found[name] = told(trainer), resumed, engine.measured()["resident"]
    return found


def test_a_frozen_base_costs_no_gradient_and_no_optimizer_state(tmp_path: Path) -> None:
    for rank in run_ranks(adapters, 2, tmp_path, timeout=180):
        for name in ("stage2", "stage3", "offloaded"):
            seen, resumed, _ = rank[name]
            assert seen == pytest.approx(rank["plain"], abs=1e-5) and resumed == pytest.approx(rank["plain"], abs=1e-5)
        mine = 4 * ADAPTERS // 2  # bytes of this rank's half of one fp32 state
        device = rank["stage2"][2]["device"]
        assert device == {"parameter": BASE + 4 * ADAPTERS, "gradient": mine, "master": 0, "moments": 2 * mine}
        device = rank["stage3"][2]["device"]
        assert device == {"parameter": (BASE + 4 * ADAPTERS) // 2, "gradient": mine, "master": 0, "moments": 2 * mine}
        assert rank["offloaded"][2]["device"]["parameter"] == 0 and rank["offloaded"][2]["host"]["moments"] == 2 * mine


def mixed(rank: int, world: int, folder: Path) -> dict[int, Any]:
    """A base in bf16 with adapters in fp32, in one unit; merged afterwards."""
    become_deepspeed()
    import onecopy.deepspeed as deepspeed

    if rank == 0:
        tiny_llama(folder / "model")
    dist.barrier()
    found: dict[int, Any] = {}
    rows = Tokens(16).rows
    for stage in (0, 2, 3):
        model = lora(folder / "model", torch.bfloat16)
        kinds = {param.dtype for param in model.parameters() if param.requires_grad}
        frozen = {param.dtype for param in model.parameters() if not param.requires_grad}
        assert kinds == {torch.float32} and frozen == {torch.bfloat16}
        optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=5e-2)
        config = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": 2}
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        losses = []
        for step in range(STEPS):
            batch = rows[4 * step + 2 * rank : 4 * step + 2 * rank + 2]
            loss = engine(input_ids=batch, labels=batch).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        assert engine.measured()["resident"] == engine.predicted()["resident"]
        assert {param.dtype for param in model.parameters() if not param.requires_grad} == {torch.bfloat16}
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            model.merge_adapter()
        whole = engine.full_state_dict(rank0_only=True)
        merged = {name: value for name, value in whole.items() if name.endswith("q_proj.base_layer.weight")}
        found[stage] = losses, engine.measured()["resident"]["device"], merged
        engine.destroy()
    return found


def test_a_base_in_bf16_and_adapters_in_fp32(tmp_path: Path) -> None:
    assert TINY["num_hidden_layers"] == 2
    for rank, found in enumerate(run_ranks(mixed, 2, tmp_path, timeout=120)):
        for stage in (2, 3):
            losses, device, merged = found[stage]
            assert losses == pytest.approx(found[0][0], abs=2e-2), "bf16 arithmetic"
            cut = 2 if stage == 3 else 1
            assert device["parameter"] == (BASE // 2 + 4 * ADAPTERS) // cut
            assert (device["master"], device["moments"], device["gradient"]) == (0, 4 * ADAPTERS, 2 * ADAPTERS)
            assert (len(merged) == 2) == (rank == 0)
            assert all(torch.allclose(value, found[0][2][name], atol=2e-2) for name, value in merged.items())
