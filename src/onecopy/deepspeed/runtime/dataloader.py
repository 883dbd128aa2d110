"""``deepspeed.runtime.dataloader``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["RepeatingLoader"]


class RepeatingLoader:
    """``loader`` again and again. Raises StopIteration for one that has nothing."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        for item in self.data_iter:
            return item
        self.data_iter = iter(self.loader)
        return next(self.data_iter)
