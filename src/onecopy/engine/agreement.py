"""What all ranks must have done alike before a step, or they would train different models in silence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from onecopy.comm import meeting
from onecopy.engine.checksum import checksum
from onecopy.engine.run import UnitRun
from onecopy.engine.weights import Weights
from onecopy.errors import EngineError, RankMismatchError

__all__ = ["State", "frozen", "look", "refuse_unless_alike"]


@dataclass
class State:
    """``options`` of the optimizer's groups; ``values``: checksums of the buffers that were written, or may have been;
    names of parameters that are ``frozen``; ``edits`` of ``p.grad``; ``failed_save``: what went wrong with an asynchronous
    save, which ranks hear of at different times."""

    options: list[dict[str, Any]] = field(default_factory=list)
    values: dict[str, int] = field(default_factory=dict)
    frozen: list[str] = field(default_factory=list)
    edits: list[tuple[Any, ...]] = field(default_factory=list)
    failed_save: str = ""


def look(
    units: Iterable[UnitRun], options: list[dict[str, Any]], edits: list[tuple[Any, ...]], failed_save: str
) -> State:
    """The state of this rank; what was written to parameters so far is taken in."""
    state = State(options, edits=edits, failed_save=failed_save)
    for weights in (weights for unit in units for weights in unit.weights):
        name, writes = weights.spec.name, weights.writes
        if weights.notice_writes() or (writes.touched and not weights.away):
            state.values[name] = checksum(weights.full)
        writes.touched = False
        stopped = frozen(weights)
        if weights.spec.trainable:
            state.frozen += stopped
        elif len(stopped) < len(weights.params):
            thawed = next(slot.param.name for slot in weights.spec.layout.slots if slot.param.name not in stopped)
            raise EngineError(
                f"parameter {thawed!r} was frozen when the engine was made and requires gradients now; close the engine "
                "and initialize again to train it"
            )
    return state


def frozen(weights: Weights) -> list[str]:
    """Names of the parameters that do not require gradients now."""
    with torch._C.DisableTorchFunctionSubclass():
        pairs = zip(weights.spec.layout.slots, weights.params, strict=True)
        return [slot.param.name for slot, param in pairs if not param.requires_grad]


def refuse_unless_alike(state: State, units: Iterable[UnitRun]) -> bool:
    """Some rank's state is another: raise :class:`RankMismatchError` on every rank that names what differs. Collective.

    Returns whether some rank knows of a failed save, which is nothing to refuse the step for. A buffer that only some ranks
    may have written is compared first: it may have been looked at and no more.
    """
    everyone = meeting.tell(state)
    doubtful = dict.fromkeys(name for theirs in everyone for name in theirs.values)
    held = {weights.spec.name: weights for unit in units for weights in unit.weights}
    values = meeting.tell({name: checksum(held[name].full) for name in doubtful})
    for theirs, sums in zip(everyone, values, strict=True):
        theirs.values = sums
    first = dict(_facts(everyone[0]))
    for rank, theirs in enumerate(everyone):
        own = dict(_facts(theirs))
        for what in {**first, **own}:
            if repr(first.get(what)) != repr(own.get(what)):
                one, other = _shown(first.get(what), own.get(what))
                raise RankMismatchError(
                    f"ranks disagree about {what}: rank 0 has {one}, rank {rank} has {other}; do the same on every rank"
                )
    return any(theirs.failed_save for theirs in everyone)


def _facts(state: State) -> Iterator[tuple[str, Any]]:
    """What ranks may disagree about, in words, and what this one has."""
    for index, group in enumerate(state.options):
        for key, value in group.items():
            yield f"what their optimizers are set to, {key!r} of group {index}", value
    for name, total in state.values.items():
        yield f"the values of the parameters in {name!r}, which were written since the last step", f"checksum {total:x}"
    yield "which parameters are frozen (requires_grad)", state.frozen
    yield "what was done to p.grad before the step", state.edits


def _shown(one: Any, other: Any) -> tuple[str, str]:
    """Both in words; of lists what only one of them has."""
    if not isinstance(one, list) or not isinstance(other, list):
        return repr(one), repr(other)
    return _only(one, other), _only(other, one)


def _only(mine: list[Any], theirs: list[Any]) -> str:
    extra = mine if Counter(mine) == Counter(theirs) else list((Counter(mine) - Counter(theirs)).elements())
    return repr(extra[:3])[:-1] + (", ...]" if len(extra) > 3 else "]")
