"""``deepspeed.utils.logging``: the one logger, ``onecopy``."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.distributed as dist

__all__ = ["log_dist", "log_dist_once", "logger", "set_log_level_from_string"]

logger = logging.getLogger("onecopy")
_said: set[str] = set()


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log ``message`` on ``ranks`` (None or -1 among them: on all)."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """:func:`log_dist`, the first time that ``message`` is said."""
    if message not in _said:
        _said.add(message)
        log_dist(message, ranks, level)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Level "debug", "info", "warning", "error" or "critical". Raises ValueError for another."""
    known = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error", "critical")}
    if log_level_str.lower() not in known:
        raise ValueError(f"{log_level_str!r} is no log level; there are {', '.join(known)}")
    (custom_logger or logger).setLevel(known[log_level_str.lower()])
