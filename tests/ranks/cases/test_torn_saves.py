"""A save that does not come to its end: killed at any point, or out of space. Resuming finds a complete checkpoint."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import onecopy
from onecopy.checkpoint import save as saving
from onecopy.checkpoint import store, tensors
from onecopy.errors import CheckpointError
from tests.ranks import models
from tests.ranks.cases.everywhere import everywhere, said, values
from tests.ranks.checkpoints import SMALL, everything, start, steps, unequal
from tests.ranks.harness import RankFailure, run_ranks

pytestmark = pytest.mark.ranks

STATES = ("exp_avg", "exp_avg_sq")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# -------------------------------------------------------------------------------------------- row 45: killed on the way


def arm(at: str, rank: int) -> None:
    """The process of the rank that ``at`` is about kills itself there, without a chance to clean up."""
    write, commit = saving.write_tensors, store.Draft.commit

    def half(path: Path, parts: Any) -> Any:
        if at == "before rank 1 writes":
            kill()
        record = write(path, parts)
        if at == "half of rank 1's file":
            os.truncate(path, record.bytes // 2)
            kill()
        return record

    def torn(draft: Any, manifest: Any) -> None:
        if at == "half of the manifest":
            (draft.folder / "manifest.json").write_text(manifest.text()[:200])
            kill()
        commit(draft, manifest)

    if rank == 1 and at in ("before rank 1 writes", "half of rank 1's file"):
        saving.write_tensors = half
    if rank == 0:
        if at == "half of the manifest":
            store.Draft.commit = torn  # type: ignore[method-assign]
        if at == "before the pointer moves":
            store.Draft.point = lambda draft: kill()  # type: ignore[method-assign]
        if at == "before the former one is removed":
            store.shutil.rmtree = lambda path: kill()  # type: ignore[assignment,attr-defined]


def killed(rank: int, world: int, folder: str, at: str, plan: Any, second: str) -> None:
    """Save step 1, then die while saving step 2 under the tag ``second``."""
    engine = start("mlp", plan)
    steps(engine, "mlp", rank, world, range(1), parts=world)
    engine.save(folder, "first", client_state={"step": 1})
    steps(engine, "mlp", rank, world, range(1, 2), parts=world)
    arm(at, rank)
    engine.save(folder, second, client_state={"step": 2})


def truths(rank: int, world: int, plan: Any) -> list[dict[str, torch.Tensor]]:
    """States after one and after two steps of a run that nobody killed."""
    engine, found = start("mlp", plan), []
    for number in range(2):
        steps(engine, "mlp", rank, world, range(number, number + 1), parts=world)
        found.append(everything(engine, STATES))
    engine.close()
    return found


def resumed(rank: int, world: int, folder: str, plans: dict[str, Any]) -> dict[str, Any]:
    """(client state, weights and moments) as every plan resumes; then the same save again, which tidies up."""
    out = {}
    for name, plan in plans.items():
        engine = start("mlp", plan)
        client = engine.load(folder)
        out[name] = client["step"], engine.global_steps, everything(engine, STATES)
        engine.close()
    engine = start("mlp", next(iter(plans.values())))
    engine.load(folder)
    engine.save(folder, "again")
    engine.load(folder, "again")
    engine.close()
    return out


KILLS = {
    # where: (the plan that saves, the tag of the second save, what may be resumed)
    "before rank 1 writes": ("stage 3", "second", {1}),
    "half of rank 1's file": ("stage 2", "second", {1}),
    "half of the manifest": ("stage 1", "second", {1}),
    "before the pointer moves": ("stage 2", "second", {1, 2}),
    "before the former one is removed": ("stage 0", "first", {1, 2}),
}


@pytest.mark.parametrize("at", KILLS)
def test_killed_while_saving_all_ranks_resume_the_same_complete_one(tmp_path: Path, at: str) -> None:
    """SIGKILL of one of two ranks at each point of the second save: several plans resume step 1, or step 2 where it
    is complete, with all its bits, on every rank. Adds rank 0's points, replaced tags, and what is read back. (row 45)"""
    plan, second, allowed = KILLS[at]
    plans = everywhere(2)
    right = run_ranks(truths, 2, plans[plan])[0]
    several = {name: plans[name] for name in ("stage 3", "stage 2", "stage 0")}
    with pytest.raises(RankFailure, match=r"-9|[Cc]onnection|did not"):
        run_ranks(killed, 2, str(tmp_path), at, plans[plan], second)
    runs = run_ranks(resumed, 2, str(tmp_path), several)
    picked = {(step, count) for run in runs for step, count, _ in run.values()}
    assert len(picked) == 1, picked
    step, count = picked.pop()
    assert step == count and step in allowed
    for run in runs:
        for name, (_, _, states) in run.items():
            assert not unequal(right[step - 1], states), name
    left = sorted(entry.name for entry in tmp_path.iterdir() if not entry.name.startswith("."))
    assert left == sorted({"again", "first", "latest"} | ({"second"} & set(left)))


def told_on_loading(rank: int, world: int, folder: str) -> str:
    """Everything that loading says by log or warning."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("onecopy")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = start("mlp", onecopy.stage(2, units=SMALL))
        engine.load(folder)
        engine.close()
    logger.removeHandler(handler)
    logger.setLevel(level)
    return "\n".join([*lines, *(str(one.message) for one in caught)])


def test_resuming_an_older_one_says_why(tmp_path: Path) -> None:
    """When the newest save was torn and an older one is resumed, rank 0 says so in the log or as a warning. (row 45)"""
    with pytest.raises(RankFailure):
        run_ranks(killed, 2, str(tmp_path), "half of rank 1's file", onecopy.stage(2, units=SMALL), "second")
    text = run_ranks(told_on_loading, 2, str(tmp_path))[0]
    assert "first" in text and "second" in text, f"loading said: {text!r}"


def damage(path: Path, how: str) -> None:
    size = path.stat().st_size
    data = path.read_bytes()
    path.write_bytes({"cut": data[: size // 2], "short": data[:-1], "empty": b"", "long": data + b"\0"}[how])


def load_damaged(rank: int, world: int, folder: str, cases: list[tuple[str, str, int, int]]) -> list[str]:
    """Load copies of a checkpoint in which one file has another length; after each, a load of the good one."""
    wrong = []
    for name, plan in everywhere(world).items():
        engine = start("mlp", plan)
        before = everything(engine)
        for tag, file, was, now in cases:
            text = said(lambda engine=engine, tag=tag: engine.load(folder, tag), CheckpointError)
            if not (file in text and str(now) in text and str(was) in text):
                wrong.append(f"{name}, {tag}: {text}")
        wrong += [f"{name}: {key} was changed" for key in unequal(before, everything(engine))]
        engine.load(folder, "first")
        engine.close()
    return wrong


def save_first(rank: int, world: int, folder: str) -> None:
    engine = start("mlp", onecopy.stage(3, units=SMALL))
    steps(engine, "mlp", rank, world, range(1), parts=world)
    engine.save(folder, "first")
    engine.close()


@pytest.mark.parametrize("world", [2, 3])
def test_a_shard_of_another_length_is_named_with_both_lengths(tmp_path: Path, world: int) -> None:
    """A shard that is cut, a byte short, empty, or a byte long: the error names the file and the bytes expected
    and found, whichever rank reads it under whichever plan, and nothing is half loaded. Adds all plans and one byte.
    (row 45)"""
    run_ranks(save_first, world, str(tmp_path))
    cases = []
    for index, how in enumerate(("cut", "short", "empty", "long")):
        file = f"rank-0000{index % world}.safetensors"
        tag = f"{how}-{file[:10]}"
        shutil.copytree(tmp_path / "first", tmp_path / tag)
        was = (tmp_path / tag / file).stat().st_size
        damage(tmp_path / tag / file, how)
        cases.append((tag, file, was, (tmp_path / tag / file).stat().st_size))
    assert run_ranks(load_damaged, 2, str(tmp_path), cases) == [[], []]


# ------------------------------------------------------------------------------------------------ row 46: no space left

ON_A_SMALL_DISK = """
    import contextlib, json, os, shutil, sys, threading
    import torch
    import onecopy
    from onecopy.checkpoint import writer
    from onecopy.errors import CheckpointError

    disk, out = sys.argv[1:]

    def fill_up_behind_training(engine, folder, rank, step):
        # There is room when an asynchronous save begins, and none left when it writes.
        go, finish = threading.Event(), writer.Writer.finish
        writer.Writer.finish = lambda one: (go.wait(60), finish(one))[1]
        engine.save(folder, "behind", asynchronous=True)
        writer.Writer.finish = finish
        if rank == 0:
            # Nothing is left when the save's thread takes the room of its file.
            with open(f"{disk}/filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
                while True:
                    file.write(bytes(4096))
        torch.distributed.barrier()
        go.set()
        engine._saves._thread.join()
        try:
            step()
            said = "no error"
        except CheckpointError as error:
            said = str(error)
        left = os.path.exists(folder)
        torch.distributed.barrier()
        if rank == 0:
            os.remove(f"{disk}/filler")
        torch.distributed.barrier()
        return [said, left]
    torch.manual_seed(0)
    told = {}
    for number in (3, 1):
        folder, plan = f"{disk}/{number}", onecopy.stage(number)
        model = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4)))
        engine = onecopy.initialize(model, plan, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3))
        rank = int(os.environ["RANK"])

        def step():
            engine(torch.ones(2, 128)).square().mean().backward()
            engine.step()

        step()
        behind = fill_up_behind_training(engine, folder, rank, step)
        engine.save(folder, "good")
        truth = {key: value.clone() for key, value in engine.full_state_dict().items()}
        step()
        try:
            engine.save(folder, "more")
            said = "saved"
        except CheckpointError as error:
            said = str(error)
        step()
        left = sorted(os.listdir(folder))
        engine.load(folder)
        same = all(torch.equal(value, truth[key]) for key, value in engine.full_state_dict().items())
        told[number] = [said, left, same, engine.global_steps, behind]
        engine.close()
        torch.distributed.barrier()
        if rank == 0:
            shutil.rmtree(folder)
        torch.distributed.barrier()
    with open(f"{out}/rank{rank}.json", "w") as file:
        json.dump(told, file)
"""


def test_a_disk_that_is_too_small(tmp_path: Path) -> None:
    """A file system of 1.3 MB where one checkpoint of 0.8 MB fits and two do not: all ranks raise the same error,
    which says what is needed and what there is; nothing is left behind, the former one loads, and training goes on. So it
    does when the disk fills up behind an asynchronous save. (row 46)"""
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "job.py").write_text(textwrap.dedent(ON_A_SMALL_DISK))
    job = [sys.executable, "-m", "onecopy.cli", "launch", "--nproc", "2", str(tmp_path / "job.py"), str(disk), str(tmp_path)]
    mount = f"mount -t tmpfs -o size=1300k none {disk} || exit 77; exec " + " ".join(job)
    try:
        done = subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True, text=True, timeout=100)
    except FileNotFoundError:
        pytest.skip("no unshare here to mount a small disk with")
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    one, two = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert one == two
    for name, (text, left, same, count, (behind, left_behind)) in one.items():
        assert "the asynchronous save of" in behind and "No space left on device" in behind, behind
        assert left_behind is False
        assert text.startswith("no space to save in"), f"{name}: {text}"
        assert re.search(r"needs [\d.]+ [KM]iB, [\d.]+ [KM]iB are free", text), text
        assert left == ["good", "latest"], name
        assert same, f"{name}: not the former checkpoint"
        assert count == 2, name


def no_space(*_: Any, **__: Any) -> Any:
    raise OSError(28, "No space left on device")


def fills_up(rank: int, world: int, folder: str, plans: list[str]) -> dict[str, list[Any]]:
    """The disk fills up at each point of a save, on rank 0 or on the last rank; training goes on after each."""
    points: dict[str, tuple[int, Any, str, Any]] = {
        "before": (0, store.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 0, 10)),  # type: ignore
        "folder": (0, store.Path, "mkdir", no_space),
        "shard": (world - 1, tensors.os, "fsync", no_space),
        "manifest": (0, saving, "_manifest", no_space),
        "rename": (0, store.os, "rename", no_space),
        "pointer": (0, store.os, "replace", no_space),
    }
    out = {}
    for name in plans:
        engine, at = start("mlp", everywhere(world)[name]), 0
        for what, (where, module, attribute, broken) in points.items():
            steps(engine, "mlp", rank, world, range(at, at + 1), parts=world)
            place = f"{folder}/{name}/{what}"
            engine.save(place, "good")
            truth = everything(engine, STATES)
            steps(engine, "mlp", rank, world, range(at + 1, at + 2), parts=world)
            real = getattr(module, attribute)
            if rank == where:
                setattr(module, attribute, broken)
            dist.barrier()
            try:
                text = said(lambda engine=engine, place=place: engine.save(place, "more"), CheckpointError)
            finally:
                setattr(module, attribute, real)
            left = sorted(os.listdir(place))
            dist.barrier()
            engine.load(place)
            same = not unequal(truth, everything(engine, STATES))
            engine.save(place, "more")
            out[f"{name}, {what}"] = [text, left, same, sorted(os.listdir(place))]
            dist.barrier()
            at += 2
        engine.close()
    return out


@pytest.mark.parametrize(("world", "plans"), [(2, ["stage 0", "stage 2", "stage 3"]), (3, ["stage 3"])])
def test_a_disk_that_fills_up_on_the_way(tmp_path: Path, world: int, plans: list[str]) -> None:
    """No space at any point of a save, on any rank, under several plans: one error for all that says so, the former
    checkpoint is what a resume finds, and the next save works. Adds the points between. (row 46)"""
    runs = run_ranks(fills_up, world, str(tmp_path), plans)
    for run in runs:
        for name, (text, left, same, after) in run.items():
            assert text == runs[0][name][0], name
            assert "space" in text, f"{name}: {text}"
            if name.endswith("before"):
                assert "10 bytes are free" in text and re.search(r"needs [\d.]+ KiB", text), text
            assert same, f"{name}: not the former checkpoint"
            assert [entry for entry in left if not entry.startswith(".")] in (["good", "latest"], ["good", "latest", "more"])
            assert left == ["good", "latest"] or name.endswith("pointer"), f"{name} left {left}"
            assert after == ["good", "latest", "more"], f"{name} left {after}"


def weights_alone(rank: int, world: int, folder: str) -> list[int]:
    """Bytes of a checkpoint with and without the optimizer's states, and of the state dict."""
    engine = start(models.build("gpt"), onecopy.stage(3, units=SMALL))
    steps(engine, "gpt", rank, world, range(1), parts=world)
    engine.save(folder, "all")
    state = engine.full_state_dict(rank0_only=True)
    truth = values(engine)
    engine.close()
    if rank == 0:
        torch.save(state, f"{folder}/state.pt")
    forward = onecopy.initialize(models.BUILDERS["gpt"](), onecopy.stage(3, units=SMALL))
    forward.load(folder, "all")
    forward.save(folder, "weights", latest=False)
    assert not unequal(truth, values(forward))
    forward.close()
    dist.barrier()

    def size(path: Path) -> int:
        return sum(file.stat().st_size for file in path.glob("*.safetensors")) if path.is_dir() else path.stat().st_size

    return [size(Path(folder) / name) for name in ("all", "weights", "state.pt")]


def test_weights_can_be_saved_without_the_optimizer(tmp_path: Path) -> None:
    """Where a whole checkpoint does not fit, the weights alone take a third of it: a state dict, or the
    checkpoint of an engine that only runs forward. (row 46)"""
    every, weights, state = run_ranks(weights_alone, 2, str(tmp_path))[0]
    size = 4 * sum(p.numel() for p in models.build("gpt").parameters())
    own = 2 * 12288  # what both ranks have of their own, random states above all
    assert size <= weights <= size + 8192 + own and size <= state <= size + 8192
    assert every >= 3 * size
