"""States off the device: the bits of a step do not depend on where its states rest, and every byte is where it was said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onecopy
from tests.ranks import models
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.ranks

# Small tiles: buffers of several, whose last is short.
TILE = onecopy.StepPolicy(tile=2048)
SMALL = onecopy.Units(min_numel=0)


def stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.Linear(65, 65), nn.LayerNorm(65), nn.Linear(65, 7))


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, fused=True)


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9, fused=True)


def adagrad(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1, fused=True)


def run(rank: int, plan: onecopy.Plan, steps: int, optimizer: Any = adamw, first: int = 0) -> tuple[Any, list[Any]]:
    """Train ``stack`` on this rank's data; the engine and what a twin must have in common, to the bit."""
    engine = onecopy.initialize(stack(), plan, optimizer=optimizer)
    return engine, go_on(engine, rank, steps, first)


def go_on(engine: Any, rank: int, steps: int, first: int = 0) -> list[Any]:
    seen: list[Any] = []
    for step in range(first, first + steps):
        for micro in range(engine.plan.batch.accumulation):
            generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
            x, y = torch.randn(4, 33, generator=generator), torch.randn(4, 7, generator=generator)
            loss = ((engine(x).float() - y) ** 2).mean()
            loss.backward()
            engine.step()
            seen.append(loss.item())
        seen.append(engine.grad_norm)
    return [*seen, *engine.full_state_dict().values()]


def same(one: list[Any], other: list[Any]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def placed(base: onecopy.Plan, where: str, folder: str) -> onecopy.Plan:
    """``base`` with its states at ``where``."""
    optimizer, parameter, ratio = {
        "host": ("host", "device", 1.0),
        "disk": ("disk", "device", 1.0),
        "partly": ("host", "device", 0.5),
        "all on host": ("host", "host", 1.0),
        "all on disk": ("disk", "disk", 1.0),
        "parameters on host": ("device", "host", 1.0),
    }[where]
    return onecopy.offload(base, optimizer, parameter, ratio=ratio, scratch=folder)  # type: ignore[arg-type]


PLACES = ("host", "disk", "partly")
SHARDED = ("all on host", "all on disk", "parameters on host")


def every_place(rank: int, world: int, folder: str, accumulation: int, dtype: str | None) -> dict[str, tuple[bool, bool]]:
    found = {}
    for number in range(4):
        units = onecopy.Units(min_numel=2500)
        base = onecopy.stage(number, dtype=dtype, accumulation=accumulation, clip=0.5, step=TILE, units=units)
        engine, twin = run(rank, base, 20)
        engine.close()
        for where in PLACES if number < 3 else (*PLACES, *SHARDED):
            engine, seen = run(rank, placed(base, where, folder), 20)
            found[f"stage {number}, {where}"] = same(seen, twin), engine.predicted() == engine.measured()
            engine.close()
    return found


@pytest.mark.parametrize(("accumulation", "dtype"), [(1, None), (4, None), (1, "bf16")])
def test_where_states_rest_changes_no_bit(tmp_path: Path, accumulation: int, dtype: str | None) -> None:
    """20 steps on 2 ranks, clipped, at every stage: losses, norms and weights are those of the stage on the device; and
    all bytes, peaks included, are as predicted."""
    for found in run_ranks(every_place, 2, str(tmp_path), accumulation, dtype):
        assert len(found) == 4 * len(PLACES) + len(SHARDED)
        assert not [name for name, (equal, _) in found.items() if not equal]
        assert not [name for name, (_, predicted) in found.items() if not predicted]
    assert not list(tmp_path.iterdir())  # nothing is left on disk


def optimizers(rank: int, world: int, folder: str) -> list[str]:
    apart = []
    for make in (sgd, adagrad):
        base = onecopy.hsdp(shard=2, number=2, step=TILE, units=SMALL)
        engine, twin = run(rank, base, 4, make)
        engine.close()
        for where in ("host", "disk"):
            engine, seen = run(rank, placed(base, where, folder), 4, make)
            engine.close()
            if not same(seen, twin):
                apart.append(f"{make.__name__} on {where}")
    return apart


def test_other_optimizers_and_groups_of_ranks(tmp_path: Path) -> None:
    """States that begin at 0.1, one state, on 2 groups of 2 ranks."""
    assert run_ranks(optimizers, 4, str(tmp_path)) == [[]] * 4


class Unused(nn.Module):
    """A part that is used every other step, one that never is, a scalar and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.always, self.sometimes, self.never = nn.Linear(5, 3), nn.Linear(5, 3), nn.Linear(5, 3)
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 8))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        out = self.always(x) * self.scale
        return (out + self.sometimes(x) if both else out).square().mean()


def unused(rank: int, world: int, folder: str) -> list[str]:
    apart = []
    for number in range(4):
        twin = Unused()
        plain = torch.optim.AdamW(twin.parameters(), lr=0.1, weight_decay=0.1)
        engines = {
            where: onecopy.initialize(Unused(), placed(onecopy.stage(number), where, folder), optimizer=adamw01)
            for where in ("host", "disk")
        }
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(world, 4, 5, generator=generator)
            twin(x.flatten(0, 1), step % 2 == 1).backward()
            plain.step()
            plain.zero_grad()
            for engine in engines.values():
                engine(x[rank], step % 2 == 1).backward()
                engine.step()
        for where, engine in engines.items():
            for name, value in engine.full_state_dict().items():
                if not torch.allclose(value, twin.state_dict()[name], atol=1e-6):
                    apart.append(f"stage {number}, {where}: {name}")
            engine.close()
    return apart


def adamw01(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.1, weight_decay=0.1)


def test_parameters_that_nobody_uses_are_left_alone(tmp_path: Path) -> None:
    """Cases row 13 with offload: as plain torch, a parameter without a gradient neither moves nor decays."""
    assert run_ranks(unused, 2, str(tmp_path)) == [[]] * 2


def micro_steps(rank: int, world: int, folder: str) -> list[float]:
    norms = []
    for where in ("host", "disk"):
        model = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(1.0)
        engine = onecopy.initialize(
            model,
            placed(onecopy.stage(2, accumulation=4), where, folder),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        )
        for window in range(3):
            if window == 2:  # given up after its first micro-batch, and begun anew
                engine(torch.ones(1, 1)).sum().backward()
                engine.step()
                engine.discard_gradients()
            for x in (1.0, 2.0, 3.0, 4.0):
                engine(torch.full((1, 1), x)).sum().backward()
                engine.step()
            assert engine.grad_norm is not None
            norms.append(engine.grad_norm)
        engine.close()
    return norms


def test_no_micro_step_is_lost(tmp_path: Path) -> None:
    """Cases row 32: the norm of the mean gradient of 1, 2, 3, 4 is 2.5 in the first window, in the second, and in
    one that was begun twice."""
    for norms in run_ranks(micro_steps, 2, str(tmp_path)):
        assert norms == [2.5] * 6


def resumes(rank: int, world: int, folder: str, scratch: str) -> list[str]:
    apart = []
    base = onecopy.stage(3, step=TILE, units=SMALL)
    for at, (before, after) in enumerate([("all on disk", "device"), ("device", "all on disk"), ("host", "disk")]):
        plans = [base if where == "device" else placed(base, where, scratch) for where in (before, after)]
        engine, _ = run(rank, plans[0], 3)
        engine.save(f"{folder}/{at}")
        want = go_on(engine, rank, 2, first=3)
        moment = onecopy.full_state(next(engine.module.parameters()), "exp_avg")
        engine.close()
        other = onecopy.initialize(stack(), plans[1], optimizer=adamw)
        other.load(f"{folder}/{at}")
        got = go_on(other, rank, 2, first=3)
        now = onecopy.full_state(next(other.module.parameters()), "exp_avg")
        other.close()
        if not same(got, want) or moment is None or now is None or not torch.equal(moment, now):
            apart.append(f"{before} to {after}")
    return apart


def test_a_checkpoint_goes_from_any_place_to_any(tmp_path: Path) -> None:
    """Cases row 53 with offload: two more steps after resuming elsewhere are those of the run that went on, to the bit."""
    assert run_ranks(resumes, 2, str(tmp_path / "saved"), str(tmp_path)) == [[]] * 2


def edits(rank: int, world: int, folder: str) -> list[str]:
    wrong = []
    for where in ("host", "disk", "all on host", "all on disk"):
        for dtype in (None, "bf16"):
            model = stack()
            engine = onecopy.initialize(
                model, placed(onecopy.stage(3, dtype=dtype, step=TILE, units=SMALL), where, folder), optimizer=adamw
            )
            go_on(engine, rank, 1)
            weight, bias, last = model[0].weight, model[0].bias, model[4].weight
            onecopy.set_full_param(weight, torch.full_like(onecopy.full_param(weight), 0.25))
            with onecopy.gathered(bias, write_rank=0):
                bias.data.fill_(0.5)
            torch.nn.init.constant_(last, 0.125)
            onecopy.set_full_state(weight, "exp_avg", torch.full(weight.shape, 2.0))
            asked = {"weight": weight, "bias": bias, "last": last}
            values = {name: onecopy.full_param(param) for name, param in asked.items()}
            wanted = {"weight": 0.25, "bias": 0.5, "last": 0.125}
            found = engine.full_state_dict()
            saved = {"weight": found["0.weight"], "bias": found["0.bias"], "last": found["4.weight"]}
            moment = onecopy.full_state(weight, "exp_avg")
            for name, want in wanted.items():
                # A master that rounds to what was written keeps its precision.
                if not (values[name].to(saved[name].dtype) == want).all() or not (saved[name] == want).all():
                    wrong.append(f"{where}, {dtype}: {name}")
            if moment is None or not (moment == 2.0).all():
                wrong.append(f"{where}, {dtype}: exp_avg")
            engine.close()
    return wrong


def test_what_is_written_by_hand_reaches_the_states_where_they_rest(tmp_path: Path) -> None:
    assert run_ranks(edits, 2, str(tmp_path)) == [[]] * 2


def capped(rank: int, world: int) -> list[str]:
    said = []
    for plan in (
        onecopy.stage(2, caps=onecopy.Caps(device=1000)),
        onecopy.offload(onecopy.stage(2, caps=onecopy.Caps(host=1000))),
    ):
        model = stack()
        before = [param.clone() for param in model.parameters()]
        with pytest.raises(onecopy.errors.PlanError) as caught:
            onecopy.initialize(model, plan, optimizer=adamw)
        said.append(str(caught.value))
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    engine, _ = run(rank, onecopy.stage(2), 1)
    needs = engine.predicted()["peak"]["device"]["total"]
    engine.close()
    engine, _ = run(rank, onecopy.stage(2, caps=onecopy.Caps(device=needs)), 1)
    engine.close()
    return said


def test_caps_are_kept_or_refused_before_anything_is_allocated() -> None:
    for device, host in run_ranks(capped, 2):
        assert "bytes of device memory on this rank and the cap is 1,000; largest: " in device
        assert "Move the optimizer's states and gradients to the host" in device
        assert "bytes of host memory on this rank and the cap is 1,000" in host
        assert "Move the optimizer's states to disk" in host


def crossing(rank: int, world: int) -> str:
    """More than the plan said: a gather of everything at once."""
    needs = 10_000_000
    for _ in range(2):
        plan = onecopy.stage(3, units=SMALL, caps=onecopy.Caps(device=needs))
        engine = onecopy.initialize(models.GPT(blocks=8), plan, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        needs = engine.predicted()["peak"]["device"]["total"]
    with pytest.raises(onecopy.errors.MemoryCapError) as caught, onecopy.gathered(engine.module):
        pass
    return str(caught.value)


def test_a_cap_holds_while_training() -> None:
    for said in run_ranks(crossing, 2):
        assert "gather buffer needs" in said
        assert "the cap is" in said


def groups(rank: int, world: int, folder: str) -> list[str]:
    """Groups whose options give them different states, and buffers of both kinds in one unit."""
    wrong = []

    def split(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        wide = [param for param in params if param.dim() == 2]
        thin = [param for param in params if param.dim() < 2]
        return torch.optim.AdamW([{"params": wide, "amsgrad": True}, {"params": thin, "lr": 0.1}], lr=1e-2, fused=True)

    for number in range(4):
        base = onecopy.stage(number, step=TILE)
        coded = onecopy.low_precision(base).rules[0].row
        mixed = base.with_(rules=(onecopy.Rule("*.weight", coded), *base.rules), step=onecopy.StepPolicy())
        engine, twin = run(rank, base, 4, split)
        engine.close()
        plans = {where: placed(base, where, folder) for where in ("host", "disk")} | {"mixed": mixed}
        for where, plan in plans.items():
            engine, seen = run(rank, plan, 4, split)
            if where != "mixed" and not same(seen, twin):
                wrong.append(f"stage {number}, {where}: values")
            if engine.predicted() != engine.measured():
                wrong.append(f"stage {number}, {where}: bytes")
            engine.close()
    return wrong


def test_groups_with_states_of_their_own(tmp_path: Path) -> None:
    assert run_ranks(groups, 2, str(tmp_path)) == [[]] * 2


def on_meta(rank: int, world: int, folder: str) -> list[str]:
    """An optimizer that makes its states at once, for a model that has no values yet."""
    apart = []
    for where in ("device", "host", "all on disk"):
        base = onecopy.stage(3, step=TILE, units=SMALL)
        plan = base if where == "device" else placed(base, where, folder)
        torch.manual_seed(0)
        with torch.device("meta"):
            model = stack()
        torch.manual_seed(0)
        engine = onecopy.initialize(model, plan, optimizer=adagrad)
        seen = go_on(engine, rank, 3)
        engine.close()
        twin, want = run(rank, base, 3, adagrad)
        twin.close()
        if not same(seen, want):
            apart.append(where)
    return apart


def test_states_of_a_model_on_the_meta_device(tmp_path: Path) -> None:
    assert run_ranks(on_meta, 2, str(tmp_path)) == [[]] * 2


def test_a_ratio_that_whole_units_cannot_make_is_said() -> None:
    plan = onecopy.offload(onecopy.stage(2), ratio=0.5)
    with pytest.warns(UserWarning, match="ratio 0.5 asked for, and 100% of the elements are stepped off the device"):
        engine = onecopy.initialize(stack(), plan, optimizer=adamw)
    engine.close()
