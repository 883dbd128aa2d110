"""Ranks that wait for others agree about who is missing, although they give up at different times."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from onecopy.comm import watch

pytestmark = pytest.mark.pure


def meet(store: dist.Store, key: str, patience: dict[int, float], world: int = 3) -> dict[int, list[int]]:
    """Who each of the ranks in ``patience`` misses."""
    with ThreadPoolExecutor(world) as pool:
        found = {rank: pool.submit(watch.arrive, store, key, rank, world, left) for rank, left in patience.items()}
        return {rank: future.result() for rank, future in found.items()}


def test_those_that_gave_up_are_not_missing_to_those_that_wait_on() -> None:
    store = dist.HashStore()
    began = time.monotonic()
    assert meet(store, "a", {0: 0.05, 2: 0.4}) == {0: [1], 2: [1]}
    assert meet(store, "a", {2: 0.05, 0: 0.4}) == {0: [1], 2: [1]}, "the same once more"
    assert meet(store, "a", {1: 0.1}) == {1: [0, 2]}, "nobody waits for it any more"
    assert meet(store, "a", {0: 5, 1: 5, 2: 5}) == {0: [], 1: [], 2: []}
    assert time.monotonic() - began < 5


def test_what_was_said_is_taken_back() -> None:
    store = dist.HashStore()
    before = store.num_keys()
    meet(store, "b", {0: 0.05, 2: 0.1})
    meet(store, "b", {0: 5, 1: 5, 2: 5})
    for rank in range(3):
        watch.depart(store, "b", rank)
    assert store.num_keys() == before
