"""When parameters come and go: gathered before use, the next unit ahead of time, given back after the last use."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from onecopy.comm import assembly
from onecopy.engine.ledger import Ledger
from onecopy.engine.run import Run, UnitRun
from onecopy.engine.weights import Weights

__all__ = ["Gathering", "Others"]


def _chain(order: list[UnitRun]) -> dict[UnitRun, UnitRun | None]:
    """Who comes after whom; the last is followed by None."""
    return dict(zip(order, [*order[1:], None], strict=True)) if order else {}


@dataclass
class Others:
    """What this engine's passes have to do with those of other ranks.

    ``asks``: gathers need the other ranks, so in passes that they may not run too (``asking``) all say what they want
    first. ``forwards``: training passes of this micro-batch. What is evaluated between two steps is part of neither, and
    not on the ``ledger``.
    """

    engine: int
    ledger: Ledger
    asks: bool = False
    asking: bool = False
    forwards: int = 0
    # The micro-batch is one that some ranks have no data for.
    partial: bool = False

    def begin(self, alone: bool, backward: bool) -> None:
        """A pass begins; ``alone``: other ranks may not run it."""
        self.asking = alone and self.asks
        self.ledger.counts = not alone
        self.forwards += not backward and not alone
        if self.asks and not alone:
            assembly.settle()


class Gathering:
    """Decides when the ``gather`` and ``free`` ops of units run.

    The order in which units are needed is learnt in every pass, one for forward and one for backward, and used for
    prefetching in the next of its kind; a pass that takes another way gathers what it needs at once.
    """

    def __init__(self, run: Run, others: Others) -> None:
        self._run = run
        self.others = others
        self._units = [unit for unit in run.units if unit.weights and any(weights.away for weights in unit.weights)]
        self._next: dict[bool, dict[UnitRun, UnitRun | None]] = {False: {}, True: {}}
        self._trail: list[UnitRun] = []
        self._forward: list[UnitRun] = []
        self._flying: set[UnitRun] = set()
        self._gathered: set[UnitRun] = set()
        self._kept = False
        self.backward = False
        self.depth = 0
        others.asks = any(weights.away and not weights.alone for unit in self._units for weights in unit.weights)
        if others.asks:
            assembly.join(others.engine, weakref.WeakMethod(self.attend))
            weakref.finalize(self, assembly.join, others.engine, None)
        # Boundary steps: what was saved of the parameters before one is not what they are after it.
        self.steps = 0
        # Storages of gathered buffers, so that what autograd saves of them can be recognised.
        self.storages: dict[int, Weights] = {}
        self.index_storages()

    def index_storages(self) -> None:
        """Note the storages again after one was exchanged."""
        self.storages.clear()
        for unit in self._units:
            self.storages.update({w.full.untyped_storage()._cdata: w for w in unit.weights if w.away})

    # Passes

    def begin(self, backward: bool, alone: bool = False) -> None:
        """A forward or backward pass starts. ``alone``: other ranks may not run it."""
        self.others.begin(alone, backward)
        self.backward = backward
        self._trail = []
        self._gathered.clear()
        if not backward:
            for unit in self._run.units:
                unit.uses, unit.watching = 0, False

    def attend_forward(self) -> None:
        """Take part in the forward pass of a micro-batch that this rank has no data for, as the other ranks run it."""
        self.begin(backward=False)
        for unit in self._forward or self._units:
            self.use(unit)
            self.release(unit)
            unit.uses = unit.expected_uses
        self.end()

    def attend_backward(self) -> None:
        """The other ranks run a backward pass that this one has no data for: units that span it are needed first there and
        reduced last, so their gathers go out before any other is waited for."""
        self.begin(backward=True)
        for unit in self._units:
            if unit.spans and not unit.present and self._run.ops(unit, "pre_backward", "gather"):
                self._start(unit)

    def end(self) -> None:
        """The pass is over: whatever is still gathered goes, and the order it took is remembered."""
        order = list(dict.fromkeys(self._trail))
        if not self.backward:
            for unit in order:
                unit.expected_uses = max(unit.uses, 1)
            self._forward = order
        # Until a backward pass has shown its own order, the reverse of the forward one is the best guess. Units that it
        # did not read (a first layer's weight is not needed for its gradient) come last, so that the schedule's gather
        # of them happens as planned.
        shown = order if self.backward else list(self._next[True])
        backward = [*shown, *(unit for unit in reversed(self._forward) if unit not in shown)]
        self._next = {False: _chain(self._forward), True: _chain(backward)}
        self._trail = []
        if not self.others.ledger.counts:
            # No backward pass follows: nothing is held for one, or this rank would not need the next gather.
            self.others.ledger.counts = True
            self.backward = True
            self.release_units()
            self.backward = False
        self.release_units()

    # Uses

    def use(self, unit: UnitRun) -> None:
        """``unit`` is about to be read: its parameters are there when this returns."""
        if unit.present:
            return
        if torch._C._functorch.peek_interpreter_stack() is not None:
            with temporarily_clear_interpreter_stack():  # the parameters are no part of what is transformed
                return self.use(unit)
        wanted = [] if unit in self._flying else [unit]
        self._trail.append(unit)
        coming = unit
        for _ in range(self._run.schedule.plan.units.prefetch):
            following = self._next[self.backward].get(coming)
            if following is None:
                break
            coming = following
            if not coming.present and coming not in self._gathered:
                wanted.append(coming)
        if (ahead := self._next[self.backward].get(coming)) is not None and ahead not in self._gathered:
            for weights in ahead.weights:
                weights.read_ahead()
        if self.others.asking and wanted:
            assembly.ask(self.others.engine, [self._run.units.index(each) for each in wanted])
        else:
            for each in wanted:
                self._start(each)
        self._land(unit)

    def attend(self, index: int, wanted: bool) -> None:
        """Take part in the gather of unit ``index`` that some rank asked for; ``wanted``: this one did."""
        unit = self._run.units[index]
        before, self.others.ledger.counts = self.others.ledger.counts, False
        if wanted:
            self._flying.add(unit)
            self._gathered.add(unit)
        for weights in unit.weights:
            if not weights.away:
                continue
            if wanted and not weights.present and weights.pending is None:
                weights.start_gather()
            else:
                weights.attend()
        self.others.ledger.counts = before

    def used(self, unit: UnitRun) -> None:
        """A forward call that reads ``unit`` has returned."""
        if self.backward:
            return  # recomputed for backward, which will say when it is done
        unit.uses += 1
        if unit.uses >= unit.expected_uses:
            self._give_back(unit, "post_forward")

    def meet(self, unit: UnitRun) -> None:
        """``unit`` is done in this backward pass: if this rank never read it, take part in the gather all the same.

        The others may have read it (ranks that route to different experts), and wait.
        """
        if unit in self._gathered or unit.present or not self._run.ops(unit, "pre_backward", "gather"):
            return
        self._start(unit)
        self.release(unit)

    def release(self, unit: UnitRun) -> None:
        """``unit`` is not needed any more in this pass."""
        if unit in self._flying:
            self._land(unit)
        self._give_back(unit, "boundary" if self.backward else "post_forward")

    def release_units(self) -> None:
        """The pass is over for all units."""
        for unit in self._units:
            self.release(unit)

    def release_all(self) -> None:
        """Nothing may stay gathered: the weights are about to change."""
        self._kept = False
        self.steps += 1
        self.backward = True
        self.release_units()
        self.backward = False
        for unit in self._units:
            for weights in unit.weights:
                weights.forget_read_ahead()

    def unit_of(self, weights: Weights) -> UnitRun:
        """The unit that ``weights`` are a buffer of."""
        return self._run.unit_of(weights)

    def demand(self, weights: Weights) -> bool:
        """A freed parameter is read outside its unit's modules: gather it now if a pass runs (backward: a part of a
        module is recomputed)."""
        if self.depth == 0 and torch._C._current_graph_task_id() == -1:
            return False
        self.use(self._run.unit_of(weights))
        return True

    def keep_all(self) -> None:
        """A backward pass builds a graph that will be run backward itself: give nothing back before the step."""
        self._kept = True

    # Details

    def _start(self, unit: UnitRun) -> None:
        self._flying.add(unit)
        self._gathered.add(unit)
        for weights in unit.weights:
            if weights.away and not weights.present:
                weights.start_gather()

    def _land(self, unit: UnitRun) -> None:
        self._flying.discard(unit)
        for weights in unit.weights:
            if weights.pending is not None:
                weights.finish_gather()

    def _give_back(self, unit: UnitRun, event: str) -> None:
        if self._kept:
            return
        for op in self._run.ops(unit, event, "free"):  # type: ignore[arg-type]
            weights = self._run.weights(op)
            if weights.present and weights.pins == 0:
                weights.free()
