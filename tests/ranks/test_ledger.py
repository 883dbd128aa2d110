"""Bytes owned and sent: predicted = measured = theory, with no padding in the model, so to the byte."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import onecopy
from tests.ranks import models
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.ranks

PSI = sum(p.numel() for p in models.Even().parameters())
LAST = sum(p.numel() for p in models.Even().last.parameters())
UNITS = models.Even.UNITS
PRESETS: dict[str, dict[str, Any]] = {
    "stage 0": {"number": 0},
    "stage 1": {"number": 1},
    "stage 2": {"number": 2},
    "stage 3": {"number": 3},
    "stage 3 held": {"number": 3, "reshard_after_forward": False},
}


def make(preset: dict[str, Any], **options: Any) -> Any:
    options = {"units": onecopy.Units(min_numel=0), **preset, **options}
    shard = options.pop("shard", None)
    number = options.pop("number")
    return onecopy.hsdp(shard=shard, number=number, **options) if shard else onecopy.stage(number, **options)


def train_and_report(rank: int, world: int, plans: dict[str, Any], model: str = "even") -> dict[str, Any]:
    """Both ledgers of each plan after two steps of AdamW, and the live bytes the engine added."""
    out = {}
    for name, plan in plans.items():
        before = live_bytes()
        net = models.build(model)
        engine = onecopy.initialize(net, plan, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3))
        for step in range(2):
            for micro in range(plan.batch.accumulation):
                engine(*models.batch(model, step, micro, rank)).backward()
                engine.step()
        gc.collect()
        held = live_bytes() - before
        out[name] = {"measured": engine.measured(), "predicted": engine.predicted(), "held": held}
        engine.close()
        del engine, net
        gc.collect()
    return out


def live_bytes(collect: bool = True) -> int:
    """Bytes of all distinct storages that live tensors hold."""
    if collect:
        gc.collect()
    found = {}
    with torch._C.DisableTorchFunctionSubclass():  # a sharded parameter refuses to show its (empty) storage
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu":
                storage = torch._C.TensorBase.untyped_storage(thing)
                found[storage._cdata] = storage.nbytes()
    return sum(found.values())


# The op that makes cut pieces whole again is "gather" when it fetches cut parameters, "spread" after a step or a sum.
OPS = {"whole": ("gather", "spread"), "reduce": ("reduce",), "sum": ("sum",)}


def sent(ledger: dict[str, Any]) -> int:
    """Bytes of parameters and gradients this rank sends in a step."""
    assert set(ledger["collectives"]) <= {"gather", "spread", "reduce", "sum", "vote"}
    return sum(op["bytes"] for kind, op in ledger["collectives"].items() if kind != "vote")


def count(ledger: dict[str, Any], what: str) -> int:
    return sum(ledger["collectives"].get(op, {"count": 0})["count"] for op in OPS[what])


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_traffic_equals_theory(world: int, accumulation: int, dtype: str | None) -> None:
    if world == 4 and dtype:
        pytest.skip("the same cells as on two ranks")
    plans = {name: make(p, accumulation=accumulation, dtype=dtype) for name, p in PRESETS.items()}
    size = 2 if dtype else 4
    once = PSI * (world - 1) // world * size
    volumes = {
        "stage 0": 2,
        "stage 1": 2,
        "stage 2": 1 + accumulation,
        "stage 3": 3 * accumulation,
        "stage 3 held": 2 * accumulation,
    }
    for run in run_ranks(train_and_report, world, plans):
        for name, ledgers in run.items():
            measured = sent(ledgers["measured"])
            assert measured == sent(ledgers["predicted"]), name
            if dtype and accumulation > 1 and name in ("stage 0", "stage 1"):
                # What has accumulated in fp32 may be reduced in fp32: then that half costs twice the bytes.
                assert measured in (volumes[name] * once, (volumes[name] + 1) * once, 2 * volumes[name] * once), name
            else:
                # The last unit of the forward may stay for the backward that follows at once: one gather of it less.
                spared = accumulation * LAST * (world - 1) // world * size if name == "stage 3" else 0
                assert measured in (volumes[name] * once, volumes[name] * once - spared), f"{name}: {measured / once}"


@pytest.mark.parametrize("accumulation", [1, 2])
def test_collectives_are_one_per_unit_and_event(accumulation: int) -> None:
    plans = {name: make(p, accumulation=accumulation) for name, p in PRESETS.items()}
    for run in run_ranks(train_and_report, 2, plans):
        counts = {name: tuple(count(ledgers["measured"], op) for op in OPS) for name, ledgers in run.items()}
        assert counts["stage 1"] == (UNITS, UNITS, 0)
        assert counts["stage 2"] == (UNITS, UNITS * accumulation, 0)
        assert counts["stage 3"][0] in (2 * UNITS * accumulation, (2 * UNITS - 1) * accumulation)
        assert counts["stage 3"][1:] == (UNITS * accumulation, 0)
        assert counts["stage 3 held"] == (UNITS * accumulation, UNITS * accumulation, 0)
        assert counts["stage 0"] in ((0, 0, UNITS), (UNITS, UNITS, 0)), "an all-reduce, or the two halves of one"


@pytest.mark.parametrize("model", ["even", "gpt", "mlp"])
@pytest.mark.parametrize("options", [{}, {"dtype": "bf16"}, {"accumulation": 2, "clip": 0.1}], ids=str)
def test_predicted_is_measured(model: str, options: dict[str, Any]) -> None:
    plans = {name: make(p, **options) for name, p in PRESETS.items()}
    for run in run_ranks(train_and_report, 2, plans, model=model):
        for name, ledgers in run.items():
            predicted, measured = ledgers["predicted"], ledgers["measured"]
            assert predicted["collectives"] == measured["collectives"], name
            assert predicted["resident"] == measured["resident"], name
            assert predicted["peak"].keys() == measured["peak"].keys(), name


def test_predicted_is_measured_on_hybrid_groups() -> None:
    plans = {name: make(p, shard=2) for name, p in PRESETS.items()}
    for run in run_ranks(train_and_report, 4, plans):
        for name, ledgers in run.items():
            assert ledgers["predicted"]["collectives"] == ledgers["measured"]["collectives"], name
            assert ledgers["predicted"]["resident"] == ledgers["measured"]["resident"], name
        # 2 x 2: reduce and gathers inside the pair (Psi/2 each), then a sum of the half across the pairs.
        inside = 3 * PSI * 4 // 2
        total = inside + 2 * (PSI // 2) * 4 // 2
        assert sent(run["stage 3"]["measured"]) in (total, total - LAST * 4 // 2)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_resident_bytes_are_those_of_the_zero_table(world: int, dtype: str | None) -> None:
    """Mixed precision: 2 + 2 + 12 bytes per parameter; plain fp32: 4 + 4 + 8, there is no second master."""
    plans = {name: make(p, dtype=dtype) for name, p in PRESETS.items()}
    wide, master = (2, 4) if dtype else (4, 0)
    cut = {  # parameter, gradient, optimizer
        "stage 0": (1, 1, 1),
        "stage 1": (1, 1, world),
        "stage 2": (1, world, world),
        "stage 3": (world, world, world),
        "stage 3 held": (world, world, world),
    }
    for run in run_ranks(train_and_report, world, plans):
        for name, ledgers in run.items():
            resident = ledgers["measured"]["resident"]["device"]
            parameter, gradient, optimizer = cut[name]
            assert resident["parameter"] == wide * PSI // parameter, name
            assert resident["master"] == master * PSI // optimizer, name
            # AdamW's step counters are states as well: 4 bytes for each flat tensor it steps.
            extra = resident["moments"] - 8 * PSI // optimizer
            assert 0 <= extra <= 4 * 4 * UNITS, name
            assert resident["gradient"] <= wide * PSI // gradient, name


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_the_process_holds_what_the_ledger_says(dtype: str | None) -> None:
    """Live tensors between two steps, counted from outside: nothing kept that the ledger does not own up to."""
    plans = {name: make(p, dtype=dtype) for name, p in PRESETS.items()}
    for run in run_ranks(train_and_report, 2, plans):
        for name, ledgers in run.items():
            said = sum(ledgers["measured"]["resident"]["device"].values())
            # Both ranks' exchange buffers are mapped, and at stage 3 the other rank's half of the parameters.
            ledgers["held"] -= 2 * ledgers["measured"]["peak"]["device"].get("exchange buffer", 0)
            if name.startswith("stage 3"):
                ledgers["held"] -= ledgers["measured"]["resident"]["device"]["parameter"]
            assert ledgers["held"] <= said + 4096, f"{name}: {ledgers['held']} bytes live, {said} owned up to"
        assert run["stage 3"]["held"] < 0.65 * run["stage 0"]["held"]
        assert run["stage 1"]["held"] < run["stage 0"]["held"]


class Watch:
    """Largest number of live bytes, above those at the start, at any call of a watched module."""

    def __init__(self, modules: nn.Module) -> None:
        self.before, self.most = live_bytes(), 0
        for module in modules.children():
            module.register_forward_hook(self.look)
            module.register_full_backward_hook(self.look)

    def look(self, *_: Any) -> None:
        self.most = max(self.most, live_bytes(collect=False) - self.before)


def peak_report(rank: int, world: int) -> dict[str, Any]:
    """Live and accounted bytes at the peak of a step of sixteen equal layers."""
    out = {}
    for name, options in {"cut": {"number": 3}, "whole": {"number": 0}}.items():
        gc.collect()
        empty = live_bytes()
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(16)))
        watch = Watch(net)
        watch.before = empty
        engine = onecopy.initialize(
            net, make(options), optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)
        )
        for _ in range(2):
            engine(torch.randn(1, 64)).square().mean().backward()
            engine.step()
        out[name] = {"seen": watch.most, "peak": engine.measured()["peak"]["device"]}
        engine.close()
        del engine, net, watch
    return out


def test_stage_3_peak_is_its_shard_and_a_window() -> None:
    psi, unit = 16 * 64 * 64 * 4, 64 * 64 * 4
    for run in run_ranks(peak_report, 2):
        # Parameter, gradient and momentum halves; two gathered units (one ahead), a reduce buffer and one in flight.
        # The exchange buffers between ranks of one host: three slots of a piece, and the peer's.
        exchange = run["cut"]["peak"].get("exchange buffer", 0)
        bound = 3 * psi // 2 + 5 * unit + 64 * 64 * 4 + exchange
        # The peer's buffers and its half of the parameters are mapped, and its own.
        seen = run["cut"]["seen"] - exchange - psi // 2
        assert seen <= bound, f"{seen / unit:.1f} units, at most {bound / unit:.1f}"
        assert run["cut"]["peak"]["total"] <= bound
        assert run["cut"]["peak"]["gather buffer"] <= 3 * unit
        assert run["cut"]["peak"]["reduce buffer"] <= 2 * unit
        assert run["cut"]["peak"]["total"] >= 3 * psi // 2
        assert run["whole"]["seen"] >= 2.5 * psi, "the watch sees memory"


def forward_only_report(rank: int, world: int, plans: dict[str, Any]) -> dict[str, Any]:
    """What engines without an optimizer own after a forward."""
    out = {}
    for name, plan in plans.items():
        engine = onecopy.initialize(models.build("even"), plan)
        with torch.no_grad():
            engine(*models.batch("even", 0, 0, rank))
        out[name] = engine.predicted()["resident"]["device"], engine.measured()["resident"]["device"]
        engine.close()
    return out


def test_forward_only_engines_own_parameters_and_nothing_else() -> None:
    plans = {name: make(p) for name, p in PRESETS.items()}
    for run in run_ranks(forward_only_report, 2, plans):
        for name, ledgers in run.items():
            for resident in ledgers:
                assert resident["parameter"] == PSI * 4 // (2 if "3" in name else 1), name
                assert resident["master"] == resident["moments"] == resident["gradient"] == 0, name
