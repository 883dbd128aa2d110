"""What a model's state has beside its parameters: buffers, and whatever its modules call extra state."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from onecopy.engine.unit import named_modules

__all__ = ["extra_modules", "persistent_buffers"]


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that ``model.state_dict()`` has, by bare name. One that several modules share has several names."""
    found: dict[str, Tensor] = {}
    for path, module in named_modules(model):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"{path}.{name}" if path else name] = buffer
    return found


def extra_modules(model: nn.Module) -> dict[str, Any]:
    """Modules that define ``get_extra_state``, by the name that ``model.state_dict()`` gives it."""
    found: dict[nn.Module, str] = {}
    for path, module in named_modules(model):
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            found.setdefault(module, f"{path}._extra_state" if path else "_extra_state")
    return {name: module for module, name in found.items()}
