"""DeepSpeed's checkpoints as manifests of ours: nothing is copied, spans lie in its files.

Read are ZeRO stages 0 to 3 (``mp_rank_*_model_states.pt``, ``zero_pp_rank_*`` and ``bf16_zero_pp_rank_*``) and universal
checkpoints, of data-parallel training on any number of ranks. Tensor, pipeline and expert parallelism is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from onecopy.checkpoint.deepspeed_layouts import (
    OPTIMIZER,
    Found,
    flat_partitions,
    natural,
    per_parameter,
    separate_files,
    unsharded,
)
from onecopy.checkpoint.foreign import Hints, bare, kind_of, options_of
from onecopy.checkpoint.format import (
    VERSION,
    FileRecord,
    Group,
    Manifest,
    OptimizerRecord,
    Parameter,
    SchedulerRecord,
    State,
    Stored,
    dtype_name,
    encode,
    ordered,
)
from onecopy.checkpoint.torchfiles import TorchReader, key_of
from onecopy.errors import CheckpointError

__all__ = ["KIND", "describe", "is_one"]

KIND = "deepspeed"
# What DeepSpeed itself writes beside the client's state.
_OWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params", "frozen_param_fragments",
    "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps", "global_steps",
    "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version",
    "universal_checkpoint_info", "num_experts", "autoep_layers", "ds_autoep_layers",
}  # fmt: skip


def is_one(folder: Path) -> bool:
    """Is ``folder`` a checkpoint that DeepSpeed wrote?"""
    return folder.is_dir() and any(folder.glob("*model_states.pt"))


def describe(folder: Path, hints: Hints) -> Manifest:
    """The manifest of the checkpoint in ``folder``; ``plan["notes"]`` says what of it is left out.

    Raises :class:`CheckpointError` for files that are missing or damaged, and for what is not read here.
    """
    files = sorted([*folder.glob("*.pt"), *folder.glob("zero/**/*.pt")], key=natural)
    reader = TorchReader(folder, {path.relative_to(folder).as_posix(): path.stat().st_size for path in files})
    names = [path.name for path in files if path.parent == folder]
    model_files = [name for name in names if name.endswith("model_states.pt")]
    optim = [name for name in names if name.endswith("optim_states.pt")]
    _refuse_parallelism(folder, names)
    content = reader.load(model_files[0])
    found, shapes = Found(), content.get("param_shapes") or []
    universal = any(name.startswith("zero/") for name in reader.sizes)
    saved = reader.load(optim[0])[OPTIMIZER] if optim else {}
    whole = len(_ranks(model_files)) == 1 and not _hollow(content["module"])
    if universal:
        separate_files(found, reader, shapes)
    elif optim:
        _check_ranks(folder, optim, saved.get("partition_count", len(optim)))
        lay_out = per_parameter if "fp32_flat_groups" in saved else flat_partitions
        lay_out(found, reader, optim, shapes)
    ties = _ties(content)
    if not (universal or optim):
        unsharded(found, reader, model_files[0], _own_names(content, ties), hints.groups if hints.optimizer_states else ())
    _add_frozen(found, reader, model_files, content, ties, whole)
    manifest = _manifest(found, content, ties, reader, saved)
    reader.close()
    return manifest


def _refuse_parallelism(folder: Path, names: Sequence[str]) -> None:
    for word, what in (("expert_", "experts in files of their own"), ("layer_", "pipeline stages")):
        if any(name.startswith(word) for name in names):
            raise CheckpointError(f"{folder} is a DeepSpeed checkpoint with {what}, which is not read here")
    if any("mp_rank_" in name and "mp_rank_00" not in name for name in names):
        raise CheckpointError(f"{folder} is a DeepSpeed checkpoint of several model-parallel ranks, which is not read here")
    ranks = _ranks([name for name in names if "model_states" in name])
    if ranks != list(range(len(ranks))):
        raise CheckpointError(f"{folder} has the model states of ranks {ranks}; some ranks' are missing")


def _ranks(names: Sequence[str]) -> list[int]:
    return [natural(Path(name))[0] for name in names]


def _check_ranks(folder: Path, optim: Sequence[str], said: Any) -> None:
    """Raise :class:`CheckpointError` unless there is one file of every rank."""
    counts = set(said) if isinstance(said, list | tuple) else {said}
    ranks = _ranks([name.removeprefix("bf16_") for name in optim])
    if counts != {len(optim)} or ranks != list(range(len(optim))):
        raise CheckpointError(
            f"{folder} has the optimizer states of ranks {ranks}; {max(counts)} ranks wrote them, so some are missing, or "
            "left from another run"
        )


def _hollow(module: Mapping[str, Tensor]) -> bool:
    """Stage 3 writes the module's parameters without elements."""
    return any(isinstance(value, Tensor) and value.shape == (0,) for value in module.values())


def _ties(content: Mapping[str, Any]) -> dict[str, str]:
    """Names of parameters that are another one, by name."""
    shared = content.get("shared_params")
    if shared is not None:
        return dict(shared)
    seen: dict[tuple[int, int, tuple[int, ...]], str] = {}
    ties = {}
    for name, value in content["module"].items():
        if isinstance(value, Tensor) and value.numel():
            first = seen.setdefault((value.data_ptr(), value.untyped_storage().nbytes(), tuple(value.shape)), name)
            if first != name:
                ties[name] = first
    return ties


def _own_names(content: Mapping[str, Any], ties: Mapping[str, str]) -> list[str]:
    buffers = set(content.get("buffer_names") or ())
    kept = [name for name, value in content["module"].items() if isinstance(value, Tensor)]
    return [name for name in kept if name not in buffers and name not in ties]


def _add_frozen(
    found: Found, reader: TorchReader, files: Sequence[str], content: Mapping[str, Any], ties: Mapping[str, str], whole: bool
) -> None:
    """Parameters without an optimizer: whole in a module, or a fragment in the file of each rank."""
    shapes = content.get("frozen_param_shapes") or {}
    for name, shape in shapes.items():
        numel, start = math.prod(shape), 0
        for file in files[:1] if whole else files:
            part = reader.load(file)["frozen_param_fragments"][name]
            held = min(part.numel(), numel - start)
            found.add(name, "weight", (file, key_of(("frozen_param_fragments", name))), part.dtype, start, held)
            start += held
    for name in _own_names(content, ties) if whole else ():
        if name not in found.spans:  # never given to an optimizer
            value = content["module"][name]
            found.add(name, "weight", (files[0], key_of(("module", name))), value.dtype, 0, value.numel())


def _manifest(
    found: Found, content: Mapping[str, Any], ties: Mapping[str, str], reader: TorchReader, saved: Mapping[str, Any]
) -> Manifest:
    config, notes = content.get("ds_config") or {}, []
    parameters = _parameters(found, content, ties)
    buffers = {}
    for name in content.get("buffer_names") or ():
        value = content["module"].get(name)
        if value is not None:
            file = next(file for file in reader.sizes if file.endswith("model_states.pt"))
            key, shape = key_of(("module", name)), tuple(value.shape)
            buffers[bare(name)] = Stored(file=file, key=key, shape=shape, dtype=dtype_name(value.dtype))
    client = {}
    for name, value in content.items():
        if name in _OWN:
            continue
        try:
            client[name] = encode(value, name)
        except CheckpointError as error:
            notes.append(f"client state left out: {error}")
    accumulation = config.get("gradient_accumulation_steps") or 1
    steps = int(content.get("global_steps") or 0)
    return Manifest(
        format=VERSION,
        library={KIND: str(content.get("ds_version")), "torch": "?"},
        plan={"source": KIND, "ranks": content.get("dp_world_size"), "accumulation": accumulation, "notes": notes},
        counters={
            "global_steps": steps,
            "skipped_steps": int(content.get("skipped_steps") or 0),
            "micro_steps": steps * accumulation,
            "grad_norm": None,
        },
        parameters=parameters,
        buffers=buffers,
        optimizer=_optimizer(found, config),
        scheduler=_scheduler(content, config),
        loss_scale=_loss_scale(content.get("optimizer") or {}, saved.get("loss_scaler")),
        client_state=client,
        files={name: FileRecord(bytes=size) for name, size in reader.sizes.items()},
    )


def _parameters(found: Found, content: Mapping[str, Any], ties: Mapping[str, str]) -> dict[str, Parameter]:
    module = content["module"]
    shapes = {name: tuple(shape) for group in content.get("param_shapes") or () for name, shape in group.items()}
    shapes |= {name: tuple(shape) for name, shape in (content.get("frozen_param_shapes") or {}).items()}
    trained = {name for group in found.groups for name in group}
    parameters = {}
    order = [name for name in module if name in found.spans]
    for name in (*order, *(found.spans.keys() - set(order))):
        states = found.spans[name]
        made = {key: State(dtype=found.dtypes[name, key], spans=ordered(spans)) for key, spans in states.items()}
        weight = made.pop("weight", None)
        if weight is None:
            raise CheckpointError(f"the checkpoint has states of {name!r} and no weights of it")
        dtype = dtype_name(module[name].dtype) if name in module else weight.dtype
        parameters[bare(name)] = Parameter(
            names=(bare(name), *(bare(alias) for alias, first in ties.items() if first == name)),
            shape=shapes.get(name) or tuple(module[name].shape),
            dtype=dtype,
            trainable=name in trained,
            weight=weight,
            moments=made,
            scalars=found.scalars.get(name, {}),
        )
    return parameters


def _optimizer(found: Found, config: Mapping[str, Any]) -> OptimizerRecord | None:
    if not found.options:
        return None
    groups = []
    for at, (names, options) in enumerate(zip(found.groups, found.options, strict=True)):
        groups.append(Group(params=tuple(bare(name) for name in names), options=options_of(options, at)))
    states = {key for states in found.spans.values() for key in states} - {"weight"}
    said = str((config.get("optimizer") or {}).get("type", "unknown"))
    return OptimizerRecord(kind=kind_of(states, found.options[0], said), groups=tuple(groups))


def _scheduler(content: Mapping[str, Any], config: Mapping[str, Any]) -> SchedulerRecord | None:
    """``kind`` is empty where the client made it: the checkpoint does not say."""
    state = content.get("lr_scheduler")
    if state is None:
        return None
    kind = str((config.get("scheduler") or {}).get("type") or "")
    return SchedulerRecord(kind=kind, state=encode(dict(state), "state of the scheduler"))


def _loss_scale(saved: Mapping[str, Any], scaler: Any) -> dict[str, float] | None:
    facts = vars(scaler) if scaler is not None else saved
    if "last_overflow_iter" not in facts:
        return None  # a constant scale has nothing to go on from
    good = int(facts["cur_iter"]) - int(facts["last_overflow_iter"]) - 1
    return {"scale": float(facts["cur_scale"]), "good_steps": good, "hysteresis": int(facts.get("cur_hysteresis", 1))}
