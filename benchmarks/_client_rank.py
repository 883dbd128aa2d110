"""One rank of ``clients.py``: Transformers' Trainer, whose callback waits for the next request between two steps.

``deepspeed`` is whatever package this interpreter finds by the name: the real one, or onecopy by the front of the path.
"""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from _common import join, make_batches
from _ranks import Job, Meter, Requests

SIZES = {
    "10m": {"hidden_size": 320, "intermediate_size": 896, "num_hidden_layers": 8, "num_attention_heads": 5},
    "25m": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8},
}


def settings(stage: int) -> dict[str, Any]:
    """The file of Transformers' documentation, all that a trainer can fill in left to it."""
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto"}
    if stage == 3:
        zero |= dict.fromkeys(("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto")
        zero |= {"sub_group_size": 1e9, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9}
    half = {name: {"enabled": "auto"} for name in ("fp16", "bf16")}
    return {**dict.fromkeys(auto, "auto"), **half, "zero_optimization": zero, "steps_per_print": 10**9}


class Text(Dataset[dict[str, Any]]):
    """Rows of ``context`` bytes of the text that the other benchmarks train on."""

    def __init__(self, context: int) -> None:
        self._row = make_batches(0, 1, 1, context)

    def __len__(self) -> int:
        return 2**20

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._row(index % 4096)[0][0]
        return {"input_ids": row, "labels": row}


class Timed(Trainer):
    """Keeps the losses of the steps that are timed."""

    losses: list[torch.Tensor]

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.detach())
        return loss


class Turns(TrainerCallback):
    """Trains as many steps as a request says, answers, and waits for the next."""

    def __init__(self, requests: Requests, meter: Meter) -> None:
        self._requests, self._meter, self._orders = requests, meter, iter(requests)
        self.trainer: Timed | None = None
        self.await_request()

    def await_request(self) -> None:
        try:
            self._steps, self._warm = next(self._orders)
        except StopIteration:
            self._requests.end()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        if self._warm > 0:
            self._warm -= 1
            if self._warm == 0:
                self.trainer.losses = []
                self._meter.begin()
            return
        self._meter.lap()
        self._steps -= 1
        if self._steps == 0:
            self._requests.answer(self._meter.answer(self.trainer.losses, None))
            self.await_request()


def weights(job: Job) -> str:
    """A folder with a random model that ``from_pretrained`` reads, the same for all ranks and modes."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        shape = LlamaConfig(vocab_size=256, max_position_embeddings=job.context, use_cache=False, **SIZES[job.model])
        LlamaForCausalLM(shape).save_pretrained(folder[0])
    dist.broadcast_object_list(folder, 0)
    return folder[0]


def train(requests: Requests, job: Job) -> None:
    name, stage = job.mode[:-1], int(job.mode[-1])
    join(requests.rank, job.world, requests.port)
    import deepspeed

    if (name == "onecopy") != (deepspeed.DeepSpeedEngine.__module__.split(".")[0] == "onecopy"):
        raise RuntimeError(f"mode {job.mode}, and deepspeed is {deepspeed.__version__} of {deepspeed.__file__}")
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    folder = weights(job)
    meter = Meter(job.account)
    turns = Turns(requests, meter)
    args = TrainingArguments(
        "unused", per_device_train_batch_size=job.rows, max_steps=10**6, learning_rate=3e-4, lr_scheduler_type="constant",
        logging_strategy="no", save_strategy="no", report_to=[], seed=1, use_cpu=True, bf16=job.dtype == "bf16",
        disable_tqdm=True, dataloader_pin_memory=False, deepspeed=settings(stage),
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder)
    trainer = Timed(model, args, train_dataset=Text(job.context), callbacks=[turns])
    trainer.losses, turns.trainer = [], trainer
    dist.barrier()
    if requests.rank == 0:
        shutil.rmtree(folder)
    trainer.train()


if __name__ == "__main__":
    asked = Requests()
    train(asked, asked.job)
