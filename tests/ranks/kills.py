"""A run whose ranks are killed at random moments of its saves, again and again, and that goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import torch

import onecopy
from onecopy.checkpoint import store
from tests.ranks import models
from tests.ranks.checkpoints import SMALL, everything, start
from tests.ranks.harness import RankFailure, run_ranks

__all__ = ["Life", "lives"]

WORLD = 2
STATES = ("exp_avg", "exp_avg_sq")


class Data:
    """Where the loop is in its data: the number of its next batch, drawn with Python's random generator."""

    def __init__(self) -> None:
        self.number = 0

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def digest(engine: Any) -> str:
    """Of weights, moments, random states and rates."""
    found = hashlib.sha256(repr((engine.lr(), engine.global_steps, random.getstate())).encode())
    found.update(torch.get_rng_state().numpy().tobytes())
    for name, value in everything(engine, STATES).items():
        found.update(name.encode() + value.numpy().tobytes())
    return found.hexdigest()


class Loop:
    """Dropout, a schedule, and batches by the numbers that Python's generator draws."""

    def __init__(self, rank: int) -> None:
        cosine = lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=50)  # noqa: E731
        self.engine = start("gpt dropout", onecopy.stage(2, units=SMALL), scheduler=cosine)
        self.data, self.rank = Data(), rank
        random.seed(rank)
        torch.manual_seed(rank)

    def step(self) -> None:
        number = self.data.number + random.randrange(3)
        self.engine(*models.batch("gpt", number, 0, self.rank)).backward()
        self.engine.step()
        self.data.number = number + 1


def reference(rank: int, world: int, steps: int) -> list[str]:
    """Digests of a run that nobody kills, before its first step and after each."""
    loop = Loop(rank)
    found = [digest(loop.engine)]
    for _ in range(steps):
        loop.step()
        found.append(digest(loop.engine))
    loop.engine.close()
    return found


class Life:
    """When a rank is killed: ``delay`` seconds after ``victim`` begins the save number ``save``; None: never."""

    def __init__(self, number: int, draw: random.Random, asynchronous: bool | None, longest: float) -> None:
        self.number = number
        self.asynchronous = asynchronous
        self.victim: int | None = draw.randrange(WORLD)
        self.save = draw.randrange(1, 4)
        self.delay = draw.uniform(0, longest)

    def spared(self) -> Life:
        """The same, and nobody is killed."""
        self.victim = None
        return self


def live(rank: int, world: int, folder: str, truth: list[list[str]], plan: Life) -> int:
    """Go on from the newest checkpoint, step and save, until ``plan`` kills a rank. Returns where it was at the end."""
    loop, place = Loop(rank), Path(folder)
    if (place / "latest").exists():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            loop.engine.load(folder, data=loop.data)
    began = loop.engine.global_steps
    if digest(loop.engine) != truth[rank][began]:
        raise AssertionError(f"resumed at step {began} with other bits than the run that nobody killed")
    if rank == 0:
        with open(place / ".lives", "a") as lines:
            lines.write(json.dumps({"began": began, "life": plan.number}) + "\n")
    for count in range(len(truth[rank]) - 1 - began):
        loop.step()
        if digest(loop.engine) != truth[rank][loop.engine.global_steps]:
            raise AssertionError(f"step {loop.engine.global_steps} has other bits than in the run that nobody killed")
        if rank == plan.victim and count == plan.save:
            timer = threading.Timer(plan.delay, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()
        asynchronous = plan.asynchronous if plan.asynchronous is not None else count % 2 == 0
        loop.engine.save(folder, data=loop.data, keep_last=2, asynchronous=asynchronous)
    loop.engine.close()
    return loop.engine.global_steps


def lives(folder: Path, count: int, seed: int, longest: float) -> dict[str, Any]:
    """``count`` lives of one run, then one to its end. Returns what was found after each kill."""
    draw = random.Random(seed)
    truth = run_ranks(reference, WORLD, 5 * count + 3, timeout=300)
    folder.mkdir()
    found: dict[str, Any] = {"kills": 0, "sync": 0, "async": 0, "half a save left": 0, "victims": [0] * WORLD}
    for number in range(count):
        life = Life(number, draw, number % 2 == 0, longest)
        try:
            run_ranks(live, WORLD, str(folder), truth, life, timeout=60)
            raise AssertionError("nobody was killed")
        except RankFailure as failure:
            assert "AssertionError" not in str(failure), failure
        found["kills"] += 1
        found["async" if life.asynchronous else "sync"] += 1
        assert life.victim is not None
        found["victims"][life.victim] += 1
        found["half a save left"] += bool(list(folder.glob(".*.partial")))
        complete = store.complete_tags(folder)
        assert complete or number == 0, "no complete checkpoint is left"
    ends = run_ranks(live, WORLD, str(folder), truth, Life(count, draw, None, longest).spared(), timeout=300)
    assert ends == [len(truth[0]) - 1] * WORLD
    assert sorted(os.listdir(folder))[-3:] == ["latest", *store.complete_tags(folder)]
    begins = [json.loads(line) for line in (folder / ".lives").read_text().splitlines()]
    assert len({each["life"] for each in begins}) == count + 1, "a life that never resumed"
    return found | {"begins": [each["began"] for each in begins]}
