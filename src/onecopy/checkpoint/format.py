"""What a checkpoint is on disk: ``manifest.json`` beside one safetensors file per rank. See ``docs/checkpoint.md``.

Plain data: nothing here knows an engine or a process group. The manifest says for every state of every parameter, by
the parameter's own name, where each range of its elements is; so who wrote a range does not matter to who reads it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from onecopy.errors import CheckpointError

__all__ = [
    "MANIFEST",
    "VERSION",
    "Group",
    "Manifest",
    "OptimizerRecord",
    "Parameter",
    "SchedulerRecord",
    "Span",
    "State",
    "Stored",
    "decode",
    "dtype_name",
    "encode",
    "file_of",
    "ordered",
    "parse",
]

MANIFEST = "manifest.json"
VERSION = 1
_SMALL = 4096  # elements of the largest tensor that is written as JSON


def file_of(rank: int) -> str:
    """Name of the tensor file that ``rank`` writes."""
    return f"rank-{rank:05d}.safetensors"


class _Record(BaseModel):
    """Fields that a later version adds are left alone."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Span(_Record):
    """Elements ``[start, stop)`` of a flattened tensor: the one-dimensional tensor ``key`` of ``file``."""

    file: str
    key: str
    start: int
    stop: int


class State(_Record):
    """One number per element of a parameter, in spans that cover it once, ordered."""

    dtype: str
    spans: tuple[Span, ...]

    def covering(self, start: int, stop: int) -> Iterator[tuple[Span, int, int]]:
        """The spans that meet ``[start, stop)``, each with the elements of the parameter to take from it.

        Raises ``ValueError`` when they do not cover it once.
        """
        at = start
        for span in self.spans:
            low, high = max(span.start, start), min(span.stop, stop)
            if low >= high:
                continue
            if low != at:
                often = "twice" if low < at else "nowhere"
                raise ValueError(f"elements [{min(low, at)}, {max(low, at)}) are there {often}")
            yield span, low, high
            at = high
        if at != stop:
            raise ValueError(f"elements [{at}, {stop}) are nowhere")


class Parameter(_Record):
    """A parameter: ``names`` are all its names (tied weights have several), ``dtype`` is that it computes in.

    ``weight``: its values in the highest precision that training held, master weights where there were some.
    ``moments``: the optimizer's states with one number per element; ``scalars``: those with one number for all.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    weight: State
    moments: dict[str, State] = {}
    scalars: dict[str, Any] = {}

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Stored(_Record):
    """A tensor that is in one file as it is: a module's buffer."""

    file: str
    key: str
    shape: tuple[int, ...]
    dtype: str


class Group(_Record):
    """One of the optimizer's groups: the names of its parameters, and its options as :func:`encode` writes them."""

    params: tuple[str, ...]
    options: dict[str, Any]


class OptimizerRecord(_Record):
    """``kind``: the optimizer's class."""

    kind: str
    groups: tuple[Group, ...]


class SchedulerRecord(_Record):
    """``kind``: the schedule's class; ``state``: its ``state_dict()`` as :func:`encode` writes it."""

    kind: str
    state: Any


class Manifest(_Record):
    """All of ``manifest.json``. ``parameters`` and optimizer groups call a parameter by the first of its names.

    ``client_states``: by rank, those that differ from ``client_state``, which is rank 0's. ``id``: no two saves have the
    same.
    """

    format: int
    library: dict[str, str]
    plan: dict[str, Any]
    counters: dict[str, Any]
    parameters: dict[str, Parameter]
    buffers: dict[str, Stored]
    extra: dict[str, Any] = {}
    optimizer: OptimizerRecord | None
    scheduler: SchedulerRecord | None
    loss_scale: dict[str, float] | None
    client_state: Any
    client_states: dict[int, Any] = {}
    files: dict[str, dict[str, int]]
    id: str = ""

    @property
    def model(self) -> dict[str, Any]:
        """What the model said of itself, see :func:`onecopy.checkpoint.recorded.describe`."""
        said: dict[str, Any] = self.plan.get("model", {})
        return said

    def text(self) -> str:
        """The file's contents."""
        return json.dumps(self.model_dump(mode="json"), indent=1, allow_nan=False)


def parse(text: str, path: str) -> Manifest:
    """The manifest that ``text`` is. Raises :class:`CheckpointError` naming ``path``."""
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: it is not JSON ({error})") from error
    version = raw.get("format") if isinstance(raw, dict) else None
    if not isinstance(version, int):
        raise CheckpointError(f"{path} is no manifest of a checkpoint: it has no format number")
    if version > VERSION:
        made = raw.get("library", {}).get("onecopy", "a later version") if isinstance(raw.get("library"), dict) else "?"
        raise CheckpointError(
            f"{path} has format {version}, written by onecopy {made}; this version reads formats up to {VERSION}. "
            "Install a newer onecopy"
        )
    try:
        return Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{path} is damaged at {where}: {first['msg']}") from error


# Values that are no tensors of the model. JSON has neither tuples nor infinities nor keys that are numbers, and
# schedules and options use all of these: they are written as an object with a key that begins with "$".


def encode(value: Any, where: str, tensors: bool = True) -> Any:
    """``value`` as JSON that :func:`decode` makes equal to it again.

    ``tensors``: may small tensors be in it. Raises :class:`CheckpointError` naming ``where`` it found what JSON cannot
    say.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str):
        return str.__str__(value)  # the characters also of a class derived from str
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, list):
        return [encode(item, f"{where}[{at}]", tensors) for at, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [encode(item, f"{where}[{at}]", tensors) for at, item in enumerate(value)]}
    if isinstance(value, dict):
        return _encode_dict(value, where, tensors)
    if isinstance(value, torch.Tensor) and tensors and value.numel() <= _SMALL and not value.is_complex():
        numbers = [encode(item, where) for item in value.detach().reshape(-1).tolist()]
        return {"$tensor": numbers, "dtype": dtype_name(value.dtype), "shape": list(value.shape)}
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
        return encode(value.item(), where, tensors)
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    raise CheckpointError(
        f"{where} is {what}, which cannot be written as JSON; it may hold None, bool, int, float, str, list, tuple and "
        "dict. Turn a tensor into numbers with .tolist(), or make it a buffer of the model"
    )


def _encode_dict(value: dict[Any, Any], where: str, tensors: bool) -> Any:
    plain = all(type(key) is str and not key.startswith("$") for key in value)
    counter = isinstance(value, Counter)
    if plain and not counter:
        return {key: encode(item, f"{where}[{key!r}]", tensors) for key, item in value.items()}
    items = [[encode(key, f"a key of {where}"), encode(item, f"{where}[{key!r}]", tensors)] for key, item in value.items()]
    return {"$counter" if counter else "$items": items}


def decode(value: Any) -> Any:
    """What :func:`encode` was given. Tensors are made on the CPU."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "$float" in value:
        return float(value["$float"])
    if "$tuple" in value:
        return tuple(decode(item) for item in value["$tuple"])
    if "$tensor" in value:
        flat = torch.tensor([decode(item) for item in value["$tensor"]], dtype=getattr(torch, value["dtype"]))
        return flat.reshape(value["shape"])
    for tag, kind in (("$items", dict), ("$counter", Counter)):
        if tag in value:
            return kind({decode(key): decode(item) for key, item in value[tag]})
    return {key: decode(item) for key, item in value.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """``"float32"`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def ordered(spans: Sequence[Span]) -> tuple[Span, ...]:
    """``spans`` by their place in the parameter."""
    return tuple(sorted(spans, key=lambda span: span.start))
