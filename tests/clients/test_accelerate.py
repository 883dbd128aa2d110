"""Accelerate with a DeepSpeed plugin, and with two: the loop that trains under DDP trains the same here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.clients.support import Tokens, become_deepspeed, ds_config, needs, tiny_llama
from tests.ranks.harness import run_ranks

pytestmark = [pytest.mark.clients, needs("transformers", "accelerate")]

SECTIONS = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
}


def plugin(stage: int, **more: Any) -> Any:
    from accelerate.utils import DeepSpeedPlugin

    return DeepSpeedPlugin(hf_ds_config=ds_config(stage, **more))


def loop(accelerator: Any, folder: Path, dummy: bool = False) -> tuple[list[float], Any, Any, Any]:
    """Eight micro-batches with accumulation 2; the losses, and what was prepared."""
    from accelerate.utils import DummyOptim, DummyScheduler
    from transformers import LlamaForCausalLM, get_linear_schedule_with_warmup

    model = LlamaForCausalLM.from_pretrained(folder)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler: Any = get_linear_schedule_with_warmup(optimizer, 4, 16)
    if dummy:
        optimizer = DummyOptim(model.parameters(), lr=5e-3)
        scheduler = DummyScheduler(optimizer, warmup_num_steps=3, total_num_steps=8)
    loader = DataLoader(Tokens(32), batch_size=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            assert not optimizer.step_was_skipped
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model, optimizer, scheduler


def step(accelerator: Any, model: Any, optimizer: Any) -> list[float]:
    """Losses of two windows on the same rows."""
    losses = []
    for batch in DataLoader(Tokens(8), batch_size=2):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
        losses.append(loss.item())
    return losses


def against_ddp(rank: int, world: int, folder: Path) -> dict[str, Any]:
    become_deepspeed()
    from accelerate import Accelerator

    if rank == 0:
        tiny_llama(folder / "model")
    dist.barrier()
    found: dict[str, Any] = {"plain": loop(Accelerator(gradient_accumulation_steps=2), folder / "model")[0]}
    for stage in (0, 2, 3):
        become_deepspeed()
        accelerator = Accelerator(gradient_accumulation_steps=2, deepspeed_plugin=plugin(stage, gradient_clipping=1.0))
        losses, model, optimizer, scheduler = loop(accelerator, folder / "model")
        assert str(accelerator.distributed_type) == "DistributedType.DEEPSPEED"
        assert scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]]
        state = accelerator.get_state_dict(model)
        assert (state is None) == (rank > 0 and stage == 3)
        accelerator.save_state(str(folder / f"state{stage}"))
        ahead = step(accelerator, model, optimizer)
        accelerator.load_state(str(folder / f"state{stage}"))
        assert step(accelerator, model, optimizer) == ahead, "the state is all there is"
        assert type(accelerator.unwrap_model(model)).__name__ == "LlamaForCausalLM"
        found[f"stage{stage}"] = losses, {} if state is None else {name: value.clone() for name, value in state.items()}
    become_deepspeed()
    accelerator = Accelerator(gradient_accumulation_steps=2, deepspeed_plugin=plugin(3, **SECTIONS))
    found["dummy"] = loop(accelerator, folder / "model", dummy=True)[0]
    return found


def test_the_same_losses_as_ddp(tmp_path: Path) -> None:
    for rank in run_ranks(against_ddp, 2, tmp_path, timeout=120):
        for stage in (0, 2, 3):
            losses, state = rank[f"stage{stage}"]
            assert losses == pytest.approx(rank["plain"], abs=1e-5)
            whole = rank["stage0"][1]
            assert all((value - whole[name]).abs().gt(1e-5).float().mean() < 0.02 for name, value in state.items())
        assert rank["dummy"][0] == pytest.approx(rank["plain"][0], abs=1e-5) and rank["dummy"][-1] < rank["dummy"][0]


def two_plugins(rank: int, world: int, folder: Path) -> list[float]:
    """A student at stage 2 learns from a teacher that is cut at stage 3 and has no optimizer."""
    become_deepspeed()
    from accelerate import Accelerator
    from transformers import LlamaForCausalLM

    if rank == 0:
        tiny_llama(folder / "model")
    dist.barrier()
    student_plugin = plugin(2, train_micro_batch_size_per_gpu=2)
    teacher_plugin = plugin(3, train_micro_batch_size_per_gpu=2)
    accelerator = Accelerator(deepspeed_plugins={"student": student_plugin, "teacher": teacher_plugin})
    student = LlamaForCausalLM.from_pretrained(folder / "model")
    assert not hasattr(student.lm_head.weight, "ds_id")
    accelerator.state.select_deepspeed_plugin("teacher")
    teacher = LlamaForCausalLM.from_pretrained(folder / "model")
    assert hasattr(teacher.lm_head.weight, "ds_id")
    teacher_accelerator = Accelerator()
    teacher = teacher_accelerator.prepare(teacher)
    teacher.eval()
    accelerator.state.select_deepspeed_plugin("student")
    optimizer: Any = torch.optim.AdamW(student.parameters(), lr=5e-3)
    student, optimizer, loader = accelerator.prepare(student, optimizer, DataLoader(Tokens(16), batch_size=2))
    gaps = []
    for batch in loader:
        with torch.no_grad():
            wanted = teacher(**batch).logits * 3
        gap = (student(**batch).logits - wanted).square().mean()
        accelerator.backward(gap)
        optimizer.step()
        optimizer.zero_grad()
        gaps.append(gap.item())
    assert (student.zero_optimization_stage(), teacher.zero_optimization_stage()) == (2, 3)
    return gaps


def test_two_plugins(tmp_path: Path) -> None:
    for gaps in run_ranks(two_plugins, 2, tmp_path, timeout=120):
        assert len(gaps) == 4 and gaps[-1] < gaps[0]
