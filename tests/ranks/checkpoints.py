"""What the tests of checkpoints share: engines, steps on one global batch, and comparing to the bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import onecopy
from onecopy.errors import CheckpointError
from tests.ranks import models

SMALL = onecopy.Units(min_numel=0)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1)


def start(model: nn.Module | str, plan: Any, optimizer: Any = adamw, **options: Any) -> Any:
    """An engine over ``model``; a name is built from a seed other than the tests' own, so that loading must do it."""
    if isinstance(model, str):
        torch.manual_seed(99)
        model = models.BUILDERS[model]()
    return onecopy.initialize(model, plan, optimizer=optimizer, **options)


def steps(engine: Any, model: str, rank: int, world: int, numbers: range, parts: int = 4) -> list[float]:
    """Optimizer steps on a batch of ``parts`` pieces that is the same however many ranks share it."""
    each = parts // world
    losses = []
    for number in numbers:
        pieces = [models.batch(model, number, 0, part) for part in range(rank * each, (rank + 1) * each)]
        loss = engine(*(torch.cat(tensors) for tensors in zip(*pieces, strict=True)))
        loss.backward()
        engine.step()
        losses.append(loss.item())
    return losses


def everything(engine: Any, states: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Weights in fp32 and optimizer states, whole."""
    named = [(name, p) for name, p in engine.module.named_parameters() if p.numel()]
    values = {name: onecopy.full_param(p).clone() for name, p in named}
    for key in states:
        found = {f"{key} {name}": onecopy.full_state(p, key) for name, p in named}
        values |= {name: value.clone() for name, value in found.items() if value is not None}
    return values


def unequal(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def refusal(call: Any) -> str:
    """What the error of ``call()`` says."""
    try:
        call()
    except CheckpointError as error:
        return str(error)
    raise AssertionError("not refused")
