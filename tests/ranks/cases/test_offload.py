"""Offload as people met it: an optimizer that is another one, a compiler, folders and sizes, gradients read too early."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onecopy
import onecopy.deepspeed as deepspeed
from onecopy.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from onecopy.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from onecopy.errors import ConfigError, DiskError
from tests.ranks import models
from tests.ranks.cases.doors import Door, feed7, json_config, offloaded, sgd1
from tests.ranks.cases.test_backward import INPUTS, Toy
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import largest_gap

pytestmark = pytest.mark.ranks

CPU = {"offload_optimizer": {"device": "cpu"}}

# -------------------------------------------------------------------------------------------- the optimizer is the same

DECAYED = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
# What is asked for, by a torch class, by the JSON, and by DeepSpeed's name for it.
ADAMS: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "AdamW": (torch.optim.AdamW, {"type": "AdamW", "params": DECAYED}, DeepSpeedCPUAdam),
    "Adam": (
        torch.optim.Adam,
        {"type": "Adam", "params": {**DECAYED, "adam_w_mode": False}},
        lambda groups, **options: DeepSpeedCPUAdam(groups, adamw_mode=False, **options),
    ),
    "FusedAdam": (torch.optim.AdamW, {"type": "Adam", "params": DECAYED}, FusedAdam),
}


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """All options of the first group are the optimizer's, the second has a rate and a decay of its own."""
    params = list(model.parameters())
    return [{"params": params[:5]}, {"params": params[5:], "lr": 3e-3, "weight_decay": 0.0}]


def a_hundred_steps(rank: int, world: int, name: str) -> list[float]:
    kind, section, named = ADAMS[name]
    torch.manual_seed(0)
    twin = models.MLP()
    plain = kind(two_groups(twin), **DECAYED)
    for count in range(100):
        for other in range(world):
            (twin(*feed7(count, other)) / world).backward()
        plain.step()
        plain.zero_grad()
    gaps = []
    for way in ("torch", "json", "named"):
        torch.manual_seed(0)
        model = models.MLP()
        groups = two_groups(model)
        config = json_config(2) | {"zero_optimization": {"stage": 2, **CPU}}
        if way == "json":
            config["optimizer"] = section
            engine: Any = deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]
        else:
            optimizer = kind(groups, **DECAYED) if way == "torch" else named(groups, **DECAYED)
            engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        stepped = engine.optimizer.optimizer  # inside the wrapper with DeepSpeed's names
        assert type(stepped) is kind and all(group["fused"] for group in stepped.param_groups)
        for count in range(100):
            engine.backward(engine(*feed7(count, rank)))
            engine.step()
        gaps.append(largest_gap(model, twin))
        engine.destroy()
    return gaps


@pytest.mark.parametrize("name", ADAMS)
def test_the_optimizer_on_the_host_is_the_one_that_was_asked_for(name: str) -> None:
    """Adam and AdamW with decay 0.1 in two groups for 100 steps, by torch's class, by the JSON and by DeepSpeed's name, with
    states on the host: what torch trains in one process, to 1e-6 (row 62)."""
    for gaps in run_ranks(a_hundred_steps, 2, name):
        assert max(gaps) <= 1e-6, gaps


def by_tiles(rank: int, world: int) -> list[list[Tensor]]:
    out = []
    for tile, threads in ((None, 1), (2048, 1), (4096, 1), (2048, 2)):
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 65), nn.Linear(65, 1))
        base = onecopy.stage(2, step=onecopy.StepPolicy(tile=tile), clip=0.1)
        optimizer = torch.optim.AdamW(two_groups(model), **DECAYED)
        engine: Any = onecopy.initialize(model, onecopy.offload(base), optimizer=optimizer)
        for count in range(5):
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * count + rank))
            engine(x).square().mean().backward()
            engine.step()
        out.append(list(engine.full_state_dict().values()))
        engine.close()
    torch.set_num_threads(1)
    return out


def test_tiles_and_threads_do_not_change_a_step() -> None:
    """Stepped whole, in tiles of two sizes, with one thread and two: the same weights (row 62), to the bit with the same
    tiles. Torch's kernel computes the last elements of a tensor, less than a vector of the processor, one by one, and on
    some processors that rounds otherwise: where a tile ends is then an ulp in a few elements."""
    for whole, small, large, threads in run_ranks(by_tiles, 2):
        assert all(torch.equal(a, b) for a, b in zip(small, threads, strict=True))
        for other in (small, large):
            for a, b in zip(whole, other, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_deepspeeds_names_have_its_arguments_and_refuse_what_torch_cannot_do() -> None:
    """Defaults are DeepSpeed's: decoupled decay of 0, and for Adagrad a rate of 0.01 (row 62)."""
    params = [nn.Parameter(torch.ones(3))]
    for made in (DeepSpeedCPUAdam(params), FusedAdam(params), DeepSpeedCPUAdam(params, 1e-3, True, [0.9, 0.999], 1e-8, 0)):
        (group,) = made.param_groups
        assert type(made) is torch.optim.AdamW and group["fused"] and group["betas"] == (0.9, 0.999)
        assert (group["lr"], group["eps"], group["weight_decay"], group["amsgrad"]) == (1e-3, 1e-8, 0.0, False)
    assert type(FusedAdam(params, adam_w_mode=False)) is torch.optim.Adam
    made = DeepSpeedCPUAdagrad(params)
    assert type(made) is torch.optim.Adagrad and made.param_groups[0]["lr"] == 1e-2
    for call in (
        lambda: DeepSpeedCPUAdam(params, bias_correction=False),
        lambda: DeepSpeedCPUAdam(params, lr=-1.0),
        lambda: DeepSpeedCPUAdagrad(params, amsgrad=True),
    ):
        with pytest.raises(ConfigError):
            call()


# --------------------------------------------------------------------------------------------------- no compiler needed

SCRIPT = """
import sys, torch, onecopy
from onecopy.deepspeed.ops.adam import DeepSpeedCPUAdam
for plan in (onecopy.offload(onecopy.stage(3), "host", "host"), onecopy.low_precision(onecopy.infinity(sys.argv[1]))):
    model = torch.nn.Linear(8, 8)
    engine = onecopy.initialize(model, plan, optimizer=lambda params: DeepSpeedCPUAdam(params, lr=0.1))
    for _ in range(2):
        engine(torch.ones(2, 8)).sum().backward()
        assert engine.step()
    engine.close()
assert "torch.utils.cpp_extension" not in sys.modules
print("trained")
"""


def test_nothing_is_compiled(tmp_path: Path) -> None:
    """No compiler on the path, no toolkit, an empty cache: offload to host and disk trains as it is installed (row 63)."""
    names = ("PYTHONPATH", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
    env = {name: os.environ[name] for name in names if name in os.environ}
    env |= {"PATH": str(tmp_path / "empty"), "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    env |= {"CC": "/bin/false", "CXX": "/bin/false"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout == "trained\n", done.stderr


# ------------------------------------------------------------------------------------------------------ paths and sizes


class Sizes(nn.Module):
    """Parameters of 1, 513 and 4099 elements, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.still = nn.Parameter(torch.randn(17), requires_grad=False)
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in (1, 513, 4099))

    def forward(self, x: Tensor) -> Tensor:
        return sum((part * x).square().mean() for part in self.parts) + self.still.sum()  # type: ignore[return-value]


def odd_sizes(rank: int, world: int, folder: str) -> dict[str, bool]:
    out = {}
    for number in (2, 3):
        states: list[list[Tensor]] = []
        for where in ("device", "disk"):
            base = onecopy.stage(number, step=onecopy.StepPolicy(tile=2048), units=onecopy.Units(min_numel=0))
            tiers = (where, where if number == 3 else "device")
            plan = base if where == "device" else onecopy.offload(base, *tiers, scratch=folder)  # type: ignore[arg-type]
            model = Sizes()
            engine: Any = onecopy.initialize(model, plan, optimizer=lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True))
            for count in range(3):
                engine(torch.tensor(float(count + rank))).backward()
                engine.step()
            moments = [onecopy.full_state(param, "exp_avg_sq") for param in model.parts]
            states.append([*engine.full_state_dict().values(), *(m for m in moments if m is not None)])
            engine.close()
        out[f"stage {number}"] = all(torch.equal(a, b) for a, b in zip(*states, strict=True)) and len(states[0]) == 7
    return out


def test_odd_sizes_come_back_from_disk_bit_for_bit(tmp_path: Path) -> None:
    """1, 513 and 4099 elements, a frozen part, ranks that step nothing of a unit: weights and moments as without disk
    (row 64; more sizes of files in ``tests/pure/test_disk.py``)."""
    for world in (1, 3):
        for found in run_ranks(odd_sizes, world, str(tmp_path)):
            assert all(found.values()), found
    assert not list(tmp_path.iterdir())


def bad_folders(rank: int, world: int, folders: list[str]) -> list[str]:
    said = []
    for folder in folders:
        nvme = {"offload_optimizer": {"device": "nvme", "nvme_path": folder}}
        config = json_config(2) | {"zero_optimization": {"stage": 2, **nvme}}
        for door in (Door(onecopy.offload(onecopy.stage(2), "disk", scratch=folder)), Door(None, config)):
            model = models.MLP()
            with pytest.raises(DiskError) as caught:
                door.open(model, sgd1)
            said.append(str(caught.value))
    return said


def test_a_folder_that_cannot_be_used_is_an_error_at_the_start(tmp_path: Path) -> None:
    """A folder that is missing, or is a file, or lets nobody write: one Python error with the path on every rank, when the
    engine is made (row 64; full and slow disks in ``tests/pure/test_disk.py``)."""
    missing, file = tmp_path / "none" / "here", tmp_path / "file"
    file.write_text("")
    one, other = run_ranks(bad_folders, 2, [str(missing), str(file), "/proc"])
    assert one == other
    assert all(str(missing) in said and "does not exist" in said and "make it" in said for said in one[:2])
    assert all(str(file) in said and "name a folder" in said for said in one[2:4])
    assert all("/proc" in said and "cannot be written" in said for said in one[4:])


# ---------------------------------------------------------------------------------------------- gradients read too early


def read_early(rank: int, world: int, folder: str) -> dict[str, tuple[list[float], float]]:
    """After each micro-batch of a window the gradient so far, read at once; and the weight after the step."""
    out = {}
    for name, door in offloaded(world, folder, accumulation=2).items():
        model, local = Toy(), []  # type: ignore[var-annotated]
        model.w.register_post_accumulate_grad_hook(lambda param, into=local: into.append(param.grad.item()))
        engine = door.open(model, sgd1)
        for x in INPUTS[rank]:
            engine(torch.tensor([x])).backward()
            if engine.is_boundary():
                found = onecopy.full_grad(engine.module.w)
                assert found is not None
                total = found.item()
            engine.step()
        assert local == list(INPUTS[rank]), (name, local)
        out[name] = [total, engine.grad_norm], onecopy.full_param(engine.module.w).item()
        # A hook that comes after the engine sees this rank's gradient too.
        local.clear()
        engine.module.w.register_post_accumulate_grad_hook(lambda param, into=local: into.append(param.grad.item()))
        engine(torch.tensor([1.0])).backward()
        assert local == [1.0, 1.0], (name, local)
        engine.close()
    return out


def test_an_offloaded_gradient_is_whole_when_it_is_read(tmp_path: Path) -> None:
    """Accumulation 2 without no_sync: a hook sees each micro-batch's own gradient or an error, the sum read right after
    backward is 2.5, and the weight is 0.75, at every stage and on every tier (row 66)."""
    for run in run_ranks(read_early, 2, str(tmp_path)):
        assert len(run) == 22
        for name, (seen, weight) in run.items():
            assert seen == [2.5, 2.5], name
            assert weight == pytest.approx(0.75), name


# ------------------------------------------------------------------------------------------ a script as it was written

NVME_KEYS = {"pin_memory": True, "buffer_count": 4, "pipeline_read": True, "fast_init": False}


def script(rank: int, world: int, folder: str) -> list[float]:
    """A DeepSpeed script's own calls: sharded construction for a tier, its optimizer's name, and a JSON with all keys."""
    gaps = []
    for device in ("cpu", "nvme"):
        place = {"device": device, "nvme_path": folder}
        config = json_config(3, 2, 1.0) | {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {**place, **NVME_KEYS, "ratio": 0.6},
                "offload_param": {**place, "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9},
                "sub_group_size": 1e9,
            },
            "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False},
            "zero_force_ds_cpu_optimizer": False,
        }
        torch.manual_seed(0)
        with deepspeed.zero.Init(remote_device=device, config_dict_or_path=config):
            model = models.MLP()
        optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=1e-2, weight_decay=0.1)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        torch.manual_seed(0)
        twin = models.MLP()
        plain = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.1)
        for count in range(6):
            engine.backward(engine(*feed7(count, rank)))
            engine.step()
            for other in range(world):
                (twin(*feed7(count, other)) / world / 2).backward()
            if count % 2:
                nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
                plain.step()
                plain.zero_grad()
        gaps.append(largest_gap(model, twin))
        other_device = {"cpu": "nvme", "nvme": "cpu"}[device]
        for remote, says in (("disk", "'none', 'cpu' or 'nvme'"), (other_device, f"offload_param.device is '{device}'")):
            with pytest.raises(ConfigError, match=says), deepspeed.zero.Init(remote_device=remote, config=config):
                pass
        engine.destroy()
    return gaps


def test_a_script_with_offload_runs_as_it_is(tmp_path: Path) -> None:
    """zero.Init for a remote device, DeepSpeedCPUAdam and every key of the offload sections: what torch trains (row 62)."""
    for gaps in run_ranks(script, 2, str(tmp_path)):
        assert max(gaps) <= 1e-6, gaps
    assert not list(tmp_path.iterdir())
