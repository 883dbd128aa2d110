"""Plain weights out of a checkpoint or an engine, in the layout that ``from_pretrained`` reads.

A checkpoint is read on one process, a range at a time. An engine is exported by all its ranks: one unit is whole at a
time, and rank 0 writes it. A model with PEFT adapters gives those alone, in PEFT's own layout.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from onecopy.checkpoint.companions import adapter_files, model_files
from onecopy.checkpoint.format import decode, dtype_name
from onecopy.checkpoint.modules import extra_modules, persistent_buffers
from onecopy.checkpoint.recorded import describe
from onecopy.checkpoint.release import Content, Entry, Release, writing_to
from onecopy.checkpoint.sources import Source
from onecopy.checkpoint.whole import whole_units
from onecopy.cluster import quantity
from onecopy.comm import assembly, meeting
from onecopy.engine.inspect import read_param
from onecopy.errors import CheckpointError

if TYPE_CHECKING:
    from onecopy.engine.engine import Engine

__all__ = ["Exported", "Options", "export_checkpoint", "export_engine", "save_weights"]

_CHUNK = 1 << 22  # elements that are read at once
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _dtype_of(name: str | torch.dtype | None) -> torch.dtype | None:
    """``torch.bfloat16`` for ``"bf16"``, ``"bfloat16"`` or itself. Raises :class:`CheckpointError` for anything else."""
    known = {alias: dtype for short, dtype in _DTYPES.items() for alias in (short, dtype_name(dtype))}
    if name is None:
        return None
    found = name if isinstance(name, torch.dtype) else known.get(name)
    if found not in known.values():
        raise CheckpointError(f"dtype {name!r} is not one that weights are exported in; choose one of {', '.join(_DTYPES)}")
    return found


@dataclass(frozen=True)
class Options:
    """How to export. ``dtype``: of floating-point parameters (default: that they compute in), and of buffers with
    ``cast_buffers``; ``limit``: bytes of the largest file; ``beside``: configuration and tokenizer too, of the folder
    ``model_dir`` or as recorded; ``frozen``: parameters that are not trained as well; ``adapters``: of a PEFT model the
    adapters alone; ``pickled``: ``pytorch_model.bin`` instead of safetensors; ``replace``: files that are there."""

    dtype: torch.dtype | None = None
    limit: int | None = 5_000_000_000
    model_dir: str | None = None
    frozen: bool = True
    adapters: bool = True
    beside: bool = True
    cast_buffers: bool = False
    pickled: bool = False
    replace: bool = False

    @classmethod
    def of(cls, dtype: str | torch.dtype | None, limit: int | str | None, **others: Any) -> Options:
        """With ``dtype`` and ``limit`` as people write them: "bf16", "5GB"."""
        return cls(
            _dtype_of(dtype), quantity(limit, "max_shard_size", size=True) if isinstance(limit, str) else limit, **others
        )


@dataclass(frozen=True)
class Exported:
    """What was written: ``folder``, ``files`` in it, how many ``tensors`` of how many ``bytes``, and ``notes``: what there
    was no place for."""

    folder: str
    files: list[str]
    tensors: int
    bytes: int
    notes: list[str]


@dataclass(frozen=True)
class _Described:
    """A tensor to export. ``names``: the first is the one it is written under, the others are its aliases."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def entry(self, key: str) -> Entry:
        return Entry(key, self.names[0], self.shape, self.dtype)


def _target(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and dtype.is_floating_point else dtype


def _folders(described: list[_Described], recorded: Mapping[str, Any], options: Options) -> dict[str, Content]:
    """The contents of each folder of the export."""
    adapters = recorded.get("adapters", {}) if options.adapters else {}
    if not adapters:
        floating = [each.dtype for each in described if each.dtype.is_floating_point]
        dtype = floating[0] if floating else None
        beside = model_files(recorded, options.model_dir, dtype) if options.beside else {}
        whole = _whole(described, options.limit, beside)
        return {"": replace(whole, stem="pytorch_model", pickled=True) if options.pickled else whole}
    by_name = {name: each for each in described for name in each.names}
    found = {}
    for adapter, record in adapters.items():
        if "problem" in record:
            raise CheckpointError(f"adapter {adapter!r} cannot be exported: {record['problem']}; save it with PEFT")
        entries = [by_name[name].entry(key) for key, name in record["keys"].items()]
        beside = adapter_files(recorded, options.model_dir, decode(record["config"]))
        found["" if adapter == "default" else adapter] = Content(entries, "adapter_model", beside=beside)
    return found


def _whole(described: list[_Described], limit: int | None, beside: Mapping[str, str | Path]) -> Content:
    entries = [each.entry(each.names[0]) for each in described]
    aliases = {alias: each.names[0] for each in described for alias in each.names[1:]}
    return Content(entries, limit=limit, aliases=aliases, beside=beside)


def _notes(recorded: Mapping[str, Any], extra: Iterable[str]) -> list[str]:
    """What the export has no place for."""
    named = ", ".join(extra)
    lost = [f"extra state of modules has no place among weights: {named}"] if named else []
    return lost + ([recorded["problem"]] if "problem" in recorded else [])


def _report(out: Path, files: list[str], folders: Mapping[str, Content], notes: list[str]) -> Exported:
    entries = [entry for content in folders.values() for entry in content.entries]
    return Exported(str(out), files, len(entries), sum(entry.bytes for entry in entries), notes)


# A checkpoint


def export_checkpoint(source: Source, out: str | os.PathLike[str], options: Options) -> Exported:
    """Write the weights of ``source`` to the folder ``out``; memory: the part of a tensor that is read at once.

    Raises :class:`CheckpointError`, with nothing left behind, when ``out`` has weights already or a file is damaged.
    """
    manifest = source.manifest
    described, notes = [], _notes(manifest.model, manifest.extra)
    for record in manifest.parameters.values():
        if options.frozen or record.trainable:
            dtype = _target(getattr(torch, record.dtype), options.dtype)
            described.append(_Described(record.names, record.shape, dtype))
    shared: dict[tuple[str, str], list[str]] = {}
    for name, stored in manifest.buffers.items():
        shared.setdefault((stored.file, stored.key), []).append(name)
    for names in shared.values():
        stored = manifest.buffers[names[0]]
        cast = options.dtype if options.cast_buffers else None
        described.append(_Described(tuple(names), stored.shape, _target(getattr(torch, stored.dtype), cast)))
    folders = _folders(described, manifest.model, options)
    with writing_to(Path(out)):
        files = _fill(Release(Path(out), folders, options.replace), source, shared)
    return _report(Path(out), files, folders, notes)


def _fill(release: Release, source: Source, shared: Mapping[tuple[str, str], list[str]]) -> list[str]:
    """Write all of ``source``, whose buffers have the names in ``shared``; returns the names of the files."""
    try:
        for name, values, start in source.values(_CHUNK):
            release.put(name, values, start)
        for names in shared.values():
            release.put(names[0], source.reader.whole(source.manifest.buffers[names[0]]))
        return release.commit()
    except BaseException:
        release.discard()
        raise
    finally:
        source.reader.close()


# An engine


def export_engine(engine: Engine, out: str | os.PathLike[str], options: Options, patience: float | None) -> Exported:
    """See :meth:`onecopy.Engine.export`."""
    _meet(engine, (os.fspath(out), options), patience)
    model = engine.module
    recorded = meeting.together(lambda: describe(model, engine._core.names))
    described = _of_engine(engine, options)
    notes = _notes(recorded, extra_modules(model))
    make = lambda: _folders(described, recorded, options)  # noqa: E731 - only on rank 0, which may copy files
    return _write(engine, Path(out), make, False, notes)


def save_weights(engine: Engine, folder: str | os.PathLike[str], file: str, frozen: bool) -> str:
    """Write the weights, in the dtype they compute in, and the buffers as the one file ``file`` of ``folder``, in place of
    one that is there; returns its path. Collective.

    A name that ends in ``.safetensors`` says the format, any other is one that ``torch.load`` reads.
    """
    _meet(engine, (os.fspath(folder), file, frozen), None)
    path = Path(file)
    if path.name != file or not path.stem:
        raise CheckpointError(f"save_filename {file!r} is not the name of a file; give its folder as save_dir")
    whole = _whole(_of_engine(engine, Options(frozen=frozen)), None, {})
    content = replace(whole, stem=path.stem, suffix=path.suffix, pickled=path.suffix != ".safetensors")
    _write(engine, Path(folder), lambda: {"": content}, True, [])
    return str(Path(folder) / file)


def _of_engine(engine: Engine, options: Options) -> list[_Described]:
    dtypes = {slot.param.name: slot.param.dtype for buffer in engine._core.schedule.buffers for slot in buffer.layout.slots}
    found = []
    for param, names in engine._core.names.items():
        if options.frozen or param.requires_grad:
            dtype = getattr(torch, dtypes[names[0]]) if names[0] in dtypes else param.dtype
            found.append(_Described(tuple(names), tuple(param.shape), _target(dtype, options.dtype)))
    shared: dict[int, list[str]] = {}
    buffers = persistent_buffers(engine.module)
    for name, buffer in buffers.items():
        shared.setdefault(id(buffer), []).append(name)
    return found + [_Described(tuple(n), tuple(buffers[n[0]].shape), buffers[n[0]].dtype) for n in shared.values()]


def _meet(engine: Engine, call: tuple[Any, ...], patience: float | None) -> None:
    meeting.meet("export", f"{engine.global_steps}.{engine.micro_steps}", patience, CheckpointError)
    meeting.same("what to export", call)
    assembly.settle()


def _write(engine: Engine, out: Path, make: Callable[[], dict[str, Content]], replacing: bool, notes: list[str]) -> Exported:
    """Rank 0 writes what ``make()`` of it says, all ranks gather it."""
    engine.finish_step()
    if engine._core.stepper is not None:
        engine._core.stepper.refuse_between("export()")
    made: list[Release] = []
    folders: dict[str, Content] = meeting.from_rank0(lambda: _open(made, out, make(), replacing))
    wanted = {entry.source: entry for content in folders.values() for entry in content.entries}
    problem: Exception | None = None
    for name, values in _values(engine, wanted):
        if made and problem is None:
            try:
                made[0].put(name, values)
            except (OSError, CheckpointError) as error:  # the others go on gathering; all hear of it below
                problem = error
    try:
        files = meeting.from_rank0(lambda: _commit(made[0], problem))
    except CheckpointError:
        if made:
            made[0].discard()
        raise
    return _report(out, files, folders, notes)


def _open(made: list[Release], out: Path, folders: dict[str, Content], replacing: bool) -> dict[str, Content]:
    made.append(Release(out, folders, replacing))
    return folders


def _commit(release: Release, problem: Exception | None) -> list[str]:
    if problem is not None:
        raise problem
    return release.commit()


def _values(engine: Engine, wanted: Mapping[str, Entry]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that is ``wanted``, whole while it is its turn. Collective."""
    core = engine._core
    params = {param: names[0] for param, names in core.names.items() if names[0] in wanted}
    plain: dict[nn.Parameter, str] = {}
    for param, name in params.items():
        if param.is_floating_point() and wanted[name].dtype != param.dtype:
            yield name, read_param(param)  # from its master weights
        else:
            plain[param] = name
    for unit in whole_units(core, frozenset(plain)):
        for param in unit:
            if param in plain:
                yield plain[param], param.detach()
    for name, buffer in persistent_buffers(engine.module).items():
        if name in wanted:
            yield name, buffer
