"""DeepSpeed's own checkpoints go on here: the same losses as its own continued run, on another number of ranks too."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import onecopy.deepspeed
from onecopy.checkpoint.convert import convert
from onecopy.checkpoint.sources import open_source
from onecopy.checkpoint.torchfiles import safe_load
from onecopy.deepspeed.utils import zero_to_fp32
from onecopy.errors import CheckpointError
from tests.data.deepspeed_runs import ARCHIVE, BEFORE, ROWS, RUNS, UNIVERSAL, Tiny, batch, config, groups
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.ranks

# fp32 differs by the order of sums, bf16 and fp16 by roundings of gradients and norms. In fp16 without ZeRO, DeepSpeed's
# own training is another one than at its stage 1, from the first step on.
CLOSE = {"fp32": 2e-6, "bf16": 5e-3, "fp16": 5e-3}
APART = {"stage0-fp16": 5e-2}
# Its stage 3 rounds a linear layer's product before it adds the bias.
FIRST = {"stage3-bf16": 1e-3}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("deepspeed")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(top, filter="data")
    return top


def go_on(rank: int, world: int, top: str, cases: list[tuple[str, int, str | None]]) -> list[Any]:
    """For each (run, stage to go on with, tag): what load_checkpoint gave, and losses and rate after it."""
    found = []
    for name, number, tag in cases:
        torch.manual_seed(5)  # other weights than the run began with
        model = Tiny()
        made = config(number, RUNS[name][1], world)
        engine, *_ = onecopy.deepspeed.initialize(model=model, model_parameters=groups(model), config=made)
        path, client = engine.load_checkpoint(f"{top}/{name}", tag)
        assert engine.global_steps == BEFORE and model.counted.tolist() == [7, 1 << 40]
        losses, each = [], ROWS // world
        expected = json.loads(Path(f"{top}/{name}/run.json").read_text())["losses"]
        for step in range(BEFORE, len(expected)):
            loss = engine(batch(step)[rank * each : (rank + 1) * each])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        found.append((path, client, losses, engine.get_lr(), engine.loss_scale))
        engine.close()
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
def test_training_goes_on_as_it_would_have(runs: Path, world: int) -> None:
    """Every run is loaded at its own stage or another one, by its own and by other numbers of ranks."""
    other = {1: 3, 2: None, 4: 1}[world]
    few = RUNS if other is None else ("stage0-fp32", "stage2-fp32", "stage2-bf16", "stage3-fp32", "stage3-bf16")
    cases = [(name, RUNS[name][0] if other is None else other, None) for name in few]
    cases += [(name, 2, f"global_step{BEFORE}_universal") for name in UNIVERSAL if other is None]
    if other is None:  # one that was written anew, beside the original
        convert(open_source(runs / "stage3-fp32"), runs / "stage3-fp32", "converted")
        cases.append(("stage3-fp32", 2, "converted"))
        (runs / "stage3-fp32" / "latest").write_text(f"global_step{BEFORE}")
    per_rank = run_ranks(go_on, world, str(runs), cases, timeout=120)
    differ = {}
    for (name, _, tag), *told in zip(cases, *per_rank, strict=True):
        facts = json.loads((runs / name / "run.json").read_text())
        path, client, _, rates, scale = told[0]
        assert path == str(runs / name / (tag or f"global_step{BEFORE}"))
        assert client == {"epoch": 3, "seen": [1, 2.5, "x"]}
        losses = [sum(each) / world for each in zip(*(rank[2] for rank in told), strict=True)]
        off = [abs(a - b) for a, b in zip(losses, facts["losses"][BEFORE:], strict=True)]
        assert off[0] < FIRST.get(name, 1e-6), name  # what was loaded, before anything is stepped
        differ[name, tag] = max(off)
        assert rates == pytest.approx(facts["lr"])
        if RUNS[name] == (1, "fp16"):
            assert scale == facts["scale"]
    assert all(worst < APART.get(name, CLOSE[RUNS[name][1]]) for (name, _), worst in differ.items()), differ


# ------------------------------------------------------------------------------------------- zero_to_fp32, one process


def masters(top: Path, name: str) -> dict[str, torch.Tensor]:
    """The fp32 weights of the trained parameters, read from DeepSpeed's files by hand: stage 2 on 2 ranks."""
    parts = [safe_load(top / name / f"global_step{BEFORE}" / f"{word}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
             for word in ("bf16_" if "bf16" in name else "",) for rank in range(2)]  # fmt: skip
    found = {}
    for at, group in enumerate(groups(model := Tiny())):
        flat = torch.cat([part["optimizer_state_dict"]["single_partition_of_fp32_groups"][at] for part in parts])
        names = {param: name for name, param in model.named_parameters()}
        for param in group["params"]:
            found[names[param]], flat = flat[: param.numel()].view(param.shape), flat[param.numel() :]
    return found


def test_plain_fp32_weights(runs: Path, tmp_path: Path) -> None:
    directory = runs / "stage2-bf16"
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(directory)
    expected = masters(runs, "stage2-bf16")
    assert len(expected) == 7 and all(torch.equal(state[name], value) for name, value in expected.items())
    assert state["head.weight"] is state["emb.weight"] and state["counted"].tolist() == [7, 1 << 40]
    assert {tensor.dtype for name, tensor in state.items() if name != "counted"} == {torch.float32}
    assert Tiny().load_state_dict(state, strict=True)
    lazy = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(directory, f"global_step{BEFORE}", lazy_mode=True)
    assert lazy["up.weight"].shape == (7, 5) and lazy["up.weight"].dtype == torch.float32
    assert torch.equal(lazy["up.weight"].contiguous(), state["up.weight"])
    trained = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(directory, exclude_frozen_parameters=True)
    assert state.keys() - trained.keys() == {"frozen.weight", "frozen.bias"}
    # The same weights whatever DeepSpeed laid them out as.
    for name in ("stage1-bf16", "stage3-fp32", "stage0-fp32", "stage0-bf16", "stage3-bf16"):
        other = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(runs / name)
        assert other.keys() == state.keys()
        assert all(torch.allclose(other[key].float(), state[key].float(), atol=2e-2) for key in state)
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(Tiny(), directory)
    assert torch.equal(model.up.weight, state["up.weight"])


def test_plain_fp32_files(runs: Path, tmp_path: Path) -> None:
    directory = runs / "stage3-bf16"
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(directory)
    zero_to_fp32.main([str(directory), str(tmp_path / "one")])
    loaded = torch.load(tmp_path / "one" / "pytorch_model.bin")
    assert loaded.keys() == state.keys() and all(torch.equal(loaded[key], state[key]) for key in state)
    convert = zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict
    convert(directory, tmp_path / "some", max_shard_size=300, safe_serialization=True, tag=f"global_step{BEFORE}")
    index = json.loads((tmp_path / "some" / "model.safetensors.index.json").read_text())["weight_map"]
    for key, file in index.items():
        assert torch.equal(load_file(tmp_path / "some" / file)[key], state[key])
    assert index.keys() == state.keys() - {"head.weight"}
    convert(directory, tmp_path / "pickled", max_shard_size=300)
    index = json.loads((tmp_path / "pickled" / "pytorch_model.bin.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    for key, file in index.items():
        assert torch.equal(torch.load(tmp_path / "pickled" / file)[key], state[key])
    assert index.keys() == state.keys()
    with pytest.raises(SystemExit) as left:
        zero_to_fp32.main([str(tmp_path / "nothing"), str(tmp_path / "out")])
    assert left.value.code == 2 and not (tmp_path / "out").exists()
    zero_to_fp32.convert_zero_checkpoint_to_state_dict(directory, tmp_path / "half", dtype="bfloat16")
    half = torch.load(tmp_path / "half" / "pytorch_model.bin")
    assert half["scale"].dtype == half["up.bias"].dtype == torch.bfloat16 and half["counted"].dtype == torch.int64


# ----------------------------------------------------------------------------------------------- what is not read


class Strange:
    """Not a class that a checkpoint may build."""


def test_what_is_not_read_is_refused_by_name(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / f"global_step{BEFORE}"
    shutil.copytree(runs / "stage2-fp32" / folder.name, folder)
    model_states = folder / "mp_rank_00_model_states.pt"

    def refused(change: Any) -> str:
        content = torch.load(runs / "stage2-fp32" / folder.name / model_states.name, weights_only=True)
        if change is not None:
            torch.save(content | change, model_states)
        with pytest.raises(CheckpointError) as error:
            open_source(folder)
        return str(error.value)

    assert "holds objects of tests.ranks.test_migration.Strange, which are not built here" in refused({"x": Strange()})
    assert "holds objects of builtins.print, which" in refused({"x": print})
    torch.save(torch.load(model_states, weights_only=False) | {"x": 1}, model_states)
    (folder / "mp_rank_01_model_states.pt").touch()
    assert "several model-parallel ranks, which is not read here" in refused(None)
    (folder / "mp_rank_01_model_states.pt").unlink()
    part = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    whole = part.read_bytes()
    part.write_bytes(whole[:-100])
    assert f"{part} cannot be read" in refused(None)
    part.unlink()
    assert "has the optimizer states of ranks [0]; 2 ranks wrote them" in refused(None)
    part.write_bytes(whole)
    assert open_source(folder).manifest.client_state["x"] == 1
