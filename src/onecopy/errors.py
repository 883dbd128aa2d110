"""Every error a user can meet, by what they should do next.

A message names the two things that conflict, their values and the nearest legal choice. Errors that depend on what
other ranks did are raised on every rank.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DiskError",
    "EngineError",
    "HangError",
    "MemoryCapError",
    "OneCopyError",
    "PlanError",
    "RankMismatchError",
    "ShardedReadError",
]


class OneCopyError(Exception):
    """Base of every error raised on purpose by onecopy."""


class ConfigError(OneCopyError, ValueError):
    """A configuration file or dict says something that cannot be: fix the named key."""


class PlanError(OneCopyError, ValueError):
    """A plan that cannot be carried out for this model on these ranks: change the named setting."""


class EngineError(OneCopyError, RuntimeError):
    """The engine was used in an order or a way that has no right result: change the calling code."""


class RankMismatchError(EngineError):
    """Ranks disagree about the model, the plan or the call they are in: make them the same."""


class HangError(EngineError):
    """Ranks waited for each other in vain: the message says where each of them is. The job cannot go on."""


class ShardedReadError(EngineError):
    """A sharded parameter was read outside a gather: wrap the read in ``onecopy.gathered(...)``."""


class MemoryCapError(EngineError, MemoryError):
    """A buffer would not fit under the memory cap of its tier: raise the cap or move a state to another tier."""


class CheckpointError(OneCopyError, RuntimeError):
    """A checkpoint cannot be written, is not there, is damaged, or is not one of this model: nothing was loaded."""


class DiskError(OneCopyError, RuntimeError):
    """States cannot be kept on disk as asked: the folder cannot be used, is full or taken, or reading or writing failed.

    ``errno``: the system's number where the system refused (``errno.ENOSPC``, ...), else None.
    """

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno
