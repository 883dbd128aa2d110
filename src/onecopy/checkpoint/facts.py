"""What a checkpoint holds, as plain data for people and programs; and reading all of it to see whether it is whole."""

from __future__ import annotations

from typing import Any

from onecopy.checkpoint.format import Parameter, State, decode
from onecopy.checkpoint.sources import Source
from onecopy.errors import CheckpointError

__all__ = ["check_everything", "facts_of"]

_SHOWN = ("lr", "weight_decay", "betas", "momentum")
_CHUNK = 1 << 22  # elements


def facts_of(source: Source) -> dict[str, Any]:
    """What ``onecopy checkpoint inspect --json`` prints."""
    manifest = source.manifest
    records = list(manifest.parameters.values())
    optimizer = manifest.optimizer
    return {
        "folder": str(source.folder),
        "kind": source.kind,
        "written by": ", ".join(f"{name} {version}" for name, version in manifest.library.items() if version != "?") or None,
        "ranks": manifest.plan.get("ranks"),
        "dtype": manifest.plan.get("dtype"),
        "global_steps": manifest.counters["global_steps"],
        "parameters": sum(record.numel for record in records),
        "trained": sum(record.numel for record in records if record.trainable),
        "weights": ", ".join(sorted({record.weight.dtype for record in records})),
        "optimizer": optimizer.kind if optimizer is not None else None,
        "groups": [
            {
                "parameters": len(group.params),
                "options": {key: decode(group.options[key]) for key in _SHOWN if key in group.options},
            }
            for group in (optimizer.groups if optimizer is not None else ())
        ],
        "scheduler": manifest.scheduler.kind or "not named" if manifest.scheduler is not None else None,
        "loss_scale": manifest.loss_scale["scale"] if manifest.loss_scale is not None else None,
        "client_state": sorted(manifest.client_state) if isinstance(manifest.client_state, dict) else [],
        "tensors": [_tensor(record) for record in records] + [_buffer(name, source) for name in manifest.buffers],
        "files": {name: record.bytes for name, record in manifest.files.items()},
        "notes": list(manifest.plan.get("notes", [])),
    }


def _tensor(record: Parameter) -> dict[str, Any]:
    return {
        "names": list(record.names),
        "shape": list(record.shape),
        "dtype": record.dtype,
        "kept": record.weight.dtype,
        "trainable": record.trainable,
        "states": [*record.moments, *record.scalars],
        "spans": len(record.weight.spans),
    }


def _buffer(name: str, source: Source) -> dict[str, Any]:
    stored = source.manifest.buffers[name]
    kept = {"dtype": stored.dtype, "kept": stored.dtype, "trainable": False, "states": [], "spans": 0}
    return {"names": [name], "shape": list(stored.shape), **kept}


def check_everything(source: Source) -> list[str]:
    """What is wrong with the checkpoint, each thing once: files that are not as they were written, and elements that are
    nowhere. Reads all of it, a range at a time."""
    problems: list[str] = []
    verify = getattr(source.reader, "verify", None)
    if verify is not None:
        for name in source.manifest.files:
            _note(problems, lambda name=name: verify(name))
    for record in source.manifest.parameters.values():
        for key, state in {"weight": record.weight, **record.moments}.items():
            _note(problems, lambda r=record, k=key, s=state: _check_state(source, r, k, s, read=verify is None))
    for stored in source.manifest.buffers.values():
        if verify is None:
            _note(problems, lambda stored=stored: source.reader.whole(stored))
    source.reader.close()
    return list(dict.fromkeys(problems))


def _note(problems: list[str], check: Any) -> None:
    try:
        check()
    except CheckpointError as error:
        problems.append(str(error))


def _check_state(source: Source, record: Parameter, key: str, state: State, read: bool) -> None:
    if read:
        for _ in source.parts(state, record.numel, _CHUNK):
            pass
        return
    try:
        list(state.covering(0, record.numel))
    except ValueError as error:
        raise CheckpointError(f"{source.folder}: of {key!r} of {record.names[0]!r} {error}") from error
