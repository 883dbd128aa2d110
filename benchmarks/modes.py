"""How each library is set up to train the same model: one function per library, from a model to a :class:`Trainer`.

Every library gets ``torch.optim.AdamW(fused=True)`` and is set up as its own documentation says. In bfloat16 DDP holds the
model in bfloat16 and nothing else; the others keep float32 master weights and moments as shards and compute in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

LR = 3e-4
MODES = (
    *("ddp", "fsdp2", "fsdp2-held", "deepspeed1", "deepspeed2", "deepspeed3"),
    *("onecopy0", "onecopy1", "onecopy2", "onecopy3", "onecopy3-held"),
)


@dataclass
class Trainer:
    """One training loop. ``gradients(x, y)`` runs forward and backward on a batch and returns the detached loss,
    ``update()`` the optimizer step.

    ``ledger()`` is what the library itself says of its memory and traffic, None where it says nothing. ``units()`` is
    how many groups of parameters it communicates at a time; for onecopy it is known after the first step.
    """

    gradients: Callable[[Tensor, Tensor], Tensor]
    update: Callable[[], object]
    ledger: Callable[[], dict[str, Any] | None] = lambda: None
    units: Callable[[], int] = lambda: 1

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.gradients(x, y)
        self.update()
        return loss


def build(mode: str, model: nn.Module, dtype: str) -> Trainer:
    """Set ``mode`` (one of :data:`MODES`, or ``"plain"``: no library at all) up on ``model``, a float32 model on its device.

    ``dtype`` is "fp32" or "bf16". Needs an initialised process group, except for ``"plain"``.
    """
    name = mode.rstrip("0123456789") if not mode.endswith("-held") else mode.removesuffix("-held").rstrip("0123456789")
    held = mode.endswith("-held")
    digits = [c for c in mode.removesuffix("-held") if c.isdigit()]
    match name, digits:
        case "plain", _:
            return _plain(model, dtype)
        case "ddp", _:
            return _ddp(model, dtype)
        case "fsdp", ["2"]:
            return _fsdp2(model, dtype, reshard=not held)
        case "deepspeed", [number]:
            return _deepspeed(model, dtype, int(number))
        case "onecopy", [number]:
            return _onecopy(model, dtype, int(number), reshard=not held)
    raise ValueError(f"mode {mode!r} does not exist; choose from {', '.join(MODES)}")


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LR, fused=True)


def blocks(model: nn.Module) -> nn.ModuleList:
    """The largest ``ModuleList`` of ``model``: its transformer blocks."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda module: sum(p.numel() for p in module.parameters()))


def _torch_loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> Trainer:
    def gradients(x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = model(x, y)
        loss.backward()
        return loss.detach()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(gradients, update)


def _plain(model: nn.Module, dtype: str) -> Trainer:
    model = model.bfloat16() if dtype == "bf16" else model
    return _torch_loop(model, adamw(model.parameters()))


def _ddp(model: nn.Module, dtype: str) -> Trainer:
    model = model.bfloat16() if dtype == "bf16" else model
    wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _torch_loop(wrapped, adamw(wrapped.parameters()))


def _fsdp2(model: nn.Module, dtype: str, reshard: bool) -> Trainer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if dtype == "bf16" else None)
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for block in blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    trainer = _torch_loop(model, adamw(model.parameters()))
    trainer.units = lambda: len(blocks(model)) + 1
    return trainer


def _deepspeed(model: nn.Module, dtype: str, stage: int) -> Trainer:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # its default is 1.0; nobody else here clips
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config)

    def gradients(x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = engine(x, y)
        engine.backward(loss)
        return loss.detach()

    return Trainer(gradients, engine.step)


def _onecopy(model: nn.Module, dtype: str, stage: int, reshard: bool) -> Trainer:
    import onecopy

    plan = onecopy.stage(stage, dtype=dtype, reshard_after_forward=reshard)
    engine: Any = onecopy.initialize(model, plan, optimizer=adamw)

    def gradients(x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = engine(x, y)
        loss.backward()
        return loss.detach()

    def units() -> int:
        moved = engine.measured()["collectives"]
        return max(int(moved[op]["count"]) for op in ("reduce", "sum") if op in moved)

    return Trainer(gradients, engine.step, lambda: {"predicted": engine.predicted(), "measured": engine.measured()}, units)
