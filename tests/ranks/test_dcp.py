"""Checkpoints of ``torch.distributed.checkpoint`` and FSDP go on here, and ours go on there."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import onecopy
from onecopy.checkpoint.convert import convert
from onecopy.checkpoint.dcp import Piece
from onecopy.checkpoint.dcp_write import to_dcp
from onecopy.checkpoint.sources import open_source
from onecopy.errors import CheckpointError
from tests.data.deepspeed_runs import ROWS, Tiny, batch, groups
from tests.ranks.checkpoints import SMALL, refusal
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.ranks

STEPS, CLOSE = 6, 2e-6  # another order of sums


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), lr=0.01, betas=(0.9, 0.95))


def train(model: Any, step: Any, rank: int, world: int, numbers: range) -> list[float]:
    each, losses = ROWS // world, []
    for number in numbers:
        loss = model(batch(number)[rank * each : (rank + 1) * each])
        loss.backward()
        step()
        total = loss.detach().double()
        if world > 1:
            dist.all_reduce(total)
        losses.append(total.item() / world)
    return losses


def fsdp(rank: int, world: int, top: str, resume: bool) -> list[float]:
    """Six steps of FSDP2 with a checkpoint after three, or the last three of them from what was saved here."""
    torch.manual_seed(0 if not resume else 7)
    model = Tiny()
    fully_shard(model)
    made = optimizer(model)

    def step() -> None:
        made.step()
        made.zero_grad()

    if resume:
        weights, states = get_state_dict(model, made)
        state = {"model": weights, "optim": states}
        checkpoint.load(state, checkpoint_id=f"{top}/written")
        set_state_dict(model, made, model_state_dict=state["model"], optim_state_dict=state["optim"])
        return train(model, step, rank, world, range(3, STEPS))
    first = train(model, step, rank, world, range(3))
    weights, states = get_state_dict(model, made)
    saved = {"model": weights, "optim": states, "loop": {"epoch": 2, "strange": torch.ones(3)}}
    checkpoint.save(saved, checkpoint_id=f"{top}/fsdp")
    weights, states = get_state_dict(model, made, options=StateDictOptions(flatten_optimizer_state_dict=True))
    checkpoint.save({"app": {"model": weights, "optim": states}}, checkpoint_id=f"{top}/flat")
    checkpoint.save({**weights, "optimizer": states, "train": {"step": torch.tensor(3)}}, checkpoint_id=f"{top}/titan")
    if rank == 0:
        unclear = {"a": {"x": torch.ones(2)}, "b": {"y": torch.ones(2)}}
        checkpoint.save(unclear, checkpoint_id=f"{top}/unclear", no_dist=True)
    return first + train(model, step, rank, world, range(3, STEPS))


def ours(rank: int, world: int, top: str, folder: str, number: int) -> list[float]:
    """The last three steps here, from a checkpoint; saved as one of ours first."""
    torch.manual_seed(7)
    model = Tiny()
    engine = onecopy.initialize(model, onecopy.stage(number, units=SMALL), optimizer=optimizer(model))
    loaded = engine.load(f"{top}/{folder}")
    assert engine.global_steps == 3 and model.counted.tolist() == [7, 1 << 40]
    if folder == "fsdp":
        assert loaded == {"loop": {"epoch": 2}}
        engine.save(f"{top}/saved{world}")
        assert "which may all be the model's" in refusal(lambda: engine.load(f"{top}/unclear"))
    return train(engine, engine.step, rank, world, range(3, STEPS))


def test_fsdp_goes_on_here_and_back(tmp_path: Path) -> None:
    top = str(tmp_path)
    expected = run_ranks(fsdp, 2, top, False)[0]

    def close(losses: list[float]) -> bool:
        return max(abs(a - b) for a, b in zip(losses, expected[3:], strict=True)) < CLOSE

    for world, number, folder in ((1, 0, "fsdp"), (2, 3, "fsdp"), (4, 2, "fsdp"), (2, 1, "flat"), (2, 2, "titan")):
        assert close(run_ranks(ours, world, top, folder, number)[0]), (world, folder)
    nested = open_source(tmp_path / "fsdp").manifest.optimizer
    for folder in ("flat", "titan"):
        flat = open_source(tmp_path / folder).manifest.optimizer
        assert flat is not None and nested is not None
        assert [(set(group.params), group.options["weight_decay"]) for group in flat.groups] == [
            (set(group.params), group.options["weight_decay"]) for group in nested.groups
        ]
    notes = open_source(tmp_path / "fsdp").manifest.plan["notes"]
    assert any("does not say which tensors are buffers" in note for note in notes), notes
    assert "left out: tensor 'loop.strange'" in notes
    to_dcp(open_source(tmp_path / "saved2"), tmp_path / "written")
    assert close(run_ranks(fsdp, 2, top, True)[0])
    with pytest.raises(CheckpointError, match="is not empty"):
        to_dcp(open_source(tmp_path / "saved2"), tmp_path / "written")
    with pytest.raises(CheckpointError, match="is a checkpoint of ours already"):
        convert(open_source(tmp_path / "saved2"), tmp_path / "again", None)


class Strange:
    """Not a record of an index."""


def test_an_index_that_builds_anything_else_is_refused(tmp_path: Path) -> None:
    for thing, said in ((Strange(), "tests.ranks.test_dcp.Strange, which are not built here"), ([], "it is a list")):
        (tmp_path / ".metadata").write_bytes(pickle.dumps(thing))
        with pytest.raises(CheckpointError, match=said):
            open_source(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"\x80")
    with pytest.raises(CheckpointError, match="is not an index that is read here"):
        open_source(tmp_path)


@pytest.mark.parametrize("shape", [(4, 6), (3, 4, 5), (7,)])
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_boxes_are_stretches_of_the_flattened_tensor(shape: tuple[int, ...], cut: int) -> None:
    """Two boxes that halve any dimension put every element in its place."""
    if cut >= len(shape):
        cut = 0
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    seen = torch.full((whole.numel(),), -1)
    low, at = shape[cut] // 2, [0] * len(shape)
    for first, size in ((0, low), (low, shape[cut] - low)):
        at[cut] = first
        sizes = [size if dim == cut else shape[dim] for dim in range(len(shape))]
        box = whole.narrow(cut, first, size).contiguous().reshape(-1)
        runs = list(Piece(tuple(at), tuple(sizes), "", 0, 0).runs(shape))
        for begin, inside, count in runs:
            assert (seen[begin : begin + count] == -1).all()
            seen[begin : begin + count] = box[inside : inside + count]
        assert cut or len(runs) == 1
    assert torch.equal(seen, whole.reshape(-1))
