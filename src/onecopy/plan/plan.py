"""The plan: WHAT is kept where. Pure data; the schedule says when things move and the engine how.

A plan is an ordered list of rules; the first whose pattern matches a parameter's name gives that parameter its
:class:`Row`, the layouts of its four training states. Everything else here is a policy beside the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from onecopy.plan.layout import Layout, Mesh, Tier

__all__ = [
    "Batch",
    "Caps",
    "Clip",
    "LossScale",
    "Plan",
    "Precision",
    "Recipe",
    "Row",
    "Rule",
    "Scratch",
    "State",
    "StepPolicy",
    "Units",
    "Wire",
    "difference",
]


@dataclass(frozen=True)
class State:
    """A state's layout at rest (between steps) and held (inside a step, between two uses)."""

    rest: Layout
    held: Layout


@dataclass(frozen=True)
class Wire:
    """Format in which a gather or a reduce sends its elements; None is the parameter's own dtype."""

    gather: str | None = None
    reduce: str | None = None


@dataclass(frozen=True)
class Row:
    """Layouts of one parameter's states. ``optimizer`` is that of the master weights, and of the moments too unless
    ``moments`` gives them another tier or codec."""

    parameter: State
    gradient: State
    optimizer: Layout
    wire: Wire = Wire()
    moments: Layout | None = None

    @property
    def moment(self) -> Layout:
        """The layout of the moments."""
        return self.moments if self.moments is not None else self.optimizer

    @property
    def tiers(self) -> tuple[Tier, Tier, Tier, Tier]:
        """Where parameter, gradient, master weights and moments rest."""
        return self.parameter.rest.tier, self.gradient.rest.tier, self.optimizer.tier, self.moment.tier


@dataclass(frozen=True)
class Rule:
    """``pattern`` (shell style, on the parameter's name) -> ``row``."""

    pattern: str
    row: Row


@dataclass(frozen=True)
class LossScale:
    """Loss scaling for float16. ``dynamic=False`` keeps ``initial`` for ever.

    After ``window`` steps without overflow the scale doubles; an overflow first uses up ``hysteresis`` (the number of
    overflows that halve it; 1 halves at once) and never goes below ``minimum``, where a further overflow is an error.
    """

    initial: float = 65536.0
    dynamic: bool = True
    window: int = 1000
    hysteresis: int = 1
    minimum: float = 1.0
    refill_hysteresis: bool = False


@dataclass(frozen=True)
class Precision:
    """``dtype``: compute dtype the floating-point parameters, buffers and inputs are cast to (None: left as they are).

    Trainable parameters held in bfloat16 or float16 get ``master`` weights, and gradients that accumulate do so in
    ``accumulate``.
    """

    dtype: str | None = None
    master: str | None = "float32"
    accumulate: str | None = "float32"
    loss_scale: LossScale | None = None
    cast_inputs: bool = True


@dataclass(frozen=True)
class Batch:
    """``accumulation`` micro-batches make one optimizer step.

    ``divide=True``: the engine divides gradients by the accumulation count, so the step follows the mean over the
    global batch when each micro-batch loss is a mean. ``divide=False``: the caller's loss is already divided.
    ``micro`` and ``total``: samples of a micro-batch on one rank and of a step on all, where a configuration gives them.
    """

    accumulation: int = 1
    divide: bool = True
    micro: int | None = None
    total: int | None = None


@dataclass(frozen=True)
class Clip:
    """Scale gradients down to global norm ``max_norm`` (None: the norm is measured, nothing is scaled)."""

    max_norm: float | None = None
    norm_type: float = 2.0


When = Literal["boundary", "backward", "delayed"]


@dataclass(frozen=True)
class StepPolicy:
    """How the optimizer proceeds. It runs where its states rest: on the host for those on host and disk.

    ``tile``: elements stepped at a time (None: a whole unit on the device; off it a size that outweighs the calls that
    step it and makes a good disk request). ``ratio``: share of the elements whose optimizer states and gradients obey a
    layout off the device; those of the other units, the first ones, stay on it (Offload++'s twin flow).

    ``when``: "boundary", in ``engine.step()``; "backward", each unit on a thread as soon as its gradients are summed, while
    the backward pass goes on to the next: the same numbers, where nothing has to be known of all gradients first (no
    clipping, no loss scale); "delayed", on a thread during the next window, so that parameters are one update behind
    (ZeRO-Offload, section 5.2). The last two are for gradients on the host and states on host or disk.
    """

    tile: int | None = None
    ratio: float = 1.0
    when: When = "boundary"


@dataclass(frozen=True)
class Scratch:
    """The disk tier: files of one run in ``folder``, removed when it ends. ``staging``: bytes of host memory, at most,
    that reads and writes pass through; ``block``: bytes of a request; ``threads``: requests under way at a time."""

    folder: str
    staging: int = 128 << 20
    block: int = 1 << 20
    threads: int = 2


@dataclass(frozen=True)
class Caps:
    """Bytes that the engine's own buffers may take on each rank, at most; None: what there is."""

    device: int | None = None
    host: int | None = None


@dataclass(frozen=True)
class Units:
    """How parameters are grouped into units.

    ``blocks``: class names of modules that each make a unit (None: found, see :mod:`onecopy.engine.unit`). Neighbours
    smaller than ``min_numel`` elements are merged. ``prefetch``: units gathered ahead of the one in use.
    ``reduce_ahead``: reductions left in flight while the next unit's gradients are filled in; each costs one more
    reduce buffer.
    """

    blocks: tuple[str, ...] | None = None
    min_numel: int = 1_000_000
    prefetch: int = 1
    reduce_ahead: int = 0


@dataclass(frozen=True)
class Recipe:
    """An optimizer or scheduler by name and keyword arguments, as configuration files give it."""

    type: str
    params: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """Rules plus policies. ``group``: ranks that share one sharded copy (None: all of them)."""

    rules: tuple[Rule, ...]
    group: int | None = None
    precision: Precision = Precision()
    batch: Batch = Batch()
    clip: Clip = Clip()
    step: StepPolicy = StepPolicy()
    scratch: Scratch | None = None
    caps: Caps = Caps()
    units: Units = Units()
    optimizer: Recipe | None = None
    scheduler: Recipe | None = None
    notes: tuple[str, ...] = ()

    def row(self, name: str) -> Row:
        """The row of the parameter called ``name``. Raises ``KeyError`` when no rule matches."""
        for rule in self.rules:
            if fnmatchcase(name, rule.pattern):
                return rule.row
        raise KeyError(name)

    def mesh(self, world: int) -> Mesh:
        """``world`` ranks as groups of ``group``. ``check`` refuses sizes that do not divide."""
        within = world if self.group is None else self.group
        return Mesh(within=within, across=max(world // within, 1))

    def with_(self, **changes: Any) -> Plan:
        """A copy with some fields replaced."""
        return replace(self, **changes)


def difference(one: Plan, other: Plan) -> str:
    """The fields in which two plans differ, each with both values: ``precision.dtype: 'float16' and 'bfloat16'``; empty
    for equal plans."""
    return "; ".join(f"{path}: {a} and {b}" for path, a, b in _differences("", one, other))


def _differences(path: str, one: Any, other: Any) -> Iterator[tuple[str, str, str]]:
    """The innermost fields that differ: what is there on one side only is shown whole."""
    if repr(one) == repr(other):
        return
    if is_dataclass(one) and type(one) is type(other):
        for part in fields(one):
            inner = f"{path}.{part.name}" if path else part.name
            yield from _differences(inner, getattr(one, part.name), getattr(other, part.name))
    elif isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        for at, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from _differences(f"{path}[{at}]", a, b)
    elif isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            a, b = (repr(side[key]) if key in side else "absent" for side in (one, other))
            if a != b:  # the order of keys is no difference
                yield f"{path}[{key!r}]", a, b
    else:
        yield path, repr(one), repr(other)
