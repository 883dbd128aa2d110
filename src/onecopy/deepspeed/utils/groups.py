"""``deepspeed.utils.groups``: every rank is data-parallel; the other kinds of groups have one rank each."""

from __future__ import annotations

import torch.distributed as dist

from onecopy.comm.groups import world_size

__all__ = ["get_data_parallel_group", "get_data_parallel_rank", "get_data_parallel_world_size"]


def _get_data_parallel_group() -> dist.ProcessGroup | None:
    """All ranks; None where there is one only."""
    return dist.group.WORLD if world_size() > 1 else None


def _get_data_parallel_world_size() -> int:
    return world_size()


def _get_data_parallel_rank() -> int:
    return dist.get_rank() if world_size() > 1 else 0


get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank


def _get_sequence_parallel_group() -> None:
    """Sequences are not split over ranks."""


def _get_sequence_parallel_world_size() -> int:
    return 1


def _get_sequence_parallel_rank() -> int:
    return 0


def _get_model_parallel_world_size() -> int:
    return 1


get_model_parallel_world_size = get_tensor_model_parallel_world_size = _get_model_parallel_world_size


def get_model_parallel_rank() -> int:
    """Nothing is model-parallel."""
    return 0


get_tensor_model_parallel_rank = get_model_parallel_rank
