"""What each rank has of its own in a checkpoint: the states of its random generators, and its place in the data."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from onecopy.checkpoint.format import Manifest, Stored
from onecopy.checkpoint.values import decode, encode
from onecopy.errors import CheckpointError

__all__ = ["Stateful", "check_stateful", "collect", "data_of", "of_rank", "random_of", "set_random"]


@runtime_checkable
class Stateful(Protocol):
    """A place in the data, such as ``torchdata.stateful_dataloader.StatefulDataLoader``."""

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`load_state_dict` goes on from: JSON values, bytes, tensors and numpy arrays."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Go on from there."""


def check_stateful(data: Any) -> None:
    """Raise :class:`CheckpointError` unless ``data`` is None or :class:`Stateful`."""
    if data is not None and not isinstance(data, Stateful):
        raise CheckpointError(
            f"data is a {type(data).__name__}, which has no state_dict() and load_state_dict(); give an object that has, "
            "such as torchdata's StatefulDataLoader, or keep the position in client_state"
        )


def collect(data: Stateful | None, device: torch.device, store: Callable[[str, Tensor], Stored]) -> dict[str, Any]:
    """The states as JSON; ``store`` takes a key and a tensor to be written, and says where it will be."""
    count = 0

    def keep(tensor: Tensor, where: str) -> dict[str, Any]:
        nonlocal count
        count += 1
        return store(f"rank/{count}/{where}", tensor).model_dump()

    found = {"random": encode(_random_now(device), "random", store=keep)}
    if data is not None:
        found["data"] = encode(data.state_dict(), "data", store=keep)
    return found


def _random_now(device: torch.device) -> dict[str, Any]:
    version, words, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss},
        "numpy": {"kind": kind, "words": np.asarray(keys, dtype=np.uint32), "rest": rest},
    }
    if device.type != "cpu":
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def of_rank(manifest: Manifest, rank: int) -> dict[str, Any]:
    """What ``rank`` had of its own; empty where there was no such rank."""
    return manifest.ranks[rank] if rank < len(manifest.ranks) else {}


def random_of(manifest: Manifest, rank: int, fetch: Callable[[dict[str, Any]], Tensor]) -> dict[str, Any] | None:
    """The random states that ``rank`` had; None where there was no such rank."""
    found: dict[str, Any] | None = decode(of_rank(manifest, rank).get("random"), fetch)
    return found


def set_random(states: dict[str, Any], device: torch.device) -> None:
    """Make the random generators go on from ``states``; of a kind of device that was not there they stay as they are."""
    torch.set_rng_state(states["torch"])
    held = states["python"]
    random.setstate((held["version"], tuple(int(word) for word in held["words"]), held["gauss"]))
    held = states["numpy"]
    np.random.set_state((held["kind"], held["words"], *held["rest"]))
    if device.type != "cpu" and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)


def data_of(manifest: Manifest, rank: int, world: int, fetch: Callable[[dict[str, Any]], Tensor]) -> Any:
    """The place in the data that ``rank`` had. Raises :class:`CheckpointError` where there is none to go on from."""
    states = [own.get("data") for own in manifest.ranks]
    if not states or None in states:
        raise CheckpointError("load(data=) of a checkpoint that was saved without data=: it has no place in the data")
    if len(states) != world and any(state != states[0] for state in states):
        raise CheckpointError(
            f"load(data=) on {world} ranks, and {len(states)} ranks saved a place in the data each, which are not the same "
            "place: load without data= and set it yourself, or let data.state_dict() be the same on every rank"
        )
    return decode(states[rank if len(states) == world else 0], fetch)
