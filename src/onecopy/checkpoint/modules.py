"""What a model's state has beside its parameters: buffers, and whatever its modules call extra state."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from onecopy.engine.unit import bare_name

__all__ = ["extra_modules", "persistent_buffers"]


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that ``model.state_dict()`` has, by bare name. One that several modules share has several names."""
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[bare_name(f"{prefix}.{name}")] = buffer
    return found


def extra_modules(model: nn.Module) -> dict[str, Any]:
    """Modules that define ``get_extra_state``, by the name that ``model.state_dict()`` gives it."""
    return {
        bare_name(f"{prefix}._extra_state"): module
        for prefix, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }
