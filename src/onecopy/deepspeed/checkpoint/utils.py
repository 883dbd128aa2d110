"""``deepspeed.checkpoint.utils``."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

__all__ = ["clone_tensors_for_torch_save"]

T = TypeVar("T")


def clone_tensors_for_torch_save(item: T, device: torch.device | str = "cpu") -> T:
    """``item`` with every tensor in it copied to ``device``, by itself: torch.save writes the whole storage of a view.

    ``item``: a tensor, or lists, tuples and dicts of such, at any depth; what is no tensor stays as it is.
    """
    made: Any = item
    if isinstance(item, torch.Tensor):
        made = item.detach().to(device, copy=True).contiguous()
    elif isinstance(item, list | tuple):
        made = type(item)(clone_tensors_for_torch_save(each, device) for each in item)
    elif isinstance(item, dict):
        made = type(item)((key, clone_tensors_for_torch_save(value, device)) for key, value in item.items())
    return made  # type: ignore[no-any-return]
