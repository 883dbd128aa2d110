"""The boundary step: agree, clip, step each unit, send the new weights round."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from onecopy.comm import meeting
from onecopy.comm.collectives import Edge
from onecopy.comm.groups import Ranks
from onecopy.engine.agreement import State, look, refuse_unless_alike
from onecopy.engine.ballot import LARGEST, Verdict, added, norms_of, number_of, root
from onecopy.engine.beside import Beside, Task
from onecopy.engine.gradients import Gradients
from onecopy.engine.run import Run, UnitRun
from onecopy.engine.tilewise import Ahead, scratch_elements, step_tiles
from onecopy.engine.weights import Weights
from onecopy.errors import DiskError, EngineError, OneCopyError
from onecopy.optim import Borrowed, Tiles
from onecopy.plan.layout import Slot, Tier
from onecopy.schedule.ops import Op
from onecopy.tiers.disk import Disk
from onecopy.tiers.held import Held
from onecopy.tiers.tiers import Tiers

__all__ = ["Stepper"]


class Stepper:
    """Runs the ``vote`` and ``step`` events for all units."""

    def __init__(self, run: Run, tiles: Tiles, ranks: Ranks, world: Edge | None, tiers: Tiers) -> None:
        self._run = run
        self._tiles = tiles
        self._ranks = ranks
        self._world = world
        self._tiers = tiers
        self._clip = run.schedule.plan.clip
        self._when = run.schedule.plan.step.when
        # What is stepped on a thread: in a backward pass, or after the step that it belongs to.
        self._beside = Beside(tiles, tiers) if self._when != "boundary" else None
        if self._beside is not None:
            for register in (tiles.optimizer.register_state_dict_pre_hook, tiles.optimizer.register_load_state_dict_pre_hook):
                register(_at_rest(weakref.ref(self)))
        run.settled = self._step_early if self._when == "backward" else self._note_norms
        self._moments: dict[Tier, int] = {}
        self._buffers = [gradients for unit in run.units for gradients in unit.gradients]
        # What interrupted a step: some tiles are stepped and some are not, until a checkpoint is loaded.
        self.torn: str | None = None
        # Norms by parameter, by their order and the number of things that were settled.
        self._norms: dict[tuple[float, int], dict[str, torch.Tensor]] = {}
        # What the user's code did to ``p.grad`` in this window; the same on every rank, or the step is refused.
        self.edits: list[tuple[object, ...]] = []

    # Agreeing

    def look(self, failed_save: str = "") -> State:
        """What the ranks must have done alike; what was written to parameters so far is taken in."""
        what = partial(look, self._run.units, self._tiles.options(), self.edits, failed_save)
        # While a step runs beside, a write cannot be taken in, and is an error on every rank.
        return meeting.all_or_none(what) if self._when == "delayed" else what()

    def agree(self, scale: float, late: list[bool], state: State) -> Verdict:
        """One small all-reduce: the ``norm_type`` norm over all elements once, the parameters used, the units ``late``,
        whether there are step hooks, and whether ``state`` has the same ``repr`` on every rank.

        Each rank adds up its own piece, whatever it holds beside it, so every layout gives the same parts. ``scale``:
        the loss scale in the gradients.
        """
        self.forget_norms()
        kind = self._clip.norm_type
        part = self._part(kind)
        own = number_of(state)
        flags = [float(own), float(LARGEST - own), float(self._tiles.hooked), *(float(unsent) for unsent in late)]
        flags += [float(used) for gradients in self._buffers for used in gradients.marks.used]
        ballot = torch.tensor([part, *flags], dtype=torch.float64, device="cpu")
        if self._world is not None:
            self._world.all_reduce(ballot, "vote", dist.ReduceOp.MAX if kind == math.inf else dist.ReduceOp.SUM)
        total, one, other, hooked, *counts = ballot.tolist()
        failed = bool(state.failed_save)
        if (one + other != LARGEST) if kind == math.inf else (one != own * self._ranks.mesh.world):
            failed = refuse_unless_alike(state, self._run.units)
        norm = total if kind == math.inf else root(total, kind)
        unsent = [count > 0 for count in counts[: len(late)]]
        return Verdict(norm / scale, self._flags(counts[len(late) :]), unsent, hooked > 0, failed)

    def _part(self, kind: float) -> float:
        """This rank's share: the largest element, or the sum of ``|g| ** kind``."""
        if not self._ranks.first_replica or self._ranks.device.type == "meta":
            return 0.0
        if self._ranks.device.type != "cpu":
            torch.accelerator.current_stream().synchronize()  # gradients on their way to the host
        norms = [norm for gradients in self._buffers for norm in self._norms_of(gradients)]
        if not norms:
            return 0.0
        part = added(norms, kind)
        if not math.isfinite(part):  # squares overflow long before gradients do
            wide = [norm for gradients in self._buffers for norm in norms_of(gradients.parts(), kind, wide=True)]
            part = added(wide, kind)
        # MAX and SUM over ranks agree that infinity is not finite, but not on NaN.
        return math.inf if math.isnan(part) else part

    def _norms_of(self, gradients: Gradients) -> list[torch.Tensor]:
        """Norms of the parts of what this rank has of ``gradients``."""
        if gradients.sums.norms is not None:
            return gradients.sums.norms
        return norms_of(gradients.parts(), self._clip.norm_type, wide=False)

    def _note_norms(self, unit: UnitRun) -> None:
        """The gradients of ``unit`` are whole: those on their way to the disk are not read again for the vote."""
        for gradients in unit.gradients:
            if gradients.sums.on_disk and self._ranks.first_replica:
                gradients.sums.norms = self._norms_of(gradients)

    def check_gradients(self, discard: Callable[[], None]) -> None:
        """Gradients that rest on disk are there. Where the disk of some rank failed, :class:`DiskError` is raised on all of
        them, after ``discard()``: the window is lost, and no state has changed. Collective where gradients rest on disk."""
        disk = self._tiers.disk
        if disk is None or not any(gradients.sums.on_disk for gradients in self._buffers):
            return
        problem = next((gradients.sums.problem for gradients in self._buffers if gradients.sums.problem is not None), None)
        try:
            meeting.all_or_none(partial(_settle, disk, problem))
        except OneCopyError as error:
            discard()
            raise DiskError(f"{error}. {_WINDOW_LOST}") from error

    # Gradients as the user sees them

    def gradients_of(self, buffer: str) -> Gradients | None:
        """Those of the buffer with this name; None when it is not trained."""
        return next((gradients for gradients in self._buffers if gradients.spec.name == buffer), None)

    def has_gradients(self) -> bool:
        """Is there anything in the open window?"""
        return any(gradients.any for gradients in self._buffers)

    def forget_norms(self) -> None:
        """The gradients were changed."""
        self._norms.clear()

    def knows_norms(self, order: float) -> bool:
        """Were they asked for before, with nothing new since?"""
        return (order, sum(gradients.sums.settled for gradients in self._buffers)) in self._norms

    def norms_by_parameter(self, order: float, scale: float) -> dict[str, torch.Tensor]:
        """Norms of the unscaled gradients of all parameters. Collective where they were not asked for before.

        Raises :class:`EngineError` in the middle of an accumulation window, where gradients are not summed yet.
        """
        key = order, sum(gradients.sums.settled for gradients in self._buffers)
        if key in self._norms:
            return self._norms[key]
        if any(gradients.total is None for gradients in self._buffers):
            raise EngineError("the norm of a gradient is known after the last micro-batch of its window, not before")
        names, parts = [], []
        for gradients in self._buffers:
            low, high = gradients.spec.layout.bounds(gradients.piece)
            for slot in gradients.spec.layout.slots:
                names.append(slot.param.name)
                first, last = (slot.local(low, high) if self._ranks.first_replica else None) or (low, low)
                own = gradients.mine(first - low, last - low).double()
                norm = torch.linalg.vector_norm(own, order) if own.numel() else own.new_zeros(())
                parts.append(norm if order == math.inf else norm.pow(order))
        found = torch.stack(parts).cpu()
        if self._world is not None:
            self._world.all_reduce(found, "norms", dist.ReduceOp.MAX if order == math.inf else dist.ReduceOp.SUM)
        norms = (found if order == math.inf else found.pow(1 / order)) / scale
        self._norms = {key: dict(zip(names, norms.unbind(), strict=True))}
        return self._norms[key]

    def _flags(self, counts: list[float]) -> dict[str, list[bool]]:
        used, at = {}, 0
        for gradients in self._buffers:
            used[gradients.spec.name] = [count > 0 for count in counts[at : at + len(gradients.marks.used)]]
            at += len(gradients.marks.used)
        return used

    # Stepping

    def apply(self, verdict: Verdict, scale: float) -> None:
        """Step every unit with its gradients divided by ``scale`` and clipped, and make the new weights whole where
        they rest whole. Sending a unit's weights overlaps with stepping the next.

        What was stepped beside the backward pass is sent; a step that is delayed begins, and the one before it is sent.
        """
        self.edits = []
        self._tiles.check_groups()
        with self._tearing():
            self._tiles.whole_step(partial(self._proceed, verdict, scale))

    def _proceed(self, verdict: Verdict, scale: float) -> None:
        """The optimizer's step hooks have run: what they did to gradients, parameters and options counts, and is agreed on
        as what the training loop did before, in the same ``verdict``."""
        if verdict.hooked:
            self.join_early()
            after = self.agree(scale, [], self.look())
            verdict.norm, verdict.used, self.edits = after.norm, after.used, []
            if not verdict.finite:
                raise EngineError("gradients are not finite after the optimizer's step hooks")
        factor = 1.0 / scale
        if self._clip.max_norm is not None:
            # As torch.nn.utils.clip_grad_norm_ does it.
            factor *= min(1.0, self._clip.max_norm / (verdict.norm + 1e-6))
        if self._when == "delayed":
            self.quiet()
            self._begin_delayed(verdict, factor)
        else:
            self._move(partial(self._step_units, verdict, factor))

    def _move(self, steps: Callable[[], None]) -> None:
        """``steps`` change the parameters."""
        with self._tearing(), self._run.writing(), torch.no_grad():
            steps()
        for tier, size in self._tiles.moments().items():
            self._tiers.memory(tier).count("moments", size - self._moments.get(tier, 0))
            self._moments[tier] = size

    @contextmanager
    def _tearing(self) -> Iterator[None]:
        """What is interrupted in here leaves the engine torn."""
        try:
            yield
        except BaseException as error:  # Ctrl-C too
            self.torn = self.torn or f"{type(error).__name__}: {error}"
            self.discard()
            raise

    def _step_units(self, verdict: Verdict, factor: float) -> None:
        """A disk that fails on one rank fails the step on all: until then the others get what they wait for."""
        sent: deque[list[Op]] = deque()
        problem: DiskError | None = None
        done = set(self._beside.take()) if self._beside is not None else set()
        with closing(Ahead(self._tiles, self._tiled(done))) as coming:
            for unit in self._run.units:
                if not unit.gradients:
                    continue
                try:
                    if unit in done:
                        self._encode(unit)
                    elif problem is None:
                        self._step_unit(unit, verdict, factor, coming)
                except DiskError as error:
                    problem = error
                spreads = self._run.ops(unit, "step", "spread")
                self._run.start(spreads)
                sent.append(spreads)
                if len(sent) > 2:
                    self._run.finish(sent.popleft())
        while sent:
            self._run.finish(sent.popleft())
        disk = self._tiers.disk
        if disk is not None:
            meeting.all_or_none(partial(_settle, disk, problem))

    def _tiled(self, done: set[UnitRun]) -> Iterator[tuple[Weights, Held]]:
        """The buffers that are stepped tile by tile, and are not ``done``, with their gradients."""
        for unit in self._run.units:
            for gradients in unit.gradients if unit not in done else ():
                if gradients.spec.tiled and gradients.total is not None:
                    yield _weights_of(unit, gradients), gradients.total

    def _step_unit(self, unit: UnitRun, verdict: Verdict, factor: float, coming: Ahead) -> None:
        held = {weights.spec.name: weights for weights in unit.weights}
        together = [gradients for gradients in unit.gradients if not gradients.spec.tiled]
        self._step_together(together, held, verdict, factor)
        for gradients in (*together, *(gradients for gradients in unit.gradients if gradients.spec.tiled)):
            weights = held[gradients.spec.name]
            if gradients.spec.tiled:
                self._step_tiles(gradients, weights, _used(gradients, verdict), factor, coming)
            gradients.drop()
            weights.changed()

    def _step_together(
        self, buffers: list[Gradients], held: dict[str, Weights], verdict: Verdict, factor: float
    ) -> None:
        """Step whole buffers on the device, all at once."""
        stepped: list[tuple[Borrowed, torch.Tensor, dict[Slot, bool]]] = []
        cast: list[torch.Tensor] = []
        for gradients in buffers:
            assert gradients.total is not None
            weights, gradient = held[gradients.spec.name], gradients.total.plain
            assert gradient is not None
            if gradient.dtype != weights.state.dtype:
                self._tiers.device.count("workspace", gradient.numel() * weights.state.dtype.itemsize)
                gradient = gradient.to(weights.state.dtype)
                cast.append(gradient)
            if factor != 1.0:
                gradient.mul_(factor)
            stepped.append((self._tiles.borrow(weights, 0), gradient, _used(gradients, verdict)))
        self._tiles.step(stepped)
        for tensor in cast:
            self._tiers.device.drop("workspace", tensor)
        for gradients, (borrowed, _, _) in zip(buffers, stepped, strict=True):
            weights = held[gradients.spec.name]
            if weights.master is not None:
                weights.write_back(0, borrowed.values.wait())
            self._tiles.give_back(borrowed)

    def _step_tiles(
        self, gradients: Gradients, weights: Weights, used: dict[Slot, bool], factor: float, coming: Ahead
    ) -> None:
        assert gradients.total is not None
        memory = self._tiers.computing(weights.spec.row.optimizer.tier)
        elements = scratch_elements(weights, gradients.total.dtype)
        scratch = memory.alloc("workspace", elements, weights.state.dtype) if elements else None
        step_tiles(self._tiles, self._tiers, weights, used, factor, coming, scratch)
        if scratch is not None:
            memory.drop("workspace", scratch)

    # Stepping on a thread

    def _step_early(self, unit: UnitRun) -> None:
        """The gradients of ``unit`` are whole: step it now, unless the vote has to be heard first."""
        assert self._beside is not None
        if unit in self._beside.units:  # join_early() says so; an error here would leave the other ranks waiting
            self._beside.again.append(unit)
            return
        pairs = [(gradients, _weights_of(unit, gradients)) for gradients in unit.gradients]
        # What this rank did not use another may have used, or none; what was written has to be looked at first.
        if all(all(gradients.marks.used) and not weights.was_written() for gradients, weights in pairs):
            tasks = [
                Task(weights, gradients.total, dict.fromkeys(gradients.spec.layout.slots, True))
                for gradients, weights in pairs
                if gradients.total is not None
            ]
            self._beside.add(unit, tasks, 1.0, look=True)

    def join_early(self) -> None:
        """Wait for what is stepped in the backward pass. Raises on every rank where that cannot stand on one."""
        if self._when == "backward":
            with self._tearing():
                meeting.all_or_none(self._join_early)

    def _join_early(self) -> None:
        assert self._beside is not None
        self.quiet()
        units = self._beside.units
        if self._beside.again:
            self.refuse_early(f"gradients came for unit {self._beside.again[0].name!r} in a second backward pass")
        if units and self.edits:
            self.refuse_early("p.grad was changed after the backward pass")
        if any(weights.was_written() for unit in units for weights in unit.weights if weights.spec.trainable):
            self.refuse_early("parameters were written, or their .data was taken, after the backward pass")
        if self._beside.reset():
            self.refuse_early("options of the optimizer, such as its learning rate, were changed after the backward pass")

    def refuse_between(self, what: str) -> None:
        """Raise :class:`EngineError` between a backward pass that stepped units and the step: ``what`` would meet a mixture
        of states before and after the step. The same on all ranks."""
        if self._when == "backward" and any(gradients.sums.settled for gradients in self._buffers):
            raise EngineError(
                f"{what} between the backward pass and engine.step(): StepPolicy(when='backward') has stepped a part of the "
                "states already; do it before the backward pass or after the step, or use when='boundary'"
            )

    def refuse_early(self, why: str) -> None:
        """Raise :class:`EngineError` where units are stepped before the vote, which would have heeded ``why``."""
        if self._when == "backward":
            self.torn = f"{why}, and StepPolicy(when='backward') had stepped units before that was known"
            self.discard()
            raise EngineError(f"{self.torn}; load() a checkpoint with its optimizer states, and use when='boundary'")

    def _begin_delayed(self, verdict: Verdict, factor: float) -> None:
        assert self._beside is not None
        for unit in self._run.units:
            tasks = [
                Task(_weights_of(unit, gradients), gradients.hand_over(), _used(gradients, verdict), owned=True)
                for gradients in unit.gradients
            ]
            if tasks:
                self._beside.add(unit, tasks, factor, look=False)

    def quiet(self) -> None:
        """Nothing is stepped on a thread from here on, and a step that was delayed has reached the parameters. Collective
        where steps are delayed."""
        if self._beside is None or not self._beside.units:
            return
        if self.torn is not None:
            self._beside.abandon()
            return
        try:
            if self._when == "delayed":
                meeting.all_or_none(self._beside.join)
            else:
                self._beside.join()
        except Exception as error:  # Ctrl-C interrupts the wait and no more: the next one goes on
            self.torn = f"{type(error).__name__}: {error}"
            raise
        if self._when == "delayed":
            self._move(partial(self._step_units, Verdict(0.0, {}, []), 1.0))
            self._run.flush()

    def end(self) -> bool:
        """The engine is closed. Is there a delayed step that will never reach the parameters?"""
        lost = self._when == "delayed" and self._beside is not None and bool(self._beside.units)
        if self._beside is not None:
            self._beside.close()
        return lost

    def _encode(self, unit: UnitRun) -> None:
        """The masters of ``unit`` are stepped: its parameters follow."""
        for gradients in unit.gradients:
            weights = _weights_of(unit, gradients)
            weights.encode()
            weights.changed()
            if self._when == "backward":  # a window later, they are those of the next step
                gradients.drop()

    def discard(self) -> None:
        """Forget the gradients of this window."""
        if self._when == "backward" and self._beside is not None and self._beside.units:
            self._beside.abandon()
            self.torn = self.torn or "gradients were discarded that StepPolicy(when='backward') had stepped with already"
        self.forget_norms()
        self.edits = []
        for gradients in self._buffers:
            gradients.drop()


def _at_rest(stepper: weakref.ref[Stepper]) -> Callable[..., None]:
    """A hook: the optimizer's states are not read or replaced while they are stepped."""

    def wait(*_: Any) -> None:
        owner = stepper()
        if owner is not None and owner._beside is not None:
            owner._beside.join()
            owner.refuse_between("state_dict() or load_state_dict() of the optimizer")

    return wait


_WINDOW_LOST = (
    "The gradients of this window are lost, and no state has changed: repeat the window if the disk works again, or "
    "engine.save() and load() that in a new engine whose gradients rest on 'host' (onecopy.offload(..., gradient='host'))"
)


def _settle(disk: Disk, problem: DiskError | None) -> None:
    """Everything is on the disk, or an error."""
    try:
        disk.drain()
    finally:
        if problem is not None:  # it came first
            raise problem


def _weights_of(unit: UnitRun, gradients: Gradients) -> Weights:
    return next(weights for weights in unit.weights if weights.spec is gradients.spec)


def _used(gradients: Gradients, verdict: Verdict) -> dict[Slot, bool]:
    """Which parameters of a buffer any rank used."""
    return dict(zip(gradients.spec.layout.slots, verdict.used[gradients.spec.name], strict=True))
