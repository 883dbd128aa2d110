"""A checkpoint written for ``torch.distributed.checkpoint``, so that FSDP loads it: one tensor is whole at a time."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from onecopy.checkpoint.format import Stored, decode
from onecopy.checkpoint.sources import Source
from onecopy.checkpoint.store import human
from onecopy.errors import CheckpointError

__all__ = ["to_dcp"]

_CHUNK = 1 << 22  # elements


class _Planner(DefaultSavePlanner):
    """Writes the real values of tensors that the state dict has without any."""

    def __init__(self, source: Source, where: Mapping[str, Any]) -> None:
        super().__init__()
        self._source = source
        self._where = where

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self._where.get(index.fqn)
        if found is None:
            return super().lookup_object(index)
        if isinstance(found, Stored):
            return self._source.reader.whole(found).clone()
        state, shape = found
        whole = torch.empty(shape, dtype=getattr(torch, state.dtype))
        for part, start in self._source.parts(state, whole.numel(), _CHUNK):
            whole.view(-1)[start : start + part.numel()].copy_(part)
        return whole


def to_dcp(source: Source, out: Path, optimizer_states: bool = True) -> str:
    """Write ``source`` to the folder ``out``: ``model`` and ``optim`` as torch's ``get_model_state_dict`` and
    ``get_optimizer_state_dict`` name them, weights in the precision that is kept, tied weights under each of their names.
    Returns ``out``.

    Raises :class:`CheckpointError` when ``out`` is not empty, there is no room, or a file is damaged; nothing is left then.
    """
    if out.exists() and any(out.iterdir()):
        raise CheckpointError(f"{out} is not empty; a checkpoint for torch.distributed.checkpoint needs a folder of its own")
    state, where = _state_dict(source, optimizer_states)
    size = sum(tensor.nbytes for tensor in _tensors(state))
    nearest = next(path for path in (out, *out.absolute().parents) if path.exists())
    free = shutil.disk_usage(nearest).free
    if free < size:
        raise CheckpointError(f"no space to write to {out}: it needs {human(size)}, {human(free)} are free")
    hidden = out.with_name(f".{out.name}.partial")
    if hidden.exists():
        shutil.rmtree(hidden)
    try:
        planner = _Planner(source, where)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*save in a single process.*")  # that is the intent
            save(state, storage_writer=FileSystemWriter(hidden), planner=planner, no_dist=True)
        if out.exists():
            out.rmdir()
        hidden.rename(out)
    except CheckpointException as error:  # torch's, which is no Exception
        causes = [cause for cause, _ in error.failures.values()]
        ours = next((cause for cause in causes if isinstance(cause, CheckpointError)), None)
        raise ours or CheckpointError(f"{out} cannot be written: {causes[0]}") from error
    finally:
        source.reader.close()
        if hidden.exists():
            shutil.rmtree(hidden)
    return str(out)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value.values() for tensor in _tensors(item)] if isinstance(value, Mapping) else []


def _state_dict(source: Source, optimizer_states: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The nested dict with tensors without values, and where the values of each are, by its name in the index."""
    manifest = source.manifest
    model: dict[str, Any] = {}
    states: dict[str, Any] = {}
    where: dict[str, Any] = {}
    for record in manifest.parameters.values():
        for name in record.names:
            model[name] = torch.empty(record.shape, dtype=getattr(torch, record.weight.dtype), device="meta")
            where[f"model.{name}"] = (record.weight, record.shape)
        held = {}
        for key, state in record.moments.items():
            held[key] = torch.empty(record.shape, dtype=getattr(torch, state.dtype), device="meta")
            where[f"optim.state.{record.names[0]}.{key}"] = (state, record.shape)
        held |= {key: decode(value) for key, value in record.scalars.items()}
        if held:
            states[record.names[0]] = held
    for name, stored in manifest.buffers.items():
        model[name] = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device="meta")
        where[f"model.{name}"] = stored
    found: dict[str, Any] = {"model": model}
    if optimizer_states and manifest.optimizer is not None:
        groups = [{**decode(group.options), "params": list(group.params)} for group in manifest.optimizer.groups]
        found["optim"] = {"state": states, "param_groups": groups}
    return found, where
