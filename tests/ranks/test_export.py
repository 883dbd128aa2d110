"""Plain weights out of engines and checkpoints: every name, every bit, one copy on disk, and nothing half-written."""

from __future__ import annotations

import json
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import onecopy
import onecopy.deepspeed
from onecopy.checkpoint.export import Options, export_checkpoint
from onecopy.checkpoint.sources import open_source
from onecopy.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from onecopy.errors import CheckpointError
from tests.data.deepspeed_runs import Tiny, batch, groups
from tests.ranks.checkpoints import adamw, refusal
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.ranks

KEPT = {"emb.weight", "up.weight", "up.bias", "down.weight", "down.bias", "frozen.weight", "frozen.bias", "norm.weight",
        "norm.bias", "counted", "scale"}  # fmt: skip


def start(plan: Any, wrap: bool = False) -> Any:
    torch.manual_seed(0)
    model = Tiny()
    if wrap:
        model.up = checkpoint_wrapper(model.up)
    return onecopy.initialize(model, plan, optimizer=lambda _: torch.optim.AdamW(groups(model), lr=0.01))


def train(engine: Any, rank: int, world: int) -> None:
    for step in range(2):
        engine(batch(step)[rank::world]).backward()
        engine.step()


def export_everything(rank: int, world: int, top: str) -> dict[str, Tensor] | None:
    """All exports of one bf16 stage-3 engine, one after the other; the values they should have."""
    engine = start(onecopy.stage(3, dtype="bf16", units=onecopy.Units(min_numel=0)), wrap=True)
    train(engine, rank, world)
    done = engine.export(f"{top}/plain")
    assert done.tensors == len(KEPT) and "model.safetensors" in done.files and not done.notes
    engine.export(f"{top}/sharded", max_shard_size=120)
    engine.export(f"{top}/fp32", dtype="fp32")
    assert "has weights already (model.safetensors)" in refusal(lambda: engine.export(f"{top}/plain"))
    assert "dtype 'int8'" in refusal(lambda: engine.export(f"{top}/x", dtype="int8"))
    assert "ranks disagree about what to export" in refusal(lambda: engine.export(f"{top}/of-{rank}"))
    with open(f"{top}/file", "w") as file:
        file.write("in the way")
    assert "in the way" not in refusal(lambda: engine.export(f"{top}/file"))
    before = sorted(os.listdir(top))
    engine.save(f"{top}/saved")
    masters = {name: onecopy.full_param(p).cpu() for name, p in engine.module.named_parameters()}
    masters = {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in masters.items()}
    assert sorted(os.listdir(top)) == sorted([*before, "saved"])
    full = engine.full_state_dict()
    return {**full, **{f"fp32 {name}": value for name, value in masters.items()}} if rank == 0 else None


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    top = tmp_path_factory.mktemp("export")
    return top, run_ranks(export_everything, 2, str(top))[0]


def same(files: list[Path], expected: dict[str, Tensor], names: set[str] = KEPT) -> None:
    found = {key: tensor for file in files for key, tensor in load_file(file).items()}
    assert found.keys() == names
    wrong = [n for n in names if not torch.equal(found[n], expected[n]) or found[n].dtype != expected[n].dtype]
    assert not wrong


def test_an_engine_is_exported_to_the_bit(exported: tuple[Path, dict[str, Tensor]]) -> None:
    top, expected = exported
    same([top / "plain" / "model.safetensors"], expected)
    with safe_open(top / "plain" / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "pt", "head.weight": "emb.weight"}
    model = Tiny().bfloat16()
    assert load_model(model, str(top / "plain" / "model.safetensors"), strict=True) == (set(), [])
    assert model.head.weight is model.emb.weight and torch.equal(model.head.weight, expected["head.weight"])
    assert model.counted.tolist() == [7, 1 << 40]
    full = {n: expected.get(f"fp32 {n}", expected[n]) for n in KEPT}
    same([top / "fp32" / "model.safetensors"], full)
    assert not torch.equal(full["up.weight"], full["up.weight"].bfloat16().float())  # master weights, unrounded


def test_several_files_have_an_index(exported: tuple[Path, dict[str, Tensor]]) -> None:
    top, expected = exported
    index = json.loads((top / "sharded" / "model.safetensors.index.json").read_text())
    files = sorted((top / "sharded").glob("*.safetensors"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert {key: name for file in files for key in load_file(file) for name in [file.name]} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(t.nbytes for file in files for t in load_file(file).values())
    assert all(sum(t.nbytes for t in load_file(file).values()) <= 120 for file in files)
    same(files, expected)
    assert not [path for path in top.rglob("*.partial")]


def test_a_checkpoint_is_exported_to_the_same_bits(exported: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    top, expected = exported
    export_checkpoint(open_source(top / "saved", None), tmp_path / "a", Options())
    same([tmp_path / "a" / "model.safetensors"], expected)
    export_checkpoint(open_source(top / "saved" / "step00000002", None), tmp_path / "b", Options(torch.float32, 120))
    full = {n: expected.get(f"fp32 {n}", expected[n]) for n in KEPT}
    same(sorted((tmp_path / "b").glob("*.safetensors")), full)
    export_checkpoint(open_source(top / "saved", None), tmp_path / "c", Options(frozen=False))
    same([tmp_path / "c" / "model.safetensors"], expected, KEPT - {"frozen.weight", "frozen.bias"})


def test_zero_to_fp32_reads_our_checkpoints(exported: tuple[Path, dict[str, Tensor]]) -> None:
    top, expected = exported
    state = get_fp32_state_dict_from_zero_checkpoint(top / "saved")
    assert state.keys() == KEPT | {"head.weight"} and state["head.weight"] is state["emb.weight"]
    for name in KEPT - {"counted"}:
        assert torch.equal(state[name], expected.get(f"fp32 {name}", expected[name]).float()), name


def test_a_damaged_checkpoint_leaves_nothing(exported: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    top, _ = exported
    path = next((top / "saved").rglob("rank-00001.safetensors"))
    whole = path.read_bytes()
    try:
        path.write_bytes(whole[:-8])
        with pytest.raises(CheckpointError, match=r"rank-00001.safetensors is damaged: it has \d+ bytes, \d+ were written"):
            export_checkpoint(open_source(top / "saved", None), tmp_path / "out", Options())
    finally:
        path.write_bytes(whole)
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"file cannot be written: .*File exists"):
        export_checkpoint(open_source(top / "saved", None), tmp_path / "file", Options())
    with pytest.raises(CheckpointError, match=r"--model-dir .* is no folder"):
        export_checkpoint(open_source(top / "saved", None), tmp_path / "out", Options(model_dir=str(tmp_path / "no")))
    assert not (tmp_path / "out").exists()


def save_16bit(rank: int, world: int, top: str) -> list[Any]:
    """``save_16bit_model`` under three configurations, into one folder."""
    said: list[Any] = []
    for number, key in ((3, True), (3, False), (2, False)):
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": number, "stage3_gather_16bit_weights_on_model_save": key},
            "bf16": {"enabled": True},
        }
        torch.manual_seed(0)
        engine, *_ = onecopy.deepspeed.initialize(model=Tiny(), optimizer=adamw, config=config)
        name = f"{number}-{key}.bin"
        said += [engine.save_16bit_model(top, name), os.path.exists(f"{top}/{name}")]
        if key:
            assert engine.save_16bit_model(top, name)  # again, in its place
            engine.save_16bit_model(top, "weights.safetensors", exclude_frozen_parameters=True)
            assert "not the name of a file" in refusal(partial(engine.save_16bit_model, top, "a/b.bin"))
            engine.save_checkpoint(f"{top}/trained", exclude_frozen_parameters=True)
            assert "which the checkpoint lacks" in refusal(partial(engine.load_checkpoint, f"{top}/trained"))
            with warnings.catch_warnings(record=True) as said_so:
                engine.load_checkpoint(f"{top}/trained", load_module_strict=False)
            assert rank or "'frozen.weight', 'frozen.bias', which the checkpoint lacks" in str(said_so[0].message)
        full = engine.full_state_dict()
        engine.close()
    return [said, full if rank == 0 else None]


def test_save_16bit_model_does_what_its_key_says(tmp_path: Path) -> None:
    (said, full), _ = run_ranks(save_16bit, 2, str(tmp_path))
    assert said == [True, True, False, False, True, True]
    for name in ("3-True.bin", "2-False.bin"):
        loaded = torch.load(tmp_path / name)
        Tiny().bfloat16().load_state_dict(loaded, strict=True)
        assert loaded.keys() == full.keys() and all(torch.equal(loaded[key], full[key]) for key in full)
        assert loaded["head.weight"].data_ptr() == loaded["emb.weight"].data_ptr()
    same([tmp_path / "weights.safetensors"], full, KEPT - {"frozen.weight", "frozen.bias"})
    assert sorted(os.listdir(tmp_path)) == ["2-False.bin", "3-True.bin", "trained", "weights.safetensors"]
    manifest = open_source(tmp_path / "trained").manifest
    assert manifest.parameters.keys() == KEPT - {"frozen.weight", "frozen.bias", "counted", "scale"}
