"""Asynchronous saves: what they write, what training does meanwhile, and where their errors go."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import onecopy
from onecopy.checkpoint import background, store, writer
from tests.ranks.checkpoints import SMALL, everything, refusal, start, steps, unequal
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.ranks

STATES = ("exp_avg", "exp_avg_sq")
FINISH = writer.Writer.finish


def held_back(event: threading.Event) -> Any:
    """A ``Writer.finish`` that waits, so that training is certain to go on before anything is written."""

    def finish(one: Any) -> Any:
        assert event.wait(60)
        return FINISH(one)

    return finish


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def plans(world: int, nvme: str) -> dict[str, Any]:
    found = {
        "stage 2": onecopy.stage(2, units=SMALL, dtype="bf16"),
        "host": onecopy.offload(onecopy.stage(3, units=SMALL)),
        "disk": onecopy.infinity(nvme, units=SMALL),
    }
    return found if world == 2 else {"pairs": onecopy.hsdp(shard=2, units=SMALL)}


def while_training(rank: int, world: int, folder: str, nvme: str) -> list[str]:
    """Save one state both ways; the asynchronous one is written only after training has changed everything."""
    wrong = []
    for name, plan in plans(world, nvme).items():
        engine, place = start("mlp", plan), Path(folder) / name
        steps(engine, "mlp", rank, world, range(2))
        truth = everything(engine, STATES)
        engine.save(place, "sync")
        go = threading.Event()
        writer.Writer.finish = held_back(go)  # type: ignore[method-assign]
        assert engine.save(place, "async", {"rank": rank}, asynchronous=True, keep_last=1) == str(place / "async")
        steps(engine, "mlp", rank, world, range(2, 4))
        random.random(), np.random.rand(), torch.rand(1)
        if store.complete_tags(place) != ["sync"] or (place / "latest").read_text() != "sync\n":
            wrong.append(f"{name}: visible before it is written")
        dist.barrier()
        go.set()
        loaded = engine.load(place)  # waits for it
        writer.Writer.finish = FINISH  # type: ignore[method-assign]
        if loaded.path != str(place / "async") or loaded != {"rank": rank}:
            wrong.append(f"{name}: loaded {loaded.path} with {dict(loaded)}")
        wrong += [f"{name}: {key}" for key in unequal(truth, everything(engine, STATES))]
        if sorted(os.listdir(place)) != ["async", "latest"]:
            wrong.append(f"{name}: left {os.listdir(place)}")
        engine.save(place, "sync")
        dist.barrier()
        if contents(place / "sync") != contents(place / "async"):
            wrong.append(f"{name}: other bytes than those of an ordinary save")
        engine.close()
    return wrong


@pytest.mark.parametrize("world", [2, 4])
def test_what_was_saved_is_what_there_was_at_the_call(tmp_path: Path, world: int) -> None:
    """Whatever training does before it is written, to the last byte, wherever states rest; random states too."""
    (tmp_path / "nvme").mkdir()
    assert run_ranks(while_training, world, str(tmp_path / "saves"), str(tmp_path / "nvme")) == [[]] * world


def no_space(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


def errors(rank: int, world: int, folder: str) -> dict[str, str]:
    """A disk that fills up behind training, on one rank or the other; where that is told, and that nothing else suffers."""
    engine, twin, told = start("mlp", onecopy.stage(2, units=SMALL)), start("mlp", onecopy.stage(2, units=SMALL)), {}
    for one in (engine, twin):
        steps(one, "mlp", rank, world, range(1))
    engine.save(folder, "good")

    def fail(victim: int, tag: str) -> None:
        writer.Writer.finish = no_space if rank == victim else FINISH  # type: ignore[method-assign,assignment]
        engine.save(folder, tag, asynchronous=True)
        thread = engine._saves._thread
        assert thread is not None
        thread.join(60)
        writer.Writer.finish = FINISH  # type: ignore[method-assign]

    fail(1, "step")
    if rank == 1:  # hears of it after the step
        real, engine._saves.failure = engine._saves.failure, lambda: ""
    told["step"] = refusal(lambda: steps(engine, "mlp", rank, world, range(1, 2)))
    if rank == 1:
        engine._saves.failure = real
    steps(twin, "mlp", rank, world, range(1, 2))
    assert not unequal(everything(engine, STATES), everything(twin, STATES)), "the step was not taken"
    assert engine.micro_steps == twin.micro_steps == 2
    for one in (engine, twin):
        steps(one, "mlp", rank, world, range(2, 3))
    fail(0, "save")
    told["save"] = refusal(lambda: engine.save(folder, "next"))
    fail(1, "load")
    told["load"] = refusal(lambda: engine.load(folder))
    assert not unequal(everything(engine), everything(twin))
    assert sorted(os.listdir(folder)) == ["good", "latest"]
    engine.save(folder, "more", asynchronous=True)
    engine.save(folder, "most", asynchronous=True)  # waits for the one before
    fail(1, "close")
    told["close"] = refusal(engine.close)
    twin.load(folder)
    assert sorted(os.listdir(folder)) == ["good", "latest", "more", "most"]
    twin.close()
    return told


def test_errors_come_up_in_the_next_call_on_every_rank(tmp_path: Path) -> None:
    one, two = run_ranks(errors, 2, str(tmp_path))
    assert one == two
    for what, text in one.items():
        assert f"the asynchronous save of {tmp_path / what} failed: " in text, text
        assert f"No space left on device (on rank {int(what != 'save')})" in text, text


def refused(rank: int, world: int, folder: str) -> list[str]:
    engine = start("mlp", onecopy.stage(1))
    steps(engine, "mlp", rank, world, range(1))
    memory = background.psutil.virtual_memory
    background.psutil.virtual_memory = lambda: namedtuple("memory", "available")(100)
    said = [refusal(lambda: engine.save(folder, asynchronous=True))]
    background.psutil.virtual_memory = memory
    said += [
        refusal(lambda: engine.save(folder, keep_last=0)),
        refusal(lambda: engine.save(folder, keep_last=2, latest=False)),
        refusal(lambda: engine.save(folder, asynchronous=rank == 0)),
        refusal(lambda: engine.save(folder, data=[1, 2])),  # type: ignore[arg-type]
    ]
    assert not os.path.exists(folder) or not os.listdir(folder)
    engine.close()
    return said


def test_what_cannot_be_asked_for(tmp_path: Path) -> None:
    one, two = run_ranks(refused, 2, str(tmp_path / "none"))
    assert one == two
    for text, words in zip(
        one,
        ("where 100 are free; save without asynchronous=", "keep_last is 0; it is a whole number from 1",
         "keep_last=2 with latest=False", "ranks disagree about how to save", "data is a list, which has no state_dict()"),
        strict=True,
    ):  # fmt: skip
        assert words in text, text


AT_THE_END = """
    import sys, time, torch, onecopy
    from onecopy.checkpoint import writer

    finish = writer.Writer.finish
    def slow(one):
        time.sleep(0.5)
        if "bad" in str(one.path):
            raise OSError(28, "No space left on device")
        return finish(one)
    writer.Writer.finish = slow
    for name in ("good", "bad"):
        engine = onecopy.initialize(torch.nn.Linear(3, 3), onecopy.stage(1), optimizer=torch.optim.AdamW)
        engine.save(f"{sys.argv[1]}/{name}", "tag", asynchronous=True)
"""


def test_the_interpreter_waits_for_it_and_says_what_nobody_asked(tmp_path: Path) -> None:
    """A script that ends, or drops its engine, right after the call: the checkpoint is there; a failure is on stderr."""
    script = "\n".join(line[4:] for line in AT_THE_END.splitlines())
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert store.complete_tags(tmp_path / "good") == ["tag"] and (tmp_path / "good" / "latest").exists()
    assert not (tmp_path / "bad").exists()
    assert "failed: " in done.stderr and "No space left on device" in done.stderr, done.stderr
