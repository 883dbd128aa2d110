"""Any elementwise torch optimizer, rebuilt over flat shards, stepped one unit or one tile at a time.

The user's optimizer object stays the one that steps, so LR schedulers attached to it keep working; only the tensors in its
groups are exchanged, each parameter for the parts of it that this rank steps. A tile is stepped by showing the optimizer
just that tile's tensors, which is right for every optimizer whose update of an element depends on nothing but that
element's own history; :func:`~onecopy.optim.elementwise.probe` finds out by trying.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from onecopy.engine.home import ParameterHome
from onecopy.engine.weights import Weights
from onecopy.errors import EngineError, PlanError
from onecopy.optim.elementwise import showing, sibling
from onecopy.plan.layout import Slot, Tier
from onecopy.tiers.held import Held, Tile

__all__ = ["Borrowed", "Moments", "Piece", "Tiles"]


def _incomplete(*_: Any) -> None:
    """A hook: the optimizer's own dict would lack the states that rest elsewhere."""
    raise EngineError(
        "states of this optimizer rest on disk or in a codec, and its state_dict() would lack them; use engine.save() and "
        "engine.load(), or onecopy.full_state(parameter, name)"
    )


@dataclass(frozen=True, eq=False)
class Piece:
    """The part of one parameter that lies in one tile of what this rank steps: elements ``[start, stop)`` of the tile,
    from element ``offset`` of the flattened parameter on. ``param`` is a view of them, where they are not away for good."""

    home: ParameterHome
    group: int
    param: nn.Parameter
    tile: int
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def elementwise(self, value: Any) -> bool:
        """Is ``value`` a state with one element per weight?"""
        return isinstance(value, torch.Tensor) and value.shape == (self.numel,)


@dataclass(frozen=True)
class Borrowed:
    """One tile at work: its pieces, its values and its moments, which are there once they are waited for."""

    pieces: list[Piece]
    values: Tile
    moments: dict[str, Tile]


class Moments:
    """Per-element optimizer states of one buffer that rest where, or as, the optimizer cannot compute with them.

    ``kept``: by piece, the states that are there; a tile that no piece was stepped in has undefined contents.
    """

    def __init__(self, held: dict[str, Held]) -> None:
        self.held = held
        self.kept: dict[Piece, tuple[str, ...]] = {}
        self._stored: set[int] = set()

    def lend(self, tile: int) -> dict[str, Tile]:
        """Every state of ``tile``."""
        fresh = tile not in self._stored
        lent = {key: held.lend(tile, fresh, zero=fresh) for key, held in self.held.items()}
        self._stored.add(tile)
        return lent

    def lend_kept(self, piece: Piece) -> dict[str, Tile]:
        """The states that ``piece`` has."""
        return {key: self.held[key].lend(piece.tile) for key in self.kept.get(piece, ())}

    def keep(self, piece: Piece, state: dict[str, Any], lent: dict[str, Tile]) -> None:
        """Take the states that are held here out of the optimizer's ``state`` of ``piece`` and into what was lent."""
        keys = [key for key in self.held if isinstance(state.get(key), torch.Tensor)]
        for key in keys:
            values, place = state.pop(key), lent[key].wait()[piece.start : piece.stop]
            if values.data_ptr() != place.data_ptr():
                place.copy_(values)
        self.kept[piece] = tuple(keys)

    def store(self, states: dict[Piece, dict[str, Any]]) -> dict[Piece, dict[str, Any]]:
        """Keep what is held here of the states of pieces of one tile; returns the others. All at once: a codec gives a
        block one scale, and would round what is there already again for every new neighbour."""
        rest = {piece: dict(state) for piece, state in states.items()}
        lent = self.lend(next(iter(states)).tile)
        for piece, state in rest.items():
            self.keep(piece, state, lent)
        for tile in lent.values():
            tile.wait()
            tile.put()
        return rest


class Tiles:
    """``optimizer`` over the pieces of ``weights``; ``moments`` holds the states of those whose states rest away."""

    def __init__(self, optimizer: Optimizer, weights: Iterable[Weights], moments: dict[Weights, Moments]) -> None:
        self.optimizer = optimizer
        self._groups = len(optimizer.param_groups)
        self.pieces: dict[Weights, list[list[Piece]]] = {
            held: [[] for _ in range(held.state.grid.count)] for held in weights
        }
        self.away = moments
        homes = {
            param: home
            for held in self.pieces
            for param in held.params
            if isinstance(home := param.__dict__.get("_onecopy_home"), ParameterHome)
        }
        self.of_param: dict[str, list[Piece]] = {}
        begins: dict[tuple[Weights, int], dict[Piece, dict[str, Any]]] = {}
        for index, group in enumerate(optimizer.param_groups):
            mine = []
            for param in group["params"]:
                state = optimizer.state.pop(param, {})
                if param in homes and param.requires_grad:
                    cut = list(_cut(homes[param], index))
                    self.of_param.setdefault(homes[param].name, []).extend(cut)
                    for piece in cut:
                        self.pieces[homes[param].weights][piece.tile].append(piece)
                        if begun := _cut_state(state, piece, optimizer, group):
                            begins.setdefault((homes[param].weights, piece.tile), {})[piece] = begun
                        mine.append(piece.param)
            group["params"] = mine
        for states in begins.values():
            self.store(states)
        self._stepping = False
        self._kernel = _without_hooks(type(optimizer))
        # So that a GradScaler, which finds no gradients here, comes as far as this hook.
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        optimizer.register_step_pre_hook(_only_by_the_engine(weakref.ref(self)))
        if moments:
            optimizer.register_state_dict_pre_hook(_incomplete)
            optimizer.register_load_state_dict_pre_hook(_incomplete)

    # One tile

    def borrow(self, weights: Weights, tile: int) -> Borrowed:
        """Start to bring what a step of ``tile`` needs."""
        away = self.away.get(weights)
        return Borrowed(self.pieces[weights][tile], weights.state.lend(tile), away.lend(tile) if away is not None else {})

    def check_groups(self) -> None:
        """Raise :class:`EngineError` when groups were added or removed."""
        if len(self.optimizer.param_groups) != self._groups:
            raise EngineError(
                f"the optimizer has {len(self.optimizer.param_groups)} groups and had {self._groups} when the engine was "
                "made; close the engine and initialize again with the new groups"
            )

    def as_set_now(self) -> Optimizer:
        """Another optimizer over the same states, whose options stay as they are now when those of the user's change."""
        twin: Optimizer = object.__new__(type(self.optimizer))
        twin.__dict__.update(self.optimizer.__dict__)
        # Copies: a rate that is a tensor is changed in place.
        twin.param_groups = [{**options, "params": []} for options in self.options_now()]
        self.optimizer._opt_called = True  # type: ignore[attr-defined] # LRScheduler looks whether there was a step
        return twin

    def options_now(self) -> list[dict[str, Any]]:
        """A copy of the options of every group."""
        groups = self.optimizer.param_groups
        return [{key: deepcopy(value) for key, value in group.items() if key != "params"} for group in groups]

    @property
    def hooked(self) -> bool:
        """Are there step hooks, of the user's, that come before a step?"""
        return len(self.optimizer._optimizer_step_pre_hooks) > 1 or bool(_global_optimizer_pre_hooks)

    def decoded(self, weights: Weights) -> int:
        """How many states of ``weights`` rest in a codec, so that a tile of each is decoded for its step."""
        away = self.away.get(weights)
        return sum(held.codec is not None for held in away.held.values()) if away is not None else 0

    def step(
        self, tiles: list[tuple[Borrowed, torch.Tensor, dict[Slot, bool]]], optimizer: Optimizer | None = None
    ) -> None:
        """Step ``tiles``, each with its gradient in the weights' dtype and the slots that any rank used; a parameter
        nobody used is left alone, as torch leaves one whose grad is None. What was borrowed is still to be given back.
        ``optimizer``: one that was made by :meth:`as_set_now`, in place of the user's."""
        optimizer = optimizer if optimizer is not None else self.optimizer
        shown: list[list[nn.Parameter]] = [[] for _ in self.optimizer.param_groups]
        for borrowed, gradient, used in tiles:
            self._attach(borrowed)
            for piece in borrowed.pieces:
                if used[piece.home.slot]:
                    piece.param.grad = gradient[piece.start : piece.stop]
                    shown[piece.group].append(piece.param)
        # Those stepped before and those not, apart: torch's fused SGD takes tensors all of one kind.
        known = [[param for param in params if self._has_state(param)] for params in shown]
        new = [[param for param in params if not self._has_state(param)] for params in shown]
        for kind in (known, new):
            if any(kind):
                with showing(optimizer, kind):
                    self._kernel(optimizer)
        for params in shown:
            for param in params:
                param.grad = None

    def whole_step(self, steps: Callable[[], None]) -> None:
        """``steps``, whose calls of :meth:`step` make one step of the optimizer: its hooks run once, before and after, and
        a learning-rate scheduler sees one step."""

        def step(_: Optimizer) -> None:
            steps()

        self._stepping = True
        try:
            Optimizer.profile_hook_step(step)(self.optimizer)
        finally:
            self._stepping = False
        self.optimizer._opt_called = True  # type: ignore[attr-defined] # LRScheduler looks whether there was a step

    def _has_state(self, param: nn.Parameter) -> bool:
        return any(value is not None for value in self.optimizer.state.get(param, {}).values())

    def _attach(self, borrowed: Borrowed) -> None:
        """Lay the borrowed values under the tensors that the optimizer knows."""
        values = borrowed.values.wait()
        for piece in borrowed.pieces:
            if piece.home.weights.state.plain is None:
                piece.param.data = values[piece.start : piece.stop]
            for key in self.away[piece.home.weights].kept.get(piece, ()) if borrowed.moments else ():
                self.optimizer.state[piece.param][key] = borrowed.moments[key].wait()[piece.start : piece.stop]

    def give_back(self, borrowed: Borrowed) -> None:
        """The borrowed values and states go back to where they rest."""
        for piece in borrowed.pieces:
            state = self.optimizer.state.get(piece.param)
            if borrowed.moments and state:
                self.away[piece.home.weights].keep(piece, state, borrowed.moments)
            if piece.home.weights.state.plain is None:
                piece.param.data = piece.param.data.new_empty(0)
        borrowed.values.put()
        for lent in borrowed.moments.values():
            lent.wait()
            lent.put()

    # States

    @contextmanager
    def states(self, piece: Piece, write: bool = False) -> Iterator[dict[str, Any]]:
        """The optimizer's states of ``piece``; ``write``: changes of those with a number per element are kept."""
        state = dict(self.optimizer.state.get(piece.param, {}))
        away = self.away.get(piece.home.weights)
        lent = away.lend_kept(piece) if away is not None else {}
        try:
            yield {**state, **{key: tile.wait()[piece.start : piece.stop] for key, tile in lent.items()}}
        finally:
            for tile in lent.values():
                tile.put() if write else tile.drop()

    def held_away(self, piece: Piece) -> dict[str, Held]:
        """The states that ``piece`` has where the optimizer cannot compute with them."""
        away = self.away.get(piece.home.weights)
        return {key: away.held[key] for key in away.kept.get(piece, ())} if away is not None else {}

    def keeps_away(self, piece: Piece) -> bool:
        """Do the states of ``piece`` rest where the optimizer cannot compute with them?"""
        return piece.home.weights in self.away

    def store(self, states: dict[Piece, dict[str, Any]]) -> None:
        """Make ``states`` those of pieces of one tile, in place of what they had; an empty one: it was never stepped."""
        for piece in states:
            self.optimizer.state.pop(piece.param, None)
        away = self.away.get(next(iter(states)).home.weights) if states else None
        for piece, state in (away.store(states) if away is not None else states).items():
            if state:
                self.optimizer.state[piece.param] = state

    @property
    def stepping(self) -> bool:
        """Is the engine stepping the optimizer just now?"""
        return self._stepping

    def options(self) -> list[dict[str, Any]]:
        """The numbers and flags of every group, as they are now."""
        return [
            {key: value for key, value in group.items() if isinstance(value, int | float | str | tuple)}
            for group in self.optimizer.param_groups
        ]

    def moments(self) -> dict[Tier, int]:
        """Bytes by tier of the states that have one element per weight and are the optimizer's own."""
        totals: dict[Tier, int] = {}
        for weights, tiles in self.pieces.items():
            if weights in self.away:
                continue
            tier = weights.spec.row.moment.tier
            for piece in (piece for tile in tiles for piece in tile):
                for value in self.optimizer.state.get(piece.param, {}).values():
                    if piece.elementwise(value):
                        totals[tier] = totals.get(tier, 0) + value.numel() * value.element_size()
        return totals


def _without_hooks(kind: type[Optimizer]) -> Callable[[Optimizer], Any]:
    """``kind.step`` as its class has it: torch wraps hooks and a profiler's mark round it."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[no-any-return]


def _only_by_the_engine(tiles: weakref.ref[Tiles]) -> Callable[..., None]:
    """A step hook: the optimizer's own ``step()`` would find no gradients and train nothing in silence."""

    def refuse(*_: Any) -> None:
        owner = tiles()
        if owner is not None and not owner.stepping:
            raise EngineError(
                "optimizer.step() was called by hand or by a GradScaler; call engine.step(), which does it at the boundary. "
                "In float16 the engine scales the loss itself: onecopy.stage(..., dtype='fp16') in the place of a GradScaler"
            )

    return refuse


def _cut(home: ParameterHome, group: int) -> Iterator[Piece]:
    """The pieces of one parameter."""
    low, high = home.weights.stepped()
    part, state = home.slot.local(low, high), home.weights.state
    if part is None:
        return
    for tile in state.grid.meets(part[0] - low, part[1] - low):
        first, last = state.grid.bounds(tile)
        start, stop = max(part[0] - low, first), min(part[1] - low, last)
        away = torch.empty(0, dtype=state.dtype, device=state.device)
        values = state.plain[start:stop] if state.plain is not None else away
        yield Piece(home, group, nn.Parameter(values), tile, start - first, stop - first, start + low - home.slot.start)


def _cut_state(state: dict[str, Any], piece: Piece, optimizer: Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """State that an optimizer made for a whole parameter, cut to the piece that this rank steps. What it made for a
    parameter on the meta device has no values: that is made anew for the piece."""
    if any(isinstance(value, torch.Tensor) and value.device.type == "meta" for value in state.values()):
        values = nn.Parameter(torch.zeros(piece.numel, dtype=piece.param.dtype, device=piece.param.device))
        fresh = sibling(optimizer, group, [values])
        if fresh is None:
            raise PlanError(
                f"{type(optimizer).__name__} made states on the meta device and cannot be made afresh from its options; "
                "build the model inside onecopy.deferred() instead"
            )
        return dict(fresh.state[values])
    return {key: _cut_value(key, value, piece) for key, value in state.items()}


def _cut_value(key: str, value: Any, piece: Piece) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    # Of a parameter without dimensions, torch's step counter has the shape too.
    if value.shape == piece.home.shape and key != "step":
        part = value.reshape(-1)[piece.offset : piece.offset + piece.numel]
        return part.to(piece.param.device, copy=True)
    return value.clone()
