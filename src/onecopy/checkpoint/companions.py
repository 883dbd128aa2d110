"""What lies beside exported weights: configuration, tokenizer, adapter configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from onecopy.checkpoint.format import decode, dtype_name
from onecopy.errors import CheckpointError

__all__ = ["adapter_files", "model_files"]

_KINDS = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py", ".vocab", ".bpe")
_OF_TRAINING = ("trainer_state.json", "adapter_config.json")
_CONFIGS = ("config.json", "generation_config.json")


def model_files(recorded: Mapping[str, Any], model_dir: str | None, dtype: torch.dtype | None) -> dict[str, str | Path]:
    """Files for a whole model: those of ``model_dir`` or, without it, what the model said of itself and the tokenizer of the
    folder it came from. ``config.json`` names ``dtype``, as ``save_pretrained`` has it."""
    found = _files(recorded, model_dir)
    if model_dir is None:
        said = {name: decode(content) for name, content in recorded.get("files", {}).items()}
        found = {name: path for name, path in found.items() if name not in _CONFIGS}
        found |= {name: _text(content) for name, content in said.items()}
    if "config.json" in found and dtype is not None:
        given = found["config.json"]
        config = json.loads(given if isinstance(given, str) else _read(given))
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype_name(dtype)
        found["config.json"] = _text(config)
    return found


def adapter_files(recorded: Mapping[str, Any], model_dir: str | None, config: Any) -> dict[str, str | Path]:
    """Files for adapters: their configuration, and the tokenizer."""
    kept = {name: path for name, path in _files(recorded, model_dir).items() if name not in _CONFIGS}
    return kept | {"adapter_config.json": _text(config)}


def _files(recorded: Mapping[str, Any], model_dir: str | None) -> dict[str, str | Path]:
    """The files that are no weights in the model's folder, by name."""
    if model_dir is not None and not Path(model_dir).is_dir():
        raise CheckpointError(f"--model-dir {model_dir} is no folder; give one with config.json and the tokenizer's files")
    folder = Path(model_dir) if model_dir is not None else Path(recorded.get("folder", ""))
    if model_dir is None and ("folder" not in recorded or not folder.is_dir()):
        return {}
    kept = [path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix in _KINDS]
    return {path.name: path for path in kept if not path.name.endswith(".index.json") and path.name not in _OF_TRAINING}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from error


def _text(content: Any) -> str:
    return json.dumps(content, indent=2, sort_keys=True) + "\n"
