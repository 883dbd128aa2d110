"""What a sharded parameter answers when a program asks it for DeepSpeed's attributes: ``param.ds_id`` and so on.

They are properties of ``torch.Tensor`` that exist only on parameters which are cut over the ranks (``hasattr`` is False on
all other tensors, also on parameters of stages 0 to 2), and they say what is true at the moment of asking. The
parameter's own ``shape`` stays its true shape; ``ds_shape`` is the same. What autograd hands a backward function in the
place of a parameter that it saved is another tensor over the gathered values: it has ``ds_status``, AVAILABLE.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from onecopy.comm import watch
from onecopy.comm.groups import world_size
from onecopy.engine.deferred import BornHome
from onecopy.engine.home import ParameterHome
from onecopy.engine.parameter import HOME, Home

__all__ = ["ZeroParamStatus", "is_cut"]


class ZeroParamStatus(Enum):
    """Where the values of a parameter are."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


_ids: WeakKeyDictionary[Home, int] = WeakKeyDictionary()
_count = itertools.count()


def _home(param: torch.Tensor, name: str) -> Home:
    home: Home | None = param.__dict__.get(HOME)
    if isinstance(home, BornHome):
        return home
    if isinstance(home, ParameterHome) and not home.weights.spec.row.parameter.rest.replicated:
        return home
    raise AttributeError(f"{type(param).__name__!r} object has no attribute {name!r}: it is not a sharded parameter")


def _saved(tensor: torch.Tensor) -> bool:
    """Is ``tensor`` a view of a buffer that an engine has gathered?"""
    if HOME in tensor.__dict__ or tensor.layout is not torch.strided:
        return False
    at = tensor.untyped_storage()._cdata
    return any(at in engine._core.gathering.storages for engine in watch.engines)


def is_cut(param: torch.Tensor) -> bool:
    """Is ``param`` cut over the ranks while nobody uses it?"""
    return isinstance(param, nn.Parameter) and hasattr(param, "ds_id")


def _id(home: Home) -> int:
    if home not in _ids:
        _ids[home] = next(_count)
    return _ids[home]


def _status(home: Home) -> ZeroParamStatus:
    return ZeroParamStatus.AVAILABLE if home.present else ZeroParamStatus.NOT_AVAILABLE


def _status_of(tensor: torch.Tensor) -> ZeroParamStatus:
    return ZeroParamStatus.AVAILABLE if _saved(tensor) else _status(_home(tensor, "ds_status"))


def _rank() -> int:
    return dist.get_rank() if world_size() > 1 else 0


_ANSWERS: dict[str, Callable[[Home], Any]] = {
    "ds_id": _id,
    "ds_shape": lambda home: home.shape,
    "ds_numel": lambda home: home.shape.numel(),
    "ds_tensor": lambda home: home.local()[0],
    "ds_persist": lambda home: False,
    "ds_active_sub_modules": lambda home: set(),
    "ds_process_group": lambda home: dist.group.WORLD if world_size() > 1 else None,
    "ds_zero_param_process_group": lambda home: dist.group.WORLD if world_size() > 1 else None,
    "ds_zero_partition_rank": lambda home: _rank(),
    "ds_zero_partition_world_size": lambda home: world_size(),
}


def _property(name: str, answer: Callable[[Home], Any]) -> property:
    return property(lambda param: answer(_home(param, name)))


def _method(name: str, call: Callable[..., Any]) -> property:
    """A method that exists only on parameters that are cut."""

    def bound(param: torch.Tensor) -> Callable[..., Any]:
        home = _home(param, name)
        return lambda *args, **kwargs: call(param, home, *args, **kwargs)

    return property(bound)


def _partition_numel(param: torch.Tensor, home: Home) -> int:
    """Elements that a rank keeps at most."""
    return -(-home.shape.numel() // world_size())


def _summary(param: torch.Tensor, home: Home, *_: Any, **__: Any) -> dict[str, Any]:
    return {"id": _id(home), "status": _status(home).name, "numel": home.shape.numel(), "shape": tuple(home.shape)}


def _install(names: Iterable[tuple[str, property]]) -> None:
    for name, value in names:
        setattr(torch.Tensor, name, _settable(name, value))


def _settable(name: str, answer: property) -> property:
    """``answer``, and on other tensors what was set: those that DeepSpeed pickled bring such attributes along."""

    def get(tensor: torch.Tensor) -> Any:
        set_before = tensor.__dict__
        return set_before[name] if name in set_before else answer.__get__(tensor)

    def put(tensor: torch.Tensor, value: Any) -> None:
        if HOME in tensor.__dict__:
            raise AttributeError(f"{name!r} of an engine's parameter cannot be set")
        tensor.__dict__[name] = value

    return property(get, put)


_install((name, _property(name, answer)) for name, answer in _ANSWERS.items())
_install([("ds_status", property(_status_of))])
_install([("partition_numel", _method("partition_numel", _partition_numel)), ("ds_summary", _method("ds_summary", _summary))])
