"""Steps on the host that run on a thread beside training (``StepPolicy.when``).

The thread steps master weights and moments, a unit at a time in the order in which units are handed to it; the parameters
do not change before the training thread has joined it and encodes the new masters. What the thread needs of the optimizer
is a copy of its options as they were when it began, so that a learning-rate schedule may go on meanwhile.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from onecopy.engine.run import UnitRun
from onecopy.engine.tilewise import Ahead, step_tiles
from onecopy.engine.weights import Weights
from onecopy.errors import EngineError
from onecopy.optim import Tiles
from onecopy.plan.layout import Slot
from onecopy.tiers.held import Held
from onecopy.tiers.tiers import Tiers

__all__ = ["Beside", "Task"]


@dataclass(frozen=True)
class Task:
    """One buffer to step: its gradients, summed, and which parameters some rank used. ``owned``: nobody else keeps the
    gradients."""

    weights: Weights
    total: Held
    used: dict[Slot, bool]
    owned: bool = False


class Beside:
    """``units`` handed over and not taken yet, in order. ``skipped``: the thread found gradients that are not finite, and
    has stepped nothing from there on. ``again``: units for which gradients came after they were handed over."""

    def __init__(self, tiles: Tiles, tiers: Tiers) -> None:
        self._tiles = tiles
        self._tiers = tiers
        self._pool = ThreadPoolExecutor(1, "onecopy-step")
        weakref.finalize(self, self._pool.shutdown, wait=False)
        self._running: deque[tuple[Task, Future[Counter[str]]]] = deque()
        self._optimizer: Optimizer | None = None
        self._before: list[dict[str, Any]] = []
        self._scratch: torch.Tensor | None = None
        self._counted = 0
        self.units: list[UnitRun] = []
        self.again: list[UnitRun] = []
        self.skipped = False

    def add(self, unit: UnitRun, tasks: list[Task], factor: float, look: bool) -> None:
        """Begin to step ``tasks``, which are those of ``unit``, with ``factor`` times their gradients. ``look``: the step
        that they belong to has not begun, and nobody has found out yet whether they are finite."""
        if self._optimizer is None:
            self._begin()
        self.units.append(unit)
        arrived, number = _mark(tasks), self._tiers.clock.step + look
        for task in tasks:
            task.weights.writes.busy, task.weights.writes.early = task.owned, not task.owned
            self._running.append((task, self._pool.submit(self._step, task, factor, look, arrived, number)))

    def join(self) -> None:
        """Wait until everything handed over is stepped; raises what went wrong on the thread. Where the wait is interrupted,
        the next one goes on."""
        optimizer, failed = self._optimizer, self._wait()
        if failed:
            raise failed[0]
        if optimizer is not None and _options(optimizer) != self._before:
            raise EngineError(
                f"{type(optimizer).__name__} changes its own options as it steps, which a step beside training cannot keep; "
                "use StepPolicy(when='boundary')"
            )

    def _wait(self) -> list[BaseException]:
        """The thread is idle, and its memory is given back; what went wrong on it."""
        failed = []
        while self._running:
            task, future = self._running[0]
            error = future.exception()
            self._running.popleft()
            if error is not None:
                failed.append(error)
            else:
                for link, size in future.result().items():
                    self._tiers.moved(link, size)
            task.weights.writes.busy = False
            if task.owned and task.total.plain is not None:
                self._tiers.host.drop("gradient", task.total.plain)
        self._optimizer = None
        if self._scratch is not None:
            self._tiers.host.count("workspace", -self._counted)
            self._scratch = None
        return failed

    def take(self) -> list[UnitRun]:
        """The units that were handed over; from here on they are not."""
        units, self.units, self.again, self.skipped = self.units, [], [], False
        for writes in (weights.writes for unit in units for weights in unit.weights):
            writes.early = writes.overtaken = False
        return units

    def reset(self) -> bool:
        """Were the options of the user's optimizer changed since the first unit was handed over?"""
        return bool(self.units) and _options(self._tiles.optimizer) != self._before

    def abandon(self) -> None:
        """Let the thread end; what it has stepped does not matter, and so neither does what went wrong with it."""
        self._wait()
        self.take()

    def close(self) -> None:
        """The thread ends, and nothing can be handed to it any more."""
        self.abandon()
        self._pool.shutdown(wait=False)

    def _begin(self) -> None:
        self._optimizer = self._tiles.as_set_now()
        self._before = self._tiles.options_now()
        # One for all, from the first task to the join: what is in use does not depend on how fast the thread is.
        sizes = {weights: _tile_bytes(weights.state) for weights in self._tiles.pieces}
        self._counted = max(size * (1 + self._tiles.decoded(weights)) for weights, size in sizes.items())
        self._tiers.host.count("workspace", self._counted)
        self._scratch = torch.empty(max(sizes.values()), dtype=torch.uint8, device="cpu")

    def _step(
        self, task: Task, factor: float, look: bool, arrived: Callable[[], Any], number: int
    ) -> Counter[str]:
        """Returns the bytes that were moved, by link."""
        arrived()
        if self.skipped or (look and not _finite(task.total.plain)):
            self.skipped = True
            return Counter()
        assert self._scratch is not None
        dtype, grid = task.weights.state.dtype, task.weights.state.grid
        scratch = self._scratch[: min(grid.tile, grid.numel) * dtype.itemsize].view(dtype)
        tiles, tiers = self._tiles, self._tiers
        with torch.no_grad(), tiers.clock.at(number), tiers.apart() as moves:
            with closing(Ahead(tiles, [(task.weights, task.total)])) as coming:
                step_tiles(tiles, tiers, task.weights, task.used, factor, coming, scratch, self._optimizer)
            return moves


def _tile_bytes(held: Held) -> int:
    return min(held.grid.tile, held.grid.numel) * held.dtype.itemsize


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def _mark(tasks: list[Task]) -> Callable[[], Any]:
    """What to call before the gradients are read: waits for copies from an accelerator that are under way."""
    device = tasks[0].weights.full.device
    if device.type == "cpu":
        return bool
    event = torch.Event(device)
    event.record()
    return event.synchronize


def _finite(total: torch.Tensor | None) -> bool:
    assert total is not None  # gradients that are stepped beside training are in memory
    return all(math.isfinite(float(torch.linalg.vector_norm(part, math.inf).float())) for part in total.split(1 << 20))
