"""Another library's checkpoint written anew as one of ours, on one process, a range at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from onecopy.checkpoint.format import Parameter, SaveRecord, Span, State, Stored, file_of
from onecopy.checkpoint.sources import OURS, Source
from onecopy.checkpoint.store import Draft, check_tag
from onecopy.checkpoint.tensors import Later, file_bytes
from onecopy.checkpoint.writer import write_tensors
from onecopy.errors import CheckpointError

__all__ = ["convert"]

_CHUNK = 1 << 22  # elements


class _Ranges(Later):
    """A state of a parameter, read from the checkpoint that is converted."""

    def __init__(self, source: Source, state: State, numel: int) -> None:
        self.source, self.state, self._numel = source, state, numel
        self.dtype = getattr(torch, state.dtype)

    def numel(self) -> int:
        return self._numel

    def parts(self) -> Iterator[Tensor]:
        yield from (part for part, _ in self.source.parts(self.state, self._numel, _CHUNK))


class _Writing:
    """The tensors of the new checkpoint, and what its manifest says of them."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.tensors: list[tuple[str, Tensor | Later]] = []

    def state(self, name: str, kind: str, state: State, numel: int) -> State:
        key = f"{name}/{kind}/0"
        if not numel:
            return State(dtype=state.dtype, spans=())
        self.tensors.append((key, _Ranges(self.source, state, numel)))
        return State(dtype=state.dtype, spans=(Span(file=file_of(0), key=key, start=0, stop=numel),))

    def parameter(self, record: Parameter, moments: bool) -> Parameter:
        name, numel = record.names[0], record.numel
        kept = record.moments if moments else {}
        made = {key: self.state(name, f"optimizer.{key}", state, numel) for key, state in kept.items()}
        weight = self.state(name, "weight", record.weight, numel)
        scalars = record.scalars if moments else {}
        return record.model_copy(update={"weight": weight, "moments": made, "scalars": scalars})

    def stored(self, key: str, stored: Stored) -> Stored:
        self.tensors.append((key, self.source.reader.whole(stored).clone()))
        return stored.model_copy(update={"file": file_of(0), "key": key})


def convert(source: Source, directory: Path, tag: str | None, optimizer_states: bool = True) -> str:
    """Write ``source`` as a checkpoint of ours to ``directory/tag`` and make it the latest there; returns its folder.

    ``tag``: by default ``step<global_steps>``. Without ``optimizer_states``, weights and buffers alone. Raises
    :class:`CheckpointError`, with nothing left behind, when a file is damaged or there is no room.
    """
    if source.kind == OURS:
        raise CheckpointError(
            f"{source.folder} is a checkpoint of ours already, which every command and engine reads as it is"
        )
    manifest, writing = source.manifest, _Writing(source)
    named = tag if tag is not None else f"step{manifest.counters['global_steps']:08d}"
    check_tag(named)
    parameters = {name: writing.parameter(record, optimizer_states) for name, record in manifest.parameters.items()}
    buffers = {name: writing.stored(f"{name}/buffer", stored) for name, stored in manifest.buffers.items()}
    draft = Draft(directory, named)
    nonce = draft.open(file_bytes(writing.tensors))
    draft = replace(draft, nonce=nonce)
    try:
        record = write_tensors(draft.folder / file_of(0), writing.tensors)
        plan = {key: value for key, value in manifest.plan.items() if key != "source"} | {"converted from": source.kind}
        draft.commit(
            manifest.model_copy(
                update={
                    "plan": plan,
                    "parameters": parameters,
                    "buffers": buffers,
                    "optimizer": manifest.optimizer if optimizer_states else None,
                    "scheduler": manifest.scheduler if optimizer_states else None,
                    "files": {file_of(0): record},
                    "save": SaveRecord(id=nonce, at=time.time(), latest=True),
                }
            )
        )
    except BaseException:
        draft.discard()
        raise
    finally:
        source.reader.close()
    draft.point()
    return str(draft.target)
