"""``onecopy.search``: a plan for a model on a cluster, in Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from onecopy.cluster import Cluster, here
from onecopy.plan.plan import Plan
from onecopy.plan.presets import stage
from onecopy.planner.estimate import Work
from onecopy.planner.search import Found, Question, fastest
from onecopy.planner.sources import activations_of, guess_inputs
from onecopy.planner.subject import Subject, facts_from_model

__all__ = ["Answer", "choose_plan", "search"]

Inputs = Callable[[int, int], Mapping[str, Any] | tuple[Any, ...]]


@dataclass(frozen=True)
class Answer:
    """What a search found: the settings with their costs, a line on each of why, and the plan."""

    found: Found
    why: list[str]
    plan: Plan


def search(
    model: nn.Module | Subject,
    cluster: Cluster | None = None,
    *,
    dtype: str | None = "bf16",
    seq: int = 2048,
    batch: int | None = None,
    accumulation: int = 1,
    inputs: Inputs | None = None,
) -> Plan:
    """The plan that is estimated to train ``model`` fastest on ``cluster`` (default: this machine) among those that fit.

    ``seq``: tokens of a sequence; ``batch``: sequences of a micro-batch (None: the most that fit, which is
    ``plan.batch.micro`` then). ``inputs(batch, seq)``: arguments of the model's forward on the meta device, for its
    activations; by default token ids are tried. Values of the model are not read; it may be on meta. Why the plan is
    what it is stands in ``plan.notes``, also whether it counts on the model's activation checkpointing. Raises
    :class:`~onecopy.errors.PlanError` when nothing fits.
    """
    return choose_plan(model, cluster, dtype=dtype, seq=seq, batch=batch, accumulation=accumulation, inputs=inputs).plan


def choose_plan(
    model: nn.Module | Subject,
    cluster: Cluster | None = None,
    *,
    dtype: str | None = "bf16",
    seq: int = 2048,
    batch: int | None = None,
    accumulation: int = 1,
    inputs: Inputs | None = None,
) -> Answer:
    """:func:`search` that also says what the plan costs."""
    subject: Subject = model  # type: ignore[assignment]
    if isinstance(model, nn.Module):
        subject = facts_from_model(model, inputs=inputs or guess_inputs(model))
    base = stage(2, dtype=dtype, accumulation=accumulation)
    work = Work(batch or 1, seq)
    activations, said = activations_of(subject, base, work)
    question = Question(subject, cluster if cluster is not None else here(), base, work, activations)
    found, why = fastest(question, batch)
    return Answer(found, why, found.choice.plan(base).with_(notes=(found.headline, *why, *said)))
