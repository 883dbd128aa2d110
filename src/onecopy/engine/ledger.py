"""What was really sent: every edge writes down what it puts on the wire, at the moment it does."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Ledger", "Traffic"]


@dataclass
class Traffic:
    """Collectives of one kind: how many, and the elements and bytes this rank sent in them."""

    count: int = 0
    elements: int = 0
    bytes: int = 0


class Ledger:
    """Traffic by kind of op, and bytes moved between tiers, since the step began; nothing is added while ``counts`` is
    False."""

    def __init__(self) -> None:
        self.open: dict[str, Traffic] = {}
        self.moves: dict[str, int] = {}
        self.counts = True

    def sent(self, kind: str, elements: int, dtype: torch.dtype) -> None:
        """One collective of ``kind`` sends ``elements`` of ``dtype`` from this rank."""
        if not self.counts:
            return
        traffic = self.open.setdefault(kind, Traffic())
        traffic.count += 1
        traffic.elements += elements
        traffic.bytes += elements * dtype.itemsize

    def moved(self, link: str, size: int) -> None:
        """``size`` bytes cross ``link``: to_device, to_host, disk_read or disk_write."""
        if self.counts:
            self.moves[link] = self.moves.get(link, 0) + size

    def close_step(self) -> None:
        """An optimizer step is complete."""
        self.open = {}
        self.moves = {}
