"""The main job and the examples, started as a person starts them."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--model", "tiny", "--batch-size", "4"]


def onecopy(*args: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "onecopy.cli", *args]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == code, done.stderr
    return done


def train(*args: str, cwd: Path) -> tuple[dict[str, Any], str]:
    """(report, stderr) of a small run."""
    done = onecopy("train", *SMALL, "--json", *args, cwd=cwd)
    assert done.stdout.count("\n") == 1, "stdout is one JSON object"
    return json.loads(done.stdout), done.stderr


def losses(folder: Path) -> dict[int, float]:
    logged = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {entry["step"]: entry["loss"] for entry in logged if "loss" in entry}


def test_training_learns_reports_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    options = ["--out", "run", "--steps", "30", "--save-every", "15"]
    whole, err = train(*options, cwd=tmp_path)
    assert whole["resumed_from"] == 0 and whole["steps"] == 30 and whole["world"] == 2
    assert whole["validation_loss"] < math.log(256) - 1.0
    assert "predicted" in err and "step 15: saved" in err and "step 30/30" in err
    for ledger in whole["ranks"]:
        assert ledger["predicted"]["resident"] == ledger["measured"]["resident"]
        assert ledger["predicted"]["collectives"] == ledger["measured"]["collectives"]
    folder = tmp_path / "run"
    assert sorted(p.name for p in (folder / "checkpoints").glob("step*")) == ["step00000015", "step00000030"]

    # As if the run had been interrupted after step 15: the rest comes out the same, to the last bit.
    first = losses(folder)
    shutil.rmtree(folder / "checkpoints" / "step00000030")
    (folder / "log.jsonl").unlink()
    again, err = train(*options, cwd=tmp_path)
    assert "resuming from step 15" in err and again["resumed_from"] == 15
    assert again["validation_loss"] == whole["validation_loss"]
    assert losses(folder)[30] == first[30]

    done, err = train(*options, cwd=tmp_path)
    assert "all 30 steps are done already" in err
    assert done["validation_loss"] == whole["validation_loss"] and done["ranks"] == []


@pytest.mark.long
def test_where_states_rest_changes_no_bit_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    disk = ["--offload", "disk", "--offload-parameters", "disk", "--scratch", "nvme", "--device-memory", "2M"]
    on_device, _ = train("--stage", "3", "--steps", "4", "--out", "device", cwd=tmp_path)
    on_disk, err = train("--stage", "3", "--steps", "4", "--out", "disk", *disk, cwd=tmp_path)
    assert on_disk["validation_loss"] == on_device["validation_loss"]
    assert "disk: moments" in err and "moved between tiers" in err
    assert not list((tmp_path / "nvme").iterdir())
    for ledger in on_disk["ranks"]:
        assert ledger["predicted"] == ledger["measured"]
        assert set(ledger["predicted"]["resident"]["disk"]) > {"parameter", "moments"}

    # A cap that cannot be kept is one line and nothing has run.
    tight = [*SMALL, "--steps", "4", "--out", "tight", "--device-memory", "100K"]
    refused = onecopy("train", *tight, cwd=tmp_path, code=2)
    assert refused.stderr.count("\n") == 1 and "the cap is 102,400" in refused.stderr


@pytest.mark.long
def test_training_follows_a_deepspeed_config(tmp_path: Path) -> None:
    config = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 2e-3}},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    command = ["train", "--model", "tiny", "--json", "--config", "ds.json", "--steps", "8", "--out", "run"]
    report = json.loads(onecopy(*command, cwd=tmp_path).stdout)
    assert report["validation_loss"] < math.log(256) - 0.3
    for ledger in report["ranks"]:
        assert ledger["measured"]["collectives"]["gather"]["count"] > 0
        assert ledger["predicted"]["resident"] == ledger["measured"]["resident"]


def test_without_json_the_report_is_a_table_on_stdout(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a rose is a rose is a rose, " * 500)
    options = ["--data", "text", "--steps", "3", "--nproc", "1", "--auto", "--out", "run"]
    done = onecopy("train", *SMALL, *options, cwd=tmp_path)
    (chosen,) = [line for line in done.stderr.splitlines() if line.startswith("auto: ")]
    assert "micro-batch 4" in chosen and "tokens/s" in chosen
    assert "measured" in done.stdout and "as predicted on every rank" in done.stdout
    assert "validation loss" in done.stdout.splitlines()[-1]

    # What the ranks refuse is one line too: here the only checkpoint has lost its end.
    for path in (tmp_path / "run" / "checkpoints" / "step00000003").glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-8])
    refused = onecopy("train", *SMALL, *options[:-3], "--steps", "6", "--out", "run", cwd=tmp_path, code=2)
    assert "Traceback" not in refused.stderr
    assert refused.stderr.splitlines()[-1].startswith("error: ") and "is damaged" in refused.stderr


@pytest.mark.parametrize("example", ["minimal.py", "deferred.py"])
def test_examples_run(example: str, tmp_path: Path) -> None:
    options = {"minimal.py": ["--steps", "20", "--stage", "3"], "deferred.py": ["--model", "tiny"]}[example]
    done = onecopy("launch", "--nproc", "2", str(EXAMPLES / example), *options, cwd=tmp_path)
    assert {"minimal.py": "29 tensors", "deferred.py": "rank 0 holds parameter "}[example] in done.stdout


def test_the_minimal_example_runs_alone(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "minimal.py"), "--steps", "10"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "step 10: loss" in done.stdout, done.stderr
