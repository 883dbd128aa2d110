"""A subject from what a user can name: a Hugging Face configuration, a function that builds a model, or numbers."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onecopy.errors import ConfigError, PlanError
from onecopy.plan.plan import Plan
from onecopy.planner.activations import Activations, Traced, by_formula
from onecopy.planner.estimate import Work
from onecopy.planner.subject import Built, Numbers, Shape, Subject, facts_from_model

__all__ = ["activations_of", "from_function", "from_huggingface", "load_subject", "token_ids"]

# What is assumed where no vocabulary is given: that of models since 2024, or a quarter of the parameters.
_VOCAB = 128_000


def load_subject(source: str, attention: str = "flash") -> Built:
    """The model that ``source`` names, on the meta device: ``module:function``, a ``config.json``, a folder that has one, or
    a name on the Hugging Face hub. Raises :class:`ConfigError` for anything else, :class:`PlanError` when it cannot be
    built there."""
    path = Path(source)
    if path.is_dir() or path.suffix == ".json":
        return from_huggingface(_config_file(path), attention)
    module, colon, name = source.partition(":")
    if colon:
        return from_function(module, name)
    if path.exists():
        raise ConfigError(f"model {source!r} is a file; give its config.json or folder, or module:function")
    return from_huggingface(source, attention)


def _config_file(path: Path) -> Path:
    """The folder's ``config.json``, or the file, once it is known to describe a model."""
    file = path / "config.json" if path.is_dir() else path
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"model configuration {str(file)!r} cannot be read: {error}") from error
    if not isinstance(found, dict) or "model_type" not in found:
        training = isinstance(found, dict) and {"zero_optimization", "train_batch_size", "bf16", "fp16"} & set(found)
        hint = "it is a DeepSpeed configuration, which --config takes" if training else "it has no model_type"
        raise ConfigError(f"{str(file)!r} is not a Hugging Face model configuration: {hint}")
    return file


def from_huggingface(source: str | Path, attention: str = "flash") -> Built:
    """A transformers model by its configuration, without weights. Needs the extra ``hf``."""
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f"model {str(source)!r}: reading a Hugging Face configuration needs transformers ({_line(error)}); pip install "
            "'onecopy[hf]', or give --params with --layers and --hidden"
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(str(source))
    except Exception as error:  # checks of transformers and of its hub raise classes of their own
        raise ConfigError(f"model {str(source)!r} is no configuration that transformers knows: {_line(error)}") from error
    options = {"attn_implementation": "eager" if attention == "eager" else "sdpa"}
    causal, plain = transformers.AutoModelForCausalLM, transformers.AutoModel
    try:
        with torch.device("meta"):
            model = (causal if type(config) in causal._model_mapping else plain).from_config(config, **options)
    except Exception as error:  # constructors of hundreds of models
        raise PlanError(f"model {str(source)!r} cannot be built on the meta device: {_line(error)}") from error
    text = config.get_text_config() if hasattr(config, "get_text_config") else config

    def inputs(batch: int, seq: int) -> Mapping[str, Any]:
        ids = token_ids(batch, seq)
        known = inspect.signature(model.forward).parameters
        options = {"labels": ids, "use_cache": False}
        return {"input_ids": ids, **{key: value for key, value in options.items() if key in known}}

    name = source.parent.name if isinstance(source, Path) else source
    return facts_from_model(model, name or config.model_type, inputs=inputs, shape=_shape(text))


def _shape(config: Any) -> Shape | None:
    found = [getattr(config, key, None) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")]
    sizes = [value for value in found if isinstance(value, int)]
    return Shape(sizes[0], sizes[1], sizes[2], sizes[3]) if len(sizes) == len(found) else None


def from_function(module: str, name: str) -> Built:
    """The model that ``name`` of ``module`` returns when it is called on the meta device; or ``(model, inputs)``, where
    ``inputs(batch, seq)`` gives the arguments of its forward, on any device. Without, token ids are tried."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"model {module}:{name} cannot be imported: {error}") from error
    if not callable(make):
        raise ConfigError(f"model {module}:{name} is a {type(make).__name__}; it is a function without arguments")
    try:
        with torch.device("meta"):
            made = make()
    except Exception as error:  # the user's own code
        raise PlanError(f"model {module}:{name} cannot be built on the meta device: {_line(error)}") from error
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{module}:{name} returned {type(model).__name__}; it returns a torch module, or (module, inputs)")
    return facts_from_model(model, f"{module}:{name}", inputs=inputs or guess_inputs(model))


def token_ids(batch: int, seq: int) -> torch.Tensor:
    """Token ids on the meta device, (batch, seq)."""
    return torch.zeros(batch, seq, dtype=torch.long, device="meta")


def guess_inputs(model: nn.Module) -> Callable[[int, int], tuple[Any, ...]]:
    """Token ids, and once more as targets where forward has an argument of that name."""
    known = list(inspect.signature(model.forward).parameters)
    count = 2 if len(known) > 1 and known[1] in ("targets", "labels") else 1
    return lambda batch, seq: (token_ids(batch, seq),) * count


def _line(error: BaseException) -> str:
    """The first line of what ``error`` says."""
    """What an error says, in one line of bounded length."""
    said = " ".join(str(error).split()) or type(error).__name__
    return said if len(said) <= 300 else f"{said[:300]} ..."


def activations_of(subject: Subject, plan: Plan, work: Work) -> tuple[Activations | None, list[str]]:
    """The activations of a micro-batch: traced where the model can run on meta, by the formula where its shape is known, else
    None; and what is to be said of that."""
    if work.seq is None:
        return None, []
    said: list[str] = []
    if isinstance(subject, Built):
        try:
            traced = Traced(subject, plan, work.seq, work.attention)
            traced.run(work.batch, work.recompute)
            return traced, said
        except PlanError as error:
            said.append(f"activations could not be traced: {_line(error)}")
            if subject.shape is None:
                return None, said
    if subject.shape is None:
        return None, said
    shape = subject.shape
    if isinstance(subject, Numbers) and shape.assumed:
        sizes = f"{shape.layers} layers of {shape.hidden}, {shape.heads} heads"
        said.append(f"the shape is assumed: {sizes} (--layers, --hidden)")
    if isinstance(subject, Numbers) and not shape.vocab:
        # Logits are often the largest activation, so a model without any would be promised too much room.
        shape = replace(shape, vocab=min(_VOCAB, max(subject.parameters // (4 * shape.hidden), 1)))
        said.append(f"logits of a vocabulary of {shape.vocab:,} (--vocab)")
    units = tuple(unit.name for unit in subject.units(plan))
    return by_formula(shape, units, work.seq, plan.precision.dtype, work.attention), said
