"""Checkpoints of odd things, in odd places, at odd times: right, or one clear error."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import onecopy
from onecopy.checkpoint import store, summed, writer
from onecopy.checkpoint.format import Span
from onecopy.checkpoint.reader import Reader
from onecopy.errors import CheckpointError

pytestmark = pytest.mark.pure

BUFFERS = {
    "flags": torch.tensor([True, False]),
    "i8": torch.arange(5, dtype=torch.int8),
    "u16": torch.arange(3).to(torch.uint16),
    "f64": torch.ones(3, dtype=torch.float64),
    "f8": torch.ones(7).to(torch.float8_e4m3fn),
    "f8 wide": torch.ones(7).to(torch.float8_e5m2),
    "none": torch.zeros(0, 2),
    "number": torch.tensor(3),
    "holes": torch.arange(10.0)[::3],
    "complex": torch.ones(3, dtype=torch.complex64) * 1j,
    "turned": (torch.ones(3, dtype=torch.complex64) * 1j).conj(),
}


class Odd(nn.Module):
    """Names with slashes, blanks and accents, a tie, a parameter of no elements and one of no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a/b": nn.Linear(3, 3), "é x": nn.Linear(3, 3)})
        self.scale, self.nothing = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(0, 4))
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.parts["a/b"].weight  # type: ignore[assignment]
        for name, value in BUFFERS.items():
            self.register_buffer(name.replace(" ", "_"), value.clone())

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts.values():
            x = part(x)
        return (self.tied(x) * self.scale).sum()


def start(seed: int = 0, number: int = 2) -> onecopy.Engine:
    torch.manual_seed(seed)
    return onecopy.initialize(Odd(), onecopy.stage(number), optimizer=lambda params: torch.optim.AdamW(params, lr=0.1))


def step(engine: Any) -> None:
    engine(torch.ones(2, 3)).backward()
    engine.step()


def bits(state: dict[str, Tensor]) -> dict[str, Any]:
    """Dtype, shape and bytes of each."""
    flat = {key: value.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for key, value in state.items()}
    return {key: (value.dtype, value.shape, flat[key].tolist()) for key, value in state.items()}


def same(one: onecopy.Engine, other: onecopy.Engine) -> bool:
    return bits(one.full_state_dict()) == bits(other.full_state_dict())


def test_odd_names_and_dtypes_come_back_and_go_out(tmp_path: Path) -> None:
    one, other = start(), start(1, 3)
    step(one)
    for buffer in other.module.buffers():
        buffer.copy_(torch.zeros_like(buffer, dtype=torch.float32).to(buffer.dtype))
    one.save(tmp_path, "now")
    one.save(tmp_path, "behind", asynchronous=True)
    other.load(tmp_path, "now")
    assert same(one, other)
    one.close()
    now, behind = (tmp_path / tag / "rank-00000.safetensors" for tag in ("now", "behind"))
    assert now.read_bytes() == behind.read_bytes()
    other.export(tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    state = other.full_state_dict()
    assert bits(exported) == bits({key: state[key] for key in exported})
    assert {"parts.a/b.weight", "parts.é x.weight", "nothing", "scale", "turned"} <= exported.keys()


def test_a_relative_path_is_that_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one = start()
    assert one.save("ein ordner/ü", "tag", asynchronous=True) == "ein ordner/ü/tag"
    os.chdir("/")
    one.close()
    assert store.complete_tags(tmp_path / "ein ordner" / "ü") == ["tag"]
    os.chdir(tmp_path)
    start(1).load("ein ordner/ü")


def test_in_any_mode_of_autograd(tmp_path: Path) -> None:
    """What a save or load makes in inference mode can be trained on and saved again outside it."""
    one, other, third = start(), start(1), start(2)
    step(one)
    with torch.inference_mode():
        one.save(tmp_path, "a", asynchronous=True)
        one._saves.settle()
        other.load(tmp_path)
    with torch.no_grad():
        one.save(tmp_path, "b", asynchronous=True)
        third.load(tmp_path, "a")
    for engine in (one, other, third):
        step(engine)
    one.save(tmp_path, "c", asynchronous=True)
    one.close()
    assert same(one, other) and same(one, third)


def test_two_saves_at_once_never_make_one_of_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under one tag the one that began first is given up, and says so; what is there is the other, whole."""
    one, other, go, finish = start(), start(1), threading.Event(), writer.Writer.finish
    monkeypatch.setattr(writer.Writer, "finish", lambda self: (go.wait(60), finish(self))[1])
    one.save(tmp_path, "tag", asynchronous=True)
    monkeypatch.undo()
    other.save(tmp_path, "tag")
    go.set()
    with pytest.raises(CheckpointError, match="another save under the tag 'tag' has begun"):
        one.close()
    third = start(2)
    third.load(tmp_path)
    assert same(third, other) and sorted(os.listdir(tmp_path)) == ["latest", "tag"]


def test_a_tag_that_is_a_link_is_replaced_and_what_it_names_is_not(tmp_path: Path) -> None:
    one = start()
    one.save(tmp_path, "real")
    (tmp_path / "link").symlink_to("real")
    step(one)
    one.save(tmp_path, "link")
    assert not (tmp_path / "link").is_symlink() and sorted(os.listdir(tmp_path)) == ["latest", "link", "real"]
    other = start(1)
    other.load(tmp_path, "real")
    assert other.global_steps == 0
    other.load(tmp_path)
    assert same(one, other)


@pytest.mark.parametrize("direct", [True, False])
def test_many_blocks_in_any_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    """Tensors over many blocks, read as announced, in another order, and without a word; through the page cache or not."""
    if not direct:
        monkeypatch.setattr(summed.os, "O_DIRECT", 0)
    wide, half = torch.randn(3_000_001), torch.randn(1_500_001).bfloat16()
    record = writer.write_tensors(tmp_path / "f", [("half", half), ("wide", wide)])
    assert torch.equal(load_file(tmp_path / "f")["wide"], wide)
    whole = {"wide": wide, "half": half}
    spans = {key: Span(file="f", key=key, start=0, stop=value.numel()) for key, value in whole.items()}
    cuts = [(key, at, min(at + 400_003, len(value))) for key, value in whole.items() for at in range(0, len(value), 400_003)]
    orders = {"as announced": cuts, "backwards": cuts[::-1], "with gaps": cuts[::3], "not announced": cuts[1::2]}
    for how, order in orders.items():
        reader = Reader(tmp_path, {"f": record}, direct=direct)
        if how != "not announced":
            reader.expect((spans[key], start, stop) for key, start, stop in cuts)
        for key, start, stop in order:
            out = torch.empty(stop - start, dtype=whole[key].dtype)
            reader.read(spans[key], start, stop, out)
            assert torch.equal(out, whole[key][start:stop]), (how, key, start)
        reader.verify("f")
        reader.close()
