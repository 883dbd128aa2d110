"""``deepspeed.utils.zero_to_fp32``: plain fp32 weights out of a checkpoint, DeepSpeed's or ours.

``python -m onecopy.deepspeed.utils.zero_to_fp32 CHECKPOINT_DIR OUTPUT_DIR`` writes them to files.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from onecopy.checkpoint.export import Options, export_checkpoint
from onecopy.checkpoint.format import Parameter, Stored
from onecopy.checkpoint.sources import Source, open_source
from onecopy.errors import OneCopyError

__all__ = [
    "LazyTensor",
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file",
    "get_optim_files",
    "load_state_dict_from_zero_checkpoint",
    "main",
]

AnyModule = TypeVar("AnyModule", bound=nn.Module)
_CHUNK = 1 << 22  # elements


class LazyTensor:
    """A tensor of a checkpoint that is read when :meth:`contiguous` is called; ``shape`` and ``dtype`` are known before."""

    def __init__(self, source: Source, record: Parameter | Stored) -> None:
        self._source = source
        self._record = record
        self.shape = torch.Size(record.shape)
        stored: torch.dtype = getattr(torch, record.weight.dtype if isinstance(record, Parameter) else record.dtype)
        self.dtype = torch.float32 if stored.is_floating_point else stored

    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    def contiguous(self) -> Tensor:
        """The values, on the CPU; floating-point ones in fp32."""
        value = torch.empty(self.shape, dtype=self.dtype)
        record = self._record
        if isinstance(record, Stored):
            value.copy_(self._source.reader.whole(record))
        else:
            flat = value.view(-1)
            for part, start in self._source.parts(record.weight, record.numel, _CHUNK):
                flat[start : start + part.numel()].copy_(part)
        self._source.reader.close()
        return value


def _tag(tag: Any) -> str | None:
    return None if tag is None else str(tag)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """The state dict of the plain model from ``checkpoint_dir/tag`` (by default the latest): fp32 master weights, buffers,
    and tied weights under each of their names, one tensor.

    ``lazy_mode``: values are :class:`LazyTensor`, read one at a time by ``.contiguous()``. Raises
    :class:`~onecopy.errors.CheckpointError` where there is no checkpoint or it is damaged.
    """
    source = open_source(Path(checkpoint_dir), _tag(tag), optimizer_states=False)
    state: dict[str, Any] = {name: LazyTensor(source, stored) for name, stored in source.manifest.buffers.items()}
    for record in source.manifest.parameters.values():
        if record.trainable or not exclude_frozen_parameters:
            state |= dict.fromkeys(record.names, LazyTensor(source, record))
    if lazy_mode:
        return state
    read = {id(lazy): lazy.contiguous() for lazy in state.values()}
    return {name: read[id(lazy)] for name, lazy in state.items()}


def get_model_state_file(checkpoint_dir: str | os.PathLike[str], zero_stage: int) -> str:
    """The file of a DeepSpeed checkpoint's tag folder that has the module, its first part where it is cut over ranks, which
    the names of the files say and ``zero_stage`` need not.

    Raises FileNotFoundError; ours have no such file, and :func:`get_fp32_state_dict_from_zero_checkpoint` reads both.
    """
    return _files(checkpoint_dir, "*mp_rank_00_model_states.pt")[0]


def get_optim_files(checkpoint_dir: str | os.PathLike[str]) -> list[str]:
    """The files of a DeepSpeed checkpoint's tag folder that have optimizer states, by rank. Raises FileNotFoundError."""
    return _files(checkpoint_dir, "*_optim_states.pt")


def _files(folder: str | os.PathLike[str], pattern: str) -> list[str]:
    def numbers(path: Path) -> list[int]:
        return [int(digits) for digits in re.findall(r"\d+", path.name)]

    found = sorted(Path(folder).glob(pattern), key=numbers)
    if not found:
        raise FileNotFoundError(f"there is no {pattern} in {os.fspath(folder)!r}: it is no tag folder of DeepSpeed's")
    return [str(path) for path in found]


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    dtype: str | torch.dtype = torch.float32,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the state dict to ``pytorch_model.bin`` in ``output_dir``, with ``safe_serialization`` ``model.safetensors``; to
    several files and an index when it has more than ``max_shard_size`` bytes.

    ``dtype``: of floating-point parameters and buffers. Files of these names are replaced. A range of one tensor is in memory
    at a time.
    """
    options = Options.of(
        dtype,
        max_shard_size,
        frozen=not exclude_frozen_parameters,
        adapters=False,
        beside=False,
        cast_buffers=True,
        pickled=not safe_serialization,
        replace=True,
    )
    export_checkpoint(open_source(Path(checkpoint_dir), _tag(tag), optimizer_states=False), output_dir, options)


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """:func:`convert_zero_checkpoint_to_state_dict` in fp32."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def load_state_dict_from_zero_checkpoint(
    model: AnyModule, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> AnyModule:
    """``model`` on the CPU with the weights of the checkpoint; names that only one of the two has are left alone."""
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    model.load_state_dict(state, strict=False)
    return model


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="zero_to_fp32", description="Plain fp32 weights out of a checkpoint.")
    parser.add_argument("checkpoint_dir", help="directory of the checkpoints")
    parser.add_argument("output_dir", help="folder for the weights")
    parser.add_argument("--max_shard_size", default="5GB", help="bytes of the largest file, as 5GB (the default)")
    parser.add_argument("--safe_serialization", action="store_true", help="safetensors instead of torch's format")
    parser.add_argument("-t", "--tag", default=None, help="which checkpoint (default: the latest)")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="trained parameters alone")
    parser.add_argument("-d", "--debug", action="store_true", help="a traceback where there is an error")
    given = parser.parse_args(arguments)
    options = (given.max_shard_size, given.safe_serialization, given.tag, given.exclude_frozen_parameters)
    try:
        convert_zero_checkpoint_to_fp32_state_dict(given.checkpoint_dir, given.output_dir, *options)
    except OneCopyError as error:
        if given.debug:
            raise
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
