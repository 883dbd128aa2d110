"""When gradients go out: one round per backward pass, every unit once, in an order that all ranks keep."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from onecopy.comm import meeting
from onecopy.comm.groups import Ranks
from onecopy.engine.gathering import Gathering
from onecopy.engine.gradients import Gradients
from onecopy.engine.run import Run, UnitRun
from onecopy.errors import RankMismatchError
from onecopy.schedule.ops import Event

__all__ = ["Rounds"]


class Turns:
    """The order in which all ranks reduce their units.

    The reverse of the registration order until the first step, then that in which rank 0's units got ready.
    """

    def __init__(self, units: list[UnitRun]) -> None:
        self.order = units
        self._next = 0
        self._seen: list[UnitRun] = []
        self._learned = False

    def restart(self) -> None:
        """A pass begins for the units that have gradients."""
        self._next = 0
        self._seen = []
        for unit in self.order:
            unit.arrived, unit.issued = 0, False
            for gradients in unit.gradients:
                gradients.marks.arrived = [False] * len(gradients.marks.arrived)

    def due(self, unit: UnitRun) -> Iterator[UnitRun]:
        """``unit`` got ready: the units whose turn it now is, itself among them if none is waited for."""
        self._seen.append(unit)
        while self._next < len(self.order) and self.order[self._next].ready:
            self._next += 1
            yield self.order[self._next - 1]

    def learn(self, ranks: Ranks) -> None:
        """Keep the order of rank 0's last pass, the first time this is called; collective."""
        if self._learned or ranks.mesh.world == 1:
            return
        self._learned = True
        late = [unit for unit in self.order if unit not in self._seen]
        order = meeting.from_rank0(lambda: [unit.name for unit in (*self._seen, *late)])
        by_name = {unit.name: unit for unit in self.order}
        self.order = [by_name[name] for name in order]


@dataclass
class Suspects:
    """``names`` of parameters whose gradient of this window is not finite on this rank, before the sum; looked for while
    they are ``wanted``."""

    wanted: Callable[[], bool] = lambda: False
    names: list[str] = field(default_factory=list)


class Rounds:
    """Takes gradients from autograd and decides when a unit's reductions run.

    A unit is ready when all its gradients arrived, when its inputs got theirs, or when the pass ends. Reductions start
    in a fixed order whatever the order in which units get ready, so that a rank that skipped a part of the model still
    meets the others; what a rank did not use counts zero.
    """

    def __init__(self, run: Run, gathering: Gathering, reduce_ahead: int) -> None:
        self._run = run
        self._gathering = gathering
        self._ahead = reduce_ahead
        self.turns = Turns([unit for unit in reversed(run.units) if unit.gradients])
        self._flying: deque[tuple[UnitRun, Event]] = deque()
        self.open = False
        # Is the micro-batch the last of its window, and are gradients to be reduced (not inside no_sync)?
        self.boundary: Callable[[], bool] = lambda: True
        self.sync = True
        # Asked to report when the gradient of a unit's inputs is there.
        self.watch: Callable[[UnitRun], None] = lambda unit: None
        self.interrupted = False
        self.suspects = Suspects()
        # How much was summed when what came late was last sent before a step.
        self._seen_whole = 0
        # Rounds that reduced in this micro-batch; backward passes since the last step() call.
        self.closed = 0
        self.passes = 0

    @property
    def event(self) -> Event:
        """What a unit's gradients being complete means now."""
        return "boundary" if self.boundary() and self.sync else "grads_ready"

    def reduces(self, gradients: Gradients) -> bool:
        """Will what is filled in now be sent at the end of this pass?"""
        return self.sync and (gradients.away or self.boundary())

    # A backward pass

    def begin(self) -> None:
        """The first sign of a backward pass."""
        if self.open:
            return
        self.open = True
        self._gathering.begin(backward=True)
        self.turns.restart()
        for unit in self._run.units:
            unit.ready = False
        torch.autograd.Variable._execution_engine.queue_callback(self.close)

    def arrive(self, unit: UnitRun, gradients: Gradients, at: int, gradient: torch.Tensor, scale: float) -> None:
        """Autograd has the gradient of the parameter in slot ``at``."""
        if not self.open:
            self.begin()
        if gradient.requires_grad:
            self._gathering.keep_all()
            gradient = gradient.detach()
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        if unit.issued:
            self._wait_for(unit)
        if not gradients.filling:
            self._fill(gradients, late=unit.issued)
        gradients.put(at, gradient, scale)
        if not gradients.marks.arrived[at]:
            gradients.marks.arrived[at] = True
            unit.arrived += 1
        if unit.arrived == unit.trainable and not unit.waits_for_input:
            self.ready(unit)

    def ready(self, unit: UnitRun) -> None:
        """Nothing more will come for ``unit`` in this pass: give its parameters back and send its gradients in turn."""
        if unit.ready:
            return
        unit.ready = True
        if unit.gradients:
            for due in self.turns.due(unit):
                self._issue(due)
        self._gathering.release(unit)

    def close(self) -> None:
        """The pass is over: units that are incomplete count zero where nothing came."""
        if not self.open:
            return
        self.open = False
        if any(unit.arrived for unit in self.turns.order):
            self.passes += 1
            self._warn_if_forgotten()
            self.closed += 1
            self._finish_round()
        self._gathering.end()
        self._gathering.backward = False

    def must_meet(self) -> bool:
        """Do the other ranks expect reductions from this one in every micro-batch?"""
        return (
            self.sync
            and self._run.schedule.facts.mesh.world > 1
            and any(gradients.away for unit in self.turns.order for gradients in unit.gradients)
        )

    def complete(self) -> None:
        """``step()`` is called: what this micro-batch owes the other ranks and the optimizer is sent.

        A rank that had no backward pass takes part with zeros. Gradients that no_sync, or a boundary set after
        backward, kept from going out are sent now.
        """
        owed = self.closed == 0 or (self.boundary() and any(g.total is None for u in self.turns.order for g in u.gradients))
        if not owed:
            return
        if self.closed == 0:
            if self._gathering.others.asks and not self._gathering.others.forwards:
                self._gathering.attend_forward()
            self._gathering.attend_backward()
        before, self.sync = self.sync, True
        for unit in self.turns.order:
            self._issue(unit)
        while self._flying:
            self._finish()
        self.sync = before
        if self.closed == 0:
            self._gathering.release_units()
        self._gathering.backward = False

    def abandon(self) -> None:
        """An exception ended the last backward pass."""
        self.open = False
        self.interrupted = True
        self._gathering.backward = False

    def discard(self) -> None:
        """Forget the open window; what is on the wire arrives first. On all ranks, which got equally far."""
        while self._flying:
            unit, event = self._flying.popleft()
            self._run.finish(self._run.ops(unit, event, "reduce"))
        self.open = self.interrupted = False
        self.closed = self.passes = self._seen_whole = 0
        self._gathering.release_all()

    def next_micro_batch(self, with_data: bool) -> None:
        """``step()`` was called. ``with_data``: every micro-batch is meant to have some."""
        window = self._run.schedule.plan.batch.accumulation
        if window > 1 and with_data and not self.passes:
            warnings.warn(
                f"step() without a backward pass since the last one counts as one of the {window} micro-batches of a window, "
                "with a gradient of zero. To leave a batch out, leave its step() out as well, on all ranks",
                stacklevel=3,
            )
        if window > 1 and self.passes >= window:
            warnings.warn(
                f"{self.passes} backward passes in one micro-batch, with accumulation over {window}: engine.step() belongs "
                "after every micro-batch, and steps the optimizer at the last one of a window",
                stacklevel=3,
            )
        self.closed = self.passes = self._gathering.others.forwards = self._seen_whole = 0

    # Details

    def _finish_round(self) -> None:
        for unit in self.turns.order:
            if 0 < unit.arrived < unit.trainable and not unit.waits_for_input:
                unit.waits_for_input = True
                self.watch(unit)
            unit.watched = 0
            if not unit.issued:
                unit.ready = True
                self._issue(unit)
        while self._flying:
            self._finish()

    def _fill(self, gradients: Gradients, late: bool = False) -> None:
        while len(self._flying) > self._ahead:
            self._finish()
        # Gradients that stay whole between micro-batches, or that no_sync keeps from going out, add up in the buffer, and
        # so do those that came too late.
        stays = late or not self.reduces(gradients) or (not gradients.away and self._run.accumulates)
        gradients.open(accumulates=stays)

    def _issue(self, unit: UnitRun) -> None:
        """Start the reductions of ``unit``; or, between boundaries of a plan that keeps gradients whole, nothing."""
        unit.issued = True
        self._gathering.meet(unit)
        self._send(unit)

    def _send(self, unit: UnitRun) -> None:
        event = self.event
        sends = [gradients for gradients in unit.gradients if self.reduces(gradients)]
        if not sends:
            return
        for gradients in sends:
            if not gradients.filling:
                self._fill(gradients)
            gradients.complete()
            if self.suspects.wanted():
                self.suspects.names += gradients.not_finite()
        self._run.start(self._run.ops(unit, event, "reduce"))
        self._flying.append((unit, event))
        while len(self._flying) > self._ahead + 1:
            self._finish()

    def _finish(self) -> None:
        """Wait for the oldest reduction; at a boundary its sum becomes the gradient of the step."""
        unit, event = self._flying.popleft()
        self._run.finish(self._run.ops(unit, event, "reduce"))
        if event == "boundary":
            self._run.start(self._run.ops(unit, event, "sum"))
            spreads = self._run.ops(unit, event, "spread")
            self._run.start(spreads)
            self._run.finish(spreads)
            for gradients in unit.gradients:
                gradients.settle()
            self._run.settled(unit)
        for gradients in unit.gradients:
            gradients.sums.put_away()

    def late(self) -> list[bool]:
        """Per unit: did gradients come after it was sent (its module was recomputed more than once)?

        They go out with the next pass. At a boundary there is none: what one rank has, all ranks must send, so the vote
        tells them.
        """
        return [any(gradients.filling for gradients in unit.gradients) for unit in self._run.units]

    def gather_late(self) -> None:
        """Send what came late now, before the step does: somebody wants to see the sums. Collective.

        Asked again with nothing new summed meanwhile, it does nothing.
        """
        settled = sum(gradients.sums.settled for unit in self._run.units for gradients in unit.gradients)
        if settled == self._seen_whole:
            return
        meeting.same("what is done with gradients before the step", "looked at", RankMismatchError)
        marked = meeting.on_any(self.late())
        if any(marked):
            self.send_late(marked)
        self._seen_whole = sum(gradients.sums.settled for unit in self._run.units for gradients in unit.gradients)

    def send_late(self, which: list[bool]) -> None:
        """Send what came late to the units marked in ``which``, as the vote found; the others have zeros. Collective."""
        for unit, marked in zip(self._run.units, which, strict=True):
            if marked:
                self._send(unit)
        while self._flying:
            self._finish()

    def _wait_for(self, unit: UnitRun) -> None:
        """More gradients for a unit that was sent: what is on its way must have left the buffer."""
        while any(flying is unit for flying, _ in self._flying):
            self._finish()

    def warn_of_zeroing(self) -> None:
        """Somebody zeroes gradients; between a backward pass and its step plain PyTorch would drop them."""
        if self.passes and self._run.schedule.plan.batch.accumulation == 1:
            warnings.warn(
                "zero_grad() between backward() and engine.step() drops nothing: gradients are dropped by engine.step(). "
                "To drop those of this window call engine.discard_gradients() on all ranks",
                stacklevel=3,
            )

    def _warn_if_forgotten(self) -> None:
        window = self._run.schedule.plan.batch.accumulation
        if self.passes == 2 * window + 1:
            warnings.warn(
                f"{self.passes} backward passes since the last engine.step(), with accumulation over {window}: "
                "call engine.step() after every micro-batch",
                stacklevel=2,
            )
