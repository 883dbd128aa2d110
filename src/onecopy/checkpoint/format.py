"""What a checkpoint is on disk: ``manifest.json`` beside one safetensors file per rank. See ``docs/checkpoint.md``.

Plain data: nothing here knows an engine or a process group. The manifest says for every state of every parameter, by
the parameter's own name, where each range of its elements is; so who wrote a range does not matter to who reads it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any
from zlib import crc32

from pydantic import BaseModel, ConfigDict, ValidationError

from onecopy.checkpoint.values import decode, dtype_name, encode
from onecopy.errors import CheckpointError

__all__ = [
    "CHUNK",
    "MANIFEST",
    "VERSION",
    "FileRecord",
    "Group",
    "Manifest",
    "NewerFormatError",
    "OptimizerRecord",
    "Parameter",
    "SaveRecord",
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
    "seal",
]

MANIFEST = "manifest.json"
VERSION = 1
# Bytes of a file that share a checksum. A rank that reads a range reads the chunks it is in, so up to this much beyond
# each of its ends; eight digits each make the manifest longer by 8 MB for a checkpoint of 1 TB.
CHUNK = 1 << 20
_SEAL = re.compile(r'\{"checksum": "([0-9a-f]{8})",')


class NewerFormatError(CheckpointError):
    """A checkpoint that is whole, and that a later version wrote in a way this one does not know."""


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


class FileRecord(_Record):
    """``bytes``: the file's size; ``crc32``: the CRC-32 (of zlib, gzip and PNG) of each ``chunk`` bytes of it in turn, the
    last one shorter, as eight hexadecimal digits each with nothing between; none of another library's files."""

    bytes: int
    chunk: int = CHUNK
    crc32: str = ""

    def sum_of(self, chunk: int) -> str:
        """The digits of one chunk."""
        return self.crc32[8 * chunk : 8 * chunk + 8]


class Group(_Record):
    """One of the optimizer's groups: the names of its parameters, and its options as :func:`encode` writes them."""

    params: tuple[str, ...]
    options: dict[str, Any]


class OptimizerRecord(_Record):
    """``kind``: the optimizer's class."""

    kind: str
    groups: tuple[Group, ...]


class SaveRecord(_Record):
    """The save itself. ``id``: no two have the same; ``at``: seconds since 1970; ``latest``: was it made the newest?"""

    id: str = ""
    at: float = 0.0
    latest: bool = True


class SchedulerRecord(_Record):
    """``kind``: the schedule's class; ``state``: its ``state_dict()`` as :func:`encode` writes it."""

    kind: str
    state: Any


class Manifest(_Record):
    """All of ``manifest.json``. ``parameters`` and optimizer groups call a parameter by the first of its names.

    ``client_state`` is rank 0's; ``ranks``: what each rank had of its own, ``random`` states, ``data``, and a
    ``client_state`` that differs.
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
    ranks: tuple[dict[str, Any], ...] = ()
    files: dict[str, FileRecord]
    save: SaveRecord = SaveRecord()

    @property
    def unverified(self) -> str:
        """A word for people where it has no checksums of its files; empty where it has."""
        if all(record.crc32 for record in self.files.values()):
            return ""
        return "an earlier version wrote it without checksums, so its bytes could not be verified"

    @property
    def model(self) -> dict[str, Any]:
        """What the model said of itself, see :func:`onecopy.checkpoint.recorded.describe`."""
        said: dict[str, Any] = self.plan.get("model", {})
        return said

    def text(self) -> str:
        """The file's contents."""
        return seal(self.model_dump(mode="json"))


def seal(record: dict[str, Any]) -> str:
    """``record`` as the text of a manifest: JSON whose first field is the CRC-32 of all that follows it."""
    rest = json.dumps({key: value for key, value in record.items() if key != "checksum"}, indent=1, allow_nan=False)[1:]
    return f'{{"checksum": "{crc32(rest.encode()):08x}",{rest}'


def _check_seal(text: str, path: str) -> None:
    """Raise :class:`CheckpointError` unless the text is what :func:`seal` made."""
    sealed = _SEAL.match(text)
    if sealed is None:
        raise CheckpointError(f"{path} is damaged: it does not begin with its checksum")
    found = f"{crc32(text[sealed.end() :].encode()):08x}"
    if found != sealed[1]:
        raise CheckpointError(f"{path} is damaged: its checksum is {found}, {sealed[1]} was written")


def _is_early(raw: Any) -> bool:
    """Was it written before there were checksums? One flipped bit cannot make a later one look like it, as that has them of
    its files, too."""
    files = raw.get("files") if isinstance(raw, dict) and "checksum" not in raw else None
    return isinstance(files, dict) and bool(files) and all(set(record) == {"bytes"} for record in files.values())


def parse(text: str, path: str) -> Manifest:
    """The manifest that ``text`` is. Raises :class:`CheckpointError` naming ``path``."""
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: it is not JSON ({error})") from error
    if not _is_early(raw):
        _check_seal(text, path)
    version = raw.get("format") if isinstance(raw, dict) else None
    if not isinstance(version, int):
        raise CheckpointError(f"{path} is no manifest of a checkpoint: it has no format number")
    if version > VERSION:
        made = raw.get("library", {}).get("onecopy", "a later version") if isinstance(raw.get("library"), dict) else "?"
        raise NewerFormatError(
            f"{path} has format {version}, written by onecopy {made}; this version reads formats up to {VERSION}. "
            "Install a newer onecopy"
        )
    try:
        return Manifest.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{path} is damaged at {where}: {first['msg']}") from error


def ordered(spans: Sequence[Span]) -> tuple[Span, ...]:
    """``spans`` by their place in the parameter."""
    return tuple(sorted(spans, key=lambda span: span.start))
