"""Learning-rate schedules: each against a formula written down naively, on any optimizer, saved and restored."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onecopy import schedules
from onecopy.errors import ConfigError

pytestmark = pytest.mark.pure


def sgd(*rates: float) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, lr=1.0)


def adam(rate: float = 0.1, betas: tuple[float, float] = (0.85, 0.95)) -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=rate, betas=betas)


def curve(schedule: Any, steps: int) -> list[float]:
    """Rates of the first group at the optimizer's first ``steps`` steps."""
    rates = []
    for _ in range(steps):
        rates.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return rates


# ------------------------------------------------------------------------------------------------ naive formulas


def warmup(i: int, low: float, high: float, steps: int, kind: str) -> float | None:
    steps = max(steps, 2)
    if i < 0:
        return low
    if i < steps:
        return low + (high - low) * (math.log(i + 1) / math.log(steps) if kind == "log" else i / steps)
    return None


def warmup_decay(i: int, low: float, high: float, steps: int, total: int, kind: str) -> float:
    rate = warmup(i, low, high, steps, kind)
    if rate is None:
        rate = low + (high - low) * max(0.0, (total - i) / max(1.0, total - max(2, steps)))
    return rate


def warmup_cosine(i: int, base: float, low: float, steps: int, total: int, end: float, kind: str) -> float:
    ratio = warmup(i, low, 1.0, steps, kind)
    if ratio is None:
        done = min(1.0, (i - max(2, steps) + 1) / max(1, total - max(2, steps)))
        ratio = end + (1 - end) * (1 + math.cos(math.pi * done)) / 2
    return base * ratio


def triangle(t: int, low: float, high: float, up: int, down: int) -> float:
    """Rates of one cycle that repeats: at step ``t``, up in ``up`` steps and down in ``down``."""
    t %= up + down
    return low + (high - low) * (t / up if t <= up else (up + down - t) / down)


RATE = st.floats(1e-6, 10.0)
KIND = st.sampled_from(["log", "linear"])


@given(low=st.floats(0, 1), high=RATE, steps=st.integers(1, 8), kind=KIND)
def test_warmup(low: float, high: float, steps: int, kind: str) -> None:
    seen = curve(schedules.WarmupLR(sgd(0.5), low, high, steps, kind), 12)
    expected = [high if (rate := warmup(i, low, high, steps, kind)) is None else rate for i in range(-1, 11)]
    assert seen == pytest.approx(expected, rel=1e-12, abs=1e-15)


@given(low=st.floats(0, 1), high=RATE, steps=st.integers(1, 6), more=st.integers(1, 6), kind=KIND)
def test_warmup_decay(low: float, high: float, steps: int, more: int, kind: str) -> None:
    total = steps + more
    schedule = schedules.WarmupDecayLR(sgd(0.5), total, low, high, steps, kind)
    expected = [warmup_decay(i, low, high, steps, total, kind) for i in range(-1, 15)]
    assert curve(schedule, 16) == pytest.approx(expected, rel=1e-12, abs=1e-15)


@given(base=RATE, low=st.floats(0, 1), steps=st.integers(1, 6), more=st.integers(1, 6), end=st.floats(0, 1), kind=KIND)
def test_warmup_cosine(base: float, low: float, steps: int, more: int, end: float, kind: str) -> None:
    total = steps + more
    schedule = schedules.WarmupCosineLR(sgd(base), total, low, steps, end, kind)
    expected = [warmup_cosine(i, base, low, steps, total, end, kind) for i in range(-1, 15)]
    assert curve(schedule, 16) == pytest.approx(expected, rel=1e-9, abs=1e-15)


@given(low=RATE, size=st.integers(1, 5), rate=st.floats(0, 3), stairs=st.booleans())
def test_range_test(low: float, size: int, rate: float, stairs: bool) -> None:
    seen = curve(schedules.LRRangeTest(sgd(0.5), low, size, rate, stairs), 12)
    expected = [low * (1 + rate * (math.floor(t / size) if stairs else t / size)) for t in range(12)]
    assert seen == pytest.approx(expected, rel=1e-12)


@given(low=RATE, high=RATE, up=st.integers(1, 5), down=st.integers(0, 5), decay=st.floats(0, 2), size=st.integers(0, 3))
def test_one_cycle_rates(low: float, high: float, up: int, down: int, decay: float, size: int) -> None:
    schedule = schedules.OneCycle(
        adam(), low, high, decay, cycle_first_step_size=up, cycle_second_step_size=down, decay_step_size=size
    )
    expected = []
    for t in range(20):
        after = t - (up + down)
        if after <= 0:
            expected.append(triangle(t, low, high, up, down))
        else:
            expected.append(low / (1 + decay * after / size) if size else low)
    assert curve(schedule, 20) == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_one_cycle_moves_the_first_beta_the_other_way_and_leaves_the_second() -> None:
    optimizer = adam(betas=(0.5, 0.95))
    schedule = schedules.OneCycle(
        optimizer, 0.1, 1.0, cycle_first_step_size=2, decay_step_size=1, decay_mom_rate=0.05, cycle_max_mom=0.9
    )
    betas = []
    for _ in range(9):
        betas.append(optimizer.param_groups[0]["betas"])
        assert schedule.get_mom() == [betas[-1]]
        optimizer.step()
        schedule.step()
    assert [b for b, _ in betas] == pytest.approx([0.9, 0.85, 0.8, 0.85, 0.9, 0.945, 0.99, 0.999, 0.999])
    assert {b for _, b in betas} == {0.95}


def test_one_cycle_in_stairs() -> None:
    schedule = schedules.OneCycle(adam(), 0.0, 1.0, cycle_first_step_size=4, cycle_first_stair_count=2)
    assert curve(schedule, 9) == pytest.approx([0, 0, 0.5, 0.5, 1, 0.5, 0.5, 0, 0])
    uneven = schedules.OneCycle(
        adam(), 0.0, 1.0, cycle_first_step_size=3, cycle_second_step_size=6, cycle_first_stair_count=0,
        cycle_second_stair_count=3,
    )  # fmt: skip
    assert curve(uneven, 10) == pytest.approx([0, 1 / 3, 2 / 3, 1, 2 / 3, 2 / 3, 1 / 3, 1 / 3, 0, 0])


def test_one_cycle_on_an_optimizer_without_betas_says_so() -> None:
    with pytest.warns(UserWarning, match="SGD has no betas"):
        schedule = schedules.OneCycle(sgd(0.1), 0.1, 1.0, cycle_first_step_size=2)
    assert schedule.get_mom() is None
    assert curve(schedule, 3) == pytest.approx([0.1, 0.55, 1.0])


# ------------------------------------------------------------------------------------------- rates of the optimizer


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_without_a_maximum_the_optimizers_own_rates_are_reached_per_group(kind: str) -> None:
    total = {} if kind == "WarmupLR" else {"total_num_steps": 10**6}
    optimizer = sgd(5e-5, 3e-4)
    schedule = getattr(schedules, kind)(optimizer, warmup_num_steps=4, **total)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]
    curve(schedule, 5)
    assert schedule.get_last_lr() == pytest.approx([5e-5, 3e-4], rel=1e-5)


def test_one_rate_per_group_may_be_given() -> None:
    optimizer = sgd(1.0, 1.0)
    schedule = schedules.WarmupLR(optimizer, [0.1, 0.2], [1.0, 2.0], warmup_num_steps=2, warmup_type="linear")
    curve(schedule, 2)
    assert schedule.get_last_lr() == pytest.approx([0.55, 1.1])
    with pytest.raises(ConfigError, match="has 3 values but the optimizer has 2"):
        schedules.WarmupLR(optimizer, warmup_max_lr=[1.0, 2.0, 3.0])


def test_a_rate_held_in_a_tensor_is_written_in_place() -> None:
    rate = torch.tensor(0.5, dtype=torch.float64)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=rate, capturable=False, foreach=False)
    schedule = schedules.WarmupLR(optimizer, warmup_num_steps=2, warmup_type="linear")
    held = optimizer.param_groups[0]["lr"]
    for _ in range(4):
        schedule.step()
    assert optimizer.param_groups[0]["lr"] is held and held.item() == 0.5
    assert schedule.get_last_lr() == [0.5]


# ------------------------------------------------------------------------------------------------ save and restore

MAKE: dict[str, Any] = {
    "WarmupLR": lambda o: schedules.WarmupLR(o, warmup_num_steps=5),
    "WarmupDecayLR": lambda o: schedules.WarmupDecayLR(o, 9, warmup_num_steps=3),
    "WarmupCosineLR": lambda o: schedules.WarmupCosineLR(o, 9, warmup_num_steps=3),
    "LRRangeTest": lambda o: schedules.LRRangeTest(o, 0.1, 2),
    "OneCycle": lambda o: schedules.OneCycle(o, 0.1, 1.0, 0.5, cycle_first_step_size=3, decay_step_size=2),
}


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("at", [0, 1, 4, 11])
def test_a_restored_schedule_goes_on_where_it_was(kind: str, at: int) -> None:
    whole = curve(MAKE[kind](adam()), 16)
    first = MAKE[kind](adam())
    curve(first, at)
    state, moments = first.state_dict(), first.optimizer.state_dict()
    assert state == {"last_batch_iteration": at - 1}
    second = MAKE[kind](adam())
    second.load_state_dict(state)
    assert second.get_last_lr() == first.get_last_lr()
    second.optimizer.load_state_dict(moments)
    assert curve(second, 16 - at) == whole[at:]


@pytest.mark.parametrize("kind", MAKE)
def test_a_schedule_built_on_a_restored_optimizer_keeps_its_rates(kind: str) -> None:
    whole = curve(MAKE[kind](adam()), 12)
    first = MAKE[kind](adam())
    curve(first, 6)
    optimizer = adam(rate=123.0)
    optimizer.load_state_dict(first.optimizer.state_dict())
    second = MAKE[kind](optimizer)
    second.load_state_dict(first.state_dict())
    assert curve(second, 6) == whole[6:]


def test_an_iteration_can_be_given_to_step_and_to_the_constructor() -> None:
    schedule = schedules.WarmupLR(sgd(1.0), warmup_num_steps=10, warmup_type="linear")
    schedule.step(7)
    assert schedule.get_last_lr() == pytest.approx([0.7])
    later = schedules.WarmupLR(sgd(1.0), warmup_num_steps=10, warmup_type="linear", last_batch_iteration=3)
    assert later.last_batch_iteration == 3 and later.get_last_lr() == pytest.approx([0.3])
    later.step()
    assert later.get_last_lr() == pytest.approx([0.4])


def test_they_work_where_torch_expects_its_own() -> None:
    optimizer = sgd(1.0)
    one = schedules.WarmupLR(optimizer, warmup_num_steps=3, warmup_type="linear")
    assert isinstance(one, torch.optim.lr_scheduler.LRScheduler)
    chained = torch.optim.lr_scheduler.ChainedScheduler([one])
    chained.step()
    chained.step()
    assert chained.get_last_lr() == pytest.approx([1 / 3])

    class Wrapper:
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.optimizer = inner

    assert schedules.WarmupLR(Wrapper(optimizer)).optimizer is optimizer
    with pytest.raises(TypeError, match="is not a torch optimizer"):
        schedules.WarmupLR(object())


@pytest.mark.parametrize(
    ("kind", "settings", "part"),
    [
        ("WarmupLR", {"warmup_num_steps": 0}, "WarmupLR.warmup_num_steps is 0; it must be a whole number from 1"),
        ("WarmupLR", {"warmup_num_steps": True}, "WarmupLR.warmup_num_steps is true"),
        ("WarmupLR", {"warmup_min_lr": math.nan}, "a finite number from 0"),
        ("WarmupLR", {"warmup_type": "lin"}, "did you mean 'linear'?"),
        ("WarmupDecayLR", {"total_num_steps": 5, "warmup_num_steps": 5}, "shorter than the whole"),
        ("WarmupCosineLR", {"total_num_steps": 5, "warmup_num_steps": 6}, "shorter than the whole"),
        ("WarmupCosineLR", {"total_num_steps": 5, "warmup_num_steps": 2, "cos_min_ratio": 2}, "from 0 to 1"),
        ("LRRangeTest", {"lr_range_test_step_size": 0}, "a whole number from 1"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_first_step_size": 0}, "a whole number from 1"),
        ("OneCycle", {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_max_mom": 1.0}, "below 1"),
        (
            "OneCycle",
            {"cycle_min_lr": 0, "cycle_max_lr": 1, "cycle_mx_mom": 1.0},
            "did you mean OneCycle.cycle_max_mom?",
        ),
    ],
)
def test_settings_that_have_no_right_result_are_refused(kind: str, settings: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigError) as info:
        getattr(schedules, kind)(adam(), **settings)
    assert part in str(info.value)
