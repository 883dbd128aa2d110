"""What ``docs/checkpoint.md`` says of exports and of other libraries' checkpoints is true: its examples and commands run."""

from __future__ import annotations

import json
import os
import re
import shlex
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import onecopy
from onecopy.cli import app
from onecopy.schedules import WarmupLR
from tests.data.deepspeed_runs import ARCHIVE, BEFORE, Tiny, batch, groups

pytestmark = pytest.mark.pure

TEXT = (Path(__file__).parents[2] / "docs" / "checkpoint.md").read_text()
SECTIONS = [
    re.split(r"\n## ", TEXT.split(f"\n## {name}\n")[1])[0] for name in ("Plain weights out", "Checkpoints of other libraries")
]


def blocks(section: str, kind: str) -> list[str]:
    return [body for word, body in re.findall(r"```(\w*)\n(.*?)```", section, re.DOTALL) if word == kind]


def commands(section: str) -> list[list[str]]:
    return [shlex.split(line)[1:] for body in blocks(section, "") for line in body.splitlines()]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run of ours, a run of DeepSpeed's and a model's folder, in which the examples run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base" / "model").mkdir(parents=True)
    (tmp_path / "base" / "model" / "tokenizer.json").write_text("{}")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "stage2-fp32").rename(tmp_path / "deepspeed" / "run")
    return tmp_path


def start() -> Any:
    torch.manual_seed(0)
    model = Tiny()
    return onecopy.initialize(
        model,
        onecopy.stage(2, dtype="bf16"),
        optimizer=lambda _: torch.optim.AdamW(groups(model), lr=0.01),
        scheduler=lambda made: WarmupLR(made, warmup_max_lr=0.02, warmup_num_steps=20),
    )


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, (arguments, result.output, result.exception)
    return result.stdout


def test_examples_and_commands_run(place: Path) -> None:
    engine = start()
    engine(batch(0)).backward()
    engine.step()
    engine.save("runs/a", "step00000400")
    for section in SECTIONS:
        (code,) = blocks(section, "python")
        exec(code, {"engine": engine})
    listed = [line for section in SECTIONS for line in commands(section)]
    assert len(listed) == 8
    said = {" ".join(line): run(*line) for line in listed}
    assert engine.global_steps == BEFORE
    half = load_file(place / "out" / "half" / "model.safetensors")
    assert half["up.weight"].dtype == torch.bfloat16 and (place / "out" / "half" / "tokenizer.json").exists()
    assert load_file(place / "out" / "fp32" / "model.safetensors")["up.weight"].dtype == torch.float32
    assert said["checkpoint verify runs/a"].endswith("step00000400: 1 files, every checksum is right\n")
    facts = json.loads(said["checkpoint inspect runs/a --tensors --json"])
    assert (facts["kind"], facts["optimizer"], facts["global_steps"]) == ("onecopy", "AdamW", 1)
    assert facts["parameters"] == sum(p.numel() for p in Tiny().parameters()) and facts["notes"] == []
    assert facts["tensors"][0]["names"] == ["emb.weight", "head.weight"]
    (words,) = re.findall(r"deepspeed 0\.19\.8", said["checkpoint inspect deepspeed/run"])
    assert words and "WarmupLR" in said["checkpoint inspect deepspeed/run"]


def test_verify_names_what_is_damaged(place: Path) -> None:
    start().save("runs/a", "one")
    path = place / "runs" / "a" / "one" / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(content)
    (problem,) = json.loads(run("checkpoint", "verify", "runs/a", "--json", code=1))["problems"]
    assert f"{path.relative_to(place)} is damaged: bytes 0 to {len(content)} have checksum" in problem
    part = place / "deepspeed" / "run" / f"global_step{BEFORE}" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    part.write_bytes(part.read_bytes()[:-50])
    (problem,) = json.loads(run("checkpoint", "verify", "deepspeed/run", "--json", code=1))["problems"]
    assert "cannot be read" in problem


def test_verify_reads_the_optimizers_states_of_another_library_too(place: Path) -> None:
    start().save("runs/a", "one")
    run("checkpoint", "convert", "runs/a", "there", "--to", "dcp")
    assert "all of it can be read" in run("checkpoint", "verify", "there")
    (path,) = (place / "there").glob("*.distcp")
    os.truncate(path, path.stat().st_size - 200)
    (problem,) = json.loads(run("checkpoint", "verify", "there", "--json", code=1))["problems"]
    assert "cannot be read" in problem


def test_verify_does_not_pass_over_the_newest(place: Path) -> None:
    """A run goes on from an older one then; a script that asks whether all is well is to hear that it is not."""
    one = start()
    one.save("runs/a", "one")
    one.save("runs/a", "two")
    path = place / "runs" / "a" / "two" / "rank-00000.safetensors"
    os.truncate(path, 900)
    with pytest.warns(UserWarning, match="two was skipped"):
        found = json.loads(run("checkpoint", "verify", "runs/a", "--json", code=1))
    (problem,) = found["problems"]
    assert found["folder"] == "runs/a/one" and "two was skipped" in problem
    os.truncate(place / "runs" / "a" / "one" / "rank-00000.safetensors", 900)
    found = json.loads(run("checkpoint", "verify", "runs/a", "--json", code=1))
    assert found["files"] == 0 and "has no complete checkpoint" in found["problems"][0]


def test_what_convert_refuses(place: Path) -> None:
    start().save("runs/a", "one")
    for arguments, said in (
        (["stage0-fp32", "out"], "does not name the parameters of its 2 optimizer groups"),
        (["runs/a", "out"], "is a checkpoint of ours already"),
        (["runs/a", "out", "--to", "fsdp"], "--to 'fsdp' is not a kind of checkpoint that is written"),
        (["base", "out"], "base has no complete checkpoint"),
    ):
        result = CliRunner().invoke(app, ["checkpoint", "convert", *arguments])
        assert result.exit_code and said in str(result.exception), (arguments, result.exception)
        assert not (place / "out").exists()
    assert "(deepspeed) is in out/step00000003 now" in run("checkpoint", "convert", "stage0-fp32", "out", "--weights-only")
    said = run("checkpoint", "inspect", "stage0-fp32", "--json")
    assert "without optimizer states" in json.loads(said)["notes"][0]
