"""``DeepSpeedEngine``: the engine under DeepSpeed's method names."""

from __future__ import annotations

import logging
import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from onecopy.checkpoint.export import save_weights
from onecopy.comm import meeting
from onecopy.deepspeed.client_state import pack, unpack
from onecopy.deepspeed.comm import get_local_rank
from onecopy.deepspeed.runtime.base_optimizer import (
    DeepSpeedZeroOptimizer,
    DeepSpeedZeroOptimizer_Stage3,
    ZeROOptimizer,
)
from onecopy.engine.build import Core
from onecopy.engine.engine import Engine
from onecopy.errors import ConfigError

__all__ = ["DeepSpeedEngine", "Settings"]

_logger = logging.getLogger("onecopy")
# Names of DeepSpeed's engine for what is decided before a run here, and what there is instead.
_ABSENT = {
    "set_train_batch_size": "the schedule is made for one number of micro-batches; destroy() this engine and initialize "
    "another with other gradient_accumulation_steps, which takes the weights over",
    "set_train_micro_batch_size": "a forward pass takes any number of samples; the configuration's is the dataloader's",
    "offload_states": "states rest where the configuration says: zero_optimization.offload_optimizer and offload_param",
    "reload_states": "states rest where the configuration says: zero_optimization.offload_optimizer and offload_param",
}
_SCRIPT = """\
# Plain weights out of the checkpoints in this folder: python zero_to_fp32.py . OUTPUT_DIR
from onecopy.deepspeed.utils.zero_to_fp32 import main

if __name__ == "__main__":
    main()
"""


def _leave_script(folder: Path) -> None:
    """Put beside the checkpoints the script by whose name people turn them into plain weights."""
    path = folder / "zero_to_fp32.py"
    if not path.exists():
        path.write_text(_SCRIPT)


@dataclass(frozen=True)
class Settings:
    """What DeepSpeed's names ask of the configuration. ``config`` is the dict itself, as the user gave it."""

    config: dict[str, Any]
    stage: int
    world: int
    rank: int


class DeepSpeedEngine(Engine):
    """An :class:`~onecopy.engine.engine.Engine` that also answers to DeepSpeed's names.

    Whatever is neither an engine's nor a DeepSpeed name is looked up in the module, so ``engine.generate(...)`` is the
    model's own method.
    """

    _all: ClassVar[weakref.WeakSet[DeepSpeedEngine]] = weakref.WeakSet()
    settings: Settings
    _shown: ZeROOptimizer | None = None
    _moved: bool = False
    overflow: bool = False  # was the last window skipped, because a gradient was not finite?

    def __init__(self, module: nn.Module, core: Core) -> None:
        super().__init__(module, core)
        self._all.add(self)

    @classmethod
    def close_former(cls, model: nn.Module) -> bool:
        """Close engines that have parameters of ``model``; were there any?

        A trainer that is made for a model which another one has trained knows nothing of the former's engine, and the newest
        is the one that is used.
        """
        wanted = set(model.parameters())
        former = [engine for engine in cls._all if not (engine._closed or wanted.isdisjoint(engine.module.parameters()))]
        for engine in former:
            engine.close()
        return bool(former)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The caller's optimizer, in a wrapper that also answers ``overflow``, ``loss_scale`` and ``.optimizer``."""
        own = self._core.optimizer
        if own is not None and (self._shown is None or self._shown.optimizer is not own):
            cut = any(not rule.row.optimizer.replicated for rule in self.plan.rules)
            states_cut = DeepSpeedZeroOptimizer if cut else ZeROOptimizer
            shown = DeepSpeedZeroOptimizer_Stage3 if self.zero_optimization_partition_weights() else states_cut
            self._shown = shown(own, self)
        return self._shown

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("module", "settings"):  # not there yet, or no engine at all
                raise
            if name in _ABSENT and not hasattr(self.module, name):
                raise AttributeError(f"the engine has no {name}(): {_ABSENT[name]}") from None
            return getattr(self.module, name)

    # training ----------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **options: Any) -> Tensor:
        """Backward of this micro-batch; returns the loss as it counts in the step, divided by the accumulation steps.

        ``scale_wrt_gas=False``: ``loss`` is divided already. ``options`` are those of ``Tensor.backward``.
        """
        if self._forced_boundary is not None and self._core.rounds.passes:
            self._core.rounds.next_micro_batch(with_data=True)  # who says where a window ends calls step() there only
        steps = self.plan.batch.accumulation
        counted = loss / steps if scale_wrt_gas else loss
        # The engine divides gradients by the accumulation count, so a loss that is divided already is multiplied first.
        super().backward(loss if scale_wrt_gas else loss * steps, retain_graph=retain_graph, **options)
        return counted.detach()

    def step(self, *_: Any, **__: Any) -> bool:
        """End a micro-batch; see :meth:`onecopy.engine.engine.Engine.step`. Arguments have no effect."""
        done, skipped = self.global_steps, self.skipped_steps
        self._moved = super().step()
        if self.global_steps > done:
            self.overflow = self.skipped_steps > skipped
        return self._moved

    def was_step_applied(self) -> bool:
        """Did the last ``step()`` move the weights? False inside a window, and after a gradient that was not finite."""
        return self._moved

    def compile(self, backend: Any = "inductor", compile_kwargs: dict[str, Any] | None = None, **_: Any) -> None:
        """Compile the model's forward in place with ``torch.compile``."""
        self.module.compile(backend=backend, **(compile_kwargs or {}))

    def get_global_grad_norm(self) -> float | None:
        """Global norm of the gradients of the last step before clipping; None before the first."""
        return self.grad_norm

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the current micro-batch ends in an optimizer step; None lets the engine count again."""
        self.set_boundary(is_boundary)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Will the current micro-batch end in an optimizer step?"""
        return self.is_boundary()

    def get_lr(self) -> list[float]:
        """Learning rates, one per parameter group."""
        return self.lr()

    def get_mom(self) -> list[Any]:
        """First moments' decay, one per parameter group: ``betas`` of Adam's kind, ``momentum`` of SGD's."""
        return [group.get("betas", group.get("momentum")) for group in self._optimizer().param_groups]

    def get_batch_info(self) -> tuple[int, int, int]:
        """``(train_batch_size(), train_micro_batch_size_per_gpu(), gradient_accumulation_steps())``."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def empty_partition_cache(self) -> None:
        """Give back what is gathered: a forward pass without backward, as in generation, may leave the last units whole."""
        self._core.gathering.release_units()

    @property
    def lr_scheduler(self) -> Any:
        """The learning-rate scheduler; may be set, also to None."""
        return self.scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any) -> None:
        self._core.scheduler = scheduler

    # configuration -----------------------------------------------------------------------------------------------

    @property
    def config(self) -> dict[str, Any]:
        """The DeepSpeed configuration as it was given."""
        return self.settings.config

    def train_batch_size(self) -> int:
        """Samples per optimizer step over all ranks."""
        return self.train_micro_batch_size_per_gpu() * self.plan.batch.accumulation * self.settings.world

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per micro-batch and rank. Raises :class:`ConfigError` when the configuration does not say it."""
        micro = self.plan.batch.micro
        if micro is None:
            raise ConfigError("the configuration has neither train_micro_batch_size_per_gpu nor train_batch_size")
        return micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.plan.batch.accumulation

    def gradient_clipping(self) -> float:
        """Largest global norm; 0 when gradients are not clipped."""
        return self.plan.clip.max_norm or 0.0

    def zero_optimization_stage(self) -> int:
        """``zero_optimization.stage`` of the configuration."""
        return self.settings.stage

    def zero_optimization(self) -> bool:
        """Is a stage above 0 asked for?"""
        return bool(self.settings.stage)

    def zero_optimization_partition_weights(self) -> bool:
        """Are parameters cut over the ranks while nobody uses them?"""
        return any(not rule.row.parameter.rest.replicated for rule in self.plan.rules)

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Does the configuration ask for whole weights where a program saves a model?"""
        section = self.settings.config.get("zero_optimization") or {}
        names = ("gather_16bit_weights_on_model_save", "gather_fp16_weights_on_model_save")
        return any(section.get(prefix + name) is True for prefix in ("stage3_", "") for name in names)

    def fp16_enabled(self) -> bool:
        """Is float16 the compute dtype?"""
        return self.plan.precision.dtype == "float16"

    def bfloat16_enabled(self) -> bool:
        """Is bfloat16 the compute dtype?"""
        return self.plan.precision.dtype == "bfloat16"

    @property
    def local_rank(self) -> int:
        """This process's number on its machine."""
        return get_local_rank()

    @property
    def global_rank(self) -> int:
        """This process's number among all."""
        return self.settings.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.settings.world

    @property
    def dp_world_size(self) -> int:
        """Number of data-parallel ranks, which is all of them."""
        return self.settings.world

    # checkpoints -------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save everything to ``save_dir/tag`` (by default ``global_step<N>``); every rank must call it. ``save_dir`` also
        gets the script ``zero_to_fp32.py``, which runs :mod:`onecopy.deepspeed.utils.zero_to_fp32`.

        ``client_state``: tensors and plain values, in containers, that :meth:`load_checkpoint` gives back.
        ``save_latest``: also make it the one that a load without a tag finds. ``exclude_frozen_parameters``: leave out
        what needs no gradient; such a checkpoint is loaded with ``load_module_strict=False``. Returns True; raises
        :class:`~onecopy.errors.CheckpointError` on every rank.
        """
        named = str(tag) if tag is not None else f"global_step{self.global_steps}"
        frozen = not exclude_frozen_parameters
        self.save(os.fspath(save_dir), named, client_state=pack(client_state), latest=save_latest, frozen=frozen)
        meeting.from_rank0(lambda: _leave_script(Path(save_dir)))
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: None = None,
    ) -> tuple[str, dict[str, Any]]:
        """Load ``load_dir/tag`` (by default the newest complete one), ours or DeepSpeed's; every rank must call it.

        Returns its path and the client state. ``load_module_only``: weights and buffers alone. Where nothing complete
        is found this raises :class:`~onecopy.errors.CheckpointError`, so that no run starts from scratch unasked.
        """
        if custom_load_fn is not None:
            raise ConfigError("load_checkpoint(custom_load_fn=...) is not supported: change the model after the load")
        loaded = self.load(
            os.fspath(load_dir),
            str(tag) if tag is not None else None,
            optimizer_states=load_optimizer_states and not load_module_only,
            scheduler_states=load_lr_scheduler_states and not load_module_only,
            strict=load_module_strict,
        )
        return loaded.path, unpack(dict(loaded))

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """Whole weights by name on rank 0's host, in the dtype they compute in; None on the other ranks. Collective.

        Raises ValueError where the configuration does not ask for it: programs go on to save their checkpoint instead.
        """
        if not self.zero_gather_16bit_weights_on_model_save():
            raise ValueError(
                "consolidated weights need zero_optimization.stage3_gather_16bit_weights_on_model_save: true; otherwise "
                "save_checkpoint() has them"
            )
        found = self.full_state_dict(rank0_only=True)
        if self.settings.rank:
            return None
        frozen = {name for name, p in self.module.named_parameters(remove_duplicate=False) if not p.requires_grad}
        return {name: value for name, value in found.items() if not (exclude_frozen_parameters and name in frozen)}

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the weights, in the dtype they compute in, and the buffers as one file; every rank must call it.

        The file is what ``torch.load`` gives a plain model, or safetensors where ``save_filename`` ends so. Returns True; and
        False, with nothing written, where the configuration cuts parameters over ranks (stage 3) and its
        ``stage3_gather_16bit_weights_on_model_save`` is not true.
        """
        if self.zero_optimization_partition_weights() and not self.zero_gather_16bit_weights_on_model_save():
            if self.settings.rank == 0:
                _logger.warning(
                    "%s is not written: zero_optimization.stage3_gather_16bit_weights_on_model_save is not true",
                    os.path.join(save_dir, save_filename),
                )
            return False
        self.finish_step()
        save_weights(self, save_dir, save_filename, frozen=not exclude_frozen_parameters)
        return True

    def save_fp16_model(self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin") -> bool:
        """:meth:`save_16bit_model` under its former name."""
        return self.save_16bit_model(save_dir, save_filename)

    def destroy(self) -> None:
        """Detach from the model and drop open gradients."""
        self.close()
