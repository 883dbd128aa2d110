"""Names of a model's parts, whatever the model is wrapped in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from onecopy.checkpoint.modules import extra_modules, persistent_buffers
from onecopy.engine.unit import find_units, named_parameters
from onecopy.plan.plan import Units

pytestmark = pytest.mark.pure


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.register_buffer("b", torch.ones(2))

    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        pass


class Model(nn.Module):
    """Its own ``module`` is no wrapper's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.module = Leaf()
        self.blocks = nn.ModuleList(Leaf() for _ in range(2))
        self.tied = self.blocks[0]


def inside() -> nn.Module:
    model = Model()
    model.blocks[1] = checkpoint_wrapper(torch.compile(model.blocks[1], backend="eager"))
    return model


WRAPPED: dict[str, Callable[[], Any]] = {
    "compiled": lambda: torch.compile(Model(), backend="eager"),
    "DataParallel": lambda: nn.DataParallel(Model()),
    "parts": inside,
    "all": lambda: torch.compile(nn.DataParallel(torch.compile(inside(), backend="eager")), backend="eager"),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_wrapper_leaves_no_trace(kind: str) -> None:
    bare, wrapped = Model(), WRAPPED[kind]()
    assert list(named_parameters(wrapped).values()) == list(named_parameters(bare).values())
    assert ["blocks.0.w", "tied.w"] in named_parameters(wrapped).values()
    assert list(persistent_buffers(wrapped)) == list(persistent_buffers(bare))
    assert list(extra_modules(wrapped)) == list(extra_modules(bare)) == [
        "module._extra_state", "blocks.0._extra_state", "blocks.1._extra_state"
    ]  # fmt: skip
    for policy in (Units(min_numel=0), Units(blocks=("Leaf",), min_numel=0), Units()):
        units = [[(unit.name, unit.numel(), unit.spans) for unit in find_units(m, policy)] for m in (wrapped, bare)]
        assert units[0] == units[1]


def test_the_names_are_those_of_the_state_dict() -> None:
    model = Model()
    names = [name for listed in named_parameters(model).values() for name in listed]
    assert sorted([*names, *persistent_buffers(model)]) == sorted(k for k in model.state_dict() if "_extra" not in k)


def test_a_wrapper_with_something_of_its_own_keeps_its_name() -> None:
    class More(nn.DataParallel):  # type: ignore[type-arg]
        def __init__(self, module: nn.Module) -> None:
            super().__init__(module)
            self.w = nn.Parameter(torch.ones(1))

    assert list(named_parameters(More(Leaf())).values()) == [["w"], ["module.w"]]
