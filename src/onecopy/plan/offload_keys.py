"""Where a DeepSpeed JSON says that states rest: ``offload_optimizer``, ``offload_param``, ``aio`` and their old names.

``read_offload`` translates them into an :class:`Offload`, or raises :class:`~onecopy.errors.ConfigError` with one line for
everything in them that cannot be.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from onecopy.errors import ConfigError
from onecopy.plan import schema
from onecopy.plan.keys import Remark
from onecopy.plan.layout import Tier
from onecopy.plan.plan import Plan, Scratch
from onecopy.plan.presets import offload
from onecopy.plan.presets import stage as stage_plan

__all__ = ["DEVICES", "Offload", "read_offload"]

_ZERO = "zero_optimization"
DEVICES: dict[str, Tier] = {"none": "device", "cpu": "host", "nvme": "disk"}
"""DeepSpeed's words for the tiers."""
_ALIGN = 4096  # bytes that requests to a disk are multiples of


@dataclass(frozen=True)
class Offload:
    """The tiers of the optimizer's states and of the parameters, what goes with them, and what keys have no effect."""

    optimizer: Tier = "device"
    parameter: Tier = "device"
    ratio: float = 1.0
    scratch: Scratch | None = None
    remarks: tuple[Remark, ...] = ()

    def place(self, plan: Plan) -> Plan:
        """``plan`` with its states there."""
        if (self.optimizer, self.parameter) == ("device", "device"):
            return plan
        return offload(plan, self.optimizer, self.parameter, ratio=self.ratio, scratch=self.scratch)


@dataclass(frozen=True)
class _Asked:
    """What one section asks for, and the key that asks."""

    key: str
    device: str
    path: str | None

    @property
    def tier(self) -> Tier:
        return DEVICES[self.device]

    def __str__(self) -> str:
        return f"{self.key} is {'true' if self.key.startswith(f'{_ZERO}.cpu_') else repr(self.device)}"


def read_offload(config: schema.Config) -> Offload:
    """Where ``config`` puts states."""
    zero = config.zero_optimization or schema.ZeroOptimization()
    problems: list[str] = []
    optimizer = _asked("offload_optimizer", zero.offload_optimizer, "cpu_offload", zero.cpu_offload, problems)
    parameter = _asked("offload_param", zero.offload_param, "cpu_offload_param", zero.cpu_offload_param, problems)
    problems += _stages(zero.stage, optimizer)
    parameter, moot = _moot(zero, parameter)
    problems += _paths(optimizer, parameter)
    on_disk = [asked for asked in (optimizer, parameter) if asked.tier == "disk"]
    aio = config.aio or schema.Aio()
    scratch = None
    if on_disk:
        threads = _threads(aio, problems)
        block = int(aio.block_size) if aio.block_size is not None else Scratch.block
        if block % _ALIGN:
            near = max(_ALIGN, round(block / _ALIGN) * _ALIGN)
            problems.append(f"aio.block_size is {block}; it must be a multiple of {_ALIGN} bytes, such as {near}")
        scratch = Scratch(on_disk[0].path or "", block=block, threads=threads)
    if problems:
        raise ConfigError("\n".join(problems))
    ratio = zero.offload_optimizer.ratio if zero.offload_optimizer is not None else 1.0
    remarks = (*moot, *_idle(zero, optimizer, parameter, aio))
    return Offload(optimizer.tier, parameter.tier, ratio if optimizer.tier != "device" else 1.0, scratch, remarks)


def _asked(
    name: str,
    section: schema.OffloadOptimizer | schema.OffloadParam | None,
    old: str,
    switch: bool | None,
    problems: list[str],
) -> _Asked:
    """What the section ``name`` asks for, or the ``switch`` that it was before it was a section."""
    key, old = f"{_ZERO}.{name}.device", f"{_ZERO}.{old}"
    if section is None:
        return _Asked(old, "cpu", None) if switch else _Asked(key, "none", None)
    device = section.device or "none"
    said, means = ("true", "cpu") if switch else ("false", "none")
    if switch is not None and device != means:
        problems.append(
            f"{old} is {said}, which means device '{means}', and {key} is {device!r}; {old} is an old name: remove it"
        )
    return _Asked(key, device, section.nvme_path)


def _stages(stage: int, optimizer: _Asked) -> Iterator[str]:
    if optimizer.tier != "device" and stage_plan(stage).rules[0].row.optimizer.replicated:
        yield (
            f"{optimizer} and {_ZERO}.stage is {stage}, where every rank keeps all states on its device; stages 1, 2 and 3 "
            "honour it: set stage to 1"
        )


def _moot(zero: schema.ZeroOptimization, parameter: _Asked) -> tuple[_Asked, tuple[Remark, ...]]:
    """What is left of ``parameter`` at this stage, and what is to be said of the rest.

    Trainers write the section into the files of every stage, and DeepSpeed reads it at stage 3 alone. So it is no error
    elsewhere, but it is not passed over in silence: who wrote it expects the memory.
    """
    if parameter.tier == "device" or not stage_plan(zero.stage).rules[0].row.parameter.rest.replicated:
        return parameter, ()
    keys = [parameter.key]
    if parameter.path is not None:
        keys.append(f"{_ZERO}.offload_param.nvme_path")
    why = (
        f"{_ZERO}.stage is {zero.stage}, where the parameters are whole on every rank and in use all the time; "
        "only stage 3 honours it"
    )
    return _Asked(parameter.key, "none", None), (Remark(why, tuple(keys)),)


def _paths(optimizer: _Asked, parameter: _Asked) -> Iterator[str]:
    for asked, other in ((optimizer, parameter), (parameter, optimizer)):
        if asked.tier == "disk" and asked.path is None:
            path = asked.key.removesuffix("device") + "nvme_path"
            near = repr(other.path) if other.path else "a folder on a disk of this host"
            yield f"{asked} and {path} is not given; set it to {near}, or device to 'cpu'"
    if optimizer.tier == parameter.tier == "disk" and optimizer.path and parameter.path:
        one, two = os.path.normpath(optimizer.path), os.path.normpath(parameter.path)
        if one != two:
            yield (
                f"{_ZERO}.offload_optimizer.nvme_path is {optimizer.path!r} and {_ZERO}.offload_param.nvme_path is "
                f"{parameter.path!r}; the states of a run are in one folder: set both to {optimizer.path!r}"
            )


def _threads(aio: schema.Aio, problems: list[str]) -> int:
    old, new = aio.thread_count, aio.intra_op_parallelism
    if old is not None and new is not None and old != new:
        problems.append(
            f"aio.thread_count is {old} and aio.intra_op_parallelism is {new}; both are the number of threads: keep one"
        )
    found = new if new is not None else old
    return int(found) if found is not None else Scratch.threads


def _idle(zero: schema.ZeroOptimization, optimizer: _Asked, parameter: _Asked, aio: schema.Aio) -> Iterator[Remark]:
    """Of the keys that are honoured where they apply, those that do not apply."""
    for name, asked, section in (
        ("offload_optimizer", optimizer, zero.offload_optimizer),
        ("offload_param", parameter, zero.offload_param),
    ):
        given = section.model_fields_set if section is not None else set()
        if "nvme_path" in given and asked.path is not None and asked.tier != "disk":
            yield Remark(f"device is {asked.device!r}", (f"{_ZERO}.{name}.nvme_path",))
        if "ratio" in given and asked.tier == "device":
            yield Remark(f"device is {asked.device!r}", (f"{_ZERO}.{name}.ratio",))
    if "disk" not in (optimizer.tier, parameter.tier):
        keys = [f"aio.{key}" for key in ("block_size", "intra_op_parallelism", "thread_count") if key in aio.model_fields_set]
        if keys:
            yield Remark("nothing is offloaded to disk", tuple(keys))
