"""The run loop: the schedule's ops, carried out on this rank's buffers.

Why a unit has an op is said in ``schedule/lower.py``; what one does is in ``weights.py``, ``gradients.py`` and
``comm/collectives.py``. When they run is decided by ``gathering.py`` (parameters), ``rounds.py`` (gradients) and
``step.py`` (the optimizer), which are told of the model's events by ``hooks.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch import nn

from onecopy.comm.collectives import Edge
from onecopy.engine.edges import Edges
from onecopy.engine.gradients import Gradients
from onecopy.engine.weights import Weights
from onecopy.schedule.lower import Schedule
from onecopy.schedule.ops import Event, Op

__all__ = ["Run", "UnitRun"]


_NOTHING: list[Op] = []


def _nobody(unit: UnitRun) -> None:
    """Nobody waits for it."""


@dataclass(eq=False)
class UnitRun:
    """One unit at work: its modules, its buffers, and how far it is in the pass that is running."""

    name: str
    entries: list[nn.Module]
    weights: list[Weights] = field(default_factory=list)
    gradients: list[Gradients] = field(default_factory=list)
    # Forward calls of the entries in this pass, and in the last one: after as many the unit is given back.
    uses: int = 0
    expected_uses: int = 0
    # Gradients that came in this backward pass, out of those that come when every parameter is used.
    arrived: int = 0
    trainable: int = 0
    # The unit is done in this backward pass: complete, or nothing more will come.
    ready: bool = False
    issued: bool = False
    # Wait for the gradient of the unit's inputs before calling it done: frozen weights may be used after the last
    # trainable one is, and unused parameters never send a gradient.
    waits_for_input: bool = False
    watched: int = 0
    watching: bool = False
    # Needed from its first use to the end of the forward pass, and all through backward.
    spans: bool = False

    @property
    def present(self) -> bool:
        """Can every parameter of the unit be read?"""
        for weights in self.weights:  # noqa: SIM110 - asked for every saved tensor, where a generator is a call more
            if not weights.present:
                return False
        return True


class Run:
    """Carries out ops: ``start`` sets one off, ``finish`` waits for what it started."""

    def __init__(self, schedule: Schedule, units: list[UnitRun], across: Edge | None, edges: Edges) -> None:
        self.schedule = schedule
        self.units = units
        self._across = across
        self._edges = edges
        self._weights = {weights.spec.name: weights for unit in units for weights in unit.weights}
        self._of = {id(weights): unit for unit in units for weights in unit.weights}
        self._gradients = {gradients.spec.name: gradients for unit in units for gradients in unit.gradients}
        self._ops: dict[tuple[str, Event, str], list[Op]] = {}
        for (name, event), listed in schedule.ops.items():
            for op in listed:
                self._ops.setdefault((name, event, op.kind), []).append(op)
        self.accumulates = schedule.plan.batch.accumulation > 1
        # Told when the gradients of a unit are those of the step.
        self.settled: Callable[[UnitRun], None] = _nobody

    def writing(self) -> AbstractContextManager[None]:
        """Around changes of all shards at once."""
        return self._edges.shelf.writing() if self._edges.shelf is not None else nullcontext()

    def flush(self) -> None:
        """Return when the ranks that are behind have all that this one sent in the step that it has ended."""
        for edge in (self._edges.gather, self._edges.reduce):
            if edge is not None:
                edge.flush()

    def ops(self, unit: UnitRun, event: Event, kind: str) -> list[Op]:
        """The ops of ``kind`` that the schedule gives ``unit`` at ``event``."""
        return self._ops.get((unit.name, event, kind), _NOTHING)

    def start(self, ops: Iterable[Op]) -> None:
        """Set ``ops`` off, in order."""
        for op in ops:
            if op.kind == "gather":
                self._weights[op.buffer].start_gather()
            elif op.kind == "reduce":
                self._gradients[op.buffer].start_reduce(self.accumulates)
            elif op.kind == "sum":
                assert self._across is not None
                reduced = self._gradients[op.buffer].reduced()
                on_device = reduced.to(self._weights[op.buffer].full.device)
                self._across.all_reduce(on_device, "sum")
                if on_device is not reduced:  # it rests on the host of an accelerator
                    reduced.copy_(on_device)
            elif op.kind == "spread":
                self._holder(op).start_spread()

    def finish(self, ops: Iterable[Op]) -> None:
        """Wait for ``ops``, which were started."""
        for op in ops:
            if op.kind == "gather":
                self._weights[op.buffer].finish_gather()
            elif op.kind == "reduce":
                self._gradients[op.buffer].finish_reduce()
            elif op.kind == "spread":
                self._holder(op).finish_spread()

    def unit_of(self, weights: Weights) -> UnitRun:
        """The unit that ``weights`` are a buffer of."""
        return self._of[id(weights)]

    def weights(self, op: Op) -> Weights:
        """The buffer ``op`` is about."""
        return self._weights[op.buffer]

    def _holder(self, op: Op) -> Weights | Gradients:
        return self._weights[op.buffer] if op.state == "parameter" else self._gradients[op.buffer]
