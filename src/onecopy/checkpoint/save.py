"""``engine.save``: every rank writes the elements it answers for, rank 0 says what is where and makes it visible.

1. *meet*     all ranks are in the same call, or an error says which are not
2. *prepare*  every rank lists its pieces and checks what it is about to save; nothing is written yet
3. *open*     rank 0 makes the folder, when there is room for all
4. *write*    every rank writes its file and makes it durable
5. *commit*   rank 0 writes the manifest, renames the folder to the tag, moves the pointer, removes what is too old

An asynchronous save copies its tensors to host memory in the place of step 4; ``background.py`` does 4 and 5.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from onecopy.checkpoint import own
from onecopy.checkpoint.background import Job, check_memory
from onecopy.checkpoint.format import (
    MANIFEST,
    VERSION,
    FileRecord,
    Group,
    Manifest,
    OptimizerRecord,
    Parameter,
    SaveRecord,
    SchedulerRecord,
    Span,
    State,
    Stored,
    dtype_name,
    encode,
    file_of,
    ordered,
    parse,
)
from onecopy.checkpoint.modules import extra_modules, persistent_buffers
from onecopy.checkpoint.recorded import describe
from onecopy.checkpoint.store import Draft, check_tag, prune
from onecopy.checkpoint.tensors import Later, file_bytes, part_of
from onecopy.checkpoint.writer import Writer, write_tensors
from onecopy.comm import meeting
from onecopy.engine.weights import Weights
from onecopy.errors import CheckpointError
from onecopy.optim import Piece, Tiles

if TYPE_CHECKING:
    from onecopy.engine.build import Core
    from onecopy.engine.engine import Engine

__all__ = ["Wish", "check_at_rest", "save"]

# A state's name in tensor keys: "weight", or the optimizer's name for it behind this.
_MOMENT = "optimizer."


@dataclass(frozen=True)
class Wish:
    """What the caller of ``save`` asked for beside the tag. ``frozen``: parameters that are not trained, too."""

    client_state: dict[str, Any] | None = None
    data: own.Stateful | None = None
    latest: bool = True
    keep_last: int | None = None
    asynchronous: bool = False
    frozen: bool = True

    def check(self) -> None:
        """Raise :class:`CheckpointError` for what cannot be asked for."""
        if self.client_state is not None and not isinstance(self.client_state, dict):
            raise CheckpointError(f"client_state is a {type(self.client_state).__name__}; give a dict")
        own.check_stateful(self.data)
        keep = self.keep_last
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise CheckpointError(f"keep_last is {keep!r}; it is a whole number from 1, or None to keep every checkpoint")
        if keep is not None and not self.latest:
            raise CheckpointError(f"keep_last={keep} with latest=False: only a save that becomes the newest removes others")


@dataclass
class Share:
    """What this rank knows that rank 0 must hear. ``rows``: (parameter, state, dtype, start, stop) of each tensor."""

    rows: list[tuple[str, str, str, int, int]] = field(default_factory=list)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)


@dataclass
class Prepared:
    """What this rank is going to write: its tensors, and its :class:`Share`."""

    client: Any
    groups: list[dict[str, Any]]
    scheduler: SchedulerRecord | None
    frozen: bool
    extra: dict[str, Any] = field(default_factory=dict)
    tensors: list[tuple[str, Tensor | Later]] = field(default_factory=list)
    buffers: dict[str, Stored] = field(default_factory=dict)
    share: Share = field(default_factory=Share)


def save(engine: Engine, directory: str | os.PathLike[str], tag: str | None, wish: Wish, patience: float | None) -> str:
    """See :meth:`onecopy.Engine.save`."""
    meeting.meet("save", f"{engine.global_steps}.{engine.micro_steps}", patience, CheckpointError)
    engine._saves.settle()
    named = tag if tag is not None else f"step{engine.global_steps:08d}"
    meeting.same("the tag of the checkpoint", named)
    meeting.same("how to save (latest, keep_last, asynchronous)", (wish.latest, wish.keep_last, wish.asynchronous))
    prepared = meeting.together(lambda: _prepare(engine, named, wish))
    draft = Draft(Path(directory).absolute(), named)  # the program may be elsewhere when it is written
    size = _size(engine, prepared, wish.asynchronous)
    _note_client(prepared)
    nonce = meeting.from_rank0(lambda: draft.open(size))
    draft = replace(draft, nonce=nonce)
    plans: list[Manifest] = []  # on rank 0: the manifest but for the files
    try:
        meeting.together(draft.check_shared)
        shares = meeting.collect(prepared.share)
        meeting.from_rank0(lambda: plans.append(_manifest(engine, prepared, shares, nonce, wish.latest)))
        if wish.asynchronous:
            job = meeting.together(lambda: _begin(engine, draft, prepared, _Finish(draft, plans, wish, nonce)))
            engine._saves.start(job)
            return str(Path(directory) / named)
        path = draft.folder / file_of(meeting.my_rank())
        records = meeting.collect(meeting.together(lambda: write_tensors(path, prepared.tensors)))
        meeting.from_rank0(lambda: draft.commit(_with_files(plans[0], records)))
    except CheckpointError:  # raised on every rank, so all are here
        meeting.from_rank0(draft.discard)
        raise
    meeting.from_rank0(lambda: _make_newest(draft, wish))
    engine._saves.last = str(Path(directory) / named)
    return engine._saves.last


def _make_newest(draft: Draft, wish: Wish) -> None:
    if wish.latest:
        draft.point()
    if wish.keep_last is not None:
        prune(draft.directory, wish.keep_last)


@dataclass(frozen=True)
class _Finish:
    """The end of an asynchronous save, as its thread calls it."""

    draft: Draft
    plans: list[Manifest]
    wish: Wish
    nonce: str

    def commit(self, records: list[FileRecord]) -> None:
        self.draft.commit(_with_files(self.plans[0], records))
        _make_newest(self.draft, self.wish)

    def done(self) -> bool:
        """Is the checkpoint there, made by this very save?"""
        path = self.draft.target / MANIFEST
        return path.is_file() and parse(path.read_text(encoding="utf-8"), str(path)).save.id == self.nonce


def _begin(engine: Engine, draft: Draft, prepared: Prepared, finish: _Finish) -> Job:
    """Copy what is in memory and write what is not; the rest is left to a thread."""
    writer = Writer(draft.folder / file_of(meeting.my_rank()), prepared.tensors)
    try:
        writer.write_later()
        engine._saves.stage(writer, engine.device)
        prefix = f"onecopy/saving/{finish.nonce}"
        return Job(writer, str(draft.target), prefix, finish.commit, draft.discard, finish.done)
    except BaseException:
        writer.close()
        raise


def _size(engine: Engine, prepared: Prepared, asynchronous: bool) -> int:
    """Bytes of all tensor files. Collective; raises :class:`CheckpointError` where copies of them need memory that is not
    there."""
    size = file_bytes(prepared.tensors)
    later = sum(tensor.numel() * tensor.element_size() for _, tensor in prepared.tensors if isinstance(tensor, Later))
    staged = max(size - later - engine._saves.room, 0) if asynchronous else 0
    return check_memory(size, staged)


def check_at_rest(engine: Engine, what: str) -> None:
    """Raise :class:`CheckpointError` when ``what`` would lose gradients or miss values that are being edited."""
    core = engine._core
    if what == "save" and core.stepper is not None and core.stepper.torn is not None:
        torn = core.stepper.torn
        raise CheckpointError(f"save() after a step that was interrupted: {torn}{engine._saves.remedy(torn)}")
    gradients = [gradients for unit in core.run.units for gradients in unit.gradients]
    if core.rounds.interrupted or any(kept.any for kept in gradients):
        raise CheckpointError(
            f"{what}() with gradients that no step has used: {engine.micro_steps} micro-batches are done, with "
            f"accumulation over {core.plan.batch.accumulation}. Call it after the engine.step() that ends a window, or "
            "call engine.discard_gradients() first"
        )
    if core.gathering.depth or any(weights.pins for unit in core.run.units for weights in unit.weights):
        raise CheckpointError(f"{what}() inside a forward pass or `with onecopy.gathered(...)`; call it outside")


# Preparing


def _prepare(engine: Engine, tag: str, wish: Wish) -> Prepared:
    check_tag(tag)
    check_at_rest(engine, "save")
    wish.check()
    core, optimizer = engine._core, engine._core.optimizer
    client = None if wish.client_state is None else encode(wish.client_state, "client_state", tensors=False)
    prepared = Prepared(client, _options(optimizer), _schedule(core.scheduler), wish.frozen)
    for unit in core.run.units:
        for weights in unit.weights:
            weights.notice_writes()
            _add_weights(prepared, core, weights)
    if core.ranks.rank == 0:
        _add_modules(prepared, engine.module)
    prepared.share.own = own.collect(wish.data, engine.device, lambda key, value: _store(prepared, key, value))
    return prepared


def _note_client(prepared: Prepared) -> None:
    """Share this rank's client state where there is one, and it is not rank 0's.

    A digest is compared first: most loops give every rank the same, and that may be large.
    """
    digest = hashlib.sha256(json.dumps(prepared.client).encode()).hexdigest()
    first = meeting.tell(digest)[0]
    if prepared.client is not None and digest != first:
        prepared.share.own["client_state"] = prepared.client


def _options(optimizer: Optimizer | None) -> list[dict[str, Any]]:
    """The options of each group of ``optimizer``."""
    return [
        {key: encode(value, f"option {key!r} of optimizer group {at}") for key, value in group.items() if key != "params"}
        for at, group in enumerate(optimizer.param_groups if optimizer is not None else [])
    ]


def _schedule(scheduler: Any) -> SchedulerRecord | None:
    if scheduler is None:
        return None
    kind = type(scheduler).__name__
    if not hasattr(scheduler, "state_dict"):
        raise CheckpointError(f"scheduler {kind} has no state_dict(), so it cannot be saved")
    return SchedulerRecord(kind=kind, state=encode(scheduler.state_dict(), f"state of scheduler {kind}"))


def _owned(core: Core, weights: Weights) -> tuple[int, int]:
    """Elements ``[low, high)`` of the flat buffer that this rank writes: its shard without padding, of which every
    replica has its part."""
    low, high = weights.spec.layout.bounds(core.ranks.piece)
    mesh = core.ranks.mesh
    part = -(-(high - low) // mesh.across)
    start = low + core.ranks.rank // mesh.within * part
    return min(start, high), min(start + part, high)


def _add_weights(prepared: Prepared, core: Core, weights: Weights) -> None:
    """The parameters of one buffer, and the optimizer's states of them."""
    low, high = _owned(core, weights)
    base = weights.stepped()[0]
    for slot, param in zip(weights.spec.layout.slots, weights.params, strict=True):
        part = slot.local(low, high)
        if part is not None and (prepared.frozen or param.requires_grad):
            values = part_of(weights.state, part[0] - base, part[1] - base)
            _add(prepared, slot.param.name, "weight", values, part[0] - slot.start)
    if core.tiles is None:
        return
    for tile in core.tiles.pieces.get(weights, []):
        for piece in tile:
            _add_states(prepared, piece, core.tiles, (low, high))


def _add_states(prepared: Prepared, piece: Piece, tiles: Tiles, owned: tuple[int, int]) -> None:
    """The optimizer's states of one piece, of the elements ``owned`` of the flat buffer."""
    name, slot = piece.home.name, piece.home.slot
    prepared.share.groups[name] = piece.group
    first = slot.start + piece.offset
    start, stop = max(first, owned[0]), min(first + piece.numel, owned[1])
    scalars: dict[str, Any] = {}
    for key, value in tiles.optimizer.state.get(piece.param, {}).items():
        if piece.elementwise(value):
            if start < stop:
                _add(prepared, name, _MOMENT + key, value[start - first : stop - first], start - slot.start)
        elif isinstance(value, Tensor) and value.numel() != 1:
            raise CheckpointError(
                f"optimizer state {key!r} of {name!r} has shape {tuple(value.shape)} for {piece.numel} elements; a "
                "checkpoint holds one number per element, or one for all"
            )
        else:
            scalars[key] = encode(value, f"optimizer state {key!r} of {name!r}")
    for key, held in tiles.held_away(piece).items():
        if start < stop:
            at = held.grid.bounds(piece.tile)[0] + piece.start
            values = part_of(held, at + start - first, at + stop - first)
            _add(prepared, name, _MOMENT + key, values, start - slot.start)
    if scalars:
        prepared.share.scalars[name] = scalars


def _add(prepared: Prepared, name: str, state: str, values: Tensor | Later, start: int) -> None:
    stop = start + values.numel()
    prepared.tensors.append((_key(name, state, start), values))
    prepared.share.rows.append((name, state, dtype_name(values.dtype), start, stop))


def _key(name: str, state: str, start: int) -> str:
    return f"{name}/{state}/{start}"


def _add_modules(prepared: Prepared, model: torch.nn.Module) -> None:
    """Buffers and extra state; rank 0's stand for everybody's."""
    keys: dict[int, Stored] = {}
    for name, buffer in persistent_buffers(model).items():
        if id(buffer) not in keys:
            keys[id(buffer)] = _store(prepared, f"{name}/buffer", buffer)
        prepared.buffers[name] = keys[id(buffer)]
    for name, module in extra_modules(model).items():
        value = module.get_extra_state()
        if isinstance(value, Tensor):
            prepared.extra[name] = {"tensor": _store(prepared, f"{name}/extra", value).model_dump()}
        else:
            prepared.extra[name] = {"value": encode(value, f"extra state {name!r}")}


def _store(prepared: Prepared, key: str, tensor: Tensor) -> Stored:
    prepared.tensors.append((key, tensor))
    return Stored(file=file_of(meeting.my_rank()), key=key, shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype))


# What is said of it


def _manifest(engine: Engine, prepared: Prepared, shares: list[Share], nonce: str, latest: bool) -> Manifest:
    """On rank 0: what all ranks write, but for their files."""
    core = engine._core
    parameters = _parameters(core, shares, prepared.frozen)
    return Manifest(
        format=VERSION,
        library={"onecopy": _version(), "torch": str(torch.__version__)},
        plan=_provenance(core) | {"model": describe(engine.module, core.names)},
        counters={
            "global_steps": engine.global_steps,
            "skipped_steps": engine.skipped_steps,
            "micro_steps": engine.micro_steps,
            "grad_norm": encode(engine.grad_norm, "grad_norm"),
        },
        parameters=parameters,
        buffers=prepared.buffers,
        extra=prepared.extra,
        optimizer=_optimizer(core.optimizer, prepared, shares, list(parameters)),
        scheduler=prepared.scheduler,
        loss_scale=engine._scaler.state() if core.plan.precision.loss_scale is not None else None,
        client_state=prepared.client if prepared.client is not None else {},
        ranks=tuple(share.own for share in shares),
        files={},
        save=SaveRecord(id=nonce, at=time.time(), latest=latest),
    )


def _with_files(manifest: Manifest, records: list[FileRecord]) -> Manifest:
    return manifest.model_copy(update={"files": {file_of(rank): record for rank, record in enumerate(records)}})


def _version() -> str:
    from onecopy import __version__  # the public page imports this module

    return __version__


def _provenance(core: Core) -> dict[str, Any]:
    """The plan that made the checkpoint. Of these, loading looks at ``accumulation`` alone."""
    mesh = core.ranks.mesh
    return {
        "ranks": mesh.world,
        "ranks_per_copy": mesh.within,
        "accumulation": core.plan.batch.accumulation,
        "dtype": core.plan.precision.dtype,
        "text": repr(core.plan),
    }


def _parameters(core: Core, shares: list[Share], frozen: bool) -> dict[str, Parameter]:
    spans: dict[str, dict[str, list[Span]]] = {}
    dtypes: dict[tuple[str, str], str] = {}
    for rank, share in enumerate(shares):
        for name, state, dtype, start, stop in share.rows:
            span = Span(file=file_of(rank), key=_key(name, state, start), start=start, stop=stop)
            spans.setdefault(name, {}).setdefault(state, []).append(span)
            dtypes[name, state] = dtype
    specs = {slot.param.name: buffer for buffer in core.schedule.buffers for slot in buffer.layout.slots}
    found = {}
    for param, names in core.names.items():
        if not (frozen or param.requires_grad):
            continue
        name = names[0]
        scalars = _scalars(name, shares)
        spec = specs.get(name)
        states = {
            state: State(dtype=dtypes[name, state], spans=ordered(parts))
            for state, parts in spans.get(name, {}).items()
            if state == "weight" or state.removeprefix(_MOMENT) not in scalars
        }
        dtype = spec.dtype if spec is not None else dtype_name(param.dtype)
        found[name] = Parameter(
            names=tuple(names),
            shape=tuple(param.shape),
            dtype=dtype,
            trainable=spec.trainable if spec is not None else param.requires_grad,
            weight=states.pop("weight", State(dtype=dtype, spans=())),
            moments={state.removeprefix(_MOMENT): held for state, held in states.items()},
            scalars=scalars,
        )
    return found


def _scalars(name: str, shares: list[Share]) -> dict[str, Any]:
    """The optimizer's states of ``name`` that are one number, which every rank that steps a part of it must agree on.

    A state of one number looks like one per element to the rank whose piece is one element; the others decide.
    """
    found: dict[str, Any] = {}
    for rank, share in enumerate(shares):
        for key, value in share.scalars.get(name, {}).items():
            if found.setdefault(key, value) != value:
                raise CheckpointError(
                    f"optimizer state {key!r} of {name!r} is {value} on rank {rank} and {found[key]} before it; one "
                    "number for the whole parameter must be the same on all ranks"
                )
    return found


def _optimizer(
    optimizer: Optimizer | None, prepared: Prepared, shares: list[Share], order: list[str]
) -> OptimizerRecord | None:
    if optimizer is None:
        return None
    group_of = {name: group for share in shares for name, group in share.groups.items()}
    groups = tuple(
        Group(params=tuple(name for name in order if group_of.get(name) == at), options=options)
        for at, options in enumerate(prepared.groups)
    )
    return OptimizerRecord(kind=type(optimizer).__name__, groups=groups)
