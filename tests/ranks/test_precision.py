"""bf16 and fp16 with masters, loss scaling, accumulation that does not stick, norms, and steps that are skipped."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onecopy
from onecopy.errors import OneCopyError
from onecopy.plan.plan import LossScale, Precision
from tests.ranks import models
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import every_plan

pytestmark = pytest.mark.ranks


def fp16(**scale: Any) -> dict[str, Any]:
    return {"precision": Precision("float16", loss_scale=LossScale(**scale))}


def full(engine: Any) -> dict[str, Tensor]:
    return {name: onecopy.full_param(p).clone() for name, p in engine.module.named_parameters()}


# ------------------------------------------------------------------------------------------------------- accumulation


class Halves(nn.Module):
    """A weight of 512 elements whose every gradient is exactly 1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


def five_hundred_ones(rank: int, world: int, cast: bool) -> dict[str, tuple[float, float]]:
    out = {}
    for name, plan in every_plan(accumulation=512, **({"dtype": "bf16"} if cast else {})).items():
        model = Halves().float() if cast else Halves()
        engine = onecopy.initialize(model, plan, optimizer=lambda params: torch.optim.SGD(params, lr=1.0))
        for _ in range(512):
            engine(torch.ones(8, dtype=torch.bfloat16)).backward()
            engine.step()
        assert engine.global_steps == 1
        out[name] = onecopy.full_param(model.w)[0].item(), engine.grad_norm
        engine.close()
    return out


@pytest.mark.parametrize("cast", [True, False], ids=["plan casts", "model is bf16"])
def test_512_ones_average_one(cast: bool) -> None:
    """Summed in bf16 they stick at 256 and average 0.5."""
    for run in run_ranks(five_hundred_ones, 2, cast):
        for name, (w, norm) in run.items():
            assert w == -1.0, name
            assert norm == pytest.approx(math.sqrt(8)), name


def small_updates(rank: int, world: int) -> dict[str, float]:
    """Steps far below bf16's resolution at 1.0 add up in the fp32 master."""
    out = {}
    for name, plan in every_plan(dtype="bf16").items():
        model = models.Toy()
        engine = onecopy.initialize(model, plan, optimizer=lambda params: torch.optim.SGD(params, lr=2**-12))
        for _ in range(64):
            engine(torch.tensor([1.0])).backward()
            engine.step()
        assert model.w.dtype == torch.bfloat16
        out[name] = onecopy.full_param(model.w).item()
        engine.close()
    return out


def test_masters_remember_what_bf16_cannot() -> None:
    for run in run_ranks(small_updates, 2):
        assert run == dict.fromkeys(run, 1 - 64 * 2**-12), run


def cast_run(rank: int, world: int, dtype: str) -> dict[str, Any]:
    """The engine casts parameters, floating buffers and inputs; integer inputs stay."""
    out = {}
    for name, plan in every_plan(dtype=dtype).items():
        model = models.build("gpt")
        engine = onecopy.initialize(model, plan, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3))
        losses = []
        for _ in range(10):
            loss = engine(*models.batch("gpt", 0, 0, rank))
            loss.backward()
            engine.step()
            losses.append(loss.item())
        out[name] = losses, {str(p.dtype) for p in model.parameters()}, engine.skipped_steps, full(engine)
        engine.close()
        linear = onecopy.initialize(nn.Linear(4, 4), plan, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
        result = linear(torch.ones(2, 4))  # fp32 input into low-precision weights
        assert str(result.dtype) == {"bf16": "torch.bfloat16", "fp16": "torch.float16"}[dtype]
        linear.close()
    return out


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_low_precision_trains(dtype: str) -> None:
    runs = run_ranks(cast_run, 2, dtype)
    for run in runs:
        first = run["stage 0"]
        for name, (losses, dtypes, skipped, weights) in run.items():
            assert dtypes == {{"bf16": "torch.bfloat16", "fp16": "torch.float16"}[dtype]}, name
            assert losses[-1] < losses[0] - 0.05, name
            assert skipped <= 2, name
            assert losses == first[0], name
            assert all(torch.equal(v, first[3][k]) for k, v in weights.items()), name


# -------------------------------------------------------------------------------------------------- overflow and skip


class Two(nn.Module):
    """loss = 2a + 0.5b, each of 4 equal elements so that rank 0 owns a and rank 1 owns b."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (2 * self.a.float() * x.float() + 0.5 * self.b.float()).sum()


def overflow_run(rank: int, world: int, hysteresis: int, both: bool) -> dict[str, Any]:
    """Two steps: the first overflows in the gradient of ``a`` (on one rank's data only unless ``both``)."""
    out = {}
    for name, plan in every_plan(**fp16(hysteresis=hysteresis)).items():
        model = Two()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        engine = onecopy.initialize(model, plan, optimizer=optimizer, scheduler=scheduler)
        assert engine.loss_scale == 65536.0
        before = full(engine)
        engine.backward(engine(torch.ones(1) * (1.0 if both or rank == 0 else 0.0)))
        moved = engine.step()
        same = all(torch.equal(v, before[k]) for k, v in full(engine).items())
        after = (moved, same, engine.loss_scale, engine.skipped_steps, engine.global_steps, engine.lr())
        steps = [float(s["step"]) for s in engine.optimizer.state.values() if "step" in s]
        scales = []
        for _ in range(2):
            engine.backward(engine(torch.ones(1) * 0.25))
            engine.step()
            scales.append(engine.loss_scale)
        out[name] = after, max(steps, default=0.0), scales, engine.skipped_steps, full(engine), engine.lr()
        engine.close()
    return out


@pytest.mark.parametrize("both", [True, False], ids=["all ranks", "one rank's data"])
@pytest.mark.parametrize("hysteresis", [1, 2])
def test_an_overflow_on_one_shard_skips_on_all(hysteresis: int, both: bool) -> None:
    runs = run_ranks(overflow_run, 2, hysteresis, both)
    scale = 32768.0 if hysteresis == 1 else 65536.0
    for run in runs:
        for name, (after, steps, scales, skipped, weights, lr) in run.items():
            moved, same, now, count, done, rates = after
            assert (moved, same, now, count, done) == (False, True, scale, 1, 1), name
            assert rates == [0.25], "the scheduler ticked on a skipped step"
            assert steps == 0.0, "the optimizer's own step count advanced"
            assert scales == [scale, scale], name
            assert skipped == 1, name
            assert lr == [0.25 * 0.25], "two steps were taken"
            assert all(torch.equal(v, runs[0]["stage 0"][4][k]) for k, v in weights.items()), name
            assert not torch.equal(weights["a"], torch.ones(4)), name


def plain_backward_fp16(rank: int, world: int) -> dict[str, float]:
    """``loss.backward()`` without the engine is scaled too: a gradient of 1e-7 survives fp16."""
    out = {}
    for name, plan in every_plan(**fp16(initial=1024.0)).items():
        engine = onecopy.initialize(models.Toy(), plan, optimizer=lambda params: torch.optim.SGD(params, lr=1000.0))
        (engine(torch.tensor([1.0])).float() * 2**-24).backward()
        engine.step()
        out[name] = onecopy.full_param(engine.module.w).item(), engine.grad_norm
        engine.close()
    return out


def test_a_plain_backward_is_scaled_too() -> None:
    for run in run_ranks(plain_backward_fp16, 2):
        for name, (w, norm) in run.items():
            assert norm == pytest.approx(2**-24, rel=1e-2), name
            assert w == pytest.approx(1 - 1000 * 2**-24, abs=1e-6), name


def growth_run(rank: int, world: int) -> dict[str, list[float]]:
    out = {}
    for name, plan in every_plan(**fp16(initial=4.0, window=2)).items():
        engine = onecopy.initialize(models.Toy(), plan, optimizer=lambda params: torch.optim.SGD(params, lr=1e-3))
        scales = []
        for count in range(7):
            x = 1e9 if count == 4 else 1.0
            engine.backward(engine(torch.tensor([1.0])).float() * x)
            engine.step()
            scales.append(engine.loss_scale)
        out[name] = [*scales, float(engine.skipped_steps)]
        engine.close()
    return out


def test_the_scale_doubles_after_a_clean_window() -> None:
    for run in run_ranks(growth_run, 2):
        for name, seen in run.items():
            assert seen == [4, 8, 8, 16, 8, 8, 16, 1], name


def floor_run(rank: int, world: int) -> dict[str, str]:
    """One parameter always gives NaN; scale 2^3, floor 1."""
    out = {}
    for name, plan in every_plan(**fp16(initial=8.0)).items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        engine = onecopy.initialize(model, plan, optimizer=lambda params: torch.optim.SGD(params, lr=1e-3))
        bad = torch.zeros(4)
        bad[0] = math.nan if rank == 1 else 0.0
        said = "no error"
        try:
            for _ in range(10):
                hidden = engine(torch.ones(2, 4))
                if hidden.requires_grad:
                    hidden.register_hook(lambda g, bad=bad: g + bad.to(g))
                engine.backward(hidden.float().sum())
                engine.step()
        except OneCopyError as error:
            said = f"{engine.global_steps}: {error}"
        out[name] = said
        engine.close()
    return out


def test_at_the_floor_the_error_names_the_parameter() -> None:
    for run in run_ranks(floor_run, 2):
        for name, said in run.items():
            assert said != "no error", name
            assert "weight" in said or "bias" in said, said
            assert "scale" in said, said


def non_finite_run(rank: int, world: int, value: float, options: dict[str, Any]) -> dict[str, Any]:
    """An infinite or NaN gradient on one rank, without loss scaling."""
    out = {}
    for name, plan in every_plan(clip=0.1, **options).items():
        model = models.build("even")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        engine = onecopy.initialize(
            model, plan, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        )
        before = full(engine)
        for count in range(3):
            loss = engine(*models.batch("even", count, 0, rank))
            (loss * (value if count == 1 and rank == 1 else 1.0)).backward()
            moved = engine.step()
            now = full(engine)
            changed = any(not torch.equal(v, before[k]) for k, v in now.items())
            finite = all(bool(v.isfinite().all()) for v in now.values())
            out.setdefault(name, []).append((moved, changed, finite, engine.skipped_steps, engine.lr()[0]))
            before = now
        engine.close()
    return out


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("options", [{}, {"dtype": "bf16"}, {"norm_type": math.inf}], ids=str)
def test_a_non_finite_gradient_skips_the_step(value: float, options: dict[str, Any]) -> None:
    for run in run_ranks(non_finite_run, 2, value, options):
        for name, seen in run.items():
            assert seen[0] == (True, True, True, 0, 0.05), name
            assert seen[1] == (False, False, True, 1, 0.05), name
            assert seen[2] == (True, True, True, 1, 0.025), name


# -------------------------------------------------------------------------------------------------------------- norms


class Vector(nn.Module):
    """A weight at zero whose gradient is the input."""

    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


def norm_run(rank: int, world: int, norm_type: float, shard: int | None) -> dict[str, Any]:
    """Rank gradients [3, 0] and [0, 4] (repeated over four ranks), clip 1, lr 1."""
    out = {}
    options = {"clip": 1.0, "norm_type": norm_type}
    plans = every_plan(**options) if shard is None else {n: onecopy.hsdp(shard=shard, number=n, **options) for n in range(4)}
    for name, plan in plans.items():
        engine = onecopy.initialize(Vector(), plan, optimizer=lambda params: torch.optim.SGD(params, lr=1.0))
        before = engine.grad_norm
        engine(torch.tensor([[3.0, 0.0], [0.0, 4.0]][rank % 2])).backward()
        engine.step()
        out[name] = before, engine.grad_norm, onecopy.full_param(engine.module.w).tolist()
        engine.close()
    return out


@pytest.mark.parametrize(("world", "shard"), [(2, None), (4, None), (4, 2), (4, 1)])
@pytest.mark.parametrize(("norm_type", "norm"), [(2.0, 2.5), (1.0, 3.5), (3.0, (1.5**3 + 2**3) ** (1 / 3)), (math.inf, 2.0)])
def test_the_global_norm(world: int, shard: int | None, norm_type: float, norm: float) -> None:
    """2.5, not 3.5 (norms averaged) or 5 (replicas counted twice); reported before clipping."""
    for run in run_ranks(norm_run, world, norm_type, shard):
        for name, (before, seen, weight) in run.items():
            assert before is None
            assert seen == pytest.approx(norm, rel=1e-6), name
            assert weight == pytest.approx([-1.5 / norm, -2.0 / norm], abs=2e-6), name


def expert_norm(rank: int, world: int) -> dict[str, float]:
    """Four experts, squared gradient norms 20 on rank 0's pair and 100 on rank 1's: sqrt(120), not 7.236."""
    out = {}
    # One unit: ranks that route to different experts of a unit still gather alike.
    for name, plan in every_plan(clip=1.0, units=onecopy.Units()).items():
        model = nn.ModuleList(Vector(1) for _ in range(4))
        model.forward = lambda xs, model=model: sum(model[i](x) for i, x in xs)  # type: ignore[assignment,misc]
        engine = onecopy.initialize(model, plan, optimizer=lambda params: torch.optim.SGD(params, lr=1.0))
        # The engine averages over two ranks, hence the factor 2.
        sizes = ((0, 4.0), (1, 2.0)) if rank == 0 else ((2, 8.0), (3, 6.0))
        engine([(i, torch.tensor([2 * size])) for i, size in sizes]).backward()
        engine.step()
        out[name] = engine.grad_norm
        engine.close()
    return out


def test_the_norm_over_experts() -> None:
    for run in run_ranks(expert_norm, 2):
        assert run == dict.fromkeys(run, pytest.approx(math.sqrt(120), rel=1e-6)), run


def tiny_norm(rank: int, world: int) -> dict[str, Any]:
    """Values whose squares leave fp32: 1e25 and 1e-25."""
    out = {}
    for size in (1e25, 1e-25):
        for name, plan in every_plan(clip=1.0).items():
            engine = onecopy.initialize(Vector(3), plan, optimizer=lambda params: torch.optim.SGD(params, lr=1.0))
            engine(torch.full((3,), size)).backward()
            engine.step()
            out[f"{name} {size}"] = engine.grad_norm, engine.skipped_steps
            engine.close()
    return out


def test_norms_beyond_the_range_of_squares() -> None:
    """Either the true norm, or (as torch in fp32) inf, in which case nothing may be poisoned."""
    for run in run_ranks(tiny_norm, 2):
        for name, (norm, skipped) in run.items():
            if "e-25" in name:
                assert norm == pytest.approx(math.sqrt(3) * 1e-25, rel=1e-5) or norm == 0.0, name
            else:
                assert norm == pytest.approx(math.sqrt(3) * 1e25, rel=1e-5) or skipped == 1, name


def scaled_clip(rank: int, world: int) -> dict[str, Any]:
    """Norm and clipping are of the unscaled gradients under fp16 and accumulation."""
    out = {}
    for name, plan in every_plan(clip=1.0, accumulation=2, **fp16(initial=256.0)).items():
        engine = onecopy.initialize(Vector(), plan, optimizer=lambda params: torch.optim.SGD(params, lr=1.0))
        for _ in range(2):
            engine.backward(engine(torch.tensor([[3.0, 0.0], [0.0, 4.0]][rank])).float())
            engine.step()
        out[name] = engine.grad_norm, onecopy.full_param(engine.module.w).tolist()
        engine.close()
    return out


def test_scaled_gradients_are_clipped_unscaled() -> None:
    for run in run_ranks(scaled_clip, 2):
        for name, (norm, weight) in run.items():
            assert norm == pytest.approx(2.5), name
            assert weight == pytest.approx([-0.6, -0.8], abs=1e-6), name


def fp64_run(rank: int, world: int) -> dict[str, float]:
    """A float64 model stays float64 and is not rounded through fp32 anywhere."""
    out = {}
    for name, plan in every_plan(clip=1e9).items():
        model = nn.Linear(3, 1, bias=False).double()
        with torch.no_grad():
            model.weight.fill_(1 + 2**-40)
        engine = onecopy.initialize(model, plan, optimizer=lambda params: torch.optim.SGD(params, lr=2**-45))
        F.mse_loss(engine(torch.ones(1, 3, dtype=torch.float64)), torch.zeros(1, 1, dtype=torch.float64)).backward()
        engine.step()
        with onecopy.gathered(model):
            out[name] = model.weight[0, 0].item() - 1
        engine.close()
    return out


def test_float64_keeps_its_digits() -> None:
    w = torch.tensor(1 + 2**-40, dtype=torch.float64)
    expected = (w - 2**-45 * 6 * w).item() - 1
    for run in run_ranks(fp64_run, 2):
        assert run == dict.fromkeys(run, pytest.approx(expected, rel=1e-9)), run
