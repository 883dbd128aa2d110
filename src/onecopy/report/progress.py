"""The live view of a training run: a bar where there is a terminal, a line now and then where there is none."""

from __future__ import annotations

import time
from types import TracebackType

import psutil  # type: ignore[import-untyped]
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from onecopy.report.measure import human_bytes, human_count

__all__ = ["RunDisplay", "memory_in_use"]

_LINES = 20  # without a terminal: about this many lines for the whole run


def memory_in_use(device: torch.device) -> int:
    """Bytes in use now: allocated on ``device`` by this process, or on the CPU this process's resident set."""
    if device.type != "cpu":
        return int(torch.get_device_module(device).memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


class RunDisplay:
    """Context manager that shows steps ``done`` to ``steps`` on ``console``."""

    def __init__(self, console: Console, done: int, steps: int, quiet: bool = False) -> None:
        self._console, self._steps, self._quiet = console, steps, quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._done = done
        self._next_line = done
        self._start = time.monotonic()

    def __enter__(self) -> RunDisplay:
        if self._console.is_terminal and not self._quiet:
            status = TextColumn("{task.fields[status]}")
            columns = (BarColumn(), MofNCompleteColumn(), status, TimeRemainingColumn())
            self._bar = Progress(TextColumn("training"), *columns, console=self._console)
            self._task = self._bar.add_task("", total=self._steps, completed=self._done, status="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, step: int, loss: float, tokens_per_second: float, memory: int) -> None:
        """``step`` steps are done; ``loss`` in nats per byte, ``memory`` in bytes on this rank."""
        status = f"loss {loss:.3f}  {human_count(tokens_per_second)} tokens/s  {human_bytes(memory)}"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, status=status)
        elif not self._quiet and (step >= self._next_line or step >= self._steps):
            self._next_line = step + max(1, self._steps // _LINES)
            self.say(f"step {step}/{self._steps}  {status}  {time.monotonic() - self._start:.0f} s")

    def say(self, text: str) -> None:
        """A line above the bar."""
        if not self._quiet:
            self._console.print(text, highlight=False, soft_wrap=True)
