"""Where DeepSpeed's checkpoints have the elements of each parameter: one function per way it lays them out.

Every function fills a :class:`Found`: spans of weights and of the optimizer's states, by the parameter's name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onecopy.checkpoint.foreign import NeedsModelError
from onecopy.checkpoint.format import Span, dtype_name, encode
from onecopy.checkpoint.torchfiles import TorchReader, key_of
from onecopy.errors import CheckpointError

__all__ = ["Found", "flat_partitions", "natural", "per_parameter", "separate_files", "unsharded"]

OPTIMIZER = "optimizer_state_dict"


@dataclass
class Found:
    """``spans``: by parameter and state ("weight" or the optimizer's name for it); ``dtypes``: of each; ``scalars``: states
    with one number; ``groups``: names of each optimizer group; ``options``: of each group, as saved."""

    spans: dict[str, dict[str, list[Span]]] = field(default_factory=dict)
    dtypes: dict[tuple[str, str], str] = field(default_factory=dict)
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[list[str]] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, state: str, where: tuple[str, str], dtype: torch.dtype, start: int, numel: int) -> None:
        """The elements from ``start`` on of a state are at ``where``, a file and a key."""
        if numel > 0:
            span = Span(file=where[0], key=where[1], start=start, stop=start + numel)
            self.spans.setdefault(name, {}).setdefault(state, []).append(span)
            self.dtypes[name, state] = dtype_name(dtype)

    def add_scalars(self, name: str, state: Mapping[str, Any], flat: int, group: Mapping[str, Any]) -> None:
        """The states of ``state`` that are one number, where others have ``flat`` elements."""
        kept = {key: value for key, value in state.items() if not elementwise(value, flat)}
        if state and "step" not in kept and "step" in group:
            kept["step"] = group["step"]  # DeepSpeed's own Adam counts once for the group
        found = self.scalars.setdefault(name, {})
        for key, value in kept.items():
            number = value if isinstance(value, Tensor) else torch.tensor(float(value)) if key == "step" else value
            found[key] = encode(number.detach().cpu() if isinstance(number, Tensor) else number, f"state {key!r} of {name!r}")


def elementwise(value: Any, flat: int) -> bool:
    """Has the state one number per element?"""
    return isinstance(value, Tensor) and value.ndim > 0 and value.numel() >= flat


def natural(path: Path) -> list[int]:
    """Sorts files by the numbers in their names: ranks come in their order."""
    return [int(number) for number in re.findall(r"\d+", path.name)]


def _states(state: Mapping[str, Any], flat: int) -> Iterable[tuple[str, Tensor]]:
    return ((key, value) for key, value in state.items() if elementwise(value, flat))


# Stages 1 and 2: the parameters of a group lie one after the other in a vector that is cut over the ranks


def flat_partitions(found: Found, reader: TorchReader, optim: Sequence[str], shapes: Sequence[Mapping[str, Any]]) -> None:
    """``optim``: the files of the ranks, in order; ``shapes``: the shape of each parameter, by group."""
    done: dict[str, int] = {}
    found.groups = [list(group) for group in shapes]
    for rank, file in enumerate(optim):
        saved = reader.load(file)[OPTIMIZER]
        base = saved["base_optimizer_state"]
        if not isinstance(base, Mapping):
            raise CheckpointError(
                f"{reader.folder / file} has the optimizer's states in DeepSpeed's elastic form, not read here"
            )
        if rank == 0:
            found.options = list(base["param_groups"])
        for at, group in enumerate(shapes):
            weights = saved["single_partition_of_fp32_groups"][at]
            state = base["state"].get(at, {})
            for name, numel, first in _fragments(saved, at, group, rank, weights.numel(), len(optim)):
                start = done.get(name, 0)
                done[name] = start + numel
                path = (OPTIMIZER, "single_partition_of_fp32_groups", at)
                found.add(name, "weight", (file, key_of(path, first)), weights.dtype, start, numel)
                for key, values in _states(state, weights.numel()):
                    where = key_of((OPTIMIZER, "base_optimizer_state", "state", at, key), first)
                    found.add(name, key, (file, where), values.dtype, start, numel)
                found.add_scalars(name, state, weights.numel(), base["param_groups"][at])


def _fragments(
    saved: Mapping[str, Any], at: int, shapes: Mapping[str, Any], rank: int, partition: int, ranks: int
) -> list[tuple[str, int, int]]:
    """(name, elements, first element in the partition) of what a rank has of group ``at``, in order.

    DeepSpeed says it since 0.8; before that, parameters lay in the order of ``shapes`` without gaps.
    """
    if "param_slice_mappings" in saved:
        mapping = saved["param_slice_mappings"][at]
        return [(name, fragment.numel, fragment.start) for name, fragment in mapping.items()]
    if rank == ranks - 1:  # its padding is cut off, so its own length is not the others'
        total = sum(math.prod(shape) for shape in shapes.values())
        partition = -(-total // ranks) if rank == 0 else (total - partition) // rank
    low, high, begin, fragments = rank * partition, (rank + 1) * partition, 0, []
    for name, shape in shapes.items():
        end = begin + math.prod(shape)
        if max(begin, low) < min(end, high):
            fragments.append((name, min(end, high) - max(begin, low), max(begin, low) - low))
        begin = end
    return fragments


# Stage 3: each parameter is cut over the ranks on its own; a rank's parts lie one after the other in sub-groups


def per_parameter(found: Found, reader: TorchReader, optim: Sequence[str], shapes: Sequence[Mapping[str, Any]]) -> None:
    """As :func:`flat_partitions`."""
    found.groups = [list(group) for group in shapes]
    group_of = {name: at for at, group in enumerate(shapes) for name in group}
    for rank, file in enumerate(optim):
        saved = reader.load(file)[OPTIMIZER]
        flats, base = saved["fp32_flat_groups"], saved[OPTIMIZER]
        if rank == 0:
            found.options = list(base["param_groups"])
        at, first = 0, 0  # sub-group, and element of it
        for name, shape in ((name, shape) for group in shapes for name, shape in group.items()):
            numel = math.prod(shape)
            share = -(-numel // len(optim))
            start, left = rank * share, share
            while left:
                if at == len(flats):
                    raise CheckpointError(f"{reader.folder / file} is damaged: it ends before parameter {name!r} does")
                part = min(left, flats[at].numel() - first)
                real = max(min(part, numel - start), 0)  # the rest is padding
                _add_part(found, name, (file, at, first), (base["state"].get(at, {}), flats[at]), (start, real))
                found.add_scalars(name, base["state"].get(at, {}), flats[at].numel(), found.options[group_of[name]])
                start, left, first = start + part, left - part, first + part
                if first == flats[at].numel():
                    at, first = at + 1, 0
        if (at, first) != (len(flats), 0):
            raise CheckpointError(f"{reader.folder / file} is damaged: it has more elements than its parameters")


def _add_part(
    found: Found, name: str, where: tuple[str, int, int], of: tuple[Mapping[str, Any], Tensor], part: tuple[int, int]
) -> None:
    """Elements of a parameter (``part``: the first, and how many) are in sub-group ``where`` of a file."""
    (file, at, first), (state, flat) = where, of
    found.add(name, "weight", (file, key_of((OPTIMIZER, "fp32_flat_groups", at), first)), flat.dtype, *part)
    for key, values in _states(state, flat.numel()):
        found.add(name, key, (file, key_of((OPTIMIZER, OPTIMIZER, "state", at, key), first)), values.dtype, *part)


# Universal: a folder per parameter, a file per state


def separate_files(found: Found, reader: TorchReader, shapes: Sequence[Mapping[str, Any]]) -> None:
    """As :func:`flat_partitions`. Every parameter has a folder below ``zero`` with ``fp32.pt`` and its states."""
    found.groups = [list(group) for group in shapes]
    common = reader.load("zero/optimizer_state.pt") if "zero/optimizer_state.pt" in reader.sizes else {}
    found.options = list(common.get("param_groups", []))
    base = common.get(OPTIMIZER, {}).get("state", {})
    for at, group in enumerate(shapes):
        for name, shape in group.items():
            prefix = f"zero/{name}/"
            files = {file[len(prefix) : -3]: file for file in reader.sizes if file.startswith(prefix)}
            state: dict[str, Any] = {}
            for key, file in files.items():
                content = reader.load(file)
                value = content["param"] if isinstance(content, Mapping) else content
                state["weight" if key == "fp32" else key] = value
                if elementwise(value, math.prod(shape)):
                    where = (file, key_of(("param",) if isinstance(content, Mapping) else ()))
                    found.add(name, "weight" if key == "fp32" else key, where, value.dtype, 0, math.prod(shape))
            moments = {key: value for key, value in state.items() if key != "weight"}
            if moments and "step" not in moments and base:
                moments["step"] = next(iter(base.values())).get("step")
            if at < len(found.options):
                found.add_scalars(name, moments, math.prod(shape), found.options[at])


# Stage 0: one file, whose optimizer counts parameters instead of naming them


def unsharded(
    found: Found, reader: TorchReader, file: str, names: Sequence[str], groups: Sequence[Sequence[str]] | None
) -> None:
    """``names``: the parameters in the model's order, tied ones once; ``groups``: names by optimizer group, where a model
    is there that says it. None: a single group is all parameters in order; none at all: the states are left out.

    Raises :class:`CheckpointError` when it cannot be said which state is whose.
    """
    content = reader.load(file)
    module, saved = content["module"], content["optimizer"]
    for name in names:
        found.add(name, "weight", (file, key_of(("module", name))), module[name].dtype, 0, module[name].numel())
    if saved is None or (groups is not None and not groups):
        return
    base, path = (saved[OPTIMIZER], ("optimizer", OPTIMIZER)) if OPTIMIZER in saved else (saved, ("optimizer",))
    found.options = list(base["param_groups"])
    found.groups = _named(reader.folder / file, found.options, names, groups)
    for number, (group, options) in enumerate(zip(found.groups, found.options, strict=True)):
        first = 0
        for position, name in enumerate(group):
            flat = "fp32_groups_flat" in saved  # one vector for each group, or one tensor for each parameter
            index = options["params"][0 if flat else position]
            state, numel = base["state"].get(index, {}), module[name].numel()
            held = _master(saved, number, position)
            whole = saved["fp32_groups_flat"][number].numel() if flat else numel
            if any(value.numel() != whole for _, value in _states(state, 1)) or first + numel > max(whole, numel):
                raise _unlike(reader.folder / file, name, numel)
            if held is not None:
                where = key_of(("optimizer", *held), first)
                found.spans[name]["weight"].clear()
                found.add(name, "weight", (file, where), torch.float32, 0, numel)
            for key, values in _states(state, whole):
                found.add(name, key, (file, key_of((*path, "state", index, key), first)), values.dtype, 0, numel)
            found.add_scalars(name, state, whole, options)
            first += numel if flat else 0


def _master(saved: Mapping[str, Any], group: int, position: int) -> tuple[str | int, ...] | None:
    """Where the fp32 weights of a parameter are, when the module has them in fewer bits."""
    if "fp32_groups_flat" in saved:
        return ("fp32_groups_flat", group)
    return ("fp32_groups", group, position) if "fp32_groups" in saved else None


def _unlike(file: Path, name: str, numel: int) -> CheckpointError:
    return CheckpointError(
        f"{file} has an optimizer state of another size where the optimizer here has {name!r} with {numel} elements; give it "
        "the parameters in the order they had, or leave the states out: optimizer_states=False"
    )


def _named(
    file: Path, options: Sequence[Mapping[str, Any]], names: Sequence[str], groups: Sequence[Sequence[str]] | None
) -> list[list[str]]:
    """The names of each group's parameters."""
    counts = [len(group["params"]) for group in options]
    if groups is None and counts != [len(names)]:
        raise NeedsModelError(
            f"{file} (ZeRO stage 0) does not name the parameters of its {len(counts)} optimizer groups, so without the model "
            "their states cannot be told apart: load it with engine.load() and save it, or leave them out"
        )
    named = [list(names)] if groups is None else [list(group) for group in groups]
    if len(named) != len(counts) or any(count not in (1, len(group)) for count, group in zip(counts, named, strict=True)):
        raise CheckpointError(
            f"{file} has optimizer groups of {counts} parameters, the optimizer here of {[len(group) for group in named]}; "
            "optimizer_states=False loads weights alone"
        )
    return named
