"""``engine.load``: every rank reads the elements it keeps, whoever wrote them.

1. *meet*     all ranks are in the same call, or an error says which are not
2. *find*     rank 0 picks the checkpoint, and all see that it is the one they have too
3. *match*    every rank compares names, shapes and options with its model, and looks each range up in the files
4. *read*     the ranges go to where the plan keeps them; up to here the engine is as it was
5. *restore*  group options, schedule, loss scale, counters
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onecopy.checkpoint import own, sources, store
from onecopy.checkpoint.foreign import Hints
from onecopy.checkpoint.format import MANIFEST, Manifest, Parameter, State, Stored, decode, parse
from onecopy.checkpoint.match import Differences, Match, groups_here, match
from onecopy.checkpoint.modules import extra_modules, persistent_buffers
from onecopy.checkpoint.save import check_at_rest
from onecopy.comm import meeting
from onecopy.engine.weights import Weights
from onecopy.errors import CheckpointError
from onecopy.optim import Piece
from onecopy.plan.layout import Slot
from onecopy.tiers.blocks import NEW_ENGINE
from onecopy.tiers.held import Held

if TYPE_CHECKING:
    from onecopy.engine.build import Core
    from onecopy.engine.engine import Engine

__all__ = ["Loaded", "Wanted", "load"]

# How a group is stepped, not what the step is: these stay as the optimizer was built here.
_EXECUTION = frozenset(("foreach", "fused", "capturable", "differentiable"))
_AT_ONCE = 1 << 22  # elements that are read before they go to a place that is no memory
# A load that tore weights alone, which the next load of weights alone makes whole.
_WITHOUT_MOMENTS = "load(optimizer_states=False)"
_SCHEDULED = frozenset(("lr", "initial_lr"))


class Loaded(dict[str, Any]):
    """The client state that was saved. ``path``: the checkpoint's folder; ``differences``: what did not match, by kind,
    empty unless ``strict=False`` let it pass."""

    path: str
    differences: Differences


@torch.inference_mode(False)  # or what is made here could not be trained on
def load(
    engine: Engine, directory: str | os.PathLike[str], tag: str | None, wanted: Wanted, patience: float | None
) -> Loaded:
    """See :meth:`onecopy.Engine.load`."""
    meeting.meet("load", f"{engine.global_steps}.{engine.micro_steps}", patience, CheckpointError)
    engine._saves.settle()
    meeting.same("what to load", (tag, *wanted.choices))
    meeting.together(lambda: check_at_rest(engine, "load"))
    groups = groups_here(engine)
    hints = _hints(engine, groups, wanted)
    found = meeting.from_rank0(lambda: sources.find(Path(directory), tag, hints))
    folder = Path(directory) / found.name
    if not found.foreign:  # of another library's files, every rank checks those that it reads
        meeting.together(lambda: _check_same(folder, found))
    manifest = meeting.together(lambda: parse(found.text, str(folder / MANIFEST)))
    with closing(sources.reader_for(folder, manifest, _alone(engine._core))) as reader:
        loading = meeting.together(lambda: Loading(engine, manifest, reader, groups, wanted))
        try:
            meeting.together(loading.read)
            meeting.together(loading.restore)
        except CheckpointError as error:
            loading.tear(error)
            again = "" if str(error).endswith(NEW_ENGINE) else "; load again to go on"
            raise CheckpointError(f"{error}. The engine holds a part of {folder} now{again}") from error
    loaded = Loaded(decode(own.of_rank(manifest, meeting.my_rank()).get("client_state", manifest.client_state)))
    loaded.path, loaded.differences = str(folder), loading.match.differences
    engine._saves.last = loaded.path
    if meeting.my_rank() == 0:
        _tell(folder, found, manifest, loaded.differences)
    return loaded


def _hints(engine: Engine, groups: list[list[str]], wanted: Wanted) -> Hints:
    """What a reader of another library's checkpoint may want to know."""
    names = tuple(tuple(names) for names in engine._core.names.values())
    buffers = frozenset(persistent_buffers(engine.module))
    states = wanted.optimizer_states and engine._core.tiles is not None
    return Hints(names, buffers, tuple(map(tuple, groups)), states)


def _alone(core: Core) -> bool:
    """Does each rank read what no other one reads? Otherwise the page cache saves the disk from reading it again."""
    mesh = core.ranks.mesh
    every = [weights for unit in core.run.units for weights in unit.weights]
    return mesh.world == 1 or (mesh.across == 1 and all(weights.away for weights in every))


def _tell(folder: Path, found: store.Found, manifest: Manifest, differences: Differences) -> None:
    if differences.any():
        warnings.warn(f"loaded {folder} with differences: {differences}", stacklevel=4)
    notes = [*found.notes, *filter(None, [manifest.unverified if not found.foreign else ""])]
    if notes:
        warnings.warn(f"loaded {folder}; {'; '.join(notes)}", stacklevel=4)


def _check_same(folder: Path, found: store.Found) -> None:
    """Raise :class:`CheckpointError` unless ``folder`` is, to this rank, the checkpoint that rank 0 found, or a copy."""
    try:
        text = (folder / MANIFEST).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"rank 0 loads {found.folder}, but {folder / MANIFEST} cannot be read ({error})") from error
    if text != found.text:
        raise CheckpointError(
            f"ranks name different checkpoints: rank 0 loads {found.folder}, and {folder} is another one. Give every rank "
            "the same directory, or copies of it"
        )


@dataclass(frozen=True)
class Wanted:
    """What the caller of ``load`` asked for."""

    optimizer_states: bool = True
    scheduler_states: bool = True
    strict: bool = True
    random_states: bool | None = None  # None: with the optimizer's
    data: own.Stateful | None = None

    @property
    def choices(self) -> tuple[Any, ...]:
        """What is the same on every rank."""
        return self.optimizer_states, self.scheduler_states, self.strict, self.random_states, self.data is not None

    @property
    def random(self) -> bool:
        return self.optimizer_states if self.random_states is None else self.random_states


@dataclass(frozen=True)
class _Target:
    """Elements ``[low, high)`` of a flat buffer are read to ``into``, from its element ``first`` on."""

    low: int
    high: int
    into: Tensor | Held
    first: int


class Loading:
    """One load on one rank. Making it checks everything that can be checked before anything is changed.

    Raises :class:`CheckpointError` for files that are missing or damaged, and, when ``strict``, for any difference.
    """

    def __init__(
        self, engine: Engine, manifest: Manifest, reader: sources.Ranges, groups: list[list[str]], wanted: Wanted
    ) -> None:
        self.engine = engine
        self.core: Core = engine._core
        self.manifest = manifest
        self.reader = reader
        self.folder: Path = reader.folder
        self.wanted = wanted
        # An engine without an optimizer has nothing to put these into.
        self.optimizer_states = wanted.optimizer_states and self.core.tiles is not None
        self.scheduler_states = wanted.scheduler_states and self.core.tiles is not None
        self.counts = wanted.optimizer_states
        own.check_stateful(wanted.data)
        if meeting.my_rank() == 0:
            for name in self.manifest.files:
                self.reader.check_file(name)
        self.match: Match = match(engine, self.manifest, groups, self.optimizer_states, self.scheduler_states)
        if self.match.differences.any() and (wanted.strict or not self.match.parameters):
            raise CheckpointError(f"{self.folder} is not a checkpoint of this model: {self.match.differences}")
        self._check_sources()
        # Small, so they are read with the rest that is looked at before anything is changed.
        rank, world = meeting.my_rank(), meeting.world_size()
        self._random = own.random_of(manifest, rank, self._stored) if wanted.random else None
        self._place: Any = own.data_of(manifest, rank, world, self._stored) if wanted.data is not None else None

    # Matching

    def _check_sources(self) -> None:
        """Look up every range that this rank is going to read."""
        for record, what, state, start, stop in self._ranges():
            self._check_range(record, what, state, start, stop)
        for stored in self.match.buffers.values():
            self.reader.check(stored, stored.shape, stored.dtype)

    def _ranges(self) -> Iterator[tuple[Parameter, str, State, int, int]]:
        """What this rank is going to read, in the order of :meth:`read`: elements [start, stop) of a state."""
        for weights in self._buffers():
            for slot in self._slots(weights):
                record = self.match.parameters[slot.param.name]
                for target in self._targets(weights):
                    part = slot.local(target.low, target.high)
                    if part is not None:
                        yield record, "weight", record.weight, part[0] - slot.start, part[1] - slot.start
            for piece in self._pieces(weights):
                record = self.match.parameters[piece.home.name]
                for key, state in record.moments.items():
                    yield record, key, state, piece.offset, piece.offset + piece.numel

    def _check_range(self, record: Parameter, what: str, state: State, start: int, stop: int) -> None:
        try:
            spans = list(state.covering(start, stop))
        except ValueError as error:
            raise CheckpointError(
                f"{self.folder / MANIFEST} is damaged: of {what!r} of {record.names[0]!r} {error}"
            ) from error
        for span, _, _ in spans:
            self.reader.check(span, (span.stop - span.start,), state.dtype)

    def _buffers(self) -> list[Weights]:
        return [weights for unit in self.core.run.units for weights in unit.weights]

    def _slots(self, weights: Weights) -> list[Slot]:
        """The parameters of a buffer that the checkpoint has."""
        return [slot for slot in weights.spec.layout.slots if slot.param.name in self.match.parameters]

    def _targets(self, weights: Weights) -> list[_Target]:
        """What to read into: what is stepped, and what rests in memory of the parameter outside it (inside it is rounded
        from it)."""
        low, high = weights.stepped()
        if weights.spec.steps_encoded:  # to nearest, as on the other ranks: only a step rounds stochastically
            if weights.away:
                return [_Target(low, high, weights.rest, 0)]
            return [_Target(0, weights.full.numel(), weights.full, 0)]
        targets = [_Target(low, high, weights.state, 0)]
        if not weights.away and (low, high) != (0, weights.full.numel()):
            full = weights.full
            targets += [_Target(a, b, full, a) for a, b in ((0, low), (high, full.numel())) if a < b]
        return targets

    def _pieces(self, weights: Weights) -> list[Piece]:
        """What this rank steps of a buffer, where its optimizer states are to be loaded."""
        if not self.optimizer_states or self.core.tiles is None:
            return []
        known = self.match.parameters.keys() & self.match.stepped
        tiles = self.core.tiles.pieces.get(weights, [])
        return [piece for pieces in tiles for piece in pieces if piece.home.name in known]

    # Reading

    def read(self) -> None:
        """Fill weights, master weights, moments and buffers."""
        self.core.gathering.release_all()
        self.reader.expect(span for _, _, state, start, stop in self._ranges() for span in state.covering(start, stop))
        with torch.no_grad(), self.core.run.writing():
            for weights in self._buffers():
                weights.notice_writes()  # or the next step would take what somebody wrote before for newer than this
                for slot in self._slots(weights):
                    self._read_weight(weights, slot)
                self._read_moments(weights)
                weights.encode()
            for name, buffer in persistent_buffers(self.engine.module).items():
                if name in self.match.buffers:
                    buffer.copy_(self.reader.whole(self.match.buffers[name]))
        self._read_extra()

    def tear(self, error: CheckpointError) -> None:
        """The engine holds a part of the checkpoint: no step and no save until one is loaded whole."""
        if self.core.stepper is not None:
            call = "load()" if self.optimizer_states else _WITHOUT_MOMENTS
            self.core.stepper.torn = self.core.stepper.torn or f"{call} failed: {error}"

    def _stored(self, record: dict[str, Any]) -> Tensor:
        return self.reader.whole(Stored.model_validate(record))

    def _read_weight(self, weights: Weights, slot: Slot) -> None:
        state = self.match.parameters[slot.param.name].weight
        for target in self._targets(weights):
            part = slot.local(target.low, target.high)
            if part is None:
                continue
            start, stop = part[0] - target.low + target.first, part[1] - target.low + target.first
            plain = target.into if isinstance(target.into, Tensor) else target.into.plain
            if plain is not None:
                self._fill(plain[start:stop], state, part[0] - slot.start)
            elif isinstance(target.into, Held):
                self._write(target.into, state, part[0] - slot.start, start, stop)

    def _write(self, held: Held, state: State, first: int, start: int, stop: int) -> None:
        """Elements ``[start, stop)`` of ``held``, which is no memory, become those of ``state`` from ``first`` on."""
        for low in range(start, stop, _AT_ONCE):
            high = min(low + _AT_ONCE, stop)
            values = torch.empty(high - low, dtype=getattr(torch, state.dtype))
            self._fill(values, state, first + low - start)
            held.write(low, high, values)

    def _fill(self, out: Tensor, state: State, start: int) -> None:
        """``out`` becomes elements ``[start, start + out.numel())`` of ``state``."""
        for span, low, high in state.covering(start, start + out.numel()):
            self.reader.read(span, low, high, out[low - start : high - start])

    def _read_moments(self, weights: Weights) -> None:
        """Make the optimizer's states what they were, tile by tile; a parameter that was never stepped has none."""
        tiles = self.core.tiles
        if tiles is None:
            return
        wanted = set(self._pieces(weights))
        for pieces in tiles.pieces.get(weights, []):
            here = [piece for piece in pieces if piece in wanted]
            tiles.store({piece: self._moments(piece, self.match.parameters[piece.home.name]) for piece in here})

    def _moments(self, piece: Piece, record: Parameter) -> dict[str, Any]:
        """The optimizer's state of ``piece``."""
        assert self.core.tiles is not None
        tiles = self.core.tiles
        fresh = {key: self._scalar(key, decode(value), piece) for key, value in record.scalars.items()}
        weight = piece.home.weights.state
        with tiles.states(piece) as former:
            kept = {key: value for key, value in former.items() if piece.elementwise(value)}
        for key, state in record.moments.items():
            saved = getattr(torch, state.dtype)
            # A moment in the weights' own dtype follows them into another precision.
            dtype = weight.dtype if state.dtype == record.weight.dtype else saved
            held = kept.get(key)
            if held is None or held.dtype != dtype or tiles.keeps_away(piece):
                held = torch.empty(piece.numel, dtype=dtype, device=weight.device)
            self._fill(held, state, piece.offset)
            fresh[key] = held
        return fresh

    def _scalar(self, key: str, value: Any, piece: Piece) -> Any:
        """torch keeps the step count on the host unless the kernel reads it; other numbers are with the weights."""
        assert self.core.tiles is not None
        group = self.core.tiles.optimizer.param_groups[piece.group]
        on_host = key == "step" and not group.get("fused") and not group.get("capturable")
        if not isinstance(value, Tensor) or on_host:
            return value
        return value.to(piece.param.device)

    def _read_extra(self) -> None:
        for name, module in extra_modules(self.engine.module).items():
            kept = self.match.extra.get(name)
            if kept is not None and "tensor" in kept:
                module.set_extra_state(self._stored(kept["tensor"]))
            elif kept is not None:
                module.set_extra_state(decode(kept["value"]))

    # Restoring

    def restore(self) -> None:
        """Group options, schedule, loss scale and counters, in the objects that others hold on to."""
        engine, core, manifest = self.engine, self.core, self.manifest
        if core.stepper is not None and (self.optimizer_states or (core.stepper.torn or "").startswith(_WITHOUT_MOMENTS)):
            core.stepper.torn = None
        if self.match.same_groups and manifest.optimizer is not None and core.optimizer is not None:
            for group, saved in zip(core.optimizer.param_groups, manifest.optimizer.groups, strict=True):
                self._restore_options(group, decode(saved.options))
        if self.scheduler_states and self.match.same_scheduler and core.scheduler is not None:
            assert manifest.scheduler is not None
            core.scheduler.load_state_dict(decode(manifest.scheduler.state))
        policy = engine._scaler.policy
        if self.optimizer_states and policy is not None and policy.dynamic and manifest.loss_scale is not None:
            engine._scaler.load(manifest.loss_scale)
        if self.counts:
            counters = manifest.counters
            core.tiers.clock.step = counters["global_steps"]
            engine.global_steps, engine.skipped_steps = counters["global_steps"], counters["skipped_steps"]
            engine.grad_norm = decode(counters["grad_norm"])
            # In other windows a count in the middle of one would end the first too early.
            accumulation = core.plan.batch.accumulation
            same = manifest.plan.get("accumulation") == accumulation
            engine.micro_steps = counters["micro_steps"] if same else engine.global_steps * accumulation
            engine._window_began = engine.micro_steps
        if self.wanted.data is not None:
            self.wanted.data.load_state_dict(self._place)
        if self._random is not None:  # last, as nothing here may draw from them
            own.set_random(self._random, engine.device)

    def _restore_options(self, group: dict[str, Any], saved: dict[str, Any]) -> None:
        """The learning rate goes with the schedule where there is one; the group itself stays the same object."""
        for key, value in saved.items():
            with_schedule = key in _SCHEDULED and self.core.scheduler is not None
            scheduled = self.scheduler_states and self.match.same_scheduler
            wanted = scheduled if with_schedule else self.optimizer_states
            if not wanted or key in _EXECUTION:
                continue
            held = group.get(key)
            if isinstance(held, Tensor) and not isinstance(value, list | tuple | dict | None):
                held.fill_(value)  # a tensor here is shared with captured or compiled steps
            elif isinstance(value, Tensor) and isinstance(held, float):
                group[key] = value.item()
            else:
                group[key] = value
