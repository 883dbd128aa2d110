"""What readers of other libraries' checkpoints share: what the engine tells them, and how an optimizer is recognised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onecopy.checkpoint.format import encode
from onecopy.errors import CheckpointError

__all__ = ["OPTIONS", "Hints", "NeedsModelError", "bare", "kind_of", "options_of"]

OPTIONS = (
    "lr", "initial_lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "momentum", "dampening", "nesterov", "alpha",
    "centered", "lr_decay",
)  # fmt: skip
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


class NeedsModelError(CheckpointError):
    """The file is whole, but only the model that it is for says what in it belongs to which parameter."""


@dataclass(frozen=True)
class Hints:
    """What is known of the model that a checkpoint is for, where there is one.

    ``names``: all names of each parameter; ``buffers``: names of the buffers; ``groups``: the first names of the parameters
    in each group of the optimizer; ``optimizer_states``: will they be asked for.
    """

    names: tuple[tuple[str, ...], ...] = ()
    buffers: frozenset[str] = frozenset()
    groups: tuple[tuple[str, ...], ...] | None = None
    optimizer_states: bool = True


def bare(name: str) -> str:
    """``name`` without what wrappers put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def options_of(group: Mapping[str, Any], at: int) -> dict[str, Any]:
    """The options of an optimizer group that say what a step is."""
    return {key: encode(group[key], f"option {key!r} of group {at}") for key in OPTIONS if key in group}


def kind_of(states: set[str], options: Mapping[str, Any], said: str) -> str:
    """The optimizer's class where nobody wrote it down: by its states and options; "or" where those leave it open.

    ``said``: what to take where they say nothing.
    """
    if "exp_avg_sq" in states:
        decoupled = options.get("decoupled_weight_decay")
        return "AdamW or Adam" if decoupled is None else "AdamW" if decoupled else "Adam"
    for state, kind in (("momentum_buffer", "SGD"), ("sum", "Adagrad"), ("square_avg", "RMSprop")):
        if state in states:
            return kind
    return "SGD" if "nesterov" in options else said
