"""``deepspeed.comm``: start the process group as DeepSpeed does; every other name is ``torch.distributed``'s own."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from onecopy.comm import watch
from onecopy.comm.groups import local_rank
from onecopy.errors import ConfigError, EngineError

__all__ = ["get_local_rank", "init_distributed", "launched_ranks"]

# What mpirun sets where torchrun sets WORLD_SIZE.
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int | None = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Start ``torch.distributed`` unless it runs; afterwards a default group exists, of one rank when nobody said more.

    RANK, WORLD_SIZE and MASTER_ADDR come from the launcher; ``distributed_port`` is used where MASTER_PORT is not set.
    ``dist_backend``: the device's own (gloo on CPU, NCCL on CUDA) when None. ``dist_init_required=False``: the caller
    has started it, and it is an error if not. ``verbose`` and ``config`` have no effect. Ranks that only mpirun knows
    of are refused, because each would train alone: ``auto_mpi_discovery`` is not supported.
    """
    if dist.is_initialized():
        return
    if dist_init_required is False:
        raise EngineError("dist_init_required is False but torch.distributed is not initialised; initialise it or drop it")
    backend = dist_backend or _default_backend()
    extra: dict[str, Any] = {}
    if timeout is not None:
        extra["timeout"] = timeout
        watch.set_patience(timeout.total_seconds())
    if init_method is not None or rank >= 0 or world_size > 0:
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, **extra)
        return
    ranks = launched_ranks()
    if ranks == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **extra)  # type: ignore[attr-defined]
        return
    missing = [name for name in ("RANK", "MASTER_ADDR") if name not in os.environ]
    if missing:
        raise EngineError(
            f"WORLD_SIZE is {ranks} but {' and '.join(missing)} not set, so the ranks cannot meet; start the script "
            "with `onecopy launch` or torchrun"
        )
    os.environ.setdefault("MASTER_PORT", str(distributed_port or 29500))
    dist.init_process_group(backend, **extra)


def launched_ranks() -> int:
    """Ranks that the launcher says there are; 1 without one. Raises where mpirun has started several it cannot name."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"WORLD_SIZE is {text!r} in the environment; it must be a whole number from 1")
    for name in _MPI_SIZES:
        if "WORLD_SIZE" not in os.environ and int(os.environ.get(name, "1")) > 1:
            raise EngineError(
                f"{name} is {os.environ[name]} but WORLD_SIZE is not set: mpirun's ranks are not discovered; set RANK, "
                "WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or start the script with `onecopy launch` or torchrun"
            )
    return int(text)


def _default_backend() -> str:
    if torch.cuda.is_available():
        return "nccl"
    return "gloo"


def get_local_rank() -> int:
    """This process's number on its machine: LOCAL_RANK, 0 when it is not set."""
    return local_rank()


def __getattr__(name: str) -> Any:
    return getattr(dist, name)
