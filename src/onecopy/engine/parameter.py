"""Sharded parameters tell the truth, take in-place initialisers, and refuse to be read.

A parameter whose values are elsewhere keeps its object, shape and dtype; meanwhile its class is one that overrides
``__torch_function__``, and it gets its own back when it is gathered: a gathered parameter costs nothing.
Anything derived from it without reading values (``.data``, ``w[0]``, ``w.view(-1)``) is a stand-in that obeys the same
rules.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from onecopy.errors import EngineError, ShardedReadError

__all__ = [
    "ELEMENTWISE",
    "HOME",
    "METADATA_METHODS",
    "METADATA_PROPERTIES",
    "Face",
    "Home",
    "engine_last",
    "hollow",
    "home_of",
    "property_name",
    "set_data",
]

HOME = "_onecopy_home"
_CHAIN = "_onecopy_chain"


class Home(Protocol):
    """Where a parameter's elements are when the parameter itself is freed."""

    @property
    def name(self) -> str:
        """The parameter's name in the model."""

    @property
    def shape(self) -> torch.Size:
        """The parameter's shape."""

    @property
    def present(self) -> bool:
        """Are the full values in memory?"""

    def local(self) -> tuple[torch.Tensor, int]:
        """The elements this rank keeps, flat, and where they start in the flattened parameter."""

    def writing(self) -> AbstractContextManager[None]:
        """Around every change of the local elements."""

    def written(self) -> None:
        """The local elements were changed: whatever is derived from them must follow."""

    def grad(self, param: torch.Tensor) -> torch.Tensor | None:
        """What ``param.grad`` is."""

    def set_grad(self, param: torch.Tensor, value: torch.Tensor | None) -> None:
        """``param.grad = value``."""

    def values(self) -> torch.Tensor:
        """The full values, when they are present."""

    def demand(self) -> bool:
        """Make the full values present if a running forward pass allows it; False if not."""


def engine_last(param: torch.Tensor) -> None:
    """The engine's hook takes the gradient away: those that others registered run before it, and see one."""
    hooks: dict[int, Any] = getattr(param, "_post_accumulate_grad_hooks", None) or {}
    for key in [key for key, hook in hooks.items() if getattr(hook, "takes_gradient", False)]:
        hooks[key] = hooks.pop(key)


def home_of(tensor: torch.Tensor) -> Home | None:
    """The home of a managed parameter, None for any other tensor."""
    return tensor.__dict__.get(HOME) if isinstance(tensor, torch.Tensor) else None


# Answered from the tensor's metadata: true whether or not there are values.
METADATA_PROPERTIES = frozenset(
    "shape dtype device requires_grad is_leaf grad grad_fn ndim layout names itemsize nbytes is_cuda is_cpu is_xpu is_mps "
    "is_meta is_sparse is_sparse_csr is_quantized is_nested is_mkldnn is_ipu is_maia is_mtia is_vulkan is_xla retains_grad "
    "output_nr _version _base _backward_hooks _post_accumulate_grad_hooks _grad_fn name volatile _is_param _grad".split()
)
_DEVICE_PROPERTIES = frozenset("device is_cuda is_cpu is_xpu is_mps is_meta is_mtia".split())
METADATA_METHODS = frozenset(
    "size dim ndimension numel nelement stride element_size is_floating_point is_complex is_contiguous get_device "
    "storage_offset is_signed __len__ requires_grad_ register_hook register_post_accumulate_grad_hook __hash__ "
    "is_inference has_names _is_view _has_symbolic_sizes_strides result_type is_same_size can_cast is_shared is_pinned "
    "is_tensor is_conj is_neg __format_meta__ _typed_storage_meta _has_compatible_shallow_copy_type".split()
)
# What a hidden parameter's own memory would answer wrongly: it repeats one element.
_LAYOUT_METHODS = frozenset("stride is_contiguous storage_offset".split())
# Same shape or dtype as the parameter, none of its values.
_LIKE = frozenset(
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty new_zeros new_ones new_full "
    "new_tensor".split()
)
_ALIASES = frozenset("detach view view_as reshape flatten __getitem__ select narrow t transpose unsqueeze squeeze".split())
_MOVES = frozenset("to cpu cuda xpu half bfloat16 float double type".split())
_RANDOM = frozenset("normal_ uniform_ bernoulli_ random_ exponential_ geometric_ cauchy_ log_normal_".split())
_FILLS = frozenset("fill_ zero_ copy_".split())
ELEMENTWISE = frozenset(
    "add_ sub_ subtract_ mul_ multiply_ div_ divide_ true_divide_ clamp_ clip_ clamp_min_ clamp_max_ erfinv_ erf_ neg_ abs_ "
    "sqrt_ rsqrt_ exp_ log_ pow_ round_ floor_ ceil_ sign_ reciprocal_ sigmoid_ tanh_ nan_to_num_ __imul__ __iadd__ "
    "__isub__ __itruediv__".split()
)


def _describe(tensor: torch.Tensor, home: Home) -> str:
    local, start = home.local()
    with torch._C.DisableTorchFunctionSubclass():
        shape, dtype = tuple(tensor.shape), tensor.dtype
    return (
        f"sharded parameter {home.name!r} of shape {shape}, {dtype}; this rank keeps elements "
        f"[{start}, {start + local.numel()})"
    )


def _refuse(home: Home, what: str) -> ShardedReadError:
    return ShardedReadError(
        f"{what} reads parameter {home.name!r}, which is sharded: its values are spread over the ranks. "
        "Read it inside `with onecopy.gathered(parameter):` (all ranks together), or use it in the model's forward"
    )


def property_name(func: Any) -> str | None:
    """Name of the property whose getter or setter ``func`` is, None when it is a function."""
    if getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__"):
        owner = getattr(func, "__self__", None)
        return str(getattr(owner, "__name__", owner))
    return None


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``__torch_function__`` does for a call that touches at least one managed tensor."""
    absent = [tensor for tensor in _tensors(args, kwargs) if (at := home_of(tensor)) is not None and not at.present]
    with torch._C.DisableTorchFunctionSubclass():
        if not absent:
            return func(*_resolved(args), **dict(zip(kwargs, _resolved(tuple(kwargs.values())), strict=True)))
        name, prop = getattr(func, "__name__", str(func)), property_name(func)
        subject = absent[0]
        home: Home = subject.__dict__[HOME]
        if prop is not None:
            return _access(func, prop, subject, home, args, kwargs)
        if name == "get_device":
            return func(home.local()[0])
        if name in _LIKE:
            kwargs.setdefault("device", home.local()[0].device)
        if name in _LAYOUT_METHODS and _CHAIN not in subject.__dict__:
            return func(torch.empty(home.shape, dtype=home.local()[0].dtype, device="meta"), *args[1:], **kwargs)
        if name in METADATA_METHODS or name in _LIKE:
            result = func(*args, **kwargs)
            if name == "register_post_accumulate_grad_hook":
                engine_last(subject)
            return result
        if name in ("__repr__", "__format__"):
            return f"<{_describe(subject, home)}>"
        first = args[0] if args else kwargs.get("tensor")
        if all(tensor is first for tensor in absent):
            rest = {key: value for key, value in kwargs.items() if key != "tensor"}
            graph = torch.is_grad_enabled() and subject.requires_grad
            if name == "detach" or (name in _ALIASES and not graph):
                return _alias(func, subject, home, args[1:], rest)
            if _writes(func, name, args[1:], rest, chained=bool(subject.__dict__.get(_CHAIN))):
                _write(func, name, subject, home, args[1:], rest)
                return subject
    if all(tensor.__dict__[HOME].demand() for tensor in absent):
        return func(*_resolved(args), **dict(zip(kwargs, _resolved(tuple(kwargs.values())), strict=True)))
    if name in _MOVES and first is subject and _CHAIN not in subject.__dict__:
        with torch._C.DisableTorchFunctionSubclass():
            return _moved(func, name, subject, home, args[1:], kwargs)
    raise _refuse(home, f"{name}()")


def _moved(func: Any, name: str, subject: torch.Tensor, home: Home, rest: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """``subject`` where ``func`` moves or casts it to what it is already; an error where it does not."""
    local = home.local()[0]
    probe = local.new_empty((0,) * len(home.shape))
    target = func(probe, *rest, **kwargs)
    if target.device == probe.device and target.dtype == probe.dtype:
        return subject
    raise ShardedReadError(
        f"{name}() would make sharded parameter {home.name!r} {target.dtype} on {target.device}, and it is {local.dtype} on "
        f"{local.device}: shards stay as they were made. Say the device in onecopy.deferred(device=) and "
        "onecopy.initialize(device=), and the dtype in the plan: onecopy.stage(..., dtype='bf16'). To read it, open "
        "onecopy.gathered(parameter)"
    )


def _resolved(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """``values`` with stand-ins replaced by the views they stand for, now that the parameters are there."""
    out: list[Any] = []
    for value in values:
        if isinstance(value, StandIn):
            out.append(_through(value.__dict__[_CHAIN], value.__dict__[HOME].values()))
        elif isinstance(value, list | tuple) and any(isinstance(item, StandIn) for item in value):
            out.append(type(value)(_resolved(tuple(value))))
        else:
            out.append(value)
    return tuple(out)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Tensors among the arguments, looked for one list or tuple deep as torch does."""
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(item for item in value if isinstance(item, torch.Tensor))
    return found


def _access(func: Any, prop: str, subject: torch.Tensor, home: Home, args: Any, kwargs: Any) -> Any:
    """Read or set property ``prop``."""
    if func.__name__ == "__get__":
        if prop == "grad":
            return home.grad(subject)
        if prop in _DEVICE_PROPERTIES:
            return func(home.local()[0])  # a stand-in is on the meta device itself
        if prop in METADATA_PROPERTIES:
            return func(*args, **kwargs)
        if prop in ("data", "T", "mT"):
            return _alias(func, subject, home, args[1:], kwargs)
        raise _refuse(home, f".{prop}")
    if prop == "data" and isinstance(args[-1], StandIn) and args[-1].__dict__[HOME] is home:
        return None  # ``p.data += 1`` has written through the stand-in already
    other = home_of(args[-1])
    if prop == "data" and other is home and _CHAIN not in args[-1].__dict__:
        return None  # itself: it was moved to where it is
    if other is not None and other is not home and not other.present:
        raise _refuse(other, f"setting .{prop} to it")
    whole = isinstance(args[-1], torch.Tensor) and args[-1].shape == home.shape
    if prop == "data" and whole and _CHAIN not in subject.__dict__:
        with home.writing():
            local, start = home.local()
            local.copy_(args[-1].detach().reshape(-1)[start : start + local.numel()])
            return home.written()
    if prop == "grad":
        return home.set_grad(subject, args[-1] if func.__name__ == "__set__" else None)
    if prop in ("requires_grad", "retains_grad", "_backward_hooks", "_post_accumulate_grad_hooks", "_grad"):
        return func(*args, **kwargs)
    raise EngineError(
        f"setting .{prop} of sharded parameter {home.name!r} would cut it off from its shards; "
        "use copy_() to write values, or onecopy.gathered(parameter, write_rank=0)"
    )


def _alias(func: Any, subject: torch.Tensor, home: Home, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """A stand-in for a view of ``subject`` that remembers how to take the same view of a whole tensor.

    It is a meta tensor underneath: code that reaches below ``__torch_function__`` meets no freed memory.
    """
    chain = subject.__dict__.get(_CHAIN, ())
    if func.__name__ != "detach" and property_name(func) != "data":
        chain = (*chain, lambda whole: func(whole, *rest, **kwargs))
    view = _through(chain, torch.empty(home.shape, dtype=home.local()[0].dtype, device="meta")).detach()
    view.__class__ = StandIn
    view.__dict__[HOME] = home
    view.__dict__[_CHAIN] = chain
    return view


def _writes(func: Any, name: str, rest: Any, kwargs: dict[str, Any], chained: bool) -> bool:
    """Is ``func`` an in-place write that can be carried out on this rank's elements alone?"""
    if name == "__setitem__" or name in _RANDOM or name in _FILLS or getattr(func, "__module__", "") == "torch.nn.init":
        return True
    numbers = all(value.dim() == 0 for value in (*rest, *kwargs.values()) if isinstance(value, torch.Tensor))
    return name in ELEMENTWISE and not chained and numbers


def _write(func: Any, name: str, subject: torch.Tensor, home: Home, rest: Any, kwargs: dict[str, Any]) -> None:
    """Carry out an in-place write on this rank's elements."""
    chain: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = subject.__dict__.get(_CHAIN, ())
    with torch.no_grad(), home.writing():
        local, start = home.local()
        if name == "__setitem__":
            key, value = rest
            _write_whole(lambda view: func(view, key, value), home, chain, lambda mask: func(mask, key, True))
        elif name == "copy_" and not chain and rest[0].shape == home.shape:
            local.copy_(rest[0].reshape(-1)[start : start + local.numel()])
        elif name in ELEMENTWISE:
            func(local, *rest, **kwargs)
        else:
            # A random fill draws for the whole tensor and keeps a part: the values are those of the unsharded
            # tensor, and every rank's generator advances as it would.
            mark = (lambda mask: mask.fill_(True)) if chain else None
            _write_whole(lambda view: func(view, *rest, **kwargs), home, chain, mark)
        home.written()


def _write_whole(
    write: Callable[[torch.Tensor], Any],
    home: Home,
    chain: tuple[Callable[[torch.Tensor], torch.Tensor], ...],
    mark: Callable[[torch.Tensor], Any] | None,
) -> None:
    """Run ``write`` on (the view by ``chain`` of) a whole scratch tensor and keep this rank's part of what it wrote.

    ``mark`` does to a mask what ``write`` does to the values; None when every element is written.
    """
    local, start = home.local()
    mine = slice(start, start + local.numel())
    scratch = torch.empty(home.shape, dtype=local.dtype, device=local.device)
    write(_through(chain, scratch))
    kept = scratch.view(-1)[mine]
    if mark is not None:
        mask = torch.zeros(home.shape, dtype=torch.bool, device=local.device)
        mark(_through(chain, mask))
        kept = torch.where(mask.view(-1)[mine], kept, local)
    local.copy_(kept)


def _through(chain: tuple[Callable[[torch.Tensor], torch.Tensor], ...], whole: torch.Tensor) -> torch.Tensor:
    for step in chain:
        whole = step(whole)
    return whole


def _torch_function(cls: type, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    return _dispatch(func, args, kwargs or {})


def _refuse_copy(self: torch.Tensor, *_: Any) -> Any:
    home: Home = self.__dict__[HOME]
    if home.present:
        return torch.Tensor.__deepcopy__(self, *_)  # type: ignore[no-untyped-call]
    raise _refuse(home, "copying or pickling")


def _refuse_pickle(self: torch.Tensor, protocol: Any) -> Any:
    home: Home = self.__dict__[HOME]
    if home.present:
        return torch.Tensor.__reduce_ex__(self, protocol)  # type: ignore[no-untyped-call]
    raise _refuse(home, "copying or pickling")


class StandIn(torch.Tensor):
    """A view of a sharded parameter taken without reading it."""

    __torch_function__: Any = classmethod(_torch_function)
    __deepcopy__ = _refuse_copy
    __reduce_ex__ = _refuse_pickle


_HIDDEN_CLASS: dict[type, type] = {}


def _hidden_class(base: type) -> type:
    """The class a parameter of class ``base`` has while it is freed."""
    if base not in _HIDDEN_CLASS:
        members = {
            "__torch_function__": classmethod(_torch_function),
            "__deepcopy__": _refuse_copy,
            "__reduce_ex__": _refuse_pickle,
            "__module__": __name__,
        }
        name = "ShardedParameter" if base is nn.Parameter else f"Sharded{base.__name__}"
        _HIDDEN_CLASS[base] = type(base)(name, (base,), members)
    return _HIDDEN_CLASS[base]


def _whole_trunc_normal(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``trunc_normal_`` reads back what it draws: for a freed parameter it runs on a whole scratch tensor."""

    def trunc_normal(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        home = home_of(tensor)
        if home is None or home.present:
            return plain(tensor, *args, **kwargs)
        chain = tensor.__dict__.get(_CHAIN, ())
        mark = (lambda mask: mask.fill_(True)) if chain else None
        with torch.no_grad(), home.writing():
            _write_whole(lambda view: plain(view, *args, **kwargs), home, chain, mark)
            home.written()
        return tensor

    return trunc_normal


# The other initialisers write with single in-place calls, which __torch_function__ sees; this one has no such seam.
if hasattr(torch.nn.init, "_no_grad_trunc_normal_"):
    torch.nn.init._no_grad_trunc_normal_ = _whole_trunc_normal(torch.nn.init._no_grad_trunc_normal_)


class Face:
    """The two states of one managed parameter: shown, a view of its buffer, and hidden. ``lasting`` gives the class that
    it has while shown, of its own.

    A hidden parameter's data is one element repeated, NaN (or the largest integer): code that reaches below
    ``__torch_function__`` reads nonsense that shows, never freed memory.
    """

    __slots__ = ("hidden_class", "hollow", "param", "shown_class", "view")

    def __init__(
        self, param: nn.Parameter, view: torch.Tensor, lasting: Callable[[type], type] = lambda plain: plain
    ) -> None:
        self.param = param
        self.view = view
        kind = type(param)
        while kind in _HIDDEN_CLASS.values() or getattr(kind, "_onecopy_shown", False):
            kind = kind.__mro__[1]
        self.shown_class, self.hidden_class = lasting(kind), _hidden_class(kind)
        self.hollow = hollow(param.shape, view.dtype, view.device)

    def show(self) -> None:
        """The values are there: ``param`` becomes an ordinary parameter over them."""
        self.param.__class__ = self.shown_class
        set_data(self.param, self.view)

    def hide(self) -> None:
        """The values are about to go: ``param`` answers for its metadata only."""
        set_data(self.param, self.hollow)
        self.param.__class__ = self.hidden_class


def is_hidden(param: torch.Tensor) -> bool:
    """Is ``param`` in the state in which it refuses to be read?"""
    return type(param) in _HIDDEN_CLASS.values()


def hollow(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of ``shape`` that takes the memory of one element."""
    if dtype.is_floating_point or dtype.is_complex:
        poison: float = float("nan")
    else:
        poison = 1 if dtype is torch.bool else torch.iinfo(dtype).max
    return torch.full((), poison, dtype=dtype, device=device).expand(shape)


_set_data = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def set_data(param: nn.Parameter, data: torch.Tensor) -> None:
    """``param.data = data`` whatever class ``param`` has, and from the meta device too; the object stays."""
    if param.device.type == "meta" and data.device.type != "meta":
        kept = dict(param.__dict__)
        torch.utils.swap_tensors(param, nn.Parameter(data, requires_grad=param.requires_grad))
        param.__dict__.update(kept)
        return
    with torch._C.DisableTorchFunctionSubclass():
        _set_data(param, data)
