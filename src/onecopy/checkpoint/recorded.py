"""What a model says about itself, so that its checkpoint can be exported without it: its Hugging Face configuration, and
which of its parameters are PEFT adapters.

Both libraries are known by what their objects have; neither is imported unless the model is one of theirs.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from onecopy.checkpoint.format import encode
from onecopy.engine.unit import unwrapped

__all__ = ["adapters_of", "describe"]

_CONFIGS = {"config": "config.json", "generation_config": "generation_config.json"}


def describe(model: nn.Module, names: Mapping[nn.Parameter, Sequence[str]]) -> dict[str, Any]:
    """``files``: JSON files that lie beside the weights, by name, as :func:`encode` writes them; ``problem``: why one is
    not there; ``folder``: where the model was loaded from, when that is a folder; ``adapters``: see :func:`adapters_of`.

    ``names``: all names of every parameter. Empty for a model that says nothing.
    """
    inner = unwrapped(model)
    base = _base_model(inner)
    found: dict[str, Any] = {}
    for attribute, file in _CONFIGS.items():
        config = getattr(base, attribute, None)
        if config is None or not hasattr(config, "to_json_string"):
            continue
        try:
            said = json.loads(config.to_json_string())
        except (TypeError, ValueError) as error:  # a save must not fail for it; the export says so
            found["problem"] = f"{file} could not be recorded: {error}"
            continue
        if attribute == "config":
            said["architectures"] = [type(base).__name__]
        found.setdefault("files", {})[file] = encode(said, file)
    folder = getattr(getattr(base, "config", None), "_name_or_path", None)
    if isinstance(folder, str) and os.path.isdir(folder):
        found["folder"] = os.path.abspath(folder)
    if hasattr(inner, "peft_config"):
        found["adapters"] = adapters_of(inner, names)
    return found


def _base_model(model: nn.Module) -> Any:
    """The Hugging Face model in a PEFT model; any other model itself."""
    base = getattr(model, "get_base_model", None)
    return base() if hasattr(model, "peft_config") and callable(base) else model


def adapters_of(model: Any, names: Mapping[nn.Parameter, Sequence[str]]) -> dict[str, Any]:
    """By adapter: its ``config`` and ``keys``, from PEFT's name of each tensor to the parameter's first name; or, for a kind
    of adapter whose tensors are computed and not stored, ``problem``.

    PEFT itself picks them, from a state dict of tensors without values.
    """
    peft: Any = importlib.import_module("peft")
    first = {alias: every[0] for every in names.values() for alias in every}
    shapes = {alias: param.shape for param, every in names.items() for alias in every}
    state = {alias: torch.empty(shape, device="meta") for alias, shape in shapes.items()}
    by_id = {id(tensor): first[alias] for alias, tensor in state.items()}
    found: dict[str, Any] = {}
    for adapter, config in model.peft_config.items():
        said = config.to_dict() | {"inference_mode": True}
        clean = {key: sorted(value) if isinstance(value, set) else value for key, value in said.items()}
        record: dict[str, Any] = {"config": encode(_plain(clean), f"adapter {adapter!r}")}
        if getattr(config, "task_type", None) is None:
            base = type(_base_model(model))
            record["config"]["auto_mapping"] = {"base_model_class": base.__name__, "parent_library": base.__module__}
        if getattr(config, "is_prompt_learning", False):
            record["problem"] = f"adapters of type {said.get('peft_type')} are computed from their parameters"
        else:
            with_embeddings = _targets_embeddings(config)
            picked = peft.get_peft_model_state_dict(model, state, adapter, save_embedding_layers=with_embeddings)
            strange = [key for key, tensor in picked.items() if id(tensor) not in by_id]
            if strange:
                record["problem"] = f"{strange[0]!r} of it is computed from parameters"
            else:
                record["keys"] = {key: by_id[id(tensor)] for key, tensor in picked.items()}
        found[adapter] = record
    return found


def _targets_embeddings(config: Any) -> bool:
    """PEFT's own default asks the hub whether the vocabulary has grown; only the part that needs no network is done."""
    known: Any = importlib.import_module("peft.utils.other").EMBEDDING_LAYER_NAMES
    targets = getattr(config, "target_modules", None) or ()
    return not isinstance(targets, str) and any(name in targets for name in known)


def _plain(value: Any) -> Any:
    """Enums as their values, anything JSON has no word for as its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return str.__str__(value) if not hasattr(value, "value") else str(value.value)
    return value if value is None or isinstance(value, bool | int | float) else str(value)
