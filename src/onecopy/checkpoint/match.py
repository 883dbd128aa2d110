"""What a checkpoint and an engine have in common, and everything they do not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch

from onecopy.checkpoint.format import Manifest, Parameter, Stored
from onecopy.checkpoint.modules import extra_modules, persistent_buffers
from onecopy.comm.meeting import tell

if TYPE_CHECKING:
    from onecopy.engine.engine import Engine

__all__ = ["Differences", "Match", "groups_here", "match"]

_NAMED = 6  # names in a message before "and ... more"


@dataclass
class Differences:
    """What did not match. ``missing``: in the model, not in the checkpoint; ``unexpected``: the other way round;
    ``changed``: in both with another shape, kind of number or ties; ``training``: optimizer, groups or schedule."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    training: list[str] = field(default_factory=list)

    def any(self) -> bool:
        """Is there any difference?"""
        return any(getattr(self, part.name) for part in fields(self))

    def __str__(self) -> str:
        said = []
        if self.missing:
            said.append(f"the model has {_some(map(repr, self.missing))}, which the checkpoint lacks")
        if self.unexpected:
            said.append(f"the checkpoint has {_some(map(repr, self.unexpected))}, which the model lacks")
        said += [_some(part, "; ") for part in (self.changed, self.training) if part]
        return "; ".join(said)


@dataclass
class Match:
    """What to load. ``parameters``: records by the model's first name for each; ``stepped``: those whose optimizer
    states are loaded; ``same_groups``: the optimizer's groups are the saved ones, in order."""

    differences: Differences
    parameters: dict[str, Parameter] = field(default_factory=dict)
    stepped: frozenset[str] = frozenset()
    buffers: dict[str, Stored] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    same_groups: bool = False
    same_scheduler: bool = False


def groups_here(engine: Engine) -> list[list[str]]:
    """Names of the parameters in each of the optimizer's groups, whichever rank steps them; collective."""
    tiles = engine._core.tiles
    if tiles is None:
        return []
    group_of: dict[str, int] = {}
    for theirs in tell({name: pieces[0].group for name, pieces in tiles.of_param.items() if pieces}):
        group_of.update(theirs)
    order = [names[0] for names in engine._core.names.values()]
    return [[name for name in order if group_of.get(name) == at] for at in range(len(tiles.optimizer.param_groups))]


def match(
    engine: Engine, manifest: Manifest, groups: list[list[str]], optimizer_states: bool, scheduler_states: bool
) -> Match:
    """Compare ``engine``, whose optimizer has ``groups``, with ``manifest``."""
    found = Match(Differences())
    _match_parameters(engine, manifest, found)
    _match_modules(engine, manifest, found)
    if optimizer_states:
        _match_optimizer(engine, manifest, groups, found)
    elif manifest.optimizer is not None:
        found.same_groups = len(manifest.optimizer.groups) == len(groups)
    if scheduler_states:
        _match_scheduler(engine, manifest, found)
    return found


def _match_parameters(engine: Engine, manifest: Manifest, found: Match) -> None:
    known = {alias: name for name, record in manifest.parameters.items() for alias in record.names}
    used = set()
    for param, names in engine._core.names.items():
        theirs = list(dict.fromkeys(known[name] for name in names if name in known))
        if not theirs:
            found.differences.missing.append(names[0])
            continue
        used.update(theirs)
        record = manifest.parameters[theirs[0]]
        shape, floating = tuple(param.shape), param.is_floating_point() or param.is_complex()
        saved: torch.dtype = getattr(torch, record.weight.dtype)
        if shape != record.shape:
            found.differences.changed.append(f"{names[0]!r} has shape {shape}, in the checkpoint {record.shape}")
            continue
        if floating != (saved.is_floating_point or saved.is_complex):
            found.differences.changed.append(f"{names[0]!r} is {param.dtype}, in the checkpoint {saved}")
            continue
        found.parameters[names[0]] = record
        if len(theirs) > 1 or set(names) != set(record.names):
            found.differences.changed.append(f"{_tie(names)} in the model, {_tie(record.names)} in the checkpoint")
    found.differences.unexpected += [name for name in manifest.parameters if name not in used]


def _match_modules(engine: Engine, manifest: Manifest, found: Match) -> None:
    buffers = persistent_buffers(engine.module)
    extra = extra_modules(engine.module)
    for here, there in ((buffers, manifest.buffers), (extra, manifest.extra)):
        found.differences.missing += [name for name in here if name not in there]
        found.differences.unexpected += [name for name in there if name not in here]
    for name, buffer in buffers.items():
        stored = manifest.buffers.get(name)
        if stored is None:
            continue
        if tuple(buffer.shape) == stored.shape:
            found.buffers[name] = stored
        else:
            shape = tuple(buffer.shape)
            found.differences.changed.append(f"buffer {name!r} has shape {shape}, in the checkpoint {stored.shape}")
    found.extra = {name: value for name, value in manifest.extra.items() if name in extra}


def _match_optimizer(engine: Engine, manifest: Manifest, groups: list[list[str]], found: Match) -> None:
    kind, saved, said = type(engine._core.optimizer).__name__, manifest.optimizer, found.differences.training
    if saved is None:
        said.append(f"the optimizer is {kind}, the checkpoint has none: optimizer_states=False loads weights alone")
        return
    if kind not in saved.kind.split(" or "):
        said.append(f"the optimizer is {kind}, in the checkpoint {saved.kind}: optimizer_states=False loads weights alone")
        return
    had_states = {name for group in saved.groups for name in group.params}
    found.stepped = frozenset(name for name, record in found.parameters.items() if record.names[0] in had_states)
    found.same_groups = len(saved.groups) == len(groups)
    if not found.same_groups:
        said.append(f"the optimizer has {len(groups)} groups, in the checkpoint {len(saved.groups)}")
        return
    ours = {record.names[0] for record in found.parameters.values()}
    for at, (names, group) in enumerate(zip(groups, saved.groups, strict=True)):
        here = {found.parameters[name].names[0] for name in names if name in found.parameters}
        there = set(group.params) & ours
        if here != there:
            said.append(
                f"optimizer group {at} has {_some(map(repr, sorted(here - there))) or 'nothing'} that the checkpoint's "
                f"has not, and lacks {_some(map(repr, sorted(there - here))) or 'nothing'}"
            )


def _match_scheduler(engine: Engine, manifest: Manifest, found: Match) -> None:
    here = type(engine.scheduler).__name__ if engine.scheduler is not None else "none"
    there = manifest.scheduler.kind if manifest.scheduler is not None else "none"
    if not there and here != "none":
        there = here  # another library's checkpoint, which does not name it
    if here != there:
        found.differences.training.append(
            f"the scheduler is {here}, in the checkpoint {there}: scheduler_states=False leaves it as it is"
        )
    found.same_scheduler = here == there != "none"


def _tie(names: Iterable[str]) -> str:
    listed = [repr(name) for name in names]
    return " and ".join(listed) + (" are one parameter" if len(listed) > 1 else " is a parameter of its own")


def _some(items: Iterable[str], separator: str = ", ") -> str:
    listed = list(items)
    more = f"{separator}and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return separator.join(listed[:_NAMED]) + more
