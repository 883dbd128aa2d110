"""Saved by some ranks under some plan, loaded by others under another: any to any, and only what is needed is read."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import onecopy
from onecopy.checkpoint import reader
from onecopy.plan.plan import Precision
from tests.ranks import models
from tests.ranks.checkpoints import SMALL, adamw, everything, refusal, start, steps, unequal
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import every_plan

pytestmark = pytest.mark.ranks

# ------------------------------------------------------------------------------------------------- other ranks and plans


def plans_for(world: int, few: bool) -> dict[str, Any]:
    """Plans to save under and to load under, by a name that is a tag; ``few``: the ones furthest apart."""
    stages = {1: (3,) if few else (0, 3), 2: (2, 3) if few else (0, 1, 2, 3), 4: () if few else (1, 3)}[world]
    plans = {f"{world}-ranks-stage-{number}": onecopy.stage(number, units=SMALL) for number in stages}
    if world == 4:
        plans["4-ranks-hsdp"] = onecopy.hsdp(shard=2, units=SMALL)
        plans["4-ranks-hsdp-1"] = onecopy.hsdp(shard=2, number=1)
    return plans


STATES = ("exp_avg", "exp_avg_sq")


def save_all(rank: int, world: int, folder: str, model: str, few: bool) -> dict[str, dict[str, Tensor]]:
    out = {}
    for name, plan in plans_for(world, few).items():
        engine = start(models.build(model), plan)
        steps(engine, model, rank, world, range(2))
        engine.save(folder, tag=name)
        out[name] = everything(engine, STATES)
        engine.close()
    return out


def load_all(rank: int, world: int, folder: str, model: str, few: bool, saved: dict[str, dict[str, Tensor]]) -> list[Any]:
    """Load every checkpoint of ``folder`` under every plan; then go on for two steps."""
    out = []
    for target, plan in plans_for(world, few).items():
        for name, values in saved.items():
            engine = start(model, plan)
            engine.load(folder, tag=name)
            changed = unequal(values, everything(engine, STATES))
            alike = same_everywhere(engine)
            steps(engine, model, rank, world, range(2, 4))
            out.append((f"{name} -> {target}", changed, alike, everything(engine)))
            engine.close()
    return out


def same_everywhere(engine: Any) -> bool:
    """Do all ranks have the same bits of every parameter, as the model computes with it?"""
    flat = torch.cat([value.float().reshape(-1) for value in engine.full_state_dict().values()])
    with onecopy.gathered(engine.module):
        own = torch.cat([p.detach().float().reshape(-1) for p in engine.module.parameters()])
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return True
    checks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(checks, (flat.tolist(), own.tolist()))
    return all(check == checks[0] for check in checks)


@pytest.mark.parametrize(("model", "few"), [pytest.param("mlp", False, marks=pytest.mark.long), ("gpt", True)])
def test_any_ranks_and_plan_to_any_other(tmp_path: Path, model: str, few: bool) -> None:
    """States are the same bits after loading; two more steps are those of plain torch on the whole batch."""
    torch.manual_seed(0)
    twin = models.BUILDERS[model]()
    plain = adamw(twin.parameters())
    for number in range(4):
        pieces = [models.batch(model, number, 0, part) for part in range(4)]
        twin(*(torch.cat(tensors) for tensors in zip(*pieces, strict=True))).backward()
        plain.step()
        plain.zero_grad()
    saved = {}
    for world in (1, 2, 4):
        saved |= run_ranks(save_all, world, str(tmp_path), model, few)[0]
    for world in (1, 2, 4):
        for run in run_ranks(load_all, world, str(tmp_path), model, few, saved):
            for way, changed, alike, after in run:
                assert not changed, way
                assert alike, way
                gap = max((after[name] - p.detach()).abs().max().item() for name, p in twin.named_parameters())
                assert gap <= 1e-6, f"{way}: {gap}"


PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"dtype": "bf16"},
    "fp16": {"dtype": "fp16"},
    "bf16 alone": {"precision": Precision("bfloat16", master=None)},
}


def save_precisions(rank: int, world: int, folder: str) -> dict[str, dict[str, Tensor]]:
    out = {}
    for name, options in PRECISIONS.items():
        engine = start(models.build("mlp"), onecopy.stage(3, units=SMALL, **options))
        steps(engine, "mlp", rank, world, range(2))
        engine.save(folder, tag=name.replace(" ", "-"))
        out[name] = everything(engine, STATES)
        engine.close()
    return out


def load_precisions(rank: int, world: int, folder: str, saved: dict[str, dict[str, Tensor]]) -> list[str]:
    wrong = []
    for number in (0, 1, 3):
        for target, options in PRECISIONS.items():
            plan = onecopy.stage(number, units=SMALL, **options)
            compute = getattr(torch, plan.precision.dtype or "float32")
            for name, values in saved.items():
                engine = start("mlp", plan)
                engine.load(folder, tag=name.replace(" ", "-"))
                way = f"{name} -> {target}, stage {number}"
                # What the engine holds is what was saved, rounded only where it has nothing wider.
                kept = torch.bfloat16 if target == "bf16 alone" else torch.float32
                expected = {key: value.to(kept).float() for key, value in values.items()}
                wrong += [f"{way}: {key}" for key in unequal(expected, everything(engine, STATES))]
                state = engine.full_state_dict()
                wrong += [
                    f"{way}: {key} as computed with"
                    for key, value in state.items()
                    if not key.startswith("layers.7.weight") and not torch.equal(value, values[key].to(compute))
                ]
                before = everything(engine)
                steps(engine, "mlp", rank, world, range(2, 4))
                if not unequal(before, everything(engine)):
                    wrong.append(f"{way}: does not train")
                engine.close()
    return wrong


@pytest.mark.long
def test_any_precision_to_any_other(tmp_path: Path) -> None:
    saved = run_ranks(save_precisions, 2, str(tmp_path))[0]
    assert run_ranks(load_precisions, 2, str(tmp_path), saved) == [[], []]


def other_windows(rank: int, world: int, folder: str) -> tuple[int, list[bool]]:
    first = start("mlp", onecopy.stage(2))
    steps(first, "mlp", rank, world, range(3))
    first.save(folder)
    second = start("mlp", onecopy.stage(1, accumulation=4))
    second.load(folder)
    moved = []
    for micro in range(5):
        second(*models.batch("mlp", 3, micro, rank)).backward()
        moved.append(second.step())
    return second.global_steps, moved


def test_windows_of_another_length_start_whole(tmp_path: Path) -> None:
    for count, moved in run_ranks(other_windows, 2, str(tmp_path)):
        assert count == 4
        assert moved == [False, False, False, True, False]


# ------------------------------------------------------------------------------------------------------------ partial loads


def parts(rank: int, world: int, folder: str) -> dict[str, Any]:
    def build(lr: float, model: str = "gpt", optimizer: Any = torch.optim.AdamW, schedule: bool = True) -> Any:
        make = (lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)) if schedule else None
        return start(model, onecopy.stage(3), lambda p: optimizer(p, lr=lr, weight_decay=lr), scheduler=make)

    saved = build(0.1)
    steps(saved, "gpt", rank, world, range(2))
    saved.save(folder)
    truth, out = everything(saved, STATES), {}
    weights = {name: value for name, value in truth.items() if " " not in name}

    for what, options in {
        "weights": {"optimizer_states": False, "scheduler_states": False},
        "no schedule": {"scheduler_states": False},
        "no moments": {"optimizer_states": False},
    }.items():
        engine = build(0.8)
        engine.load(folder, **options)
        have = everything(engine, STATES)
        assert not unequal(weights, {name: have[name] for name in weights}), what
        decay = engine.optimizer.param_groups[0]["weight_decay"]
        out[what] = len(have) == len(truth), engine.lr(), decay, engine.global_steps, engine.scheduler.last_epoch
        engine.close()

    forward = onecopy.initialize(models.BUILDERS["gpt"](), onecopy.stage(3))
    forward.load(folder)
    assert not unequal(weights, everything(forward))
    forward.save(folder, "forward-only", latest=False)
    out["forward"] = forward.global_steps
    forward.close()
    for what, engine, tag in (
        ("other optimizer", build(0.1, optimizer=torch.optim.SGD), None),
        ("no schedule here", build(0.1, schedule=False), None),
        ("no optimizer there", build(0.1), "forward-only"),
        ("other ties", build(0.1, "gpt untied"), None),
        ("other model", build(0.1, "even"), None),
    ):
        before = everything(engine)
        out[what] = refusal(lambda engine=engine, tag=tag: engine.load(folder, tag))
        assert not unequal(before, everything(engine)), what
        if what == "no optimizer there":
            engine.load(folder, tag, optimizer_states=False, scheduler_states=False)
            assert not unequal(weights, everything(engine))
        engine.close()
    return out


def test_parts_by_choice_and_differences_by_name(tmp_path: Path) -> None:
    one, two = run_ranks(parts, 2, str(tmp_path))
    assert one == two
    assert one["weights"] == (False, [0.8], 0.8, 0, 0)
    assert one["no schedule"] == (True, [0.8], 0.1, 2, 0)
    assert one["no moments"] == (False, [0.025], 0.8, 0, 2)
    assert one["forward"] == 2
    assert "the optimizer is SGD, in the checkpoint AdamW" in one["other optimizer"]
    assert "the scheduler is none, in the checkpoint StepLR: scheduler_states=False" in one["no schedule here"]
    assert "the checkpoint has none: optimizer_states=False" in one["no optimizer there"]
    assert "'head.weight' is a parameter of its own in the model" in one["other ties"]
    assert "'emb.weight' and 'head.weight' are one parameter in the checkpoint" in one["other ties"]
    assert "the model has 'first.weight'" in one["other model"]
    assert "the checkpoint has 'emb.weight'" in one["other model"]


class Changed(nn.Module):
    """``old``: layers a, b, c. Not ``old``: a, b of another shape, d; and a is frozen."""

    def __init__(self, old: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3 if old else 4)
        setattr(self, "c" if old else "d", nn.Linear(3, 3))
        self.a.requires_grad_(old)

    def forward(self, x: Tensor) -> Tensor:
        other = self.c if hasattr(self, "c") else self.d
        return self.b(other(self.a(x))).square().mean()


def changed(rank: int, world: int, folder: str) -> Any:
    first = start(Changed(True), onecopy.stage(2))
    first(torch.ones(1, 3)).backward()
    first.step()
    first.save(folder)
    a = everything(first)["a.weight"]
    second = start(Changed(False), onecopy.stage(3))
    before = everything(second)
    said = refusal(lambda: second.load(folder))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = second.load(folder, strict=False)
    after = everything(second)
    assert torch.equal(after["a.weight"], a)
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["a.weight", "a.bias"]
    found = loaded.differences
    return said, [str(one.message) for one in caught], found.missing, found.unexpected, found.changed, found.training


def test_what_matches_is_loaded_and_the_rest_is_named(tmp_path: Path) -> None:
    one, two = run_ranks(changed, 2, str(tmp_path))
    said, told, missing, unexpected, altered, training = one
    assert two[0] == said
    assert missing == ["d.weight", "d.bias"]
    assert unexpected == ["c.weight", "c.bias"]
    assert altered == [
        "'b.weight' has shape (4, 3), in the checkpoint (3, 3)", "'b.bias' has shape (4,), in the checkpoint (3,)"
    ]  # fmt: skip
    assert "lacks 'a.bias', 'a.weight'" in training[0]
    for part in ("'d.weight'", "'c.bias'", "(4, 3)", "optimizer group 0"):
        assert part in said
        assert part in told[0]
    assert not two[1], "one rank says it for all"


# ------------------------------------------------------------------------------------------------------------- what is read


def reads(rank: int, world: int, folder: str, dtype: str | None) -> dict[str, int]:
    """Elements read by this rank at each stage, of a model with 8 bytes of moments per element."""
    out = {}
    plans = every_plan(**({"dtype": dtype} if dtype else {}))
    first = start("even", plans["stage 2"])
    steps(first, "even", rank, world, range(1))
    first.save(folder)
    real = reader.Reader.read
    for name, plan in plans.items():
        engine, count = start("even", plan), 0

        def counted(one: Any, span: Any, start: int, stop: int, out: Tensor) -> None:
            nonlocal count
            count += stop - start
            real(one, span, start, stop, out)

        reader.Reader.read = counted  # type: ignore[method-assign]
        engine.load(folder)
        reader.Reader.read = real  # type: ignore[method-assign]
        out[name] = count
    return out


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_a_rank_reads_what_it_keeps(tmp_path: Path, dtype: str | None) -> None:
    size = sum(p.numel() for p in models.build("even").parameters())
    for found in run_ranks(reads, 2, str(tmp_path), dtype):
        assert found["stage 0"] == 3 * size
        assert found["stage 1"] == found["stage 2"] == size + 2 * size // 2
        assert found["stage 3"] == found["stage 3 held"] == 3 * size // 2


# -------------------------------------------------------------------------------------------------------- client state


def keep_own(rank: int, world: int, folder: str) -> None:
    engine = start("toy", onecopy.stage(1))
    engine.save(folder, "own", {"rank": rank, "pair": (rank, float("inf"))})
    engine.save(folder, "some", None if rank == 1 else {"rank": rank})
    engine.save(folder, "same", {"epoch": 3})
    engine.close()


def give_back(rank: int, world: int, folder: str) -> list[dict[str, Any]]:
    engine = start("toy", onecopy.stage(3))
    found = [dict(engine.load(folder, tag)) for tag in ("own", "some", "same")]
    engine.close()
    return found


def test_a_rank_gets_its_own_client_state_or_that_of_rank_0(tmp_path: Path) -> None:
    run_ranks(keep_own, 3, str(tmp_path))
    text = (tmp_path / "same" / "manifest.json").read_text()
    assert text.count('"client_state"') == 1, "written once where it is the same"
    for world in (1, 2, 3, 4):
        for rank, (own, some, same) in enumerate(run_ranks(give_back, world, str(tmp_path))):
            saved = rank if rank < 3 else 0
            assert own == {"rank": saved, "pair": (saved, float("inf"))}
            assert some == {"rank": 0 if rank == 1 else saved}
            assert same == {"epoch": 3}


def other_folders(rank: int, world: int, folder: str) -> list[str]:
    """Two saves of one shape before any step: nothing but the weights tells them apart."""
    engine = start("toy", onecopy.stage(3))
    for name in "01":
        engine.save(f"{folder}/{name}", "first")
    said = [refusal(partial(engine.load, f"{folder}/{where}", "first")) for where in (rank, "no" if rank else 0)]
    engine.close()
    return said


def test_ranks_that_load_from_different_folders_are_told_which(tmp_path: Path) -> None:
    one, two = run_ranks(other_folders, 2, str(tmp_path))
    assert one == two
    assert f"rank 0 loads {tmp_path}/0/first, and {tmp_path}/1/first is another one" in one[0] and "on rank 1" in one[0]
    assert "manifest.json cannot be read" in one[1] and "on rank 1" in one[1]
