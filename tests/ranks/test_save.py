"""Save and load: the same run goes on, every file opens without pickling, a torn save is no silent restart."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onecopy
from onecopy.errors import OneCopyError
from tests.ranks import models
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import every_plan, sgd

pytestmark = pytest.mark.ranks


def make(plan: Any, seed: int = 0, model: str = "mlp") -> Any:
    torch.manual_seed(seed)
    net = models.BUILDERS[model]()
    groups = [
        {"params": [p for n, p in net.named_parameters() if "bias" in n], "weight_decay": 0.0, "lr": 1e-2},
        {"params": [p for n, p in net.named_parameters() if "bias" not in n], "weight_decay": 0.1},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    return onecopy.initialize(net, plan, optimizer=optimizer, scheduler=scheduler)


def train(engine: Any, model: str, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        for micro in range(engine.plan.batch.accumulation):
            loss = engine(*models.batch(model, step, micro, rank))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def status(engine: Any) -> tuple[Any, ...]:
    return engine.lr(), engine.global_steps, engine.skipped_steps, engine.micro_steps, engine.loss_scale


def full(engine: Any) -> dict[str, torch.Tensor]:
    named = list(engine.module.named_parameters())
    values = {n: onecopy.full_param(p).clone() for n, p in named}
    for key in ("exp_avg", "exp_avg_sq"):
        values |= {f"{key} {n}": onecopy.full_state(p, key).clone() for n, p in named}
    return values


def resume_run(rank: int, world: int, folder: str, options: dict[str, Any], model: str) -> dict[str, Any]:
    """Ten straight steps against five, save, a new engine from another seed, load, five more."""
    out = {}
    for name, plan in every_plan(**options).items():
        place = str(Path(folder) / name.replace(" ", "-"))
        straight = make(plan, model=model)
        expected = train(straight, model, rank, range(10))
        truth, expected_status = full(straight), status(straight)
        straight.close()
        first = make(plan, model=model)
        train(first, model, rank, range(5))
        first.save(place, client_state={"epoch": 3, "note": "text", "list": [1, 2.5, None]})
        saved = status(first)
        # Going on after a save is undisturbed too.
        assert train(first, model, rank, range(5, 10)) == expected[5 * plan.batch.accumulation :], name
        first.close()
        second = make(plan, seed=9, model=model)
        client = second.load(place)
        assert client == {"epoch": 3, "note": "text", "list": [1, 2.5, None]}, name
        assert status(second) == saved, name
        losses = train(second, model, rank, range(5, 10))
        assert losses == expected[5 * plan.batch.accumulation :], name
        assert status(second) == expected_status, name
        after = full(second)
        out[name] = [k for k, v in truth.items() if not torch.equal(v, after[k])]
        second.close()
    return out


@pytest.mark.parametrize("model", ["mlp", pytest.param("gpt", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "options", [{}, {"dtype": "bf16"}, {"dtype": "fp16"}, {"accumulation": 2, "clip": 0.1}], ids=str
)
def test_resume_is_a_continuation_to_the_bit(tmp_path: Path, options: dict[str, Any], model: str) -> None:
    for run in run_ranks(resume_run, 2, str(tmp_path), options, model):
        assert not any(run.values()), run


def save_plain(rank: int, world: int, folder: str) -> str:
    engine = make(onecopy.stage(3, dtype="bf16"), model="gpt")
    train(engine, "gpt", rank, range(1))
    path = engine.save(folder, tag="first")
    train(engine, "gpt", rank, range(1, 2))
    engine.save(folder, tag="second")
    engine.close()
    return str(path)


def test_every_file_is_plain(tmp_path: Path) -> None:
    """Tensors in safetensors (or weights-only torch files) and JSON; nothing unpickles a class."""
    from safetensors import safe_open

    paths = run_ranks(save_plain, 2, str(tmp_path))
    assert len(set(paths)) == 1
    assert Path(paths[0]).is_dir()
    kinds = set()
    for file in (f for f in tmp_path.rglob("*") if f.is_file()):
        kinds.add(file.suffix)
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as tensors:
                assert all(tensors.get_tensor(key) is not None for key in tensors.keys())  # noqa: SIM118
        elif file.suffix == ".json":
            json.loads(file.read_text())
        elif file.suffix in (".pt", ".pth", ".bin"):
            torch.load(file, weights_only=True)
        else:
            file.read_text()
    assert kinds & {".safetensors", ".pt"}, kinds


def load_bad(rank: int, world: int, folder: str, tag: str | None, which: str = "same") -> str:
    plan = onecopy.stage(3, dtype="bf16")
    engine = make(plan, seed=4, model="mlp" if which == "other model" else "gpt")
    name, p = next(iter(engine.module.named_parameters()))
    before = onecopy.full_param(p).clone()
    try:
        client = engine.load(folder, tag=tag)
        said = f"loaded {client}, steps {engine.global_steps}"
    except (OneCopyError, OSError) as error:
        said = f"{type(error).__name__}: {error}"
        assert torch.equal(before, onecopy.full_param(p)), f"{name} was half loaded"
    engine.close()
    return said


def test_newest_complete_save_is_loaded(tmp_path: Path) -> None:
    run_ranks(save_plain, 2, str(tmp_path))
    assert all("steps 2" in said for said in run_ranks(load_bad, 2, str(tmp_path), None))
    assert all("steps 1" in said for said in run_ranks(load_bad, 2, str(tmp_path), "first"))


def test_missing_saves_are_errors_that_list_what_is_there(tmp_path: Path) -> None:
    for said in run_ranks(load_bad, 2, str(tmp_path / "nowhere"), None):
        assert "nowhere" in said
        assert not said.startswith("loaded")
    run_ranks(save_plain, 2, str(tmp_path))
    for said in run_ranks(load_bad, 2, str(tmp_path), "third"):
        assert not said.startswith("loaded")
        assert "first" in said and "second" in said and "third" in said
    for said in run_ranks(load_bad, 2, str(tmp_path), None, "other model"):
        assert not said.startswith("loaded"), said


def test_a_truncated_shard_is_noticed(tmp_path: Path) -> None:
    """With the newest save torn the older is loaded when no tag is given; asked for by name it is an error."""
    run_ranks(save_plain, 2, str(tmp_path))
    shards = [f for f in (tmp_path / "second").rglob("*") if f.suffix in (".safetensors", ".pt", ".bin")]
    assert shards
    victim = max(shards, key=lambda f: f.stat().st_size)
    os.truncate(victim, victim.stat().st_size // 2)
    for said in run_ranks(load_bad, 2, str(tmp_path), "second"):
        assert not said.startswith("loaded")
        assert victim.name in said
    for said in run_ranks(load_bad, 2, str(tmp_path), None):
        assert "steps 1" in said or victim.name in said, said


def test_a_missing_shard_is_noticed(tmp_path: Path) -> None:
    run_ranks(save_plain, 2, str(tmp_path))
    shards = sorted(f for f in (tmp_path / "second").rglob("*") if f.suffix in (".safetensors", ".pt", ".bin"))
    shards[-1].unlink()
    for said in run_ranks(load_bad, 2, str(tmp_path), "second"):
        assert not said.startswith("loaded")
        assert shards[-1].name in said, said


class Parts(nn.ParameterDict):
    """Parameters whose sum is the loss; a plain ParameterDict refuses to be called."""

    __call__ = nn.Module.__call__

    def forward(self) -> torch.Tensor:
        return torch.stack([param.sum() for param in self.values()]).sum()


def odd_moments(rank: int, world: int, folder: str) -> list[str]:
    """Three groups of 5, 7 and 11 elements; moments set to counting numbers come back as such."""
    wrong = []
    for name, plan in every_plan().items():
        place = str(Path(folder) / name.replace(" ", "-"))
        for phase in ("save", "load"):
            model = Parts({k: torch.zeros(n) for k, n in (("a", 5), ("b", 7), ("c", 11))})
            groups = [{"params": [p], "lr": 0.1 * (i + 1)} for i, p in enumerate(model.values())]
            engine = onecopy.initialize(model, plan, optimizer=torch.optim.AdamW(groups))
            engine().backward()
            engine.step()
            for p in model.values():
                if phase == "save":
                    onecopy.set_full_state(p, "exp_avg", torch.arange(float(p.numel())))
            if phase == "save":
                engine.save(place)
            else:
                engine.load(place)
                for key, p in model.items():
                    if not torch.equal(onecopy.full_state(p, "exp_avg"), torch.arange(float(p.numel()))):
                        wrong.append(f"{name} {key}")
                if engine.lr() != pytest.approx([0.1, 0.2, 0.3]):
                    wrong.append(f"{name} lr {engine.lr()}")
            engine.close()
    return wrong


@pytest.mark.parametrize("world", [2, 3])
def test_moments_come_back_where_they_were(tmp_path: Path, world: int) -> None:
    assert run_ranks(odd_moments, world, str(tmp_path)) == [[]] * world


def weights_only(rank: int, world: int, folder: str) -> None:
    """Forward-only engines save and load too; buffers and frozen parameters are in the file."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7))
    model[0].bias.requires_grad_(False)
    engine = onecopy.initialize(model, onecopy.stage(3), optimizer=sgd)
    for _ in range(2):
        engine(torch.randn(4, 7, generator=torch.Generator().manual_seed(rank))).square().sum().backward()
        engine.step()
    truth = {k: v.clone() for k, v in engine.full_state_dict().items()}
    engine.save(folder)
    engine.close()
    torch.manual_seed(1)
    other = nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7))
    other[0].bias.requires_grad_(False)
    engine = onecopy.initialize(other, onecopy.stage(3), optimizer=sgd)
    engine.load(folder)
    for key, value in engine.full_state_dict().items():
        if "running" in key:
            assert (value - truth[key]).abs().max() < 10, key  # batch norm statistics are each rank's own
        else:
            assert torch.equal(value, truth[key]), key
    engine.close()


def test_buffers_and_frozen_weights_are_saved(tmp_path: Path) -> None:
    run_ranks(weights_only, 2, str(tmp_path))


def rank0_only(rank: int, world: int) -> dict[str, list[int]]:
    out = {}
    for name, plan in every_plan().items():
        engine = onecopy.initialize(models.build("gpt"), plan, optimizer=sgd)
        state = engine.full_state_dict(rank0_only=True)
        out[name] = [len(state or {}), len(engine.full_state_dict())]
        if rank == 0:
            models.build("gpt").load_state_dict(state, strict=True)
        engine.close()
    return out


def test_full_state_dict_on_rank_0() -> None:
    count = len(models.build("gpt").state_dict())
    one, two = run_ranks(rank0_only, 2)
    assert all(sizes == [count, count] for sizes in one.values()), one
    assert all(sizes == [0, count] for sizes in two.values()), two
