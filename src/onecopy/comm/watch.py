"""Who is where, for the rank that waits in vain.

A rank that waits for others notes what for; nothing is sent. When the wait fails, because its time is up or a
connection is gone, that rank raises an alarm in the job's store. A thread on every rank looks for the alarm once a
second and answers with what its rank is doing, so the error can say who is missing and where they are.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import socket
import sys
import threading
import time
import weakref
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from onecopy.errors import ConfigError, HangError, OneCopyError

__all__ = [
    "HERE",
    "engines",
    "group_timeout",
    "lost",
    "patience",
    "reports",
    "set_patience",
    "start",
    "stop",
    "tell_end",
    "tell_failure",
    "waiting",
]

_ALARM, _WHERE, _WHO = "onecopy/alarm", "onecopy/where/", "onecopy/who/"
_TICK, _ANSWER = 1.0, 3.0  # seconds between looks at the alarm; seconds that ranks get to answer it
_LIBRARY = tuple(str(Path(file).parent) + os.sep for file in (Path(__file__).parent, torch.__file__, contextlib.__file__))
_WITHOUT, _WITH_ACCELERATOR = 30.0, 600.0
_given: list[float] = []


class Engine(Protocol):
    """What the watch asks an engine."""

    module: torch.nn.Module

    def progress(self) -> str:
        """Step, micro-batch and pass it is in."""


# Engines of this process, asked only when there is an alarm.
engines: weakref.WeakSet[Any] = weakref.WeakSet()


def patience() -> float:
    """Seconds that a rank waits for others: :func:`set_patience`, else ``ONECOPY_PATIENCE``, else 30, and 600 where there
    is an accelerator (whose jobs start, compile and save for longer)."""
    if _given:
        return _given[-1]
    text = os.environ.get("ONECOPY_PATIENCE")
    if text is None:
        return _WITH_ACCELERATOR if torch.accelerator.is_available() else _WITHOUT
    try:
        return _checked(float(text))
    except ValueError:
        raise ConfigError(f"ONECOPY_PATIENCE is {text!r}; it is a number of seconds above 0") from None


def set_patience(seconds: float | None) -> None:
    """Wait ``seconds`` for other ranks in what is set up from here on; None: as the environment says."""
    _given[:] = [] if seconds is None else [_checked(seconds)]


def _checked(seconds: float) -> float:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
        raise ConfigError(f"patience is {seconds!r}; it is a number of seconds above 0")
    return float(seconds)


# Waiting


class _Here:
    """What this process waits for: ``what`` is printed when somebody asks, None when it waits for nobody."""

    __slots__ = ("since", "thread", "what")

    def __init__(self) -> None:
        self.what: Any = None
        self.since = 0.0
        self.thread = 0


HERE = _Here()


class waiting:
    """``with waiting("what"):`` around a call that returns when other ranks do their part."""

    def __init__(self, what: Any) -> None:
        self._what = what

    def __enter__(self) -> None:
        HERE.what, HERE.since, HERE.thread = self._what, time.monotonic(), threading.get_ident()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, OneCopyError):
            raise lost(error) from error
        HERE.what = None


@dataclass(frozen=True)
class Report:
    """What one rank says of itself. ``state``: running, ended or failed; ``waits`` is empty when it waits for nobody."""

    state: str = "running"
    waits: str = ""
    seconds: float = 0.0
    engine: str = ""
    place: str = ""
    error: str = ""

    def describe(self) -> str:
        parts = {
            "ended": "has ended its script",
            "failed": f"failed: {self.error}",
            "running": f"waits {self.seconds:.0f} s for {self.waits}" if self.waits else "is in no collective call",
        }
        return "; ".join(filter(None, (parts[self.state], self.engine, self.place)))


def lost(error: BaseException | None = None) -> HangError:
    """The error for a wait that failed, with where every rank is; ``error`` is what ended the wait."""
    what, seconds = HERE.what, time.monotonic() - HERE.since
    head = f"rank {_rank()} waited {seconds:.0f} s for {what}"
    cause = f" ({_first_line(error)})" if error is not None else ""
    lines = _roll_call()
    HERE.what = None
    if not lines:
        return HangError(f"{head}{cause}, and the job's store does not answer: the process that serves it is gone")
    missing = [rank for rank, (report, _) in lines.items() if report is None or not report.waits]
    if missing:
        which = "rank" if len(missing) == 1 else "ranks"
        said = f"{which} {_listed(missing)} did not come"
    else:
        said = "every rank waits for something else"
    return HangError("\n".join([f"{head}, and {said}{cause}:", *_grouped(lines)]))


def reports(ranks: list[int]) -> list[str]:
    """Where ``ranks`` are, a line each for those that say the same."""
    return _grouped({rank: line for rank, line in _roll_call().items() if rank in ranks})


def _grouped(lines: dict[int, tuple[Report | None, str]]) -> list[str]:
    same: dict[str, list[int]] = {}
    for rank, (report, text) in lines.items():
        same.setdefault(report.describe() if report is not None else text, []).append(rank)
    return [f"  rank{'s' * (len(ranks) > 1)} {_listed(ranks)}: {text}" for text, ranks in same.items()]


def _listed(ranks: list[int]) -> str:
    """``0-6, 8``"""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _first_line(error: BaseException) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    text = text.rpartition("] ")[2] or text  # gloo puts a source line in front, and advice behind
    return text.partition(". This is")[0]


def _roll_call() -> dict[int, tuple[Report | None, str]]:
    """Every rank's report, or why there is none; empty when the store is gone."""
    watch = _watch
    if watch is None:
        return {}
    try:
        return watch.roll_call()
    except RuntimeError:  # DistError: rank 0's process served the store, and is gone
        return {}


def arrive(store: Any, key: str, rank: int, world: int, seconds: float) -> list[int]:
    """Say in ``store`` that ``rank`` has come to ``key`` and wait for all ``world``; those missing after ``seconds``.

    Ranks that waited together give up one after another: those that have say so, and do not count as missing to the
    others while somebody never came.
    """
    keys = [f"{key}/{other}" for other in range(world)]
    gone = [f"{key}/{other}/gone" for other in range(world)]
    if gone[rank] in _gave_up:
        store.delete_key(gone[rank])
        _gave_up.discard(gone[rank])
    store.set(keys[rank], "here")
    deadline, pause = time.monotonic() + seconds, 0.001
    while not store.check(keys):
        if time.monotonic() > deadline:
            absent = [other for other in range(world) if not store.check([keys[other]])]
            if not absent:
                break
            never = [other for other in absent if not store.check([gone[other]])]
            store.set(gone[rank], "gone")  # before the key goes, so that nobody sees neither
            _gave_up.add(gone[rank])
            depart(store, key, rank)
            return never or absent
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return []


# What this process left in the store when it gave up; taken back when it comes to the same place again.
_gave_up: set[str] = set()


def depart(store: Any, key: str, rank: int) -> None:
    """Take back what :func:`arrive` said, so that the store keeps nothing."""
    store.delete_key(f"{key}/{rank}")


# The thread


class _Watch:
    """Answers the alarm for this rank. One per default process group."""

    def __init__(self, base: Any, rank: int, world: int) -> None:
        self.base, self.rank, self.world = base, rank, world
        self._store = base.clone() if hasattr(base, "clone") else base
        self._end = threading.Event()
        self._main = threading.main_thread().ident or 0
        self._store.set(f"{_WHO}{rank}", f"{socket.gethostname()}:{os.getpid()}")
        self._thread = threading.Thread(target=self._look, name="onecopy-watch", daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._end.wait(_TICK):
            if not dist.is_initialized() or distributed_c10d._get_default_store() is not self.base:
                return
            try:
                if self._store.check([_ALARM]):
                    self.answer(self.report())
            except RuntimeError:  # the store is gone, and with it everybody who could ask
                return

    def stop(self) -> None:
        self._end.set()
        self._thread.join(_TICK)

    def answer(self, report: Report) -> None:
        self._store.set(f"{_WHERE}{self.rank}", json.dumps(asdict(report)))

    def report(self) -> Report:
        frame = sys._current_frames().get(HERE.thread if HERE.what is not None else self._main)
        waits, since = HERE.what, HERE.since
        seconds = time.monotonic() - since if waits is not None else 0.0
        engine = "; ".join(sorted({engine.progress() for engine in engines}))
        return Report("running", str(waits or ""), seconds, engine, _place(frame))

    def roll_call(self) -> dict[int, tuple[Report | None, str]]:
        self._store.set(_ALARM, "1")
        self.answer(self.report())
        keys = [f"{_WHERE}{rank}" for rank in range(self.world)]
        deadline = time.monotonic() + _ANSWER
        while not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.05)
        lines: dict[int, tuple[Report | None, str]] = {}
        for rank, key in enumerate(keys):
            said = Report(**json.loads(self._store.get(key))) if self._store.check([key]) else None
            lines[rank] = (said, "" if said is not None else self._silent(rank))
        return lines

    def _silent(self, rank: int) -> str:
        if not self._store.check([f"{_WHO}{rank}"]):
            return "has never reached onecopy"
        host, _, pid = self._store.get(f"{_WHO}{rank}").decode().rpartition(":")
        if host == socket.gethostname() and not os.path.exists(f"/proc/{pid}") and os.path.exists("/proc/self"):
            return f"its process (pid {pid} on {host}) is gone: killed, or out of memory"
        return f"no sign from its process (pid {pid} on {host}): gone, stopped, or busy in native code"


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _place(frame: FrameType | None) -> str:
    """The innermost line of the user's own code, and the module whose forward it is in."""
    while frame is not None and _in_library(frame):
        frame = frame.f_back
    if frame is None:
        return ""
    code, line = frame.f_code, frame.f_lineno
    text = linecache.getline(code.co_filename, line).strip()
    owner = frame.f_locals.get("self")
    inside = f" of {_module_name(owner)}" if isinstance(owner, torch.nn.Module) else ""
    return f"{os.path.basename(code.co_filename)}:{line} in {code.co_name}{inside}" + (f": {text}" if text else "")


def _in_library(frame: FrameType) -> bool:
    """Is it a line of onecopy, torch or the standard library?"""
    file = frame.f_code.co_filename
    ours, torchs, pythons = _LIBRARY
    return file.startswith((ours, torchs)) or (file.startswith((pythons, "<frozen")) and "-packages" not in file)


def _module_name(module: torch.nn.Module) -> str:
    kind = type(module).__name__
    for engine in engines:
        for name, held in engine.module.named_modules():
            if held is module:
                return f"{name or 'the model'} ({kind})"
    return kind


_watch: _Watch | None = None


def start() -> None:
    """Watch the ranks of the default process group. Does nothing when they are watched, or when there is one."""
    global _watch
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    base = distributed_c10d._get_default_store()
    if _watch is not None and _watch.base is base:
        return
    stop()
    _watch = _Watch(base, dist.get_rank(), dist.get_world_size())
    _install_hook()


def stop() -> None:
    """End the thread; what this rank said last stays in the store."""
    global _watch
    if _watch is not None:
        _watch.stop()
        _watch = None


def tell_end() -> None:
    """This rank leaves: say so before others wait for it."""
    _say(Report("ended"))


def tell_failure(error: BaseException) -> None:
    """This rank dies of ``error``; those that wait for it will say so. Of a :class:`HangError` they know more already."""
    if isinstance(error, HangError):
        stop()
        return
    trace = error.__traceback__
    frame: FrameType | None = None
    while trace is not None:
        if not _in_library(trace.tb_frame):
            frame = trace.tb_frame
        trace = trace.tb_next
    first = str(error).splitlines()[:1]
    _say(Report("failed", error=": ".join([type(error).__name__, *first]), place=_place(frame)))


def _say(report: Report) -> None:
    global _watch
    watch, _watch = _watch, None
    if watch is None:
        return
    watch.stop()
    try:
        watch.answer(report)
    except RuntimeError:
        return  # the store is gone: nobody is left to hear it


def _install_hook() -> None:
    """An uncaught exception is told before the interpreter ends."""
    if getattr(sys.excepthook, "onecopy", False):
        return
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        tell_failure(error)
        before(kind, error, trace)

    hook.onecopy = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def group_timeout() -> timedelta:
    """:func:`patience` as process groups take it."""
    return timedelta(seconds=patience())
