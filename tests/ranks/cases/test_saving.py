"""Saving and loading as a collective: who is missing, which directory is meant, whose disk it is, and what files hold."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import onecopy
import onecopy.deepspeed as deepspeed
from onecopy.checkpoint import store
from onecopy.checkpoint.format import seal
from onecopy.errors import CheckpointError, OneCopyError
from tests.ranks import models
from tests.ranks.cases.everywhere import everywhere, json_plans, said, values
from tests.ranks.checkpoints import SMALL, start, unequal
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.ranks

ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}


def json_engine(number: int, model: str = "mlp", **keys: Any) -> Any:
    torch.manual_seed(99)
    setup = json_plans(1, optimizer=ADAM, **keys)[f"json {number}"]
    return deepspeed.initialize(model=models.BUILDERS[model](), config=setup)[0]


def step(engine: Any, number: int, rank: int, model: str = "mlp") -> None:
    engine.backward(engine(*models.batch(model, number, 0, rank)))
    engine.step()


# ------------------------------------------------------------------------------------ row 44: not every rank is there


def some_enter(rank: int, world: int, folder: str, entering: list[int]) -> dict[str, str]:
    """``entering`` call save, load and their DeepSpeed names; the others wait outside. Then all of them do."""
    engine, other = start("mlp", onecopy.stage(2, units=SMALL)), json_engine(3)
    for one in (engine, other):
        step(one, 0, rank)
    engine.save(folder, "good")
    calls: dict[str, Callable[[], Any]] = {
        "save": lambda: engine.save(folder, patience=0.3),
        "load": lambda: engine.load(folder, patience=0.3),
        "save_checkpoint": lambda: other.save_checkpoint(folder),
        "load_checkpoint": lambda: other.load_checkpoint(folder),
    }
    # DeepSpeed's signatures have no room for it.
    for name in ("save", "load"):
        real = getattr(other, name)
        setattr(other, name, lambda *args, real=real, **options: real(*args, **options, patience=0.3))
    texts = {}
    for name, call in calls.items():
        if rank in entering:
            began = time.monotonic()
            texts[name] = said(call, CheckpointError)
            assert time.monotonic() - began < 30
        dist.barrier()
    assert engine.global_steps == 1
    for one in (engine, other):
        step(one, 1, rank)
    dist.barrier()
    engine.save(folder, "after")
    engine.load(folder)
    assert engine.global_steps == 2
    texts["left"] = ", ".join(sorted(os.listdir(folder)))
    engine.close(), other.destroy()
    return texts


@pytest.mark.parametrize(("world", "entering"), [(2, [0]), (3, [0, 2])])
def test_a_save_or_load_that_some_ranks_enter_says_who_is_missing(tmp_path: Path, world: int, entering: list[int]) -> None:
    """``if rank == 0: engine.save(d)``: an error within 30 s that names the ranks inside and the missing ones,
    after which training and saving go on. Adds the other ranks, three of them, load, and DeepSpeed's names. (row 44)"""
    missing = [rank for rank in range(world) if rank not in entering]
    runs = run_ranks(some_enter, world, str(tmp_path), entering)
    for rank in entering:
        for name in ("save", "load", "save_checkpoint", "load_checkpoint"):
            what = name.removesuffix("_checkpoint")
            assert f"collective {what} entered by ranks {entering}, missing {missing}" in runs[rank][name]
    assert all(run["left"] == "after, good, latest" for run in runs)


def test_nobody_is_waited_for_longer_than_half_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is told otherwise, a save or a load on CPU ranks waits for 30 s at most. (row 44)"""
    monkeypatch.delenv("ONECOPY_PATIENCE")  # the suite's own
    for call in (onecopy.Engine.save, onecopy.Engine.load):
        patience = inspect.signature(call).parameters["patience"].default
        if patience is None:
            from onecopy.comm import watch

            patience = watch.patience() if not torch.accelerator.is_available() else 30
        assert 0 < patience <= 30


def save_and_load(rank: int, world: int, folder: str) -> str:
    """Rank 0 saves while rank 1 loads."""
    engine = start("mlp", onecopy.stage(3, units=SMALL))
    step(engine, 0, rank)
    engine.save(folder, "good")
    wrong = (lambda: engine.save(folder, patience=0.3)) if rank == 0 else (lambda: engine.load(folder, patience=0.3))
    text = said(wrong, CheckpointError)
    dist.barrier()
    engine.load(folder)
    engine.close()
    return text


def test_a_save_does_not_meet_a_load(tmp_path: Path) -> None:
    """Two ranks in different calls are each told that the other is not in theirs. (row 44)"""
    one, two = run_ranks(save_and_load, 2, str(tmp_path))
    assert "collective save entered by ranks [0], missing [1]" in one
    assert "collective load entered by ranks [1], missing [0]" in two


def gather_one(engine: Any, p: Any) -> Any:
    with onecopy.gathered(p):
        return p.detach().clone()


def gather_deepspeed(engine: Any, p: Any) -> Any:
    with deepspeed.zero.GatheredParameters([p]):
        return p.detach().clone()


GETTERS: dict[str, Callable[[Any, Any], Any]] = {
    "full_state_dict": lambda engine, p: engine.full_state_dict()["layers.1.weight"],
    "full_param": lambda engine, p: onecopy.full_param(p).clone(),
    "full_grad": lambda engine, p: onecopy.full_grad(p).clone(),
    "full_state": lambda engine, p: onecopy.full_state(p, "exp_avg").clone(),
    "gathered": gather_one,
    "GatheredParameters": gather_deepspeed,
}


def getter_alone(rank: int, world: int, folder: str, getter: str) -> str:
    """Rank 0 calls ``getter`` where rank 1 does not, as logging code does."""
    os.environ["ONECOPY_PATIENCE"] = "3"
    done = Path(folder) / "done"
    try:
        engine = start("mlp", onecopy.stage(3, units=SMALL))
        step(engine, 0, rank)
        engine.backward(engine(*models.batch("mlp", 1, 0, rank)))
        p = engine.module.layers[1].weight
        truth = GETTERS[getter](engine, p)
        if rank == 0:
            try:
                text = "right" if torch.equal(truth, GETTERS[getter](engine, p)) else "wrong values"
            except OneCopyError as error:
                text = str(error)
            done.touch()
            return text
        deadline = time.monotonic() + 20
        while not done.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        return ""
    finally:
        del os.environ["ONECOPY_PATIENCE"]


@pytest.mark.parametrize("getter", GETTERS)
def test_a_getter_that_one_rank_calls_says_who_is_missing(tmp_path: Path, getter: str) -> None:
    """``if rank == 0: print(full_param(p))`` and its like: an error of the library on that rank that names the
    missing one, or the right value without it; not a wait without end. (row 44)"""
    text = run_ranks(getter_alone, 2, str(tmp_path), getter, init_group=False)[0]
    assert text == "right" or "missing [1]" in text or "rank 1 did not come" in text, text


# --------------------------------------------------------------------------------- row 47: the way to the checkpoint


def lost_ways(rank: int, world: int, folder: str) -> dict[str, list[str]]:
    """Every wrong way to two good checkpoints, for both kinds of engine; what each rank is told."""
    out: dict[str, list[str]] = {}
    base = Path(folder)
    for kind, number in (("plain", 3), ("json", 2)):
        engine = start("mlp", onecopy.stage(3, units=SMALL)) if kind == "plain" else json_engine(number)
        runs = base / kind
        for tag in ("one", "two"):
            step(engine, 0, rank)
            engine.save(runs, tag)
        step(engine, 1, rank)
        before, counted = values(engine), engine.global_steps

        def load(where: Path, tag: str | None = None, engine: Any = engine, kind: str = kind) -> Any:
            return engine.load(where, tag) if kind == "plain" else engine.load_checkpoint(str(where), tag)

        pointers: dict[str, Callable[[Path], Any]] = {
            "pointer is stale": lambda path: path.write_text("three\n"),
            "pointer is empty": lambda path: path.write_text(""),
            "pointer leads outside": lambda path: path.write_text("../one\n"),
            "pointer is a folder": lambda path: (path.unlink(), path.mkdir()),
            "pointer is gone": lambda path: path.rmdir() if path.is_dir() else path.unlink(),
        }
        for name, damage in pointers.items():
            if rank == 0:
                damage(runs / "latest")
            dist.barrier()
            out[f"{kind}, {name}"] = [said(lambda w=runs: load(w), CheckpointError), str(runs)]
        for name, where, tag in (
            ("no such tag", runs, "three"),
            ("step folder", runs / "two", None),
            ("one level up", base, None),
            ("a file", runs / "one" / "manifest.json", None),
            ("nowhere", base / "nowhere", None),
            ("other tags", runs, f"tag{rank}"),
        ):
            out[f"{kind}, {name}"] = [said(lambda w=where, t=tag: load(w, t), CheckpointError), str(where)]
        assert not unequal(before, values(engine)), "an error changed weights"
        assert engine.global_steps == counted
        load(runs, "one")
        assert engine.global_steps == 1
        engine.close()
    return out


@pytest.mark.parametrize("world", [2, 3])
def test_a_wrong_way_to_a_checkpoint_lists_what_is_there(tmp_path: Path, world: int) -> None:
    """No pointer, a stale, empty or strange one, a tag that does not exist, the step's folder or the one above
    instead of its parent, other tags on two ranks: an error on all ranks that says the path tried and the complete tags,
    never a start from scratch. Adds ranks, both kinds of engine and the strange pointers. (row 47)"""
    runs = run_ranks(lost_ways, world, str(tmp_path))
    assert all(run == runs[0] for run in runs), "ranks are told different things"
    unclear = []
    for name, (text, path) in runs[0].items():
        what = name.split(", ")[1]
        words = {
            "other tags": ["tag0", "tag1"],
            "step folder": [path, "two", str(Path(path).parent)],
            "one level up": [path],
            "a file": [path],
            "nowhere": [path],
        }.get(what, [path, "one, two"])
        unclear += [f"{name}: {text}" for word in words if word not in text]
    assert not unclear, unclear


def two_folders(rank: int, world: int, folder: str) -> dict[str, str]:
    """The ranks load one tag from two folders, which hold different runs of one shape."""
    out = {}
    for name, plan in everywhere(world).items():
        held = []
        for run in range(2):
            engine = start("mlp", plan)
            for number in range(run + 1):
                step(engine, 7 * run + number, rank)
            engine.save(f"{folder}/{name}/{run}", "same")
            held.append(values(engine))
            engine.close()
        engine = start("mlp", plan)
        before = values(engine)
        try:
            engine.load(f"{folder}/{name}/{rank % 2}", "same")
            out[name] = "loaded the first" if not unequal(held[0], values(engine)) else "loaded a mixture"
        except CheckpointError as error:
            out[name] = "refused" if not unequal(before, values(engine)) else f"half loaded: {error}"
        engine.close()
    return out


def test_ranks_that_name_different_folders_do_not_load_a_mixture(tmp_path: Path) -> None:
    """Rank 0 loads ``a/same``, rank 1 ``b/same``: an error, or one of the two on all ranks; never parts of both. (row 47)"""
    for run in run_ranks(two_folders, 2, str(tmp_path)):
        assert set(run.values()) <= {"refused", "loaded the first"}, run


# --------------------------------------------------------------------------------------------- row 49: whose disk it is


def apart(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Ways in which the last rank's directory is not rank 0's, and ways in which it is."""
    store._SHARED_WITHIN = 0.2  # type: ignore[assignment]
    base, last, home = Path(folder), rank == world - 1, os.getcwd()
    engine, other = start("mlp", onecopy.stage(3, units=SMALL)), json_engine(1)
    for one in (engine, other):
        step(one, 0, rank)
    engine.save(base / "here", "good")
    truth = values(engine)
    if rank == 0:
        shutil.copytree(base / "here", base / "copy")
        (base / "link").symlink_to(base / "here", target_is_directory=True)
        for name in ("cwd0", "cwd1"):
            (base / name).mkdir()
    dist.barrier()
    texts = {
        "elsewhere": said(lambda: engine.save(base / ("there" if last else "here")), CheckpointError),
        "a copy": said(lambda: engine.save(base / ("copy" if last else "here")), CheckpointError),
        "json": said(lambda: other.save_checkpoint(str(base / ("there" if last else "here"))), CheckpointError),
    }
    os.chdir(base / ("cwd1" if last else "cwd0"))
    texts["other working directory"] = said(lambda: engine.save("runs"), CheckpointError)
    os.chdir(home)
    left = {name: sorted(os.listdir(base / name)) for name in ("here", "copy", "there", "cwd0/runs", "cwd1") if
            (base / name).exists()}  # fmt: skip
    dist.barrier()
    # The same storage by another name, and a copy of everything on every machine, are fine.
    step(engine, 1, rank)
    engine.save(base / ("link" if last else "here"), "linked")
    linked = values(engine)
    engine.load(base / ("here" if last else "link"), "linked")
    assert not unequal(linked, values(engine))
    engine.load(base / ("copy" if last else "here"), "good")
    assert not unequal(truth, values(engine))
    engine.close(), other.destroy()
    return {"texts": texts, "left": left}


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_write_to_different_disks_are_told_at_once(tmp_path: Path, world: int) -> None:
    """One rank writes to another directory, a copy of it, or the same relative path elsewhere: all ranks say so
    when saving, and nothing is left behind. Adds copies, links, working directories and a third rank. (row 49)"""
    runs = run_ranks(apart, world, str(tmp_path))
    for run in runs:
        for name, text in run["texts"].items():
            assert "ranks see different storage" in text, f"{name}: {text}"
            assert text == runs[0]["texts"][name] or name == "other working directory"
    assert runs[0]["left"]["here"] == ["good", "latest"] == runs[0]["left"]["copy"]
    assert not runs[0]["left"].get("there") and "cwd0/runs" not in runs[0]["left"] and not runs[0]["left"]["cwd1"]


def race(rank: int, world: int, folder: str) -> None:
    """All ranks make the directory that they save to, at the same time, again and again."""
    engine, other = start("toy", onecopy.stage(1)), json_engine(3, "toy")
    for one in (engine, other):
        step(one, 0, rank, "toy")
    for count in range(12):
        where = Path(folder) / "deep" / str(count)
        if count % 2:
            where.mkdir(parents=True, exist_ok=True)
        engine.save(where / "new", tag="x")
        other.save_checkpoint(str(where / "other"), tag="x")
        engine.load(where / "new")
        other.load_checkpoint(str(where / "other"))
    engine.close(), other.destroy()


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_make_the_same_directory_do_not_collide(tmp_path: Path, world: int) -> None:
    """Ranks race to create the directory of a save: nobody meets a FileExistsError. (row 49)"""
    run_ranks(race, world, str(tmp_path))
    assert len(list(tmp_path.glob("deep/*/*/latest"))) == 24


# --------------------------------------------------------------------------------------- row 50: nothing is unpickled


def trained(plan: Any, rank: int, model: str = "gpt") -> Any:
    schedule = lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=7)  # noqa: E731
    engine = start(model, plan, scheduler=schedule)
    step(engine, 0, rank, model)
    return engine


def save_every_kind(rank: int, world: int, folder: str, dtypes: tuple[str, ...]) -> None:
    for dtype in dtypes:
        for name, plan in everywhere(world, dtype=dtype).items():
            engine = trained(plan, rank)
            engine.save(f"{folder}/{dtype}/{name}", client_state={"epoch": 1, "note": (1, None, float("inf"))})
            whole = engine.full_state_dict()
            if rank == 0:
                torch.save(whole, f"{folder}/{dtype}/{name}/whole.pt")
            engine.close()
    for name, setup in json_plans(world, optimizer=ADAM, fp16={"enabled": True}).items():
        other = deepspeed.initialize(model=models.build("gpt"), config=setup)[0]
        step(other, 0, rank, "gpt")
        other.save_checkpoint(f"{folder}/json/{name}", client_state={"epoch": 1})
        other.destroy()


@pytest.mark.parametrize(("world", "dtypes"), [(2, ("fp32", "bf16", "fp16")), (4, ("bf16",))])
def test_every_file_of_every_plan_opens_without_pickle(tmp_path: Path, world: int, dtypes: tuple[str, ...]) -> None:
    """Files are safetensors, JSON and a line of text, for every stage and dtype; none begins as a pickle or a zip
    of pickles does. What ``full_state_dict`` gives is plain tensors, which torch.load opens by its default. (row 50)"""
    from safetensors.torch import load_file

    run_ranks(save_every_kind, world, str(tmp_path), dtypes)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    files = [file for file in files if file.name != "zero_to_fp32.py"]  # the script that save_checkpoint leaves beside
    assert len({file.suffix for file in files}) == 4
    for file in files:
        if file.suffix == ".pt":
            models.build("gpt").load_state_dict(torch.load(file))  # weights_only is the default
            continue
        assert file.read_bytes()[:2] not in (b"PK", b"\x80\x02", b"\x80\x04", b"\x80\x05"), file
        if file.suffix == ".safetensors":
            assert load_file(file) is not None
        elif file.suffix == ".json":
            assert json.loads(file.read_text())["format"] == 1
        else:
            assert file.name == "latest" and "\n" in file.read_text()


def no_pickle(*_: Any, **__: Any) -> Any:
    raise AssertionError("something was pickled or unpickled")


def without_pickle(rank: int, world: int, folder: str) -> None:
    """One rank, so that no message between ranks is pickled either."""
    names = ("load", "loads", "dump", "dumps", "Pickler", "Unpickler")
    held = {name: getattr(pickle, name) for name in names}
    torch_io = torch.save, torch.load
    for name, plan in everywhere(1, dtype="fp16").items():
        engine, second = trained(plan, rank), trained(plan, rank)
        try:
            for attribute in names:
                setattr(pickle, attribute, no_pickle)
            torch.save = torch.load = no_pickle
            engine.save(f"{folder}/{name}", client_state={"epoch": 1})
            second.load(f"{folder}/{name}")
        finally:
            for attribute, value in held.items():
                setattr(pickle, attribute, value)
            torch.save, torch.load = torch_io
        assert not unequal(values(engine), values(second))
        engine.close(), second.close()


def test_neither_saving_nor_loading_pickles(tmp_path: Path) -> None:
    """With every pickle function and torch.save and torch.load gone, both work. (row 50)"""
    run_ranks(without_pickle, 1, str(tmp_path))


class Colour:
    """A class that only this program knows."""


def other_version(rank: int, world: int, folder: str) -> list[str]:
    engine = trained(onecopy.stage(3, units=SMALL), rank)
    texts = [
        said(lambda: engine.save(folder, "odd", client_state={"a": {"b": Colour()}}), OneCopyError),
        said(lambda: engine.save(folder, "odd", client_state={"device": torch.device("cpu")}), OneCopyError),
        said(lambda: engine.save(folder, "odd", client_state={"path": Path("x")}), OneCopyError),
    ]
    folder_of = Path(engine.save(folder, "good"))
    truth = values(engine)
    if rank == 0:
        path = folder_of / "manifest.json"
        manifest = json.loads(path.read_text())
        manifest["library"] = {"onecopy": "9.9.9", "torch": "9.0", "new": "1"}
        manifest["parameters"]["emb.weight"]["new_field"] = [1, 2]
        manifest["plan"] = {"text": "Plan(unknown)", "accumulation": 1}
        path.write_text(seal(manifest))
    dist.barrier()
    step(engine, 1, rank, "gpt")
    engine.load(folder, "good")
    assert not unequal(truth, values(engine))
    texts.append(", ".join(sorted(os.listdir(folder))))
    engine.close()
    return texts


def test_objects_of_a_library_are_refused_and_other_versions_load(tmp_path: Path) -> None:
    """A class, a device or a path in ``client_state`` would need unpickling: an error that says where it is. A
    manifest by another version, with fields and a plan this one does not know, loads. (row 50)"""
    for texts in run_ranks(other_version, 2, str(tmp_path)):
        for text, key in zip(texts, ("['a']['b']", "['device']", "['path']"), strict=False):
            assert f"client_state{key}" in text, text
        assert texts[-1] == "good, latest"
