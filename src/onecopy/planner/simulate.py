"""One rank's real engine among ranks that are not there: every collective of a step beside what was predicted.

The model is on the meta device and the process group is torch's fake one, so a job of any size runs in one process that
allocates nothing: the engine's own hooks, schedule and bookkeeping do what they would do, and what they did is held
against the prediction, collective by collective and byte by byte.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from onecopy.cluster import Cluster
from onecopy.comm.simulated import Journal, Sending, pretend
from onecopy.engine.build import build_core
from onecopy.engine.engine import Engine
from onecopy.errors import EngineError, PlanError
from onecopy.plan.plan import Plan
from onecopy.planner.estimate import Work
from onecopy.planner.report import schedule_for
from onecopy.planner.subject import Built, facts
from onecopy.planner.tape import OnMeta, checkpointed, roots, run_backward
from onecopy.schedule.lower import Schedule
from onecopy.schedule.ops import Op
from onecopy.schedule.predict import predict, sends

__all__ = ["Simulation", "simulate"]


@dataclass(frozen=True)
class Simulation:
    """One optimizer step of rank 0, its second. ``sent``: its collectives in order, each with the bytes that the engine
    held then; ``measured``: as ``Engine.measured()``; ``python``: seconds of the step on the processor, without those of the
    fake group; ``bare``: of the same passes without an engine. ``in_order``: collectives came in the predicted order, that
    in which the model registers its units; then the peak is ``expected``, in another order other buffers meet."""

    sent: list[Sending]
    measured: dict[str, Any]
    python: float
    bare: float
    in_order: bool = False
    expected: int = 0

    def report(self) -> dict[str, Any]:
        """As JSON has it."""
        totals = {name: value for name, value in self.measured.items() if name != "moved"}
        collectives = [
            {"op": op.kind, "unit": op.unit, "elements": op.elements, "dtype": op.dtype, "bytes": op.bytes,
             "ranks": op.ranks, "held": op.held}
            for op in self.sent
        ]  # fmt: skip
        python = {"step": self.python, "without_engine": self.bare}
        return {"step": collectives, "in_order": self.in_order, "predicted_peak": self.expected, **totals, "python": python}


def simulate(subject: Built, plan: Plan, cluster: Cluster, work: Work) -> Simulation:
    """Train two steps as rank 0 of ``cluster.ranks``, and compare the second with the prediction.

    Raises :class:`EngineError` that names the first collective which is another than predicted, or the bytes that are, and
    :class:`PlanError` for what cannot run on the meta device.
    """
    if cluster.gpu.shared:
        raise PlanError("a simulation is of ranks with accelerators, and CPUs of a host share its memory; give another --gpu")
    if any("disk" in row.tiers for row in _rows(plan)):
        raise PlanError("a simulation writes nothing, so nothing of it can rest on disk; choose host")
    if plan.step.when != "boundary":
        raise PlanError(f"a simulation steps at the boundary, and this plan steps {plan.step.when!r}; simulate it without")
    if subject.inputs is None or work.seq is None:
        raise PlanError(f"{subject.name} takes inputs that are not known, so its steps cannot be simulated")
    schedule = schedule_for(plan, facts(subject, plan, cluster.ranks), cluster)
    given = subject.inputs(work.batch, work.seq)
    with OnMeta(work.attention == "flash"), checkpointed(subject.model, work.recompute):
        try:
            bare = _bare(subject.model, given)
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError) as error:
            raise PlanError(f"{subject.name} cannot run on the meta device: {error}") from error
        with pretend(cluster.ranks) as journal:
            found = _steps(subject.model, plan, given, journal, bare * plan.batch.accumulation)
    peak = predict(schedule)["peak"]["device"]["total"]
    return replace(found, in_order=_check(found, schedule), expected=peak)


def _rows(plan: Plan) -> list[Any]:
    return [rule.row for rule in plan.rules]


def _pass(model: nn.Module, given: Mapping[str, Any] | tuple[Any, ...]) -> None:
    out = model(**given) if isinstance(given, Mapping) else model(*given)
    run_backward(roots(out))


def _bare(model: nn.Module, given: Mapping[str, Any] | tuple[Any, ...]) -> float:
    """Processor seconds of a forward and backward pass."""
    _pass(model, given)
    model.zero_grad()
    began = time.process_time()
    _pass(model, given)
    took = time.process_time() - began
    model.zero_grad()
    return took


def _steps(model: nn.Module, plan: Plan, given: Any, journal: Journal, bare: float) -> Simulation:
    optimizer = None if plan.optimizer is not None else torch.optim.AdamW
    core = build_core(model, plan, optimizer, None, torch.device("meta"))
    engine = Engine(model, core)
    journal.held = lambda: core.tiers.device.total
    try:
        for _ in range(2):
            journal.sent.clear()
            journal.seconds = 0.0
            began = time.process_time()
            for _ in range(plan.batch.accumulation):
                _pass(engine, given)
                engine.step()
            took = time.process_time() - began
        return Simulation(list(journal.sent), engine.measured(), took - journal.seconds, bare)
    finally:
        engine.close()


def _check(found: Simulation, schedule: Schedule) -> bool:
    """Is the order of the collectives the predicted one? An engine learns the order of a model's units from its passes, where
    that is another than the order in which the model registers them.

    Raises :class:`EngineError` for the first collective that is too many, missing or another than predicted.
    """
    mesh = schedule.facts.mesh
    ranks = {"within": mesh.within, "across": mesh.across, "world": mesh.world, "none": 1}
    expected = [_said(op, ranks[op.group]) for op in sends(schedule)]
    done = [_done(op) for op in found.sent]
    missing = Counter(expected)
    for at, op in enumerate(done):
        if not missing[op]:
            said = expected[at] if at < len(expected) else "nothing more"
            raise EngineError(f"collective {at + 1} of a step: predicted was {said}, and the engine did {op}")
        missing[op] -= 1
    if left := next(missing.elements(), None):
        raise EngineError(f"a collective of a step: predicted was {left}, and the engine did not do it")
    theirs = predict(schedule)
    for part in ("collectives", "moved", "resident", *(["peak"] if done == expected else [])):
        if theirs[part] != found.measured[part]:
            raise EngineError(f"{part} of a step: predicted was {theirs[part]}, the engine measured {found.measured[part]}")
    return done == expected


def _said(op: Op, ranks: int) -> str:
    unit = op.buffer.rpartition("/")[0] if op.kind not in ("vote", "sum") else ""
    return _words(op.kind, unit, op.sent, op.codec, ranks)


def _done(op: Sending) -> str:
    return _words(op.kind, op.unit, op.elements, op.dtype, op.ranks)


def _words(kind: str, unit: str, elements: int, dtype: str, ranks: int) -> str:
    of = f" of {unit}" if unit else ""
    return f"the {kind}{of} ({elements:,} x {dtype} sent among {ranks:,} ranks)"
