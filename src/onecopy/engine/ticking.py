"""The schedule's tick at every step that was taken, and a word when somebody else ticks it too."""

from __future__ import annotations

import warnings

from torch.optim.lr_scheduler import LRScheduler

__all__ = ["Ticks"]


class Ticks:
    """Ticks a schedule, and counts the windows in which it had moved on meanwhile.

    Once may be a checkpoint that was loaded; again in the next window it is a loop that ticks by hand.
    """

    def __init__(self) -> None:
        self._seen: tuple[LRScheduler, object] | None = None
        self._moved = 0

    def tick(self, scheduler: LRScheduler) -> None:
        """One step was taken."""
        now = getattr(scheduler, "last_epoch", None)
        same = self._seen is not None and self._seen[0] is scheduler
        self._moved = self._moved + 1 if same and self._seen is not None and self._seen[1] != now else 0
        if self._moved == 2:
            warnings.warn(
                f"the {type(scheduler).__name__} given to initialize is ticked by engine.step() and by the loop's own "
                "scheduler.step() too, so its rates come too early: leave one of them out",
                stacklevel=4,
            )
        scheduler.step()
        self._seen = scheduler, getattr(scheduler, "last_epoch", None)
