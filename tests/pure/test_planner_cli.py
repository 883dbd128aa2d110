"""``onecopy plan``: what it prints, its JSON, and one clear line for bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import onecopy
from onecopy import cli, gpt
from onecopy.plan.config import load_config
from onecopy.planner.activations import trace
from onecopy.planner.report import human_gb
from onecopy.planner.sources import guess_inputs
from onecopy.planner.subject import facts_from_model
from onecopy.templates import template, with_auto

pytestmark = pytest.mark.pure


class Cli:
    """``onecopy plan ARGS`` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def __call__(self, *args: str) -> tuple[int, str, str]:
        """(exit code, stdout, stderr)."""
        self._monkeypatch.setattr("sys.argv", ["onecopy", "plan", *args])
        with pytest.raises(SystemExit) as end:
            cli.main()
        shown = self._capsys.readouterr()
        return int(end.value.code or 0), shown.out, shown.err

    def json(self, *args: str) -> dict[str, Any]:
        code, out, _ = self(*args, "--json")
        assert code == 0
        found: dict[str, Any] = json.loads(out)
        return found


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    return Cli(capsys, monkeypatch)


def integers(found: Any) -> bool:
    if isinstance(found, dict):
        return all(integers(value) for key, value in found.items() if key != "group")
    return isinstance(found, int) and not isinstance(found, bool)


def test_the_json_has_its_schema(plan: Cli) -> None:
    found = plan.json("--params", "7.5e9", "--ranks", "64", "--stage", "1", "--dtype", "bf16")
    assert set(found) == {
        "model", "cluster", "plan", "per_rank", "peak", "per_node", "traffic", "time", "fits", "why", "others", "assumptions"
    }  # fmt: skip
    device = found["per_rank"]["device"]
    assert sum(device[kind] for kind in ("parameter", "gradient", "master", "moments")) == 31_406_250_000
    assert set(found["per_node"]) == {"host", "disk"}
    assert set(found["traffic"]) == {"intra_node", "inter_node", "pcie", "disk_read", "disk_write", "collectives"}
    assert integers(found["per_rank"]) and integers(found["per_node"]) and integers(found["traffic"])
    assert set(found["time"]) == {
        "compute", "communication", "exposed", "offload", "offload_exposed", "optimizer", "step", "tokens_per_second"
    }  # fmt: skip
    assert found["fits"] is True and found["why"][0].startswith("device: fits")


def test_what_is_shown(plan: Cli) -> None:
    code, out, err = plan("--params", "7B", "--gpus", "4", "--gpu", "24GB", "--host-memory", "128GB")
    assert code == 0 and not err
    for words in ("does not fit by", "It would fit with", "optimizer step", "assumed: ", "DeepSpeed's estimator"):
        assert words in " ".join(out.split())
    code, out, err = plan("--params", "7B", "--gpus", "4", "--gpu", "24GB", "--host-memory", "128GB", "--json")
    assert code == 0 and json.loads(out)["change"]["fits"] and "does not fit by" in " ".join(err.split())


def test_rules_of_thumb_stand_beside_with_what_they_miss(plan: Cli) -> None:
    """7 billion parameters on 8 ranks: 42 and 18 GB by the rules, and the bytes of what those have no term for."""
    two, three = (plan.json("--params", "7B", "--gpus", "8", "--stage", stage) for stage in ("2", "3"))
    assert "42.00 GB on a rank" in two["others"][0] and "master weights (3.50 GB)" in two["others"][0]
    assert "gradients whole: 12.25 GB too many" in two["others"][0]
    gathered = two["others"][0].count("gathered parameters"), three["others"][0].count("gathered parameters")
    assert "18.20 GB on a rank" in three["others"][0] and gathered == (0, 1)
    for found in (two, three):
        assert f"activations ({human_gb(found['per_rank']['device']['activations'])})" in found["others"][0]
        assert f"a peak of {human_gb(found['per_rank']['device']['peak'])} here" in found["others"][0]
    host = plan.json("--params", "7B", "--gpus", "8", "--config", "zero2_offload")["others"][0]
    assert host.endswith("it knows no offload")


def test_a_file_may_leave_to_the_options_what_it_says_auto_of(plan: Cli, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(with_auto(template("zero2"))))
    found = plan.json("--params", "7B", "--gpus", "8", "--config", str(path), "--batch-size", "3", "--accumulation", "2")
    assert (found["plan"]["batch_size"], found["plan"]["accumulation"], found["plan"]["dtype"]) == (3, 2, "bfloat16")
    assert any("train_micro_batch_size_per_gpu 3" in line for line in found["assumptions"])
    told = ("--dtype", "fp32", "--set", "zero_optimization.stage=3")
    half = plan.json("--params", "7B", "--gpus", "8", "--config", str(path), *told)
    assert (half["plan"]["dtype"], half["plan"]["stage"]) == ("float32", 3)
    code, _, err = plan("--params", "7B", "--config", str(path), "--dtype", "fp16")
    assert code == 2 and "add the section 'fp16'" in err


def test_compare(plan: Cli) -> None:
    found = plan.json("--params", "1B", "--gpus", "2", "--gpu", "24GB", "--nvme", "2TB", "--compare")
    places = {(one["stage"], one["optimizer"], one["parameter"]) for one in found["variants"]}
    assert {(number, "device", "device") for number in range(4)} <= places
    assert {(3, "disk", "disk"), (2, "host", "device"), (3, "host", "host")} <= places
    code, out, _ = plan("--params", "1B", "--gpus", "2", "--gpu", "24GB", "--compare")
    assert code == 0 and "█" in out


def test_compare_as_a_page(plan: Cli, tmp_path: Path) -> None:
    """Everything that the JSON says of every variant is on one page that needs nothing else."""
    file = tmp_path / "page.html"
    found = plan.json("--params", "1B", "--gpus", "2", "--gpu", "24GB", "--nvme", "2TB", "--compare", "--html", str(file))
    text = file.read_text()
    page = ElementTree.fromstring(text)
    assert "http" not in text and not {"script", "link", "img", "iframe"} & {part.tag for part in page.iter()}
    assert not [key for part in page.iter() for key in part.attrib if key in ("src", "href")]
    words = set(page.itertext())
    for one in found["variants"]:
        assert one["plan"].rpartition(", micro-batch")[0] in words
        assert human_gb(one["per_rank"]["device"]["peak"]) in words
        assert human_gb(one["traffic"]["intra_node"] + one["traffic"]["inter_node"]) in words
        assert f"{one['time']['step']:.3g} s" in words
        for tier, size in one["lacks"].items():
            assert any(f"{tier} {human_gb(size)}" in word for word in words)
    assert len(list(page.iter("svg"))) == 4 and len(list(page.iter("rect"))) > 4 * len(found["variants"])
    code, _, err = plan("--params", "1B", "--compare", "--html", str(tmp_path / "no" / "page.html"))
    assert code == 2 and "cannot be written" in err


def test_search_writes_a_configuration_that_is_read(plan: Cli, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    args = ("--params", "7B", "--gpus", "4", "--gpu", "24GB", "--host-memory", "128GB")
    found = plan.json(*args, "--search", "--write", str(file))
    assert found["fits"] and len(found["chosen"]) >= 3
    written = load_config(file, world_size=4)
    assert written.batch.micro == found["plan"]["batch_size"]
    again = plan.json(*args, "--config", str(file), *(["--recompute"] if found["plan"]["recompute"] else []))
    assert again["per_rank"] == found["per_rank"] and again["traffic"] == found["traffic"]


MODULE = """
import torch
from torch import nn
from onecopy import gpt
def tiny():
    return gpt.GPT(gpt.config("tiny"))
def pair():
    return nn.Linear(4, 4), lambda batch, seq: {"input": torch.empty(batch, 4)}
def broken():
    raise RuntimeError("no weights here")
def number():
    return 7

class Odd(nn.Linear):
    def forward(self, x):
        return super().forward(x).nothing_like_this

def odd():
    return Odd(4, 4), lambda batch, seq: (torch.zeros(batch, 4),)
"""


@pytest.fixture
def builders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "builders_of_models.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "builders_of_models", raising=False)
    return "builders_of_models"


def test_a_function_that_builds_a_model(plan: Cli, builders: str) -> None:
    found = plan.json(f"{builders}:tiny", "--seq", "64", "--gpus", "2")
    with torch.device("meta"):
        model = gpt.GPT(gpt.config("tiny"))
    subject = facts_from_model(model, inputs=guess_inputs(model))
    assert found["model"]["parameters"] == subject.parameters == gpt.config("tiny").parameters
    traced = trace(subject, onecopy.stage(2, dtype="bf16"), 64)
    assert found["per_rank"]["device"]["activations"] == traced.run(1, False).most
    assert plan.json(f"{builders}:pair", "--gpus", "2")["model"]["parameters"] == 20


def test_a_verdict_without_activations_says_so(plan: Cli, builders: str) -> None:
    """The model's own code fails where tensors have no values; what is left is no promise that it fits."""
    found = plan.json(f"{builders}:odd", "--seq", "64", "--gpus", "2")
    assert found["why"][0].endswith("ACTIVATIONS NOT COUNTED")
    assert any("could not be traced" in line and "nothing_like_this" in line for line in found["assumptions"])
    assert not any("--seq" in line for line in found["assumptions"])
    assert "COUNTED" not in plan.json(f"{builders}:pair", "--gpus", "2")["why"][0], "its inputs are on the CPU"


def test_the_way_to_fit_says_what_the_host_needs(plan: Cli) -> None:
    """The optimizer may come from a disk that is too small to a host that is not."""
    args = ("--params", "7B", "--gpus", "1", "--offload", "disk", "--nvme", "10GB", "--host-memory", "200GB")
    change = plan.json(*args)["change"]
    assert (change["stage"], change["optimizer"], change["parameter"]) == (2, "host", "device")
    assert change["text"].endswith("of host memory on a node")


BAD = {
    "nothing": ([], "nothing to plan for"),
    "gpu": (["--params", "7B", "--gpu", "h10O"], "GPU 'h10O' is not known; did you mean h100?"),
    "params": (["--params", "-5"], "--params -5: it is 1 or more"),
    "word": (["--params", "many"], "--params 'many' is not a number"),
    "gpus": (["--params", "7B", "--gpus", "0"], "--gpus 0"),
    "ranks": (["--params", "7B", "--ranks", "12", "--gpus", "8"], "--ranks 12 is not 2 nodes of 8 GPUs"),
    "memory": (["--params", "7B", "--host-memory", "lots"], "--host-memory 'lots' is not a size"),
    "stage": (["--params", "7B", "--stage", "5"], "stage 5 does not exist"),
    "dtype": (["--params", "7B", "--dtype", "fp8"], "--dtype fp8: it is one of fp32, bf16, fp16"),
    "attention": (["--params", "7B", "--attention", "fast"], "--attention fast: it is one of flash, eager"),
    "seq": (["--params", "7B", "--seq", "0"], "--seq 0"),
    "offload": (["--params", "7B", "--offload", "cpu"], "--offload cpu: it is host or disk"),
    "write": (["--params", "7B", "--write", "x"], "--write x without --search"),
    "both": (["--params", "7B", "--search", "--compare"], "--compare and --search"),
    "model and numbers": (["a:b", "--params", "7B"], "--params beside the model 'a:b'"),
    "module": (["nowhere:model"], "model nowhere:model cannot be imported"),
    "file": (["nowhere.json"], "'nowhere.json' cannot be read"),
    "config": (["--params", "7B", "--config", "nowhere.json"], "nowhere.json"),
    "config beside": (["--params", "7B", "--config", "x.json", "--stage", "2"], "--stage 2 beside --config x.json"),
    "link": (["--params", "7B", "--link", "0"], "--link 0"),
    "card that ends like a unit": (["--params", "70B", "--gpu", "3090Ti"], "GPU '3090Ti' is not known; did you mean 3090?"),
    "no unit": (["--params", "7B", "--host-memory", "128"], "no node has 128 bytes; a size has a unit, such as 128GB"),
    "another shape": (
        ["--params", "7B", "--layers", "2000", "--hidden", "40960"],
        "not --params 7,000,000,000; a usual decoder of that many has 33 layers of 4224",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(plan: Cli, case: str) -> None:
    args, says = BAD[case]
    code, out, err = plan(*args)
    assert code == 2 and not out
    assert says in err and err.startswith("error: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("broken", "cannot be built on the meta device: no weights here"),
        ("number", "returned int"),
        ("x", "cannot be imported"),
    ],
)
def test_a_function_that_builds_no_model(plan: Cli, builders: str, name: str, says: str) -> None:
    code, _, err = plan(f"{builders}:{name}")
    assert code == 2 and says in err and err.count("\n") == 1


def test_a_configuration_of_another_kind(plan: Cli, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 2}}')
    code, _, err = plan(str(file))
    assert code == 2 and "it is a DeepSpeed configuration, which --config takes" in err
