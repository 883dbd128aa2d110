"""Both ways into the library at every stage, and the plain twin that each is held to.

A :class:`Door` opens an engine: by a plan through ``onecopy``, or by a DeepSpeed JSON through ``onecopy.deepspeed``.
``beside_twin`` trains a model through every door and compares it with one process that sees all ranks' data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import onecopy
import onecopy.deepspeed as deepspeed
from tests.ranks import models
from tests.ranks.oracle import call, every_plan, largest_gap, sgd

__all__ = [
    "Door", "adamw", "beside_twin", "doors", "each_door", "feed7", "full_weights", "json_config", "offloaded", "sgd1",
    "truth",
]  # fmt: skip


@dataclass(frozen=True)
class Door:
    """One way to an engine. With ``config`` it is ``onecopy.deepspeed``'s, else ``onecopy``'s with ``plan``."""

    plan: Any
    config: dict[str, Any] | None = None

    def open(self, model: nn.Module, optimizer: Any = sgd, scheduler: Any = None) -> Any:
        if self.config is None:
            return onecopy.initialize(model, self.plan, optimizer=optimizer, scheduler=scheduler)
        return deepspeed.initialize(model=model, config=self.config, optimizer=optimizer, lr_scheduler=scheduler)[0]


def json_config(
    stage: int, accumulation: int = 1, clip: float | None = None, dtype: str | None = None, **sections: Any
) -> dict[str, Any]:
    """A DeepSpeed JSON as a dict; without ``clip`` nothing is clipped."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip or 0,
        "zero_optimization": {"stage": stage},
    }
    if dtype is not None:
        config[dtype] = {"enabled": True}
    return config | sections


def doors(world: int, **options: Any) -> dict[str, Door]:
    """Stages 0 to 3 with small units, 3 held, 3 in one unit, hybrid groups, and stages 0 to 3 by JSON.

    ``options`` are ``accumulation``, ``clip``, ``norm_type`` and ``dtype``. Groups are of half of the ranks.
    """
    found = {name: Door(plan) for name, plan in every_plan(**options).items()}
    found["one unit"] = Door(onecopy.stage(3, **options))
    if world % 2 == 0:
        small = {"units": onecopy.Units(min_numel=0), **options}
        found |= {f"hybrid {n}": Door(onecopy.hsdp(shard=world // 2, number=n, **small)) for n in (1, 2, 3)}
    if "norm_type" not in options:  # the JSON has no key for it
        found |= {f"json {n}": Door(None, json_config(n, **options)) for n in range(4)}
    return found


def offloaded(world: int, folder: str, **options: Any) -> dict[str, Door]:
    """Stages 0 to 3 with states on the host, on disk in ``folder`` and partly on the device, in tiles of which a buffer has
    several; 3 with its parameters there too; and by JSON what it can say. ``options`` as in :func:`doors`."""
    found: dict[str, Door] = {}
    options.setdefault("units", onecopy.Units(min_numel=0))
    for number in range(4):
        base = onecopy.stage(number, step=onecopy.StepPolicy(tile=2048), **options)
        found[f"stage {number} host"] = Door(onecopy.offload(base))
        found[f"stage {number} disk"] = Door(onecopy.offload(base, "disk", scratch=folder))
        found[f"stage {number} half"] = Door(onecopy.offload(base, ratio=0.5))
    found["stage 3 all host"] = Door(onecopy.offload(base, "host", "host"))
    found["stage 3 all disk"] = Door(onecopy.offload(base, "disk", "disk", scratch=folder))
    nvme, cpu = {"device": "nvme", "nvme_path": folder}, {"device": "cpu"}
    plain = {key: value for key, value in options.items() if key != "units"}
    for number in (1, 2, 3):
        for name, section in {"host": cpu, "disk": nvme}.items():
            found[f"json {number} {name}"] = Door(None, _with_zero(number, plain, offload_optimizer=section))
    for name, section in {"host": cpu, "disk": nvme}.items():
        found[f"json 3 all {name}"] = Door(None, _with_zero(3, plain, offload_optimizer=section, offload_param=section))
    return found


def _with_zero(number: int, options: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return json_config(number, **options) | {"zero_optimization": {"stage": number, **sections}}


# ------------------------------------------------------------------------------------------------------ optimizers, data


def sgd1(params: Any) -> torch.optim.Optimizer:
    """Plain SGD with rate 0.1."""
    return torch.optim.SGD(params, lr=0.1)


def adamw(params: Any) -> torch.optim.Optimizer:
    """AdamW with a rate and a decay large enough to show a weight that should not have moved."""
    return torch.optim.AdamW(params, lr=0.1, weight_decay=0.1)


def feed7(count: int, rank: int) -> tuple[Tensor, Tensor]:
    """Input and target of width 7."""
    source = torch.Generator().manual_seed(1000 * rank + count)
    x, y = (torch.randn(4, 7, generator=source) for _ in range(2))
    return x, y


# ----------------------------------------------------------------------------------------------------------- the oracle


@dataclass
class Truth:
    """The trained twin, and the global norm of every step before clipping."""

    twin: nn.Module
    norms: list[float]


def truth(
    world: int,
    build: Callable[[], nn.Module],
    feed: Callable[[int, int], tuple[Any, ...]],
    objective: Callable[..., Tensor] = call,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    steps: int = 3,
    accumulation: int = 1,
    clip: float | None = None,
    norm_type: float = 2.0,
) -> Truth:
    """``build()`` trained by torch alone on the mean of all ranks' and micro-batches' losses."""
    torch.manual_seed(0)
    twin = build()
    plain = optimizer([p for p in twin.parameters() if p.requires_grad])
    before, norms = models.bare(twin), []
    for step in range(steps):
        for count in range(step * accumulation, (step + 1) * accumulation):
            for rank in range(world):
                torch.manual_seed(100 * count + rank)  # dropout
                (objective(twin, *feed(count, rank)) / world / accumulation).backward()
        trained = [p for p in twin.parameters() if p.grad is not None]
        limit = clip if clip is not None else float("inf")
        norms.append(nn.utils.clip_grad_norm_(trained, limit, norm_type).item())
        plain.step()
        plain.zero_grad()
    assert any(not torch.equal(before[k], p) for k, p in twin.named_parameters()), "the oracle did not move"
    return Truth(twin, norms)


def beside_twin(
    rank: int,
    world: int,
    build: Callable[[], nn.Module],
    feed: Callable[[int, int], tuple[Any, ...]] = feed7,
    objective: Callable[..., Tensor] = call,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    steps: int = 3,
    accumulation: int = 1,
    clip: float | None = None,
    norm_type: float = 2.0,
    tolerance: float = 1e-6,
    after: Callable[[Any, nn.Module], None] | None = None,
    only: str = "",
    through: Callable[..., dict[str, Door]] = doors,
) -> dict[str, float]:
    """Train ``build()`` through every door of ``through``: weights within ``tolerance`` of the twin's, norms within 1e-5.

    ``feed(count, rank)`` is what ``rank`` gets in micro-batch ``count``; ``after(engine, twin)`` is asked at the end.
    ``only``: ends of doors' names, with commas between. Returns the gap of each door.
    """
    right = truth(world, build, feed, objective, optimizer, steps, accumulation, clip, norm_type)
    options: dict[str, Any] = {"accumulation": accumulation, "clip": clip}
    if norm_type != 2.0:
        options["norm_type"] = norm_type
    gaps: dict[str, float] = {}
    for name, door in through(world, **options).items():
        if only and not name.endswith(tuple(only.split(","))):
            continue
        torch.manual_seed(0)
        engine = door.open(build(), optimizer)
        norms = []
        for count in range(steps * accumulation):
            torch.manual_seed(100 * count + rank)
            objective(engine, *feed(count, rank)).backward()
            if engine.step():
                norms.append(engine.grad_norm)
        gaps[name] = largest_gap(engine.module, right.twin)
        assert gaps[name] <= tolerance, f"{name}: weights are off by {gaps[name]}"
        assert_close(norms, right.norms, name)
        if after is not None:
            after(engine, right.twin)
        engine.close()
    assert gaps, f"no door ends in {only!r}"
    return gaps


def assert_close(norms: list[float], expected: list[float], name: str) -> None:
    assert len(norms) == len(expected), f"{name}: {len(norms)} steps were taken instead of {len(expected)}"
    for one, other in zip(norms, expected, strict=True):
        assert abs(one - other) <= 1e-5 * max(abs(other), 1e-6), f"{name}: norms {norms}, the oracle's {expected}"


def full_weights(module: nn.Module) -> dict[str, Tensor]:
    """Copies of all whole parameters in fp32; collective."""
    return {name: onecopy.full_param(p).clone() for name, p in module.named_parameters()}


def each_door(world: int, through: Callable[..., dict[str, Door]] = doors, **options: Any) -> Iterator[tuple[str, Door]]:
    """``through(world, **options)``, each with the same seed."""
    for name, door in through(world, **options).items():
        torch.manual_seed(0)
        yield name, door
