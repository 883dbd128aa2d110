"""One buffer stepped tile by tile: of each the gradient is cast and scaled, the kernel runs, and the new weights go to where
the parameter rests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from torch.optim import Optimizer

from onecopy.engine.weights import Weights
from onecopy.optim import Borrowed, Tiles
from onecopy.plan.layout import Slot
from onecopy.tiers.tiers import Tiers

__all__ = ["Ahead", "scratch_elements", "step_tiles"]


class Ahead:
    """The tiles of ``buffers`` in the order in which they are stepped, each borrowed while the one before is stepped."""

    def __init__(self, tiles: Tiles, buffers: Iterable[Weights]) -> None:
        self._tiles = tiles
        self._order = iter((weights, tile) for weights in buffers for tile in range(weights.state.grid.count))
        self._borrowed: deque[Borrowed] = deque()
        self._given: Borrowed | None = None

    def next(self) -> Borrowed:
        """The next tile."""
        while len(self._borrowed) < 2 and (following := next(self._order, None)) is not None:
            self._borrowed.append(self._tiles.borrow(*following))
        self._given = self._borrowed.popleft()
        return self._given

    def close(self) -> None:
        """Let go of what was borrowed and has not been given back."""
        for borrowed in (self._given, *self._borrowed):
            if borrowed is not None:
                for tile in (borrowed.values, *borrowed.moments.values()):
                    tile.drop()


def scratch_elements(weights: Weights, gradient: torch.dtype) -> int:
    """Elements, in the dtype that is stepped, of the copy of a tile's gradient; 0 where the gradient itself will do."""
    row, grid = weights.spec.row, weights.state.grid
    computes = "device" if row.optimizer.tier == "device" else "host"
    direct = gradient == weights.state.dtype and row.gradient.rest.tier == computes
    return 0 if direct else min(grid.tile, grid.numel)


def step_tiles(
    tiles: Tiles,
    tiers: Tiers,
    weights: Weights,
    total: torch.Tensor,
    used: dict[Slot, bool],
    factor: float,
    coming: Ahead,
    scratch: torch.Tensor | None,
    beside: Optimizer | None = None,
) -> None:
    """Step ``weights`` with ``factor`` times the gradients ``total``, of which tiles are cast into ``scratch``, where it is
    needed. ``beside``: the optimizer to step with, in place of the user's; the parameter then stays as it is."""
    grid, row = weights.state.grid, weights.spec.row
    for tile in range(grid.count):
        low, high = grid.bounds(tile)
        borrowed = coming.next()
        gradient = total[low:high]
        if row.gradient.rest.tier == "device" != row.optimizer.tier:
            tiers.moved("to_host", gradient.numel() * gradient.element_size())
        if scratch is not None:
            gradient = scratch[: high - low].copy_(gradient)
        if factor != 1.0:
            gradient.mul_(factor)
        tiles.step([(borrowed, gradient, used)], beside)
        if weights.master is not None and beside is None:
            weights.write_back(low, borrowed.values.wait())
        tiles.give_back(borrowed)
