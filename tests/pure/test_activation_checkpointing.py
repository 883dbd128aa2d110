"""``onecopy.deepspeed.checkpointing``: torch's checkpoint, what is kept of it, and where."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from onecopy.deepspeed import checkpointing

pytestmark = pytest.mark.pure


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_configured", "_in_cpu"):
        monkeypatch.setattr(checkpointing, name, False)


def block(x: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.dropout((x.sin() * y).exp(), 0.5)


def gradients(call: Any) -> tuple[Tensor, list[int]]:
    """Of ``call`` on two tensors, and the addresses of what is saved outside it."""
    torch.manual_seed(0)
    x, y = torch.randn(64, requires_grad=True), torch.randn(64)
    saved: list[int] = []
    with saved_tensors_hooks(lambda t: (saved.append(t.data_ptr()), t)[1], lambda t: t):
        out = call(block, x, y)
    out.sum().backward()
    assert x.grad is not None
    return x.grad, [saved.index(t.data_ptr()) for t in (x, y)] if len(saved) == 2 else [-1]


@pytest.mark.parametrize("in_cpu", [False, True])
def test_the_inputs_are_what_hooks_around_it_get_and_gradients_are_the_same(in_cpu: bool) -> None:
    plain, kept = gradients(lambda function, *args: function(*args))
    assert kept != [0, 1]
    checkpointing.configure(checkpoint_in_cpu=in_cpu)
    again, kept = gradients(checkpointing.checkpoint)
    assert torch.equal(plain, again)
    assert kept == [0, 1], "inputs, and nothing of the inside"


def test_a_configuration_says_where_what_is_kept_rests(caplog: pytest.LogCaptureFixture) -> None:
    checkpointing.follow({"activation_checkpointing": {"cpu_checkpointing": True}})
    assert checkpointing._in_cpu and not checkpointing.is_configured()
    checkpointing.follow({"zero_optimization": {"stage": 1}})
    assert checkpointing._in_cpu
    with caplog.at_level(logging.WARNING, logger="onecopy"):
        checkpointing.configure(None, {"activation_checkpointing": {"cpu_checkpointing": False}}, partition_activations=True)
    assert checkpointing.is_configured() and not checkpointing._in_cpu
    assert "partition_activations (they are divided over tensor-parallel ranks" in caplog.text
