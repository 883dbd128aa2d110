"""What a program gives ``save_checkpoint(client_state=)``: anything that torch loads with ``weights_only=True``.

A checkpoint holds JSON and plain tensors. A state that JSON cannot say (it has tensors in it, or sets) is put there as the
bytes of ``torch.save``, in base64, and read with torch's restricted unpickler, which runs no code.
"""

from __future__ import annotations

import base64
import io
import pickle
from typing import Any

import torch

from onecopy.checkpoint.format import encode
from onecopy.errors import CheckpointError

__all__ = ["pack", "unpack"]

_KEY = "torch.save"


def pack(state: dict[str, Any] | None) -> dict[str, Any] | None:
    """``state`` as JSON values; as it is where it could not be read back, which the save then refuses on every rank."""
    if not isinstance(state, dict) or _is_plain(state):
        return state
    try:
        data = _bytes(state)
        _read(data)
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError):
        return state
    return {_KEY: base64.b64encode(data).decode()}


def unpack(state: dict[str, Any]) -> dict[str, Any]:
    """What :func:`pack` was given."""
    if state.keys() != {_KEY}:
        return state
    found: dict[str, Any] = _read(base64.b64decode(state[_KEY]))
    return found


def _is_plain(state: dict[str, Any]) -> bool:
    try:
        encode(state, "client_state", tensors=False)
    except CheckpointError:
        return False
    return True


def _bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _read(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
