"""One buffer stepped tile by tile: of each the gradient is cast and scaled, the kernel runs, and the new weights go to where
the parameter rests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from torch.optim import Optimizer

from onecopy.engine.weights import Weights
from onecopy.optim import Borrowed, Tiles
from onecopy.plan.layout import Slot, in_memory
from onecopy.tiers.held import Held, Tile
from onecopy.tiers.tiers import Tiers

__all__ = ["Ahead", "scratch_elements", "step_tiles"]


class Ahead:
    """The tiles of ``buffers`` in the order in which they are stepped, each borrowed, with its gradients, while the one
    before is stepped."""

    def __init__(self, tiles: Tiles, buffers: Iterable[tuple[Weights, Held]]) -> None:
        self._tiles = tiles
        self._order = iter(
            (weights, total, tile) for weights, total in buffers for tile in range(weights.state.grid.count)
        )
        self._borrowed: deque[tuple[Borrowed, Tile]] = deque()
        self._given: tuple[Borrowed, Tile] | None = None

    def next(self) -> tuple[Borrowed, Tile]:
        """The next tile, and its gradients."""
        while len(self._borrowed) < 2 and (following := next(self._order, None)) is not None:
            weights, total, tile = following
            self._borrowed.append((self._tiles.borrow(weights, tile), total.lend(tile)))
        self._given = self._borrowed.popleft()
        return self._given

    def close(self) -> None:
        """Let go of what was borrowed and has not been given back."""
        for taken in (self._given, *self._borrowed):
            if taken is not None:
                borrowed, gradient = taken
                for tile in (borrowed.values, *borrowed.moments.values(), gradient):
                    tile.drop()


def scratch_elements(weights: Weights, gradient: torch.dtype) -> int:
    """Elements, in the dtype that is stepped, of the copy of a tile's gradient; 0 where the gradient itself will do."""
    row, grid = weights.spec.row, weights.state.grid
    direct = gradient == weights.state.dtype and in_memory(row.gradient.rest.tier) == in_memory(row.optimizer.tier)
    return 0 if direct else min(grid.tile, grid.numel)


def step_tiles(
    tiles: Tiles,
    tiers: Tiers,
    weights: Weights,
    used: dict[Slot, bool],
    factor: float,
    coming: Ahead,
    scratch: torch.Tensor | None,
    beside: Optimizer | None = None,
) -> None:
    """Step ``weights``, whose tiles are ``coming``, with ``factor`` times their gradients, which are cast into ``scratch``
    where it is needed. ``beside``: the optimizer to step with, in place of the user's; the parameter then stays as it is."""
    grid, row = weights.state.grid, weights.spec.row
    comes, computes = in_memory(row.gradient.rest.tier), in_memory(row.optimizer.tier)
    for tile in range(grid.count):
        low, high = grid.bounds(tile)
        borrowed, lent = coming.next()
        gradient = lent.wait()
        if comes != computes:
            tiers.moved("to_host" if computes == "host" else "to_device", gradient.numel() * gradient.element_size())
        if scratch is not None:
            gradient = scratch[: high - low].copy_(gradient)
        if factor != 1.0:
            gradient.mul_(factor)
        tiles.step([(borrowed, gradient, used)], beside)
        if weights.master is not None and beside is None:
            weights.write_back(low, borrowed.values.wait())
        tiles.give_back(borrowed)
        lent.drop()
