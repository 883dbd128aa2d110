"""One parameter of a buffer as it sees itself: where its values are, and what happens when it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from onecopy.engine.pending import read_grad, write_grad
from onecopy.plan.layout import Slot

if TYPE_CHECKING:
    from onecopy.engine.weights import Weights

__all__ = ["ParameterHome"]


def _nothing() -> None:
    return None


class ParameterHome:
    """One parameter of a :class:`Weights` as :class:`~onecopy.engine.parameter.Home` sees it."""

    def __init__(self, weights: Weights, slot: Slot, demand: Callable[[Weights], bool]) -> None:
        self.weights = weights
        self.slot = slot
        self._demand = demand
        self._writing = 0
        self._copy: torch.Tensor | None = None

    @property
    def name(self) -> str:
        return self.slot.param.name

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.slot.param.shape)

    @property
    def present(self) -> bool:
        return self.weights.present

    def local(self) -> tuple[torch.Tensor, int]:
        """This rank's elements; what rests on disk is a copy, which is taken back when it was changed inside
        :meth:`writing`."""
        rest, part = self.weights.rest, self.weights.piece_of(self.slot)
        if part is None:
            return torch.empty(0, dtype=rest.dtype, device=self.weights.full.device), 0
        offset = part[0] + self.weights.piece * self.weights.spec.layout.shard - self.slot.start
        if rest.plain is not None:
            return rest.plain[part[0] : part[1]], offset
        copy = self._copy
        if copy is None:
            copy = torch.empty(part[1] - part[0], dtype=rest.dtype)
            rest.read(*part, copy)
            self._copy = copy if self._writing else None
        return copy, offset

    def values(self) -> torch.Tensor:
        """The full values, which must be present."""
        return self.weights.full[self.slot.start : self.slot.stop].view(self.shape)

    def __reduce__(self) -> Any:
        """A parameter is copied or pickled without its home: the copy belongs to no engine."""
        return _nothing, ()

    @contextmanager
    def writing(self) -> Iterator[None]:
        self._writing += 1
        try:
            with self.weights.writing():
                yield
        finally:
            self._writing -= 1
            self._copy = None

    def written(self) -> None:
        part = self.weights.piece_of(self.slot)
        if self._copy is not None and part is not None:
            self.weights.write_rest(*part, self._copy)
        self.weights.follow(self.slot)

    def grad(self, param: torch.Tensor) -> torch.Tensor | None:
        return read_grad(param)

    def set_grad(self, param: torch.Tensor, value: torch.Tensor | None) -> None:
        write_grad(param, value)

    def demand(self) -> bool:
        return self._demand(self.weights)
