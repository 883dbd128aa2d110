"""Files that ``torch.save`` wrote, read by torch's safe loader and mapped: ranges of them cost the pages they are on.

Some hold objects of DeepSpeed's classes. A stand-in without behaviour takes the place of each class that is known to be
harmless; any other is refused by its name, so that reading a file runs none of its code.
"""

from __future__ import annotations

import json
import math
import pickle
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onecopy.checkpoint.format import Span, Stored, dtype_name
from onecopy.errors import CheckpointError

__all__ = ["TorchReader", "key_of", "safe_load"]

_OBJECTS = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScalerBase",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
_NUMBERS = ("deepspeed.runtime.zero.config.ZeroStageEnum",)


def _stand_in(path: str, base: type) -> type:
    module, name = path.rsplit(".", 1)
    return type(name, (base,), {"__module__": module, "__qualname__": name, "__doc__": f"Stands in for {path}."})


_STAND_INS: list[Any] = [_stand_in(path, object) for path in _OBJECTS] + [_stand_in(path, int) for path in _NUMBERS]
_ONE_AT_A_TIME = threading.RLock()  # torch keeps what is allowed in one place for the whole process


def safe_load(path: Path) -> Any:
    """What ``torch.save`` wrote to ``path``, on the CPU, its tensors mapped.

    Raises :class:`CheckpointError` for a file that is damaged, or that would build an object of a class not known here.
    """
    try:
        with _ONE_AT_A_TIME, torch.serialization.safe_globals(_STAND_INS):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        refused = _refused(path)
        if refused:
            raise CheckpointError(
                f"{path} holds objects of {', '.join(refused)}, which are not built here. Where you know the class to be "
                "harmless, allow it with torch.serialization.add_safe_globals, or save the checkpoint without it"
            ) from error
        raise CheckpointError(f"{path} is damaged: {_line(error)}") from error
    except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read: {_line(error)}") from error


def _refused(path: Path) -> list[str]:
    """Classes that the file names and that are neither torch's own nor allowed."""
    with _ONE_AT_A_TIME, torch.serialization.safe_globals(_STAND_INS):
        try:
            return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
        except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError):
            return []  # so it is damaged, which the caller says


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def key_of(path: Sequence[str | int], offset: int = 0) -> str:
    """The key of a span: where in the loaded file its tensor is, and the element of it that the span begins at."""
    return json.dumps([*path, offset])


class TorchReader:
    """Ranges of the tensors in files that ``torch.save`` wrote. Keys are those of :func:`key_of`.

    ``sizes``: bytes of each file that the manifest names.
    """

    def __init__(self, folder: Path, sizes: dict[str, int]) -> None:
        self.folder = folder
        self.sizes = sizes
        self._open: dict[str, Any] = {}

    def check_file(self, name: str) -> None:
        """Raise :class:`CheckpointError` when the file is missing here, or is another one than was described."""
        path = self.folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != self.sizes[name]:
            seen = "missing" if found is None else f"damaged: it has {found} bytes"
            raise CheckpointError(f"{path} is {seen}; it had {self.sizes[name]} bytes when the checkpoint was looked at")

    def check(self, source: Span | Stored, shape: Sequence[int], dtype: str) -> None:
        """Raise :class:`CheckpointError` unless the file has the elements ``source`` names, of that dtype."""
        tensor, offset = self._find(source)
        if tensor.numel() - offset < math.prod(shape) or dtype_name(tensor.dtype) != dtype:
            raise CheckpointError(
                f"{self.folder / source.file} is damaged: {source.key} is {dtype_name(tensor.dtype)} of shape "
                f"{tuple(tensor.shape)}, {math.prod(shape)} elements of {dtype} from element {offset} on are wanted"
            )

    def expect(self, ranges: Iterable[tuple[Span, int, int]]) -> None:
        """Nothing is read ahead here."""

    def read(self, span: Span, start: int, stop: int, out: Tensor) -> None:
        """Fill ``out``, flat, with elements ``[start, stop)`` of the parameter, which ``span`` has."""
        tensor, offset = self._find(span)
        first = offset - span.start
        out.copy_(tensor.detach().reshape(-1)[first + start : first + stop])

    def whole(self, stored: Stored) -> Tensor:
        """A tensor that is stored as it is. Do not keep it: it maps the whole file."""
        tensor, _ = self._find(stored)
        return tensor.detach().reshape(stored.shape)

    def load(self, name: str) -> Any:
        """The file's contents."""
        if name not in self._open:
            self.check_file(name)
            self._open[name] = safe_load(self.folder / name)
        return self._open[name]

    def close(self) -> None:
        """Give the mappings back. Reading maps again."""
        self._open.clear()

    def _find(self, source: Span | Stored) -> tuple[Tensor, int]:
        *path, offset = json.loads(source.key)
        found = self.load(source.file)
        try:
            for step in path:
                found = found[step]
        except (KeyError, IndexError, TypeError) as error:
            raise CheckpointError(f"{self.folder / source.file} is damaged: it has no {source.key}") from error
        if not isinstance(found, Tensor):
            raise CheckpointError(f"{self.folder / source.file} is damaged: {source.key} is a {type(found).__name__}")
        return found, offset
