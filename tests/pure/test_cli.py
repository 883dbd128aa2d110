"""The command line's words, the hostfile, the port check, the tables: everything that starts no rank."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

import onecopy
from onecopy import cli, launch, train
from onecopy.cluster import quantity
from onecopy.errors import ConfigError, EngineError
from onecopy.place import Place
from onecopy.report import doctor as report_doctor
from onecopy.report.measure import compare_table, human_bytes, human_count, lines, plan_table

pytestmark = pytest.mark.pure


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of ``onecopy ARGS``."""
    monkeypatch.setattr("sys.argv", ["onecopy", *args])
    with pytest.raises(SystemExit) as end:
        cli.main()
    shown = capsys.readouterr()
    return int(end.value.code or 0), shown.out, shown.err


def test_version_and_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = run(capsys, monkeypatch, "--version")
    assert code == 0 and out.startswith("onecopy 0.")
    code, out, _ = run(capsys, monkeypatch, "--help")
    assert code == 0 and "train" in out and "launch" in out


BAD = {
    "stage": (["train", "--stage", "4"], "stage 4 does not exist; choose 0, 1, 2 or 3"),
    "dtype": (["train", "--dtype", "fp8"], "--dtype fp8: it is one of fp32, bf16, fp16"),
    "out": (["train", "--out", "/proc/x"], "--out /proc/x cannot be written"),
    "out is a file": (["train", "--out", __file__], f"--out {__file__} is a file; name a folder"),
    "out in a file": (["train", "--out", f"{__file__}/x"], f"--out {__file__}/x cannot be written"),
    "model": (["train", "--model", "huge"], "model 'huge' does not exist"),
    "data": (["train", "--data", "nowhere"], "'nowhere' is neither a file nor a folder"),
    "steps": (["train", "--steps", "0"], "--steps 0"),
    "batch": (["train", "--batch-size", "-1"], "--batch-size -1"),
    "accumulation": (["train", "--accumulation", "0"], "--accumulation 0"),
    "lr": (["train", "--lr", "nan"], "--lr nan"),
    "keep": (["train", "--keep", "0"], "--keep 0"),
    "ranks": (["train", "--nproc", "0"], "--nproc 0"),
    "config file": (["train", "--config", "nowhere.json"], "nowhere.json"),
    "tier": (["train", "--offload", "nvme"], "--offload nvme: it is host or disk"),
    "parameters below stage 3": (
        ["train", "--offload-parameters", "host"],
        "--offload-parameters host beside --stage 0, 1 or 2, which keep the parameters whole on every rank: add --stage 3",
    ),
    "gradients below stage 2": (
        ["train", "--stage", "1", "--offload-gradients", "disk"],
        "--offload-gradients disk beside --stage 0 or 1, which keep gradients whole on every rank: add --stage 2",
    ),
    "disk without a folder": (["train", "--offload", "disk"], "states on disk need --scratch FOLDER"),
    "folder without a disk": (["train", "--offload", "host", "--scratch", "x"], "--scratch x and nothing on disk"),
    "no such folder": (["train", "--offload", "disk", "--scratch", "nowhere"], "--scratch nowhere is no folder"),
    "ratio": (["train", "--offload", "host", "--offload-ratio", "2"], "--offload-ratio 2.0: it is a share from 0 to 1"),
    "ratio of nothing": (["train", "--offload-ratio", "0.5"], "--offload-ratio 0.5 without --offload"),
    "states": (["train", "--states", "int3"], "--states int3: it is one of fp32, bf16, int8, int4; the nearest is int8"),
    "device memory": (["train", "--device-memory", "lots"], "--device-memory 'lots' is not a size such as 24GB"),
    "host memory": (["train", "--host-memory", "-1G"], "--host-memory -1G: it is 1 or more"),
    "script": (["launch", "nowhere.py"], "'nowhere.py' does not exist"),
    "hostfile": (["launch", "--hostfile", "nowhere", __file__], "'nowhere' does not exist"),
    "node rank": (["launch", "--node_rank", "1", __file__], "--node_rank 1 without --hostfile"),
    "doctor's count": (["doctor", "--params", "7X"], "--params '7X' is not a number such as 7.5e9, 7B or 125M"),
    "doctor's disk without a name": (["doctor", "--disk", " "], "--disk ' ' names no folder"),
    "doctor's disk": (["doctor", "--disk", "nowhere"], "nowhere is no folder"),
    "port": (["launch", "--master_port", "70000", __file__], "--master_port 70000"),
}


@pytest.mark.parametrize(("args", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_one_line_and_exit_code_2(
    args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, monkeypatch, *args)
    assert code == 2 and not out
    assert err.startswith("error: ") and message in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir()), "a refused command leaves nothing behind"


def test_a_config_file_excludes_the_options_it_decides(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}}))
    assert train.Method(config=str(path)).plan(2).batch.micro == 4
    assert train.Method(config=str(path), lr=1e-3).plan(2).optimizer is None
    for option in ({"stage": 3}, {"dtype": "bf16"}, {"accumulation": 2}, {"batch_size": 4}):
        with pytest.raises(ConfigError, match=rf"--{next(iter(option)).replace('_', '-')} .* beside --config"):
            train.Method(config=str(path), **option).plan(2)  # type: ignore[arg-type]


def test_options_that_place_states_are_a_plan(tmp_path: Path) -> None:
    base = onecopy.stage(3, dtype="fp32", clip=1.0)
    whole = Place("disk", "host", 0.5, str(tmp_path), "int8", 10**9, 10**10, "disk")
    placed = onecopy.offload(base, "disk", "host", gradient="disk", ratio=0.5, scratch=str(tmp_path))
    expected = onecopy.low_precision(placed, "int8")
    method = train.Method(stage=3, dtype="fp32", place=whole)
    assert method.plan(2) == expected.with_(caps=onecopy.Caps(10**9, 10**10))
    settings = train.Settings(train.Task(), method, train.Run(str(tmp_path), 5))
    assert train.Settings.from_json(settings.to_json()) == settings
    assert train.Method(stage=3, dtype="fp32").plan(2) == base
    bf16 = train.Method(stage=3, dtype="fp32", place=Place(states="bf16")).plan(2)
    assert bf16 == onecopy.low_precision(base, "bfloat16_sr")


def test_options_that_place_states_beside_a_config_file(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}))
    places = Place("host"), Place(parameters="host"), Place(ratio=0.5), Place(scratch="x"), Place(gradients="disk")
    for place in places:
        with pytest.raises(ConfigError, match=r"--\S+ \S+ beside --config .* zero_optimization.offload_"):
            train.Method(config=str(path), place=place).plan(2)
    plan = train.Method(config=str(path), place=Place(states="int4", host_memory=5)).plan(2)
    row = plan.row("x")
    assert (row.optimizer.tier, row.moment.tier, row.moment.codec, plan.caps.host) == ("host", "host", "int4", 5)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512M", 512 << 20), ("2G", 2 << 30), ("1.5GiB", 3 << 29), ("2 gb", 2 * 10**9), ("100", 100), ("1k", 1024),
        ("3TB", 3 * 10**12), ("1e9", 10**9), ("1.G", 1 << 30), ("7B", 7), ("0.5KiB", 512),
    ],
)  # fmt: skip
def test_sizes_are_read(text: str, size: int) -> None:
    assert quantity(text, "--x", size=True) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "0", "1P", "nan", "1 G B", "0.1B"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--x .*(is not a size|it is 1 or more)"):
        quantity(text, "--x", size=True)


def test_a_folder_with_another_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 80)
    settings = train.Settings(train.Task("tiny", data=(str(text),)), train.Method(), train.Run(str(tmp_path / "run"), 5))
    (tmp_path / "run" / "checkpoints" / "step00000005").mkdir(parents=True)
    train.claim(settings)
    train.claim(settings)  # the same again is no conflict
    command = ["train", "--model", "tiny", "--data", str(text), "--out", str(tmp_path / "run")]
    code, _, err = run(capsys, monkeypatch, *command, "--seed", "1")
    assert code == 2 and "holds a run with seed 0, this one has 1" in err and err.count("\n") == 1
    text.write_bytes(bytes(range(256)) * 90)
    code, _, err = run(capsys, monkeypatch, *command)
    assert code == 2 and "holds a run with data " in err


def test_a_note_of_what_the_folder_is_for_may_be_damaged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints" / "step00000005").mkdir(parents=True)
    (tmp_path / "task.json").write_text('{"model": "ti')
    code, _, err = run(capsys, monkeypatch, "train", "--out", str(tmp_path))
    assert code == 2 and err.startswith(f"error: {tmp_path}/task.json is damaged") and err.count("\n") == 1


def test_an_interruption_promises_no_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    settings = train.Settings(train.Task(), train.Method(), train.Run(str(tmp_path), 300))
    assert train.what_is_kept(settings) == (
        "no checkpoint was written yet (--save-every 50), so the same command begins anew"
    )
    engine = onecopy.initialize(torch.nn.Linear(2, 2), onecopy.stage(1))
    for tag in ("step00000050", "step00000100"):
        engine.save(tmp_path / "checkpoints", tag)
    engine.close()
    (tmp_path / "checkpoints" / "step00000150").mkdir()  # not a whole one
    assert train.what_is_kept(settings) == f"the same command resumes from {tmp_path}/checkpoints/step00000100"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two' in the environment; it must be a whole number from 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is '0'"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE is '-2'"),
        ({"RANK": "first"}, "RANK is 'first' in the environment; it must be a whole number from 0 to 1"),
        ({"RANK": "2"}, "RANK is '2'"),
        ({"MASTER_PORT": "any"}, "MASTER_PORT is 'any' in the environment; it must be a whole number from 1 to 65535"),
    ],
)
def test_a_launchers_variable_that_cannot_be_is_named(
    changed: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    for name, value in (good | changed).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EngineError, match=re.escape(says)):
        onecopy.initialize(torch.nn.Linear(2, 2), onecopy.stage(1))


def test_settings_survive_json() -> None:
    settings = train.Settings(train.Task(data=("a", "b")), train.Method(stage=3, lr=1e-3), train.Run("out", 5))
    assert train.Settings.from_json(settings.to_json()) == settings


def test_learning_rate_rises_then_falls() -> None:
    factor = train.warm_up_and_cosine(100)
    values = [factor(step) for step in range(130)]
    assert values[:10] == sorted(values[:10]) and values[0] == 0.1 and max(values) == 1.0
    assert values[10:] == sorted(values[10:], reverse=True) and values[100] == values[129] == pytest.approx(0.05)


@pytest.fixture
def hostfile(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "hosts"
    path.write_text("# two machines\nfirst slots=4\n\nsecond  slots = 2  # smaller\n")
    yield path


def test_hostfile(hostfile: Path) -> None:
    assert launch.read_hostfile(hostfile) == [launch.Host("first", 4), launch.Host("second", 2)]
    assert launch.place(hostfile, 1, None, 1234) == (2, launch.Nodes(2, 1, "first", 1234))
    assert launch.place(hostfile, 0, 3, 1234, "10.0.0.1") == (3, launch.Nodes(2, 0, "10.0.0.1", 1234))
    with pytest.raises(ConfigError, match=r"--nproc 3 is more than the 2 slots of 'second'"):
        launch.place(hostfile, 1, 3, 1234)
    with pytest.raises(ConfigError, match=r"--node_rank 2: .* has 2 hosts"):
        launch.place(hostfile, 2, None, 1234)
    with pytest.raises(ConfigError, match=r"--node_rank None: .* has 2 hosts"):
        launch.place(hostfile, None, None, 1234)
    with pytest.raises(ConfigError, match="2 hosts without --master_port"):
        launch.place(hostfile, 0, None, None)


@pytest.mark.parametrize("text", ["first slots=x", "first", "first slots=0", "a slots=1\na slots=1", "", "# only"])
def test_a_wrong_hostfile_is_refused_by_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"hostfile .*hosts' (line \d|names no host)"):
        launch.read_hostfile(path)


def test_one_machine_needs_no_port() -> None:
    assert launch.place(None, None, 3, None) == (3, launch.Nodes())
    assert launch.place(None, 0, None, None)[0] == launch.default_ranks() >= 1


def test_a_taken_port_is_named_with_its_owner() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--master_port {port} is taken"):
            launch.require_free(port)
    launch.require_free(port)


def test_human_numbers() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1536, -(1 << 20), 5 << 30)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "-1.00 MiB",
        "5.00 GiB",
    ]
    assert [human_count(n) for n in (7, 1500, 25_482_240, 3e9)] == ["7", "1.5k", "25.5M", "3.0G"]


LEDGER = {
    "resident": {"device": {"parameter": 4096, "moments": 8192}},
    "peak": {"device": {"total": 100_000}},
    "collectives": {"reduce": {"count": 3, "elements": 1024, "bytes": 4096, "group": "within"}},
}


def shown(table: object) -> str:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def test_tables_set_measured_beside_predicted() -> None:
    measured = json.loads(json.dumps(LEDGER))
    measured["resident"]["device"]["moments"] += 4096
    measured["peak"]["device"]["total"] -= 1000
    measured["collectives"]["vote"] = {"count": 1, "elements": 2, "bytes": 8, "group": "within"}
    verdicts = {line.name: line.verdict for line in lines(LEDGER, measured)}
    assert verdicts["device: parameter"] == verdicts["reduce: bytes"] == "equal"
    assert verdicts["device: moments"] == "+50.00%" and verdicts["device: total"] == "-1.00%"
    assert verdicts["vote: count"] == "not predicted"
    text = shown(compare_table(LEDGER, measured))
    assert "8.00 KiB" in text and "12.00 KiB" in text and "+50.00%" in text and "1,024" in text
    text = shown(plan_table(LEDGER))
    assert "8.00 KiB" in text and "measured" not in text


def doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: str) -> tuple[int, str, str]:
    monkeypatch.setattr("onecopy.report.doctor.COPIED", 1 << 20)
    monkeypatch.setattr("onecopy.report.doctor.WRITTEN", 1 << 20)
    return run(capsys, monkeypatch, "doctor", *args)


def test_doctor_measures_what_it_is_asked_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = doctor(capsys, monkeypatch, "--disk", str(tmp_path), "--memory", "--params", "2B", "--json")
    found = json.loads(out)
    assert code == 0 and found["params"] == 2_000_000_000
    assert set(found["memory"]) == {"1", str(torch.get_num_threads())}
    assert found["disk"]["path"] == str(tmp_path) and found["disk"]["written"] > 0 and found["disk"]["read"] > 0
    host, disk = found["step"]["host"], found["step"]["disk"]
    assert host["seconds"] == pytest.approx(28 * 2e9 / (max(found["memory"].values()) * report_doctor.HOST_FRACTION))
    assert disk["seconds"] == pytest.approx(12 * 2e9 / found["disk"]["written"] + 12 * 2e9 / found["disk"]["read"])
    assert all(cost["mparams"] == pytest.approx(2e3 / cost["seconds"]) for cost in (host, disk))
    assert not list(tmp_path.iterdir())
    only_disk = json.loads(doctor(capsys, monkeypatch, "--disk", str(tmp_path), "--json")[1])
    assert only_disk["memory"] is None and set(only_disk["step"]) == {"disk"}
    only_memory = json.loads(doctor(capsys, monkeypatch, "--json")[1])
    assert only_memory["disk"] is None and set(only_memory["step"]) == {"host"} and only_memory["params"] == 7 * 10**9


def test_doctor_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = doctor(capsys, monkeypatch, "--disk", str(tmp_path), "--memory", "--params", "350M")
    assert code == 0
    for words in ("memory copied, 1 thread (read + written)", "350.0M parameters, states on host", "states on disk", "28 B"):
        assert words in out


def test_doctor_by_arithmetic() -> None:
    assert report_doctor.host_step(10**9, 28e9 / report_doctor.HOST_FRACTION) == report_doctor.Cost(1.0, 1000.0)
    assert report_doctor.disk_step(10**9, 12e9, 4e9) == report_doctor.Cost(4.0, 250.0)
    for text, count in {"7B": 7 * 10**9, "350m": 35 * 10**7, "1.5b": 15 * 10**8, "7e9": 7 * 10**9, "1_000": 1000}.items():
        assert quantity(text, "--params") == count
