"""Saving and loading that cannot be: one error on all ranks, nothing left behind, nothing half loaded."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import onecopy
from onecopy.checkpoint import reader
from onecopy.checkpoint import save as saving
from onecopy.checkpoint.store import complete_tags
from tests.ranks import models
from tests.ranks.checkpoints import SMALL, everything, refusal, start, steps, unequal
from tests.ranks.harness import RankFailure, run_ranks

pytestmark = pytest.mark.ranks


# ------------------------------------------------------------------------------------------------------ what goes wrong


def bad_calls(rank: int, world: int, folder: str) -> dict[str, str]:
    plan = onecopy.stage(1, accumulation=2, units=SMALL)
    engine = start("mlp", plan)
    out = {}

    def micro() -> None:
        engine(*models.batch("mlp", 0, 0, rank)).backward()
        engine.step()

    micro()
    out["open window"] = refusal(lambda: engine.save(folder))
    out["open window, load"] = refusal(lambda: engine.load(folder))
    micro()
    engine.save(folder, "good")
    if rank == 1:  # gradients on one rank only
        engine(*models.batch("mlp", 0, 0, rank)).backward()
    out["one rank's gradients"] = refusal(lambda: engine.save(folder))
    engine.discard_gradients()
    with onecopy.gathered(engine.module):
        out["inside gathered"] = refusal(lambda: engine.save(folder))
    out["tensor on rank 1"] = refusal(lambda: engine.save(folder, client_state={"x": torch.ones(2) if rank else 1}))
    out["tags"] = refusal(lambda: engine.save(folder, tag=f"tag{rank}"))
    out["load tags"] = refusal(lambda: engine.load(folder, tag=f"tag{rank}"))
    out["no dict"] = refusal(lambda: engine.save(folder, client_state=[1]))
    out["storage"] = refusal(lambda: engine.save(f"{folder}/of-rank-{rank}"))
    # After all of these the run goes on, and what was there is there.
    micro(), micro()
    engine.save(folder, "later")
    out["left"] = ", ".join(sorted(entry.name for entry in Path(folder).iterdir()))
    engine.close()
    return out


def test_one_error_on_all_ranks_and_nothing_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = run_ranks(bad_calls, 2, str(tmp_path))
    assert {**one, "storage": ""} == {**two, "storage": ""}
    assert (
        "save() with gradients that no step has used: 1 micro-batches are done, with accumulation over 2"
        in one["open window"]
    )
    assert "load() with gradients" in one["open window, load"]
    assert "(on rank 1)" in one["one rank's gradients"]
    assert "inside a forward pass or `with onecopy.gathered" in one["inside gathered"]
    assert "client_state['x'] is a tensor of shape (2,)" in one["tensor on rank 1"]
    assert "(on rank 1)" in one["tensor on rank 1"]
    assert "rank 0 has 'tag0', rank 1 has 'tag1'" in one["tags"]
    assert "rank 0 has ('tag0'" in one["load tags"]
    assert "client_state is a list; give a dict" in one["no dict"]
    assert "ranks see different storage" in one["storage"]
    assert "of-rank-1" in one["storage"]
    assert one["left"] == "good, later, latest"


def missing_rank(rank: int, world: int, folder: str) -> str:
    engine = start("mlp", onecopy.stage(2))
    steps(engine, "mlp", rank, world, range(1))
    said = ""
    if rank == 0:
        said = refusal(lambda: engine.save(folder, patience=0.5))
    dist.barrier()
    # A late rank is waited for.
    late = threading.Event()
    if rank == 1:
        late.wait(0.5)
    engine.save(folder)
    engine.load(folder)
    engine.close()
    return said


def test_who_is_missing_is_named(tmp_path: Path) -> None:
    said = run_ranks(missing_rank, 2, str(tmp_path))[0]
    assert "collective save entered by ranks [0], missing [1] after 0.5 s" in said


def full_disk(rank: int, world: int, folder: str) -> list[str]:
    engine = start("mlp", onecopy.stage(3))
    steps(engine, "mlp", rank, world, range(1))
    engine.save(folder, "good")
    truth = everything(engine)
    said = []
    real = saving.write_tensors
    for victim in (0, 1):

        def fails(path: Path, tensors: Any, victim: int = victim) -> Any:
            if rank == victim:
                path.write_bytes(b"half")
                raise OSError(28, "No space left on device", str(path))
            return real(path, tensors)

        saving.write_tensors = fails
        said.append(refusal(lambda: engine.save(folder, "more")))
        saving.write_tensors = real
        said.append(", ".join(sorted(os.listdir(folder))))
    said.append(str(refusal(lambda: failing_read(engine, folder, rank))))
    engine.load(folder)
    assert not unequal(truth, everything(engine))
    steps(engine, "mlp", rank, world, range(1, 2))
    engine.close()
    return said


def failing_read(engine: Any, folder: str, rank: int) -> None:
    """A disk that breaks on rank 1 while the weights are being read."""
    real = reader.Reader.read
    try:
        if rank == 1:
            reader.Reader.read = lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error"))  # type: ignore
        engine.load(folder)
    finally:
        reader.Reader.read = real  # type: ignore[method-assign]


def test_a_disk_that_fails_on_one_rank(tmp_path: Path) -> None:
    one, two = run_ranks(full_disk, 2, str(tmp_path))
    assert one == two
    for rank in (0, 1):
        assert "No space left on device" in one[2 * rank]
        assert f"(on rank {rank})" in one[2 * rank]
        assert f"rank-0000{rank}.safetensors" in one[2 * rank]
        assert one[2 * rank + 1] == "good, latest"
    assert "Input/output error" in one[4]
    assert "load again to go on" in one[4]


def dies(rank: int, world: int, folder: str, at: str) -> None:
    """Rank 1 (or rank 0 at the end) is killed in the middle of the second save."""
    engine = start("mlp", onecopy.stage(3, dtype="bf16"))
    steps(engine, "mlp", rank, world, range(1))
    engine.save(folder, "first")
    steps(engine, "mlp", rank, world, range(1, 2))
    real = saving.write_tensors

    def write(path: Path, tensors: Any) -> Any:
        record = real(path, tensors)
        if at == "half written" and rank == 1:
            os.truncate(path, record.bytes // 2)
        if at in ("half written", "written") and rank == 1:
            os._exit(9)
        return record

    saving.write_tensors = write
    if at == "before the pointer" and rank == 0:
        saving.Draft.point = lambda draft: os._exit(9)  # type: ignore[method-assign]
    engine.save(folder, "second")


def load_after(rank: int, world: int, folder: str) -> int:
    engine = start("mlp", onecopy.stage(1))
    engine.load(folder)
    count = int(engine.global_steps)
    steps(engine, "mlp", rank, world, range(2, 3))
    engine.save(folder, "second")
    engine.load(folder)
    engine.close()
    return count


@pytest.mark.parametrize("at", ["half written", "written", "before the pointer"])
def test_a_rank_that_dies_while_saving(tmp_path: Path, at: str) -> None:
    with pytest.raises(RankFailure):
        run_ranks(dies, 2, str(tmp_path), at)
    assert complete_tags(tmp_path) == (["first", "second"] if at == "before the pointer" else ["first"])
    assert run_ranks(load_after, 2, str(tmp_path)) == [1, 1]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["first", "latest", "second"]


def damaged(rank: int, world: int, folder: str, tag: str) -> str:
    engine = start("mlp", onecopy.stage(3))
    before = everything(engine)
    said = refusal(lambda: engine.load(folder, tag))
    assert not unequal(before, everything(engine))
    engine.close()
    return said


def saved_twice(rank: int, world: int, folder: str) -> None:
    engine = start("mlp", onecopy.stage(3))
    steps(engine, "mlp", rank, world, range(1))
    engine.save(folder, "a")
    engine.save(folder, "b")
    engine.close()


def test_damage_is_found_whoever_reads_it(tmp_path: Path) -> None:
    run_ranks(saved_twice, 2, str(tmp_path))
    for file, change, says in (
        ("rank-00001.safetensors", lambda path: path.unlink(), "is missing"),
        ("rank-00000.safetensors", lambda path: os.truncate(path, 100), "it has 100 bytes"),
        ("rank-00001.safetensors", lambda path: path.write_bytes(b"\0" * path.stat().st_size), "is damaged"),
    ):
        shutil.copytree(tmp_path / "a", tmp_path / "bad")
        change(tmp_path / "bad" / file)  # type: ignore[no-untyped-call]
        for world in (1, 2):
            for said in run_ranks(damaged, world, str(tmp_path), "bad"):
                assert says in said, said
                assert file in said, said
        shutil.rmtree(tmp_path / "bad")
