"""Activations of a micro-batch: traced on the meta device for a model, by a closed formula for numbers.

The trace runs the model's own forward and backward on meta tensors, where nothing is allocated, and follows every storage
that lives; see :mod:`onecopy.planner.tape`. What single kernels take for themselves is not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from onecopy.engine.unit import find_units
from onecopy.errors import PlanError
from onecopy.plan.layout import itemsize
from onecopy.plan.plan import Plan
from onecopy.planner.subject import Built, Shape
from onecopy.planner.tape import record
from onecopy.schedule.walk import Saved, Stretch

__all__ = ["ATTENTION", "Activations", "Formula", "Traced", "by_formula", "layer_bytes", "trace"]

ATTENTION = ("flash", "eager")


class Activations(Protocol):
    """What a micro-batch keeps, "traced" or by a "formula"."""

    @property
    def how(self) -> str:
        """Where they are from."""

    def saved(self, batch: int, recompute: bool) -> Saved:
        """Activations of ``batch`` samples, every block computed again in backward or not."""


# Closed formulas


@dataclass(frozen=True)
class Formula:
    """Bytes of one sample by unit, ``kept`` for backward as they come, of which ``inside`` its blocks; ``inputs`` of those
    blocks, which is what checkpointing keeps instead; ``blocks``: what one block of the unit keeps at most."""

    kept: Mapping[str, int]
    inside: Mapping[str, int] = field(default_factory=dict)
    inputs: Mapping[str, int] = field(default_factory=dict)
    blocks: Mapping[str, int] = field(default_factory=dict)
    how: str = "formula"

    def saved(self, batch: int, recompute: bool) -> Saved:
        """See :class:`Activations`."""
        forward: list[Stretch] = []
        backward: list[Stretch] = []
        total = 0
        for unit, whole in self.kept.items():
            own = whole - self.inside.get(unit, 0) + self.inputs.get(unit, 0) if recompute else whole
            again = self.blocks.get(unit, 0) if recompute else 0
            before, total = total, total + own * batch
            forward.append(Stretch(unit, total, total))
            backward.insert(0, Stretch(unit, total + again * batch, before, total + again * batch))
        return Saved(tuple(forward), tuple(backward))


def layer_bytes(shape: Shape, seq: int, width: int = 2, attention: str = "flash", dropout: bool = True) -> int:
    """Bytes that one transformer layer keeps for backward of one sequence: ``s h (34 + 5 a s / h)`` with elements of
    ``width`` 2 and dropout (Korthikanti et al. 2022, equation 2), of which dropout's masks are 2 s h + a s^2.

    Without dropout it is ``2 s (16 h + 2 a s)``, as ZeRO-Infinity has it (Rajbhandari et al. 2021, equation 5). Flash
    attention keeps nothing of size s^2 but one float32 per row of the scores.
    """
    s, h, a = seq, shape.hidden, shape.heads
    linear = s * h * (16 * width + (2 if dropout else 0))
    if attention == "flash":
        return linear + 4 * a * s
    # Softmax, what dropout makes of it, and dropout's mask; without dropout scores and softmax.
    return linear + a * s * s * (2 * width + (1 if dropout else 0))


def by_formula(
    shape: Shape, units: tuple[str, ...], seq: int, dtype: str | None, attention: str = "flash", dropout: bool = True
) -> Formula:
    """:func:`layer_bytes` for every unit that is called by a number in a list ("blocks.0"), a share of it
    each where there are more or fewer of them than layers; the last of them has the head too: ``4 s h`` for its norm and
    input (Korthikanti et al. 2022, section 4.3), and of size ``s v`` in float32 the logits, their log-softmax and its
    gradient, which are there together when backward begins, and the logits as a 16-bit model computes them, which its
    caller holds.
    """
    width = itemsize(dtype or "float32")
    blocks = [unit for unit in units if unit.rpartition(".")[2].isdigit()]
    if not blocks:
        return Formula({})
    whole = layer_bytes(shape, seq, width, attention, dropout) * shape.layers
    each = {unit: whole // len(blocks) for unit in blocks}
    layer_input = width * seq * shape.hidden * shape.layers // len(blocks)
    one = layer_bytes(shape, seq, width, attention, dropout)
    logits = 3 * 4 + (width if width < 4 else 0)
    head = {blocks[-1]: each[blocks[-1]] + seq * (4 * shape.hidden + logits * shape.vocab)} if shape.vocab else {}
    return Formula({**each, **head}, each, dict.fromkeys(each, layer_input), dict.fromkeys(each, one))


# Tracing


class Traced:
    """Activations found by running a model on the meta device, once for every micro-batch and policy that is asked for.

    Between powers of two a micro-batch of more than 2 samples is not run but interpolated, unless :meth:`run` was called
    for it: what is live at a time is the larger of straight lines, so a chord lies on or above it.
    """

    how = "traced"

    def __init__(self, built: Built, plan: Plan, seq: int, attention: str = "flash") -> None:
        self._built, self._seq, self._flash = built, seq, attention == "flash"
        self._dtype = getattr(torch, plan.precision.dtype) if plan.precision.dtype else None
        self._units = find_units(built.model, plan.units)
        self._known: dict[tuple[int, bool], Saved] = {}

    def run(self, batch: int, recompute: bool) -> Saved:
        """Activations of exactly this micro-batch. Raises :class:`PlanError` when the model cannot run on meta."""
        if (batch, recompute) not in self._known:
            built = self._built
            if built.inputs is None:
                raise PlanError(f"{built.name} takes inputs that are not known, so it cannot be traced")
            try:
                given = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), built.inputs(batch, self._seq))
                how = {"flash": self._flash, "recompute": recompute}
                self._known[batch, recompute] = record(built.model, self._units, given, self._dtype, **how)
            except Exception as error:  # whatever the model's own code raises where tensors have no values
                raise PlanError(f"{built.name} cannot run on the meta device: {error}") from error
        return self._known[batch, recompute]

    def saved(self, batch: int, recompute: bool) -> Saved:
        """See :class:`Activations`."""
        low = 1 << batch.bit_length() - 1
        if batch == low or (batch, recompute) in self._known:
            return self.run(batch, recompute)
        one, other = self.run(low, recompute), self.run(2 * low, recompute)
        share = (batch - low) / low
        return Saved(_between(one.forward, other.forward, share), _between(one.backward, other.backward, share))


def _between(one: tuple[Stretch, ...], other: tuple[Stretch, ...], share: float) -> tuple[Stretch, ...]:
    """Stretches ``share`` of the way from ``one`` to ``other``, rounded up."""

    def mean(low: int, high: int) -> int:
        return low - int((low - high) * share // 1)

    pairs = zip(one, other, strict=True)
    return tuple(
        Stretch(a.unit, mean(a.peak, b.peak), mean(a.then, b.then), mean(a.filled, b.filled)) for a, b in pairs
    )


def trace(built: Built, plan: Plan, seq: int, attention: str = "flash") -> Traced:
    """The activations of a model with sequences of ``seq`` tokens, its parameters in the plan's dtype.

    ``attention="eager"`` leaves attention to the model. Raises :class:`PlanError` when it cannot run on the meta device.
    """
    traced = Traced(built, plan, seq, attention)
    traced.run(1, False)
    return traced
