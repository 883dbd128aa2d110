"""What ranks vote on before a step, and the numbers that the vote adds up."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch

from onecopy.comm import meeting
from onecopy.engine.precision import LossScaler
from onecopy.errors import EngineError

__all__ = ["LARGEST", "PART", "Verdict", "added", "in_parts", "norms_of", "number_of", "raise_at_floor", "root"]


class Verdict:
    """What all ranks agreed on before a step: the global norm of the unscaled gradients, whether it is finite, for each
    buffer which of its parameters some rank used, for which units some rank has gradients that it has not sent, and whether
    some rank's optimizer has step hooks, which may change anything, or knows that an asynchronous save has failed."""

    def __init__(
        self,
        norm: float,
        used: dict[str, list[bool]],
        late: list[bool],
        hooked: bool = False,
        save_failed: bool = False,
    ) -> None:
        self.norm = norm
        self.used = used
        self.late = late
        self.hooked = hooked
        self.save_failed = save_failed

    @property
    def finite(self) -> bool:
        return math.isfinite(self.norm)

    @property
    def empty(self) -> bool:
        """Did no rank have any gradient?"""
        return not any(any(flags) for flags in self.used.values())


# Elements that a norm on the host is taken of at a time.
PART = 1 << 20
# Numbers up to here are added up over thousands of ranks without rounding.
LARGEST = 2**40


def number_of(state: object) -> int:
    """A number below :data:`LARGEST` that is the same for states with the same ``repr``, and hardly for others."""
    return int.from_bytes(hashlib.sha256(repr(state).encode()).digest()[:5], "big")


def raise_at_floor(scaler: LossScaler, step: int, suspects: list[str], outputs_finite: bool | None) -> None:
    """Say which parameters' gradients overflow when the loss scale cannot go lower, on the ranks that computed them, and
    where the model's outputs were not finite before that; collective, raises on every rank."""
    told = meeting.tell((suspects, outputs_finite))
    found = [(rank, name) for rank, (names, _) in enumerate(told) for name in names]
    named = ", ".join(f"{name!r} (rank {rank})" for rank, name in found[:5])
    worse = [rank for rank, (_, finite) in enumerate(told) if finite is False]
    known = any(finite is not None for _, finite in told)
    outputs = "were not kept, so look at the loss" if not known else "were finite on every rank: the backward pass overflows"
    if worse:
        outputs = f"were not finite already on ranks {worse}: the forward pass or the data of that step is at fault"
    raise EngineError(
        f"step {step}: gradients are not finite at the smallest loss scale {scaler.scale:g}; first of them: {named}. The "
        f"model's outputs (the loss, if it computes one) {outputs}. Training in bf16 needs no scale"
    )


def norms_of(parts: Iterable[torch.Tensor], kind: float, wide: bool) -> list[torch.Tensor]:
    """The norm of each of ``parts``, float64 without dimensions; ``wide``: in float64 from the start."""
    norms = []
    for part in parts:
        dtype = torch.float64 if wide and not part.is_complex() else _at_least_fp32(part.dtype)
        norms.append(torch.linalg.vector_norm(part, kind, dtype=dtype).double())
    return norms


def added(norms: list[torch.Tensor], kind: float) -> float:
    """The largest element, or the sum of ``|g| ** kind``, of all that ``norms`` were taken of."""
    stacked = torch.stack(norms)
    return float(stacked.max() if kind == math.inf else stacked.pow(kind).sum())


def root(total: float, kind: float) -> float:
    """The norm of which ``total`` is the power; infinite where that is not finite."""
    return total ** (1.0 / kind) if math.isfinite(total) else math.inf


def in_parts(flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """``flat`` as its norm is best taken. On the host torch copies a low-precision tensor whole to fp32 for that, and adds
    so many squares in fp32 that digits are lost: in parts the copy is small and the sum exact to 1e-4."""
    return flat.split(PART) if flat.device.type == "cpu" else (flat,)


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float32, torch.float64) or dtype.is_complex else torch.float32
