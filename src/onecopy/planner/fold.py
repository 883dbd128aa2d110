"""Lists of equal blocks run as three of them: what the second does stands for all but the first and the last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from onecopy.schedule.walk import Saved, Stretch

__all__ = ["Fold", "folded", "unfold"]

# Fewer blocks are all run.
_WORTH = 5
# Attributes in which equal blocks differ.
_NUMBERS = frozenset(("layer_idx", "layer_id", "layer_index", "layer_number", "idx", "index", "block_idx"))


@dataclass
class Fold:
    """``block`` stands for itself and the blocks of ``units`` that follow it. ``forward``, ``backward``: where its stretches
    begin and end among all, noted while the model runs."""

    block: nn.Module
    unit: str
    units: list[str]
    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)


@contextmanager
def folded(
    model: nn.Module, home: Mapping[nn.Module, str], wanted: bool
) -> Iterator[list[tuple[Fold, nn.Module, nn.Module]]]:
    """Within the context every long list of equal blocks has its first two and its last; gives the folds, each with the
    blocks that come before and after it. ``home``: the unit of every block; ``wanted``: else there are none."""
    folds, kept = [], []
    for module in model.modules() if wanted else ():
        if isinstance(module, nn.ModuleList) and len(module) >= _WORTH and all(block in home for block in module):
            blocks = list(module)
            if len({_signature(block) for block in blocks}) == 1:
                fold = Fold(blocks[1], home[blocks[1]], [home[block] for block in blocks[2:-1]])
                folds.append((fold, blocks[0], blocks[-1]))
                kept.append((module, dict(module._modules)))
    for module, _ in kept:
        first, second, *_, last = module._modules.values()
        module._modules = {"0": first, "1": second, "2": last}
    try:
        yield folds
    finally:
        for module, blocks_of in kept:
            module._modules = blocks_of


def _signature(block: nn.Module) -> tuple[Any, ...]:
    """What two blocks that do the same have in common: classes, shapes and plain settings of all their modules."""
    found: list[Any] = []
    for name, module in block.named_modules():
        own = vars(module)
        settings = {k: v for k, v in own.items() if isinstance(v, bool | int | float | str) and k not in _NUMBERS}
        tensors = [(key, tuple(value.shape), value.dtype) for key, value in module.named_parameters(recurse=False)]
        found.append((name, type(module), tuple(sorted(settings.items())), tuple(tensors)))
    return tuple(found)


def unfold(saved: Saved, folds: list[Fold]) -> Saved | None:
    """``saved`` with every block that a fold stands for; None where the bytes of equal blocks do not repeat, so that the
    whole model has to be run."""
    if not all(len(fold.forward) == len(fold.backward) == 2 for fold in folds):
        return None
    forward, backward, shift = list(saved.forward), list(saved.backward), 0
    growths = {}
    for fold in sorted(folds, key=lambda fold: fold.forward, reverse=True):
        start, stop = fold.forward
        growth = growths[id(fold)] = _level(forward, stop) - _level(forward, start)
        copies = [_moved(s, fold, unit, n * growth) for n, unit in enumerate(fold.units, 1) for s in forward[start:stop]]
        rest = [_moved(s, fold, fold.unit, len(fold.units) * growth) for s in forward[stop:]]
        forward[stop:] = [*copies, *rest]
        shift += len(fold.units) * growth
    done: list[Stretch] = []
    at = 0
    for fold in sorted(folds, key=lambda fold: fold.backward):
        start, stop = fold.backward
        growth = growths[id(fold)]
        if _level(backward, stop) - _level(backward, start) != -growth:
            return None
        done += [_moved(s, fold, fold.unit, shift) for s in backward[at:start]]
        for n, unit in enumerate(reversed(fold.units)):
            done += [_moved(s, fold, unit, shift - n * growth) for s in backward[start:stop]]
        shift -= len(fold.units) * growth
        at = start
    last = folds[0] if folds else Fold(nn.Identity(), "", [])
    done += [_moved(s, last, last.unit, shift) for s in backward[at:]]
    return Saved(tuple(forward), tuple(done))


def _level(stretches: list[Stretch], at: int) -> int:
    """Bytes that are there when the stretch at ``at`` begins."""
    return stretches[at - 1].then if at else 0


def _moved(stretch: Stretch, fold: Fold, unit: str, by: int) -> Stretch:
    """``stretch`` with ``by`` bytes more, and as one of ``unit`` where it is one of the fold's."""
    name = unit if stretch.unit == fold.unit else stretch.unit
    return Stretch(name, stretch.peak + by, stretch.then + by, stretch.filled + by if stretch.filled else 0)
