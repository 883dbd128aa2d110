"""A checkpoint of ``torch.distributed.checkpoint`` as a manifest of ours: nothing is copied, spans lie in its files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from onecopy.checkpoint.dcp import INDEX, DcpReader, Tree, files_of, read_index
from onecopy.checkpoint.foreign import OPTIONS, Hints, bare, kind_of, options_of
from onecopy.checkpoint.format import (
    VERSION,
    Group,
    Manifest,
    OptimizerRecord,
    Parameter,
    State,
    dtype_name,
    encode,
    ordered,
)
from onecopy.errors import CheckpointError

__all__ = ["KIND", "describe", "is_one"]

KIND = "dcp"
_MODELS = ("model", "module", "state_dict", "model_state_dict")
_PARTS = ("state", "param_groups")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked", "inv_freq")

_READ = frozenset((*OPTIONS, "params", "decoupled_weight_decay"))

Path_ = tuple[str, ...]


def is_one(folder: Path) -> bool:
    """Is ``folder`` a checkpoint of ``torch.distributed.checkpoint``?"""
    return (folder / INDEX).is_file()


def describe(folder: Path, hints: Hints) -> Manifest:
    """The manifest of the checkpoint in ``folder``; ``plan["notes"]`` says what of it is left out.

    Raises :class:`CheckpointError` for an index that is damaged, files that are missing, and where it cannot be said what the
    model's weights are.
    """
    tree = _nested(read_index(folder))
    files = files_of(folder, tree)
    reader = DcpReader(folder, {name: record.bytes for name, record in files.items()})
    optimizer, model = _optimizer_root(folder, tree), _model_root(folder, tree, hints)
    names = {bare(path[-1]): path for path in tree.tensors if path[:-1] == model and not _under(path, optimizer)}
    options = _groups(tree, reader, optimizer, hints) if optimizer is not None and hints.optimizer_states else []
    states = _states(tree, optimizer, hints) if options else {}
    parameters, buffers = _weights(tree, names, states, hints)
    parameters = {name: _with_states(record, tree, states, reader) for name, record in parameters.items()}
    client, notes = _rest(tree, reader, model, optimizer)
    if not hints.names:
        notes.append(
            "torch.distributed.checkpoint does not say which tensors are buffers and which weights are tied, so it is "
            "guessed; an engine that loads this checkpoint itself knows"
        )
    steps = [value for record in parameters.values() if (value := record.scalars.get("step")) is not None]
    done = max((int(step["$tensor"][0] if isinstance(step, dict) else step) for step in steps), default=0)
    return Manifest(
        format=VERSION,
        library={KIND: "?", "torch": "?"},
        plan={"source": KIND, "notes": notes},
        counters={"global_steps": done, "skipped_steps": 0, "micro_steps": done, "grad_norm": None},
        parameters=parameters,
        buffers={name: tree.stored(names[name]) for name in buffers},
        optimizer=_optimizer(parameters, options, hints) if options else None,
        scheduler=None,
        loss_scale=None,
        client_state=client,
        files=files,
    )


def _nested(tree: Tree) -> Tree:
    """``tree`` with the paths taken apart that ``flatten_optimizer_state_dict`` joins: ``state.NAME.KEY`` and
    ``param_groups.NAME.KEY``, options of each parameter in the place of groups."""
    named = {
        (*path[:-1], path[-1].removeprefix("param_groups.").rpartition(".")[0])
        for path in (*tree.values, *tree.tensors)
        if path[-1].startswith("param_groups.")
    }

    def apart(path: Path_) -> Path_:
        kind, _, rest = path[-1].partition(".")
        name, _, key = rest.rpartition(".")
        return (*path[:-1], kind, name, key) if kind in _PARTS and (*path[:-1], name) in named else path

    return Tree(
        {apart(path): found for path, found in tree.tensors.items()}, {apart(path): at for path, at in tree.values.items()}
    )


def _under(path: Path_, root: Path_ | None) -> bool:
    """Is the leaf one of an optimizer's state dict at ``root``?"""
    if root is None or path[: len(root)] != root or len(path) == len(root):
        return False
    return path[len(root)] in _PARTS


def _optimizer_root(folder: Path, tree: Tree) -> Path_ | None:
    roots = {path[: path.index("param_groups")] for path in (*tree.values, *tree.tensors) if "param_groups" in path}
    if len(roots) > 1:
        raise CheckpointError(f"{folder} has {len(roots)} optimizers, at {_list(roots)}; one is read here")
    return next(iter(roots), None)


def _model_root(folder: Path, tree: Tree, hints: Hints) -> Path_:
    optimizer = [path[: path.index("param_groups")] for path in (*tree.values, *tree.tensors) if "param_groups" in path]
    root = optimizer[0] if optimizer else None
    found = {path[:-1] for path in tree.tensors if not _under(path, root)}
    known = {name for names in hints.names for name in names}
    if root is not None and not known:  # the optimizer's parameters are some of the model's
        depth = len(root)
        known = {bare(path[depth + 1]) for path in tree.tensors if path[: depth + 1] == (*root, "state")}
    if len(found) > 1 and known:
        fits = {path[:-1] for path in tree.tensors if path[:-1] in found and bare(path[-1]) in known}
        found = fits or found
    if len(found) > 1:
        found = {path for path in found if path and path[-1] in _MODELS} or found
    if len(found) != 1:
        raise CheckpointError(
            f"{folder} has tensors at {_list(found) or 'no place'}, which may all be the model's; call those 'model'"
        )
    return next(iter(found))


def _list(paths: set[Path_]) -> str:
    return ", ".join(repr(".".join(path)) for path in sorted(paths))


def _groups(tree: Tree, reader: DcpReader, root: Path_, hints: Hints) -> list[dict[str, Any]]:
    """The optimizer's groups with their options and ``params``."""
    depth = len(root)
    groups: dict[str, dict[str, Any]] = {}
    for path in (*tree.values, *tree.tensors):
        if path[: depth + 1] == (*root, "param_groups") and path[depth + 2] in _READ:
            value = reader.value(tree.values[path]) if path in tree.values else reader.whole(tree.stored(path)).clone()
            groups.setdefault(path[depth + 1], {})[path[depth + 2]] = value
    if all(name.isdigit() for name in groups):
        return [groups[name] for name in sorted(groups, key=int)]
    return _grouped(groups, hints)


def _grouped(options: Mapping[str, dict[str, Any]], hints: Hints) -> list[dict[str, Any]]:
    """Groups of an optimizer of which each parameter's options are known: those of the engine where they fit, else one for
    all parameters with the same options."""
    first = {alias: names[0] for names in hints.names for alias in names}
    saved = {first.get(bare(name), bare(name)): name for name in options}
    ours = [[saved[name] for name in group if name in saved] for group in hints.groups or ()]
    fits = all(repr(options[name]) == repr(options[names[0]]) for names in ours for name in names)
    if not fits or not all(ours) or sum(map(len, ours)) < len(options):
        alike: dict[str, list[str]] = {}
        for name, said in options.items():
            alike.setdefault(repr(sorted(said.items())), []).append(name)
        ours = list(alike.values())
    return [{**options[names[0]], "params": names} for names in ours]


def _states(tree: Tree, root: Path_ | None, hints: Hints) -> dict[str, dict[str, Path_]]:
    """By parameter and state, the path of it."""
    found: dict[str, dict[str, Path_]] = {}
    if root is None:
        return found
    counted = [name for group in hints.groups or () for name in group]
    depth = len(root)
    for path in (*tree.tensors, *tree.values):
        if path[: depth + 1] == (*root, "state") and len(path) == depth + 3:
            name = path[depth + 1]
            if name.isdigit():  # a plain optimizer.state_dict() counts parameters
                if int(name) >= len(counted):
                    raise CheckpointError(
                        f"the optimizer's states at {'.'.join(root)!r} are counted and not named, so without the model it "
                        "cannot be said whose they are: load it with engine.load() and save it, or leave them out"
                    )
                name = counted[int(name)]
            found.setdefault(bare(name), {})[path[depth + 2]] = path
    return found


def _weights(
    tree: Tree, names: Mapping[str, Path_], states: Mapping[str, Any], hints: Hints
) -> tuple[dict[str, Parameter], list[str]]:
    """Parameters, and the names of buffers. Without a model, buffers are told by their names and kinds of number."""
    aliases = {alias: every for every in hints.names for alias in every}
    parameters: dict[str, Parameter] = {}
    buffers = []
    for name, path in names.items():
        shape, dtype, _ = tree.tensors[path]
        plain = name not in aliases and name not in states
        guessed = not aliases and (not dtype.is_floating_point or name.rsplit(".", 1)[-1] in _BUFFERS)
        if plain and (name in hints.buffers or guessed):
            buffers.append(name)
            continue
        every = aliases.get(name, (name,))
        present = tuple(alias for alias in every if alias in names) or (name,)
        if present[0] in parameters:
            continue  # the same weight under another of its names
        first = names[present[0]]
        parameters[present[0]] = Parameter(
            names=every if name in aliases else (name,),
            shape=shape,
            dtype=dtype_name(dtype),
            trainable=any(alias in states for alias in present) or not states,
            weight=State(dtype=dtype_name(dtype), spans=ordered(tree.spans(first))),
        )
    return parameters, buffers


def _with_states(record: Parameter, tree: Tree, states: Mapping[str, dict[str, Path_]], reader: DcpReader) -> Parameter:
    held = next((states[name] for name in record.names if name in states), {})
    moments, scalars = {}, {}
    for key, path in held.items():
        if path in tree.values:
            scalars[key] = encode(reader.value(tree.values[path]), f"state {key!r} of {record.names[0]!r}")
            continue
        shape, dtype, _ = tree.tensors[path]
        if shape == record.shape and shape:
            moments[key] = State(dtype=dtype_name(dtype), spans=ordered(tree.spans(path)))
        else:
            value: Tensor = reader.whole(tree.stored(path))
            scalars[key] = encode(value.clone(), f"state {key!r} of {record.names[0]!r}")
    return record.model_copy(update={"moments": moments, "scalars": scalars})


def _optimizer(parameters: Mapping[str, Parameter], options: list[dict[str, Any]], hints: Hints) -> OptimizerRecord:
    first = {alias: record.names[0] for record in parameters.values() for alias in record.names}
    counted = iter([name for group in hints.groups or () for name in group])
    groups = []
    for at, group in enumerate(options):
        named = [bare(name) if isinstance(name, str) else next(counted) for name in group.get("params", ())]
        params = tuple(first[name] for name in named if name in first)
        groups.append(Group(params=params, options=options_of(group, at)))
    states = {key for record in parameters.values() for key in record.moments}
    return OptimizerRecord(kind=kind_of(states, options[0], "unknown"), groups=tuple(groups))


def _rest(tree: Tree, reader: DcpReader, model: Path_, optimizer: Path_ | None) -> tuple[dict[str, Any], list[str]]:
    """Everything else: values as client state, and what of it cannot be kept."""
    client: dict[str, Any] = {}
    notes = []
    for path, piece in tree.values.items():
        if _under(path, optimizer):
            continue
        try:
            value = encode(reader.value(piece), ".".join(path))
        except CheckpointError as error:
            notes.append(f"left out: {error}")
            continue
        at = client
        for step in path[:-1]:
            at = at.setdefault(step, {})
        at[path[-1]] = value
    lost = [path for path in tree.tensors if path[:-1] != model and not _under(path, optimizer)]
    return client, notes + [f"left out: tensor {'.'.join(path)!r}" for path in lost]
