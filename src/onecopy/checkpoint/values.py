"""Values that are no tensors of the model, as JSON and back.

JSON has neither tuples nor infinities nor keys that are numbers, and schedules, options and data loaders use all of
these: they are written as an object with a key that begins with "$".
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onecopy.errors import CheckpointError

__all__ = ["decode", "dtype_name", "encode"]

SMALL = 4096  # elements of the largest tensor that is written as JSON

# Keeps a tensor elsewhere and says where, as JSON; the other way round.
Store = Callable[[Tensor, str], dict[str, Any]]
Fetch = Callable[[dict[str, Any]], Tensor]


def encode(value: Any, where: str, tensors: bool = True, store: Store | None = None) -> Any:
    """``value`` as JSON that :func:`decode` makes equal to it again.

    ``tensors``: may small tensors be in it. ``store``: puts tensors and arrays of any size elsewhere. Raises
    :class:`CheckpointError` naming ``where`` it found what JSON cannot say.
    """
    return _Encoder(tensors, store).value(value, where)


@dataclass(frozen=True)
class _Encoder:
    tensors: bool
    store: Store | None

    def value(self, value: Any, where: str) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            return int(value)
        if isinstance(value, str):
            return str.__str__(value)  # the characters also of a class derived from str
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        if isinstance(value, list):
            return [self.value(item, f"{where}[{at}]") for at, item in enumerate(value)]
        if type(value) is tuple:
            return {"$tuple": [self.value(item, f"{where}[{at}]") for at, item in enumerate(value)]}
        if isinstance(value, dict):
            return self._dict(value, where)
        return self._special(value, where)

    def _special(self, value: Any, where: str) -> Any:
        if isinstance(value, np.generic) and value.shape == ():
            return self.value(value.item(), where)
        if isinstance(value, Tensor) and self.tensors and not value.is_complex():
            if self.store is not None:
                return {"$stored": self.store(value.detach(), where)}
            if value.numel() <= SMALL:
                numbers = [self.value(item, where) for item in value.detach().reshape(-1).tolist()]
                return {"$tensor": numbers, "dtype": dtype_name(value.dtype), "shape": list(value.shape)}
        if self.store is not None and isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            return {"$array": self.value(torch.from_numpy(np.ascontiguousarray(value)), where)}
        if self.store is not None and isinstance(value, bytes):
            return {"$bytes": base64.b64encode(value).decode()}
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise CheckpointError(
            f"{where} is {what}, which cannot be written as JSON; it may hold None, bool, int, float, str, list, tuple and "
            "dict. Turn a tensor into numbers with .tolist(), or make it a buffer of the model"
        )

    def _dict(self, value: dict[Any, Any], where: str) -> Any:
        plain = all(type(key) is str and not key.startswith("$") for key in value)
        counter = isinstance(value, Counter)
        if plain and not counter:
            return {key: self.value(item, f"{where}[{key!r}]") for key, item in value.items()}
        items = [[encode(key, f"a key of {where}"), self.value(item, f"{where}[{key!r}]")] for key, item in value.items()]
        return {"$counter" if counter else "$items": items}


def decode(value: Any, fetch: Fetch | None = None) -> Any:
    """What :func:`encode` was given. Tensors are made on the CPU; ``fetch`` brings those that were put elsewhere."""
    if isinstance(value, list):
        return [decode(item, fetch) for item in value]
    if not isinstance(value, dict):
        return value
    if "$float" in value:
        return float(value["$float"])
    if "$tuple" in value:
        return tuple(decode(item, fetch) for item in value["$tuple"])
    if "$tensor" in value:
        flat = torch.tensor([decode(item) for item in value["$tensor"]], dtype=getattr(torch, value["dtype"]))
        return flat.reshape(value["shape"])
    if "$bytes" in value:
        return base64.b64decode(value["$bytes"])
    if "$array" in value:
        return decode(value["$array"], fetch).numpy()
    if "$stored" in value:
        assert fetch is not None
        return fetch(value["$stored"])
    for tag, kind in (("$items", dict), ("$counter", Counter)):
        if tag in value:
            return kind({decode(key): decode(item, fetch) for key, item in value[tag]})
    return {key: decode(item, fetch) for key, item in value.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
