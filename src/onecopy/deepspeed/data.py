"""The dataloader that ``initialize(training_data=...)`` returns: each rank its own share of every epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from onecopy.errors import ConfigError

__all__ = ["EpochSampler", "make_dataloader"]


class EpochSampler(DistributedSampler[Any]):
    """A ``DistributedSampler`` that goes on to the next epoch's order by itself whenever it is iterated.

    ``set_epoch`` still says which order comes next.
    """

    def __iter__(self) -> Iterator[Any]:
        order = super().__iter__()
        self.epoch += 1
        return order


def make_dataloader(
    dataset: Any, *, micro: int | None, rank: int, world: int, collate_fn: Callable[..., Any] | None, drop_last: bool
) -> DataLoader[Any]:
    """Batches of ``micro`` samples for this rank, shuffled the same way on all; the end is filled up so that all ranks
    get as many batches. Raises :class:`ConfigError` when ``micro`` is unknown or the data has no length."""
    if micro is None:
        raise ConfigError(
            "training_data needs a batch size: set train_micro_batch_size_per_gpu or train_batch_size in the config"
        )
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"training_data is a {type(dataset).__name__} without a length, so it cannot be split over the ranks; give "
            "each rank a DataLoader of its own share instead"
        )
    sampler = EpochSampler(dataset, num_replicas=world, rank=rank)
    return DataLoader(
        dataset,
        batch_size=micro,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=drop_last,
        pin_memory=torch.cuda.is_available(),
    )
