"""The engine as its user meets it: call it, backward, step."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from onecopy.checkpoint.background import Saves
from onecopy.checkpoint.export import Exported, Options, export_engine
from onecopy.checkpoint.load import Loaded, Wanted, load
from onecopy.checkpoint.own import Stateful
from onecopy.checkpoint.save import Wish, save
from onecopy.checkpoint.whole import full_state_dict
from onecopy.comm import assembly, watch
from onecopy.engine.ballot import raise_at_floor
from onecopy.engine.build import Core
from onecopy.engine.hooks import scaled_loss
from onecopy.engine.parameter import home_of
from onecopy.engine.precision import LossScaler
from onecopy.engine.ticking import Ticks
from onecopy.engine.uneven import Shares, uneven
from onecopy.errors import CheckpointError, EngineError
from onecopy.plan.plan import Plan
from onecopy.schedule.predict import LINKS, predict

__all__ = ["Engine"]

T = TypeVar("T")

_RESIDENT = ("parameter", "gradient", "master", "moments")


class Engine(nn.Module):
    """A sharded model with its optimizer, made by :func:`onecopy.initialize`.

    ``engine(...)`` is the model's forward; ``loss.backward()`` and ``engine.backward(loss)`` are the same;
    ``engine.step()`` ends a micro-batch and steps the optimizer when the window of ``plan.batch.accumulation``
    micro-batches is full.

    ==============  ==================================================================================
    global_steps    windows that were completed, skipped ones included
    skipped_steps   windows whose gradients were not finite: no weight, moment or schedule moved
    micro_steps     ``step()`` calls
    grad_norm       global norm of the last window's gradients before clipping by the plan, after what the loop did to
                    ``p.grad`` by hand; None before the first
    ==============  ==================================================================================
    """

    def __init__(self, module: nn.Module, core: Core) -> None:
        super().__init__()
        self.module = module
        self._core = core
        self._ticks = Ticks()
        self._scaler = LossScaler(core.plan.precision.loss_scale)
        self.global_steps = 0
        self.skipped_steps = 0
        self.micro_steps = 0
        self._window_began = 0  # micro_steps then
        self.grad_norm: float | None = None
        self._closed = False
        self._forced_boundary: bool | None = None
        self._measured: dict[str, Any] = {}
        self._saves = Saves()
        plan, world = core.plan, core.ranks.mesh.world
        shares = plan.batch.accumulation if plan.batch.divide else 1
        core.hooks.gradient_scale = 1.0 / (world * shares)
        self._shares = Shares(world * plan.batch.accumulation)
        core.hooks.scales = plan.precision.loss_scale is not None and core.optimizer is not None
        core.hooks.output_scale = lambda scaler=self._scaler: scaler.scale  # type: ignore[misc]
        core.rounds.boundary = _Boundary(self)
        core.rounds.suspects.wanted = lambda scaler=self._scaler: scaler.at_floor  # type: ignore[misc]
        watch.engines.add(self)
        # An engine that is dropped leaves no hooks on the model; they do not refer to it.
        weakref.finalize(self, core.hooks.remove)

    # What it is

    @property
    def plan(self) -> Plan:
        return self._core.plan

    @property
    def optimizer(self) -> Optimizer | None:
        """The user's optimizer, its groups as given, over this rank's pieces of the parameters."""
        return self._core.optimizer

    @property
    def scheduler(self) -> LRScheduler | None:
        return self._core.scheduler

    @property
    def device(self) -> torch.device:
        return self._core.ranks.device

    @property
    def loss_scale(self) -> float:
        """What gradients are multiplied with on their way in; 1.0 unless the plan scales the loss."""
        return self._scaler.scale

    def lr(self) -> list[float]:
        """The learning rate of every group, as the user gave them."""
        return [float(group["lr"]) for group in self._optimizer().param_groups]

    # A step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        self._check_open()
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor, **options: Any) -> torch.Tensor:
        """``loss.backward()``; returns ``loss``. Raises :class:`EngineError` without an optimizer.

        With loss scaling the loss itself is scaled here, so every road from it to a parameter is. ``loss.backward()``
        scales where gradients enter the model, at its outputs: a penalty computed from parameters outside needs this
        method.
        """
        self._optimizer()
        hooks = self._core.hooks
        if not hooks.scales:
            loss.backward(**options)
            return loss
        with scaled_loss(self._scaler.scale):
            (loss.float() * self._scaler.scale).backward(**options)
        return loss

    def is_boundary(self) -> bool:
        """Will the current micro-batch end in an optimizer step?"""
        if self._forced_boundary is not None:
            return self._forced_boundary
        return (self.micro_steps + 1 - self._window_began) % self.plan.batch.accumulation == 0

    def set_boundary(self, boundary: bool | None) -> None:
        """Say whether the current micro-batch ends in a step; None counts micro-batches again. All ranks alike."""
        self._forced_boundary = boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add up on this rank and are reduced by the next one outside.

        Plans that keep gradients cut hold them whole meanwhile: memory for fewer collectives.
        """
        rounds = self._core.rounds
        before, rounds.sync = rounds.sync, False
        try:
            yield
        finally:
            rounds.sync = before

    def step(self) -> bool:
        """End a micro-batch; at the window's end clip, step the optimizer, tick the schedule and drop the gradients.

        Returns True when weights moved. Raises :class:`EngineError` when no rank had a backward pass in the window, and
        when gradients overflow at the smallest loss scale.
        """
        self._optimizer()
        assembly.settle()
        core, boundary = self._core, self.is_boundary()
        self._check_order()
        if boundary or core.rounds.must_meet():
            core.rounds.complete()
        core.rounds.next_micro_batch(with_data=not self._shares.open)
        moved = self._step_boundary() if boundary else False
        core.run.flush()
        self.micro_steps += 1
        self._saves.raise_agreed()
        return moved

    def uneven(self, batches: Iterable[T]) -> Iterator[T]:
        """``batches`` of this rank, for ranks that have different numbers of them. Collective in every iteration.

        ::

            for x, y in engine.uneven(loader):
                engine(x, y).backward()
                engine.step()

        A rank that has no more batches goes on taking part with zeros, inside the loop, until no rank has any; the mean
        is over the micro-batches that had data. A window that is left incomplete at the end is stepped with what it has.
        """
        if self.plan.step.when == "backward":
            raise EngineError(
                "uneven() learns at the end of a window how many micro-batches had data, and StepPolicy(when='backward') "
                "steps before that; use when='boundary'"
            )
        return uneven(self, batches, self._shares)

    def finish_step(self) -> None:
        """The last update reaches the parameters where steps are delayed (``StepPolicy(when="delayed")``), as before an
        evaluation; otherwise it has already. :meth:`save`, :meth:`load` and all that reads or writes whole values does it
        by itself. Collective."""
        if self._core.stepper is not None:
            self._core.stepper.quiet()

    def train(self, mode: bool = True) -> Engine:
        """As for any module. Ranks may run different numbers of forward passes in evaluation, and meet here again."""
        if self._core.gathering.others.asks:
            assembly.settle() if mode else assembly.expect()
        return super().train(mode)

    def discard_gradients(self) -> None:
        """Forget the gradients of the open window, for example after an interrupted backward pass: the next micro-batch is
        the first of a new one. On all ranks."""
        self._window_began = self.micro_steps
        self._core.rounds.discard()
        self._shares.take()
        if self._core.stepper is not None:
            self._core.stepper.discard()

    def close(self) -> None:
        """Detach from the model: hooks go, open gradients are dropped, and the parameters may join another engine.

        Parameters that rest whole are ordinary ones from here on; sharded ones stay sharded. Waits for an asynchronous
        save; raises :class:`~onecopy.errors.CheckpointError`, closed, when that failed.
        """
        error = self._saves.wait()
        core = self._core
        self._closed = True
        core.hooks.remove()
        if core.stepper is not None and core.stepper.end():
            warnings.warn("close() drops the last update, which is delayed; call finish_step() before", stacklevel=2)
        if core.stepper is not None:
            core.stepper.discard()
        for unit in core.run.units:
            for weights in unit.weights:
                weights.detach()
        if all(weights.rest.plain is not None for unit in core.run.units for weights in unit.weights):
            core.tiers.close()  # else the parameters are on disk, whose files go when they do
        self._saves.release()
        if error:
            raise CheckpointError(error)

    def __getstate__(self) -> Any:
        raise EngineError(
            "an engine is bound to its process groups and cannot be copied or pickled; copy engine.module and initialize "
            "again, or write a checkpoint with engine.save()"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops nothing: gradients are dropped by :meth:`step`, so one in the middle of a window loses nothing. Between a
        backward pass and its step it warns: :meth:`discard_gradients` is what drops them."""
        self._core.rounds.warn_of_zeroing()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As for any module, whose names begin with ``module.`` here; the bare names of the model will do as well."""
        known = {name for name, _ in (*self.module.named_parameters(), *self.module.named_buffers())}
        own = any(name.startswith("module.") and name.removeprefix("module.") in known for name in state_dict)
        if not own and not known.isdisjoint(state_dict):
            return self.module.load_state_dict(state_dict, strict, assign)
        return super().load_state_dict(state_dict, strict, assign)

    def _optimizer(self) -> Optimizer:
        self._check_open()
        if self._core.optimizer is None:
            raise EngineError("this engine has no optimizer: it is for forward passes; pass optimizer= to initialize")
        return self._core.optimizer

    def __getattr__(self, name: str) -> Any:
        """What the engine lacks is asked of the model: ``engine.generate(...)``."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(super().__getattr__("module"), name)

    def progress(self) -> str:
        """Where in a run this engine is, for people."""
        rounds, depth, window = self._core.rounds, self._core.gathering.depth, self.plan.batch.accumulation
        doing = ", in a backward pass" if rounds.open else ", in a forward pass" if depth else ""
        micro = f", micro-batch {(self.micro_steps - self._window_began) % window + 1} of {window}" if window > 1 else ""
        return f"step {self.global_steps}{micro}{doing}"

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("this engine is closed; make another with onecopy.initialize")

    def _check_order(self) -> None:
        torn = self._core.stepper.torn if self._core.stepper is not None else None
        if torn is not None:
            raise EngineError(
                "some weights are stepped and some are not, since the last step was interrupted: "
                f"{torn}{self._saves.remedy(torn)}"
            )
        if self._core.rounds.interrupted or self._core.rounds.open:
            raise EngineError(
                "the last backward pass was interrupted, so this window's gradients are incomplete; call "
                "engine.discard_gradients() on all ranks and start the window again"
            )

    def _step_boundary(self) -> bool:
        core, stepper = self._core, self._core.stepper
        assert stepper is not None
        core.gathering.release_all()
        stepper.join_early()
        stepper.check_gradients(self.discard_gradients)
        self._refuse_strangers()
        gradient = {memory.tier: memory.live["gradient"] for memory in core.tiers.all}
        # Gradients are too large by the loss scale, and too small where ranks had no data.
        scale = self._scaler.scale / self._shares.take()
        state = stepper.look(self._saves.failure())
        verdict = stepper.agree(scale, core.rounds.late(), state)
        if any(verdict.late):
            stepper.refuse_early("gradients came after their unit was sent")
            core.rounds.send_late(verdict.late)
            stepper.check_gradients(self.discard_gradients)
            verdict = stepper.agree(scale, core.rounds.late(), state)
        if verdict.empty:
            what = "after every p.grad was set to None" if stepper.edits else "without a backward pass on any rank"
            stepper.discard()
            raise EngineError(
                f"step() {what} since the last step: nothing to step with; engine.discard_gradients() skips a window"
            )
        if not verdict.finite:
            stepper.refuse_early(f"gradients of step {self.global_steps} are not finite")
        if not verdict.finite and self._scaler.at_floor:
            raise_at_floor(self._scaler, self.global_steps, core.rounds.suspects.names, core.hooks.outputs_finite())
        self.global_steps += 1
        core.tiers.clock.step = self.global_steps
        self.grad_norm = verdict.norm
        if verdict.finite:
            stepper.apply(verdict, scale)
            self.grad_norm = verdict.norm  # step hooks may have changed gradients
            if core.scheduler is not None:
                self._ticks.tick(core.scheduler)
        else:
            self.skipped_steps += 1
            stepper.discard()
        self._scaler.update(overflow=not verdict.finite)
        core.rounds.suspects.names.clear()
        core.rounds.turns.learn(core.ranks)
        self._measured = self._measure(gradient)
        core.ledger.close_step()
        for memory in core.tiers.all:
            memory.reset_peak()
        self._saves.agreed = verdict.save_failed
        return verdict.finite

    # Whole values, and checkpoints

    def full_state_dict(self, rank0_only: bool = False) -> dict[str, torch.Tensor]:
        """What ``state_dict()`` of the unsharded model would be, by bare names, copied to the host. Collective.

        Parameters have the dtype they compute in; tied ones are one tensor under each of their names. ``rank0_only``:
        other ranks get an empty dict. Beside the result, one unit is whole at a time.
        """
        self.finish_step()
        return full_state_dict(self, rank0_only)

    def save(
        self,
        directory: str | os.PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        *,
        data: Stateful | None = None,
        keep_last: int | None = None,
        asynchronous: bool = False,
        latest: bool = True,
        patience: float | None = None,
        frozen: bool = True,
    ) -> str:
        """Write a checkpoint of all that training goes on from; returns its folder, ``directory/tag``. Collective.

        ``tag``: default ``step<global_steps>``; a checkpoint that has it already is replaced. ``client_state``: a dict
        of JSON values that :meth:`load` returns. ``data``: a loader or sampler with ``state_dict()``, for :meth:`load`.
        ``keep_last``: afterwards remove all but so many of the newest complete checkpoints. ``asynchronous``: return once
        there is a copy in host memory, and write that while training goes on. ``latest``: make it the one that :meth:`load`
        picks. ``patience``: seconds to wait for ranks that have not called it (default: the job's, see
        :func:`onecopy.initialize`). ``frozen=False``: without parameters that need no gradient, for models whose base is
        kept elsewhere; it is loaded with ``strict=False``. What is written is visible only once it is complete and durable.
        See ``docs/checkpoint.md``.

        Raises :class:`~onecopy.errors.CheckpointError` on every rank, with nothing left behind and what was there
        intact, when one rank cannot write, and in the middle of an accumulation window. Of an asynchronous save that
        fails later, it is raised by the next :meth:`step` that ends a window (which is taken), :meth:`save`, :meth:`load` or
        :meth:`close`.
        """
        self.finish_step()
        wish = Wish(client_state, data, latest, keep_last, asynchronous, frozen)
        return save(self, directory, tag, wish, patience)

    def load(
        self,
        directory: str | os.PathLike[str],
        tag: str | None = None,
        *,
        optimizer_states: bool = True,
        scheduler_states: bool = True,
        random_states: bool | None = None,
        data: Stateful | None = None,
        strict: bool = True,
        patience: float | None = None,
    ) -> Loaded:
        """Go on from the checkpoint ``tag`` of ``directory``, by default its latest; returns the client state.
        Collective.

        The number of ranks, the plan and the precision may be others than those it was saved with. Without
        ``optimizer_states`` moments, group options, loss scale, step counts and random states stay as they are, without
        ``scheduler_states`` schedule and learning rates. ``random_states``: whether torch's, Python's and numpy's random
        generators go on as they would have. ``data``: goes on from where the one given to :meth:`save` was.
        ``strict=False`` loads what matches and warns of the rest, which is in ``.differences`` of the result.

        Raises :class:`~onecopy.errors.CheckpointError` on every rank when there is no such checkpoint, a file is
        missing or damaged, or the model is another one. The engine is then as it was; or, when the damage is inside a file,
        it refuses to step or save until a checkpoint is loaded.
        """
        self.finish_step()
        wanted = Wanted(optimizer_states, scheduler_states, strict, random_states, data)
        return load(self, directory, tag, wanted, patience)

    def export(
        self,
        directory: str | os.PathLike[str],
        dtype: str | torch.dtype | None = None,
        max_shard_size: int | str | None = "5GB",
        *,
        model_dir: str | os.PathLike[str] | None = None,
        patience: float | None = None,
    ) -> Exported:
        """Write plain weights to the folder ``directory``, as ``from_pretrained`` reads them. Collective.

        Safetensors files of at most ``max_shard_size`` bytes (one tensor may be larger), with an index when they are several;
        tied weights once; a Hugging Face model's configuration; configuration and tokenizer of the folder ``model_dir``.
        ``dtype``: of floating-point parameters, "fp32" from their master weights (default: that they compute in); buffers
        stay as they are. Of a PEFT model, the adapters alone, in PEFT's layout. One unit is whole at a time; rank 0 writes.

        Raises :class:`~onecopy.errors.CheckpointError` on every rank, with nothing left behind, when rank 0 cannot write or
        there are weights already.
        """
        self.finish_step()
        folder = None if model_dir is None else os.fspath(model_dir)
        return export_engine(self, directory, Options.of(dtype, max_shard_size, model_dir=folder), patience)

    def _refuse_strangers(self) -> None:
        """A parameter that joined the model after initialize would never be stepped."""
        for name, param in self.module.named_parameters():
            if home_of(param) is None and param.numel() and param.requires_grad:
                raise EngineError(
                    f"parameter {name!r} joined the model after the engine was made and would not be trained; close the "
                    "engine and initialize again"
                )

    # Ledgers

    def predicted(self) -> dict[str, Any]:
        """Bytes resident and at the peak by kind, and collectives of one step, as the schedule says they will be."""
        return predict(self._core.schedule, self._core.ranks.piece)

    def measured(self) -> dict[str, Any]:
        """The same of the last complete window, as it was; before the first one, as it is now."""
        return self._measured or self._measure({memory.tier: memory.live["gradient"] for memory in self._core.tiers.all})

    def _measure(self, gradient: dict[str, int]) -> dict[str, Any]:
        ledger, resident, peak = self._core.ledger, {}, {}
        for memory in self._core.tiers.all:
            kinds = {kind: memory.live[kind] for kind in _RESIDENT} | {"gradient": gradient[memory.tier]}
            if memory.tier == "device" or any(kinds.values()):
                resident[memory.tier] = kinds
            if memory.tier == "device" or memory.peak_total:
                peak[memory.tier] = {"total": memory.peak_total, **{kind: size for kind, size in memory.peak.items() if size}}
        groups = {"sum": "across", "vote": "world"}
        return {
            "resident": resident,
            "peak": peak,
            "moved": {link: ledger.moves[link] for link in LINKS if ledger.moves.get(link)},
            "collectives": {
                kind: {
                    "count": sent.count,
                    "elements": sent.elements,
                    "bytes": sent.bytes,
                    "group": groups.get(kind, "within"),
                }
                for kind, sent in ledger.open.items()
            },
        }


class _Boundary:
    """Asks its engine without keeping it alive."""

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self) -> bool:
        engine = self._engine()
        return engine is not None and engine.is_boundary()
