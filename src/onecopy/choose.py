"""``onecopy train --auto``: the plan for the machine it is on, found by the planner."""

from __future__ import annotations

from dataclasses import replace

import torch

from onecopy import gpt
from onecopy.cluster import Cluster, here
from onecopy.errors import ConfigError, PlanError
from onecopy.method import ROWS, Method, default_dtype
from onecopy.place import STATES, Place
from onecopy.planner.public import Answer, choose_plan
from onecopy.train import Settings

__all__ = ["choose"]


def choose(settings: Settings, ranks: int) -> tuple[Settings, str]:
    """``settings`` with the stage, places, codec, recomputation and micro-batch that are estimated to train fastest on
    ``ranks`` ranks of this machine, and a line that says what and why.

    Rows of a micro-batch are as given, or the usual ones where they fit, else the most that fit. Raises
    :class:`ConfigError` for an option that the search decides, :class:`PlanError` when nothing fits.
    """
    method, place = settings.method, settings.method.place
    decided = {
        "--config": method.config,
        "--stage": method.stage,
        "--offload": place.optimizer,
        "--offload-parameters": place.parameters,
        "--offload-gradients": place.gradients,
        "--offload-ratio": place.ratio,
        "--states": place.states if place.states != Place().states else None,
        "--recompute": "" if method.recompute else None,
    }
    for option, value in decided.items():
        if value is not None:
            said = f"{option} {value}".strip()
            raise ConfigError(f"{said} beside --auto: the search decides that; drop one")
    place.check_folder()
    cluster = _machine(place, ranks)
    shape = gpt.config(settings.task.model, context=settings.task.context)
    with torch.device("meta"):
        model = gpt.GPT(shape)

    def ask(rows: int | None) -> Answer:
        return choose_plan(
            model, cluster, dtype=method.dtype or default_dtype(), seq=shape.context, batch=rows,
            accumulation=method.accumulation or 1,
        )  # fmt: skip

    try:
        answer = ask(method.batch_size or ROWS)
    except PlanError:
        if method.batch_size is not None:
            raise
        answer = ask(None)
    made = _method(method, answer)
    why = "; ".join(answer.why[:2])  # of the stage and of the tiers
    return replace(settings, method=made), f"auto: {answer.found.headline}. {why}; the simplest within 1 % of the fastest"


def _machine(place: Place, ranks: int) -> Cluster:
    """This machine with ``ranks`` ranks, and no more memory than the caps allow."""
    found = here(place.scratch)
    device, host = found.gpu.memory, found.host_memory
    if found.gpu.shared and host is not None:
        device = host // ranks
    if place.device_memory is not None:
        device = min(device, place.device_memory)
    if place.host_memory is not None and host is not None:
        host = min(host, place.host_memory * ranks)
    return replace(found, gpu=replace(found.gpu, memory=device), gpus=ranks, host_memory=host)


def _method(method: Method, answer: Answer) -> Method:
    choice = answer.found.choice
    optimizer, parameters = (None if tier == "device" else tier for tier in (choice.optimizer, choice.parameter))
    states = next(name for name, codec in STATES.items() if codec == choice.moments)
    scratch = method.place.scratch if "disk" in (optimizer, parameters) else None
    place = replace(method.place, optimizer=optimizer, parameters=parameters, scratch=scratch, states=states)
    return replace(method, stage=choice.number, batch_size=choice.batch, recompute=choice.recompute, place=place)
