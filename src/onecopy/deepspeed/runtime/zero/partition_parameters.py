"""``deepspeed.runtime.zero.partition_parameters``: what programs reach for in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from onecopy.deepspeed.accelerator import get_accelerator
from onecopy.deepspeed.params import ZeroParamStatus
from onecopy.deepspeed.zero import GatheredParameters, Init, register_external_parameter, unregister_external_parameter

__all__ = [
    "GatheredParameters", "Init", "ZeroParamStatus", "get_accelerator", "register_external_parameter",
    "unregister_external_parameter", "zero_wrapper_for_fp_tensor_constructor",
]  # fmt: skip

# zero.Init leaves torch's constructors alone, so that they keep dtype and device of what is built; Transformers swaps
# the wrapper below for the time of a construction and compares what it is handed with this one.
_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., torch.Tensor], target_fp_dtype: torch.dtype, target_device: torch.device | None = None
) -> Callable[..., torch.Tensor]:
    """``fn``, whose floating-point results have ``target_fp_dtype`` and which builds on ``target_device``."""

    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") is None and target_device is not None:
            kwargs["device"] = target_device
        made = fn(*args, **kwargs)
        return made.to(target_fp_dtype) if made.is_floating_point() else made

    return wrapped
