"""``onecopy config check`` and ``show``, and what the options of ``onecopy train`` make of a file or of the machine."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onecopy import choose, cli
from onecopy.cluster import Cluster
from onecopy.errors import ConfigError, PlanError
from onecopy.method import Method
from onecopy.place import Place
from onecopy.plan.auto import batch_auto
from onecopy.plan.config import DEEPSPEED, load_config
from onecopy.plan.explain import explain
from onecopy.plan.reading import override
from onecopy.planner.report import schedule_for
from onecopy.planner.subject import facts, facts_from_numbers
from onecopy.schedule.rest import resident
from onecopy.templates import FILLED_BY_TRAINERS, NAMES, resolve, template, with_auto
from onecopy.train import Run, Settings, Task
from tests.pure.test_config import JUNK, KEYS, nested
from tests.pure.test_config_keys import info_of

pytestmark = pytest.mark.pure

SOME: dict[str, Any] = {
    "_why": "a comment",
    "zero_optimization": {
        "stage": 2, "overlap_comm": True, "stage3_max_live_parameters": 1e9, "zero_quantized_weights": False,
    },
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": False, "loss_scale": 8},
    "train_batch_size": 16,
    "gradient_accumulation_steps": "auto",
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 1.0, "betas": "auto", "torch_adam": True, "set_grad_none": True}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_max_lr": "auto"}},
    "comms_logger": {"enabled": False, "verbose": True},
    "tensorboard": {"enabled": True},
}  # fmt: skip


class Cli:
    """``onecopy ARGS`` in this process: exit code, stdout, stderr."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def __call__(self, *args: str) -> tuple[int, str, str]:
        self._monkeypatch.setattr("sys.argv", ["onecopy", *args])
        with pytest.raises(SystemExit) as end:
            cli.main()
        shown = self._capsys.readouterr()
        return int(end.value.code or 0), shown.out, shown.err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("COLUMNS", "200")
    return Cli(capsys, monkeypatch)


# ---------------------------------------------------------------------------------------------------------------- check


def test_every_key_has_one_verdict_and_the_reason() -> None:
    found = {line.key: line for line in explain(SOME, 2).lines}
    verdicts = {
        "zero_optimization.stage": ("honoured", "gradients"),
        "zero_optimization.overlap_comm": ("no effect", "while backward goes on"),
        "zero_optimization.stage3_max_live_parameters": ("no effect", "stage is 2, and only stage 3"),
        "zero_optimization.zero_quantized_weights": ("off", "quantised gathers"),
        "bf16.enabled": ("auto", "nothing here says"),
        "fp16.enabled": ("off", "not asked for"),
        "fp16.loss_scale": ("no effect", "fp16 is not enabled"),
        "train_batch_size": ("honoured", "samples"),
        "gradient_accumulation_steps": ("honoured", "follows from the others"),
        "train_micro_batch_size_per_gpu": ("honoured", "micro-batch"),
        "optimizer.type": ("honoured", "torch optimizer"),
        "optimizer.params.lr": ("honoured", "torch.optim.AdamW"),
        "optimizer.params.betas": ("auto", "nothing here says"),
        "optimizer.params.torch_adam": ("honoured", "chose torch.optim.AdamW"),
        "optimizer.params.set_grad_none": ("no effect", "freed after every step"),
        "scheduler.type": ("honoured", "learning rate"),
        "scheduler.params.total_num_steps": ("auto", "nothing here says"),
        "scheduler.params.warmup_max_lr": ("honoured", "onecopy.schedules.WarmupDecayLR"),
        "comms_logger.enabled": ("off", "not enabled"),
        "comms_logger.verbose": ("off", "not enabled"),
        "tensorboard.enabled": ("no effect", "no log is written"),
    }
    assert list(found) == list(verdicts)
    for key, (verdict, part) in verdicts.items():
        assert found[key].verdict == verdict and part in found[key].says, found[key]


def test_what_is_wrong_is_marked_at_its_key() -> None:
    wrong = override(SOME, {"zero_optimization.stge": 3, "model_parallel_size": 2, "optimizer.params.lr": -1})
    explained = explain(wrong, 2)
    found = {line.key: line for line in explained.lines}
    assert not explained.ok
    assert found["zero_optimization.stge"].verdict == "wrong"
    assert "did you mean zero_optimization.stage?" in found["zero_optimization.stge"].says
    assert found["model_parallel_size"].verdict == "wrong"
    assert "tensor parallelism is not there yet" in found["model_parallel_size"].says
    assert found["optimizer.params.lr"].verdict == "wrong" and "from 0" in found["optimizer.params.lr"].says
    assert found["train_micro_batch_size_per_gpu"].verdict == "honoured"


def leaves(config: Any, path: str = "") -> list[str]:
    """Dotted keys of ``config`` whose values are no sections."""
    found = []
    for key, value in config.items():
        found += leaves(value, f"{path}{key}.") if isinstance(value, dict) and value else [f"{path}{key}"]
    return found


@given(key=st.sampled_from([key for key in KEYS if info_of(key)[1] is None]), value=st.sampled_from(JUNK))
def test_check_is_right_about_every_value_of_every_key(key: str, value: Any) -> None:
    """It finds an error exactly where loading does, unless that is of an open "auto"; no key of the file is left out."""
    config = nested(key, value)
    found = explain(config, 1)
    try:
        load_config(config, 1)
        loads = True
    except ConfigError:
        loads = False
    assert found.ok == (loads or (not found.reading.problems and bool(found.reading.open)))
    lines = [line.key for line in found.lines]
    assert len(set(lines)) == len(lines)
    assert all(any(line == leaf or leaf.startswith(f"{line}.") for line in lines) for leaf in leaves(config) if value != {})


def test_check_on_the_command_line(run: Cli, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(SOME))
    code, out, err = run("config", "check", str(path), "--ranks", "2")
    assert (code, err) == (0, "")
    for part in ("no effect: ", "zero_optimization.overlap_comm", "gradients cut over all ranks", "3 keys are still 'auto'"):
        assert part in out
    code, out, _ = run("config", "check", str(path), "--ranks", "2", "--set", "zero_optimization.stage=3", "--json")
    found = json.loads(out)
    assert code == 0 and found["ok"] and set(found) == {"file", "ok", "plan", "keys", "errors", "auto", "notes"}
    assert "parameters cut over all ranks" in found["plan"][0]
    assert {"key": "zero_optimization.stage", "value": 3, "verdict": "honoured"}.items() <= found["keys"][0].items()
    code, out, _ = run("config", "check", str(path), "--set", "bf16.enable=1", "--set", "train_batch_size=15", "--json")
    found = json.loads(out)
    assert code == 1 and not found["ok"] and found["plan"] is None and "bf16.enabled?" in found["errors"][0]
    code, out, _ = run("config", "check", str(path), "--set", "train_batch_size=15", "--ranks", "2")
    assert code == 1 and "error: train_batch_size 15 is not divisible" in out
    assert run("config", "check", "zero3")[0] == 0


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (("check", "nowhere.json"), "cannot read configuration 'nowhere.json'"),
        (("check", "zero2", "--set", "stage"), "--set 'stage' is not KEY=VALUE"),
        (("check", "zero2", "--set", "bf16.enabled.x=1"), "bf16.enabled is true, which is no section"),
        (("check", "zero2", "--ranks", "0"), "it must be a whole number from 1"),
        (("show", "zero4"), "there is no template 'zero4'; did you mean 'zero"),
        (("show", "zero2", "--write", "nowhere/ds.json"), "--write nowhere/ds.json cannot be written"),
        (("show", "--write", "ds.json"), "say which template"),
    ],
)
def test_bad_input_is_one_line(run: Cli, args: tuple[str, ...], part: str) -> None:
    code, _, err = run("config", *args)
    assert code == 2 and err.startswith("error: ") and part in err and err.count("\n") == 1


def test_the_documentations_commands_and_python_run(
    run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text(json.dumps({"zero_optimization": {"stage": 2, "overlap_comm": True}}))
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert block is not None
    exec(block[1], {})
    assert "overlap_comm does nothing: " in capsys.readouterr().out
    commands = re.findall(r"^onecopy (config .*?) +#", text, re.MULTILINE)
    assert len(commands) == 4
    assert [run(*command.split())[0] for command in commands] == [0, 0, 0, 0]
    assert json.loads(Path("ds_config.json").read_text())["zero_optimization"]["offload_optimizer"]["device"] == "cpu"


# ------------------------------------------------------------------------------------------------------------ templates


@pytest.mark.parametrize("name", NAMES)
def test_a_template_holds_what_is_honoured_and_says_when_to_use_it(name: str) -> None:
    config = template(name)
    world = config["zero_optimization"].get("mics_shard_size", 2)
    found = explain(config, world)
    assert found.ok and not found.reading.open and not found.reading.remarks
    assert {line.verdict for line in found.lines} == {"honoured"}
    why = " ".join(config["_why"])
    assert re.search(r"odels up to about \d+B on (\d|nodes of)", why) and config["_why"][0].endswith((".", "of"))
    left = explain(with_auto(config), world)
    assert left.ok and set(left.reading.open) == set(FILLED_BY_TRAINERS) & {line.key for line in left.lines}


STATES = re.compile(r"(\d+)B on (\d+) ranks: ([\d.]+) GB of states on the (device|host|disk)")


def test_the_bytes_that_templates_name_are_the_planners() -> None:
    """Per rank and at rest: "7B on 8 ranks: 28.00 GB of states on the device"."""
    checked = 0
    for name in NAMES:
        config = template(name)
        for billions, ranks, said, tier in STATES.findall(" ".join(config["_why"])):
            plan, subject = load_config(config, int(ranks)), facts_from_numbers(int(billions) * 10**9)
            cluster = Cluster(gpus=8 if int(ranks) > 8 else int(ranks), nodes=max(int(ranks) // 8, 1))
            held = resident(schedule_for(plan, facts(subject, plan, int(ranks)), cluster), 0)[tier]
            assert f"{sum(held.values()) / 1e9:.2f}" == said, (name, billions, ranks, tier)
            checked += 1
    assert checked >= 11


def test_show_prints_a_template_that_loads_and_lists_them_all(run: Cli, tmp_path: Path) -> None:
    for name in NAMES:
        code, out, _ = run("config", "show", name)
        assert code == 0 and json.loads(out) == template(name)
    path = tmp_path / "ds.json"
    code, out, _ = run("config", "show", "zero2_offload", "--auto", "--write", str(path))
    assert code == 0 and path.read_text() == out and json.loads(out)["optimizer"]["params"]["lr"] == "auto"
    code, out, _ = run("config", "show")
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == list(NAMES)
    assert resolve("zero2") == template("zero2") and resolve(str(path)) == str(path)


# ----------------------------------------------------------------------------------------------------------------- auto


def test_what_a_file_leaves_auto_is_what_the_run_knows(tmp_path: Path) -> None:
    config = with_auto(template("zero2")) | {
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "scheduler": {"type": "WarmupDecayLR", "params": dict.fromkeys(("warmup_num_steps", "total_num_steps"), "auto")},
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    plan = Settings(Task("tiny"), Method(str(path), dtype="fp16", batch_size=3, lr=0.5), Run("out", 50)).plan(2)
    assert (plan.batch.micro, plan.batch.accumulation, plan.precision.dtype) == (3, 1, "float16")
    assert plan.clip.max_norm == 1.0 and plan.optimizer is not None and plan.scheduler is not None
    assert plan.optimizer.params == {"lr": 0.5, "betas": (0.9, 0.95), "weight_decay": 0.1}
    assert plan.scheduler.params == {"warmup_num_steps": 5, "total_num_steps": 50}
    (note,) = [note for note in plan.notes if "'auto' became" in note]
    assert "fp16.enabled true" in note and "scheduler.params.total_num_steps 50" in note
    with pytest.raises(ConfigError, match="add the section 'fp16'"):
        Method("zero2", dtype="fp16", changes={"bf16.enabled": "auto"}).plan(2)
    with pytest.raises(ConfigError, match=r"--set bf16\.enabled without --config"):
        Method(changes={"bf16.enabled": True}).plan(2)
    with pytest.raises(ConfigError, match=r"--batch-size 2 beside --config zero2: the file decides"):
        Method("zero2", batch_size=2).plan(2)
    assert Method("zero2", changes={"train_micro_batch_size_per_gpu": 5}).plan(2).batch.micro == 5


@pytest.mark.parametrize(
    ("raw", "options", "expected"),
    [
        (("auto", "auto", "auto"), (None, None), (7, 1)),
        (("auto", "auto", "auto"), (2, 3), (2, 3)),
        ((24, "auto", "auto"), (None, None), (12, 1)),
        ((24, "auto", "auto"), (4, None), (4, 3)),
        ((24, "auto", "auto"), (None, 4), (3, 4)),
        ((24, "auto", 2), (None, None), (6, 2)),
        ((24, 6, "auto"), (None, None), (6, 2)),
        ((None, 5, "auto"), (None, None), (5, 1)),
    ],
)
def test_batch_sizes_that_are_auto(raw: tuple[Any, ...], options: tuple[Any, Any], expected: tuple[int, int]) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    config = {key: value for key, value in zip(keys, raw, strict=True) if value is not None}
    batch = load_config(config, 2, auto=batch_auto(config, *options, 7)).batch
    assert (batch.micro, batch.accumulation) == expected


def test_all_that_stays_auto_is_one_line_of_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(with_auto(template("zero2")), 2, auto={"bf16.enabled": True, "gradient_clipping": 1.0})
    (line,) = str(caught.value).splitlines()
    assert line.startswith("still 'auto'") and set(line.split(": ")[1].split(", ")) == set(FILLED_BY_TRAINERS) - {
        "bf16.enabled", "gradient_clipping",
    }  # fmt: skip
    plan = load_config({"zero_optimization": {"overlap_comm": "auto", "stage": 1}}, defaults=DEEPSPEED)
    assert plan.notes == ()


# ---------------------------------------------------------------------------------------------------------- train --auto


def job(model: str = "tiny", **options: Any) -> Settings:
    return Settings(Task(model), Method(dtype="fp32", **options), Run("out", 1))


def test_train_auto_takes_what_the_search_finds_on_this_machine() -> None:
    made, said = choose.choose(job(), 2)
    method = made.method
    assert method.stage in range(4) and method.batch_size == 16 and "\n" not in said
    assert said.startswith(f"auto: stage {method.stage}, micro-batch 16: ") and "the best of stage" in said
    made.plan(2)
    assert choose.choose(job(batch_size=3), 2)[0].method.batch_size == 3


def test_train_auto_keeps_to_the_memory_it_may_take() -> None:
    """Less and less memory: more is cut, activations are computed again, the micro-batch shrinks; then nothing fits."""
    room = {cap: choose.choose(job("small", place=Place(device_memory=cap)), 2)[0].method for cap in (2 * 10**9, 10**8)}
    large, small = room.values()
    assert large.batch_size == 16 and not large.recompute
    assert small.stage is not None and large.stage is not None
    assert (small.stage, small.recompute, -(small.batch_size or 0)) > (large.stage, large.recompute, -16)
    with pytest.raises(PlanError, match="no plan fits"):
        choose.choose(job("small", place=Place(device_memory=10**6)), 2)


@pytest.mark.parametrize(
    "option",
    [
        {"stage": 0}, {"config": "zero2"}, {"recompute": True}, {"place": Place("host")}, {"place": Place(states="int8")},
        {"place": Place(ratio=0.5)}, {"place": Place(gradients="host")},
    ],
)  # fmt: skip
def test_options_that_the_search_decides_are_refused_beside_it(option: dict[str, Any]) -> None:
    settings = job()
    with pytest.raises(ConfigError, match="beside --auto: the search decides that"):
        choose.choose(replace(settings, method=replace(settings.method, **option)), 2)
