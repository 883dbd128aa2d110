"""The batch triangle: samples per optimizer step = samples per micro-batch x micro-batches x ranks."""

from __future__ import annotations

import os
from dataclasses import dataclass

from onecopy.errors import ConfigError
from onecopy.plan.plan import Batch

__all__ = ["ACCUMULATION", "MICRO", "TRAIN", "World", "find_world", "resolve_batch", "undetermined"]

TRAIN, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True)
class World:
    """Number of data-parallel ranks, and a remark for messages when nobody said it."""

    size: int
    remark: str = ""


def find_world(world_size: int | None) -> World:
    """``world_size`` if given, else WORLD_SIZE of the environment, else one rank with a remark that it was assumed."""
    if world_size is not None:
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise ConfigError(f"world_size is {world_size!r}; it must be a whole number from 1")
        return World(world_size)
    text = os.environ.get("WORLD_SIZE")
    if text is None:
        return World(1, "WORLD_SIZE is not set, so 1 rank was assumed; pass world_size or start with torchrun")
    if not text.strip().isdecimal() or int(text) < 1:
        raise ConfigError(f"WORLD_SIZE is {text!r} in the environment; it must be a whole number from 1")
    return World(int(text))


def _known(train: int | None, micro: int | None, accumulation: int | None, auto: frozenset[str]) -> dict[str, int | None]:
    """The three numbers, with the accumulation that an absent key means where the others do not say it."""
    known = {TRAIN: train, MICRO: micro, ACCUMULATION: accumulation}
    if ACCUMULATION not in auto and accumulation is None and (train is None or micro is None):
        known[ACCUMULATION] = 1
    return known


def undetermined(train: int | None, micro: int | None, accumulation: int | None, auto: frozenset[str]) -> list[str]:
    """Those of the three that were left "auto" and do not follow from the others."""
    known = _known(train, micro, accumulation, auto)
    return [name for name in known if name in auto and sum(known[other] is not None for other in known if other != name) < 2]


def resolve_batch(
    train: int | None, micro: int | None, accumulation: int | None, world: World, auto: frozenset[str] = frozenset()
) -> Batch:
    """The micro-batch size (None when nothing says it) and the number of micro-batches per step.

    ``auto`` names those of the three that were left "auto" and follow from the others (:func:`undetermined`); an absent
    accumulation is otherwise 1. Raises :class:`ConfigError` with all the numbers and a fix.
    """
    known = _known(train, micro, accumulation, auto)
    if train is None:
        return Batch(accumulation=known[ACCUMULATION] or 1, micro=micro)
    if micro is not None and known[ACCUMULATION] is not None:
        accumulation = known[ACCUMULATION] or 1
        _check_product(train, micro, accumulation, world)
        return Batch(accumulation=accumulation, micro=micro, total=train)
    if micro is not None:
        return Batch(accumulation=_share(train, {MICRO: micro}, world), micro=micro, total=train)
    accumulation = known[ACCUMULATION] or 1
    by = {ACCUMULATION: accumulation} if accumulation > 1 else {}
    return Batch(accumulation=accumulation, micro=_share(train, by, world), total=train)


def _check_product(train: int, micro: int, accumulation: int, world: World) -> None:
    product = micro * accumulation * world.size
    if train == product:
        return
    fixes = [f"set {TRAIN} to {product}"]
    if train % (micro * world.size) == 0:
        fixes.append(f"{ACCUMULATION} to {train // (micro * world.size)}")
    if train % (accumulation * world.size) == 0:
        fixes.append(f"{MICRO} to {train // (accumulation * world.size)}")
    raise ConfigError(
        f"{TRAIN} {train} != {micro}*{accumulation}*{world.size} = {product} ({MICRO} {micro} x {ACCUMULATION} "
        f"{accumulation} x world size {world.size}); {', or '.join(fixes)}{_remark(world)}"
    )


def _share(train: int, by: dict[str, int], world: World) -> int:
    """``train`` divided by the ranks and by the one other number known."""
    divisor = world.size
    for number in by.values():
        divisor *= number
    if train % divisor == 0:
        return train // divisor
    low = train // divisor * divisor
    near = f"{low} or {low + divisor}" if low else f"{divisor}"
    also = "".join(f" x {name} {number} = {divisor}" for name, number in by.items())
    raise ConfigError(f"{TRAIN} {train} is not divisible by {world.size} ranks{also}; set {TRAIN} to {near}{_remark(world)}")


def _remark(world: World) -> str:
    return f" ({world.remark})" if world.remark else ""
