"""The naive twin: the same model in one process, plain torch, on the concatenated global batch; and the run to compare.

A :class:`Case` says what to train. ``run_case`` trains it with onecopy on a rank, ``oracle`` with torch alone; both
give an :class:`Outcome`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import onecopy
from tests.ranks import models

__all__ = [
    "Case", "Outcome", "beside_oracle", "call", "difference", "every_plan", "largest_gap",
    "make_optimizer", "make_plan", "oracle", "run_case", "run_cases", "sgd",
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A short training run. ``plan`` are keyword arguments of ``onecopy.stage`` plus ``shard`` for HSDP."""

    model: str = "gpt"
    stage: int = 0
    plan: dict[str, Any] = field(default_factory=dict)
    optimizer: tuple[str, dict[str, Any]] = ("AdamW", {"lr": 1e-3})
    scheduler: tuple[str, dict[str, Any]] | None = None
    groups: Sequence[tuple[str, dict[str, Any]]] = ()  # (word in the name, options), the rest forms a last group
    steps: int = 3
    accumulation: int = 1
    clip: float | None = None
    norm_type: float = 2.0

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)


@dataclass
class Outcome:
    """``losses``: this rank's micro-batch losses (the oracle's: of the global batch). ``weights``: fp32, full."""

    losses: list[float]
    norms: list[float]
    lrs: list[list[float]]
    weights: dict[str, Tensor]
    moved: list[bool] = field(default_factory=list)


def make_plan(case: Case) -> Any:
    """The plan of ``case``: every leaf or block its own unit, so that cuts and orders are exercised."""
    options = {"accumulation": case.accumulation, "clip": case.clip, "norm_type": case.norm_type}
    options |= {"units": onecopy.Units(min_numel=0)} | case.plan
    shard = options.pop("shard", None)
    if shard is not None:
        return onecopy.hsdp(shard=shard, number=case.stage, **options)
    return onecopy.stage(case.stage, **options)


def param_groups(case: Case, model: nn.Module) -> list[Any]:
    """Parameters as ``case.groups`` splits them."""
    left = dict(model.named_parameters())
    groups = []
    for word, options in case.groups:
        chosen = [name for name in left if word in name]
        groups.append({"params": [left.pop(name) for name in chosen], **options})
    return [*groups, {"params": list(left.values())}] if case.groups else list(left.values())


def make_optimizer(case: Case, params: Any) -> torch.optim.Optimizer:
    kind, options = case.optimizer
    return getattr(torch.optim, kind)(params, **options)


def make_scheduler(case: Case, optimizer: torch.optim.Optimizer) -> Any:
    kind, options = case.scheduler or ("ConstantLR", {"factor": 1.0})
    return getattr(torch.optim.lr_scheduler, kind)(optimizer, **options)


def run_case(rank: int, world: int, case: Case) -> Outcome:
    """Train ``case`` with onecopy on this rank."""
    model = models.build(case.model)
    optimizer = make_optimizer(case, param_groups(case, model))
    scheduler = make_scheduler(case, optimizer) if case.scheduler else None
    engine = onecopy.initialize(model, make_plan(case), optimizer=optimizer, scheduler=scheduler)
    out = Outcome([], [], [], {})
    for step in range(case.steps):
        for micro in range(case.accumulation):
            loss = engine(*models.batch(case.model, step, micro, rank))
            loss.backward()
            out.moved.append(engine.step())
            out.losses.append(loss.item())
        assert engine.grad_norm is not None
        out.norms.append(engine.grad_norm)
        out.lrs.append(list(engine.lr()))
    out.weights = {name: onecopy.full_param(p).clone() for name, p in engine.module.named_parameters()}
    engine.close()
    return out


def run_cases(rank: int, world: int, cases: dict[Any, Case]) -> dict[Any, Outcome]:
    """``run_case`` on each of ``cases``, one after the other in the same processes."""
    return {key: run_case(rank, world, case) for key, case in cases.items()}


def oracle(case: Case, world: int, merge: str = "concat", dtype: torch.dtype | None = None) -> Outcome:
    """Train ``case`` in one process.

    ``merge="concat"`` runs the ranks' micro-batches as one batch, ``"mean"`` averages the ranks' own losses: the two
    differ by rounding only, which says how much rounding the case amplifies. ``dtype`` computes in that precision.
    """
    model = models.build(case.model).to(dtype)
    optimizer = make_optimizer(case, param_groups(case, model))
    scheduler = make_scheduler(case, optimizer)
    out = Outcome([], [], [], {})
    for step in range(case.steps):
        for micro in range(case.accumulation):
            parts = [models.batch(case.model, step, micro, rank) for rank in range(world)]
            if dtype:
                parts = [tuple(x.to(dtype) if x.is_floating_point() else x for x in part) for part in parts]
            if merge == "concat" and case.model not in ("toy", "exact"):
                loss = model(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
            else:
                loss = torch.stack([model(*part) for part in parts]).mean()
            (loss / case.accumulation).backward()
            out.losses.append(loss.item())
        trained = [p for p in model.parameters() if p.grad is not None]
        limit = case.clip if case.clip is not None else float("inf")
        out.norms.append(torch.nn.utils.clip_grad_norm_(trained, limit, case.norm_type).item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        out.lrs.append([group["lr"] for group in optimizer.param_groups])
    out.weights = {name: value.float() for name, value in models.bare(model).items()}
    return out


def difference(one: Outcome, other: Outcome) -> float:
    """Largest absolute difference of any weight."""
    assert one.weights.keys() == other.weights.keys()
    gaps = [
        (one.weights[k].float() - other.weights[k].float()).abs().max() for k in one.weights if one.weights[k].numel()
    ]
    return torch.stack(gaps).max().item()


def every_plan(**options: Any) -> dict[str, Any]:
    """Plans of all stages with small units; ``options`` go to ``onecopy.stage``."""
    options = {"units": onecopy.Units(min_numel=0)} | options
    plans = {f"stage {number}": onecopy.stage(number, **options) for number in range(4)}
    return plans | {"stage 3 held": onecopy.stage(3, reshard_after_forward=False, **options)}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01)


def call(model: Any, *args: Any) -> Tensor:
    """The default objective: the model's output is the loss."""
    return model(*args)


def largest_gap(module: nn.Module, twin: nn.Module) -> float:
    """Largest absolute difference of a parameter gathered from ``module`` to that of ``twin``; collective."""
    gap = 0.0
    for (name, one), (other_name, other) in zip(module.named_parameters(), twin.named_parameters(), strict=True):
        assert name == other_name
        assert one.shape == other.shape, f"{name} tells shape {tuple(one.shape)}"
        full = onecopy.full_param(one)
        assert full.shape == other.shape, f"{name} gathers to {tuple(full.shape)}"
        if full.numel():
            gap = max(gap, (full - other.detach().float()).abs().max().item())
    return gap


def beside_oracle(
    rank: int,
    world: int,
    build: Callable[[], nn.Module],
    feed: Callable[[int, int], tuple[Any, ...]],
    plans: dict[str, Any] | None = None,
    objective: Callable[..., Tensor] = call,
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    steps: int = 3,
    tolerance: float = 1e-6,
) -> dict[str, float]:
    """Train ``build()`` under each plan beside a plain twin that averages all ranks' losses; assert equal weights.

    ``feed(count, rank)`` is what ``rank`` gets in micro-batch number ``count``; ``objective(model, *fed)`` the loss.
    Returns the largest gap of each plan. This is for models and losses that differ by rank, which no concatenated
    batch can express.
    """
    gaps = {}
    for name, plan in (plans or every_plan()).items():
        torch.manual_seed(0)
        twin = build()
        torch.manual_seed(0)
        engine = onecopy.initialize(build(), plan, optimizer=optimizer)
        plain = optimizer([p for p in twin.parameters() if p.requires_grad])
        before = models.bare(twin)
        for count in range(steps * plan.batch.accumulation):
            objective(engine, *feed(count, rank)).backward()
            moved = engine.step()
            for other in range(world):
                (objective(twin, *feed(count, other)) / world / plan.batch.accumulation).backward()
            if (count + 1) % plan.batch.accumulation == 0:
                assert moved, f"{name}: no step at the boundary"
                if plan.clip.max_norm is not None:
                    torch.nn.utils.clip_grad_norm_(twin.parameters(), plan.clip.max_norm, plan.clip.norm_type)
                plain.step()
                plain.zero_grad()
        gaps[name] = largest_gap(engine.module, twin)
        assert any(not torch.equal(before[k], p) for k, p in twin.named_parameters()), "the oracle did not move"
        assert gaps[name] <= tolerance, f"{name}: weights are off by {gaps[name]}"
        engine.close()
    return gaps
