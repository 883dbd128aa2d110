"""The planner: ZeRO's bytes to the byte, links, activations counted and not guessed, changes and searches."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onecopy
from onecopy import gpt
from onecopy.cluster import Cluster, gpu
from onecopy.engine.unit import find_units
from onecopy.errors import ConfigError, PlanError
from onecopy.plan.config import load_config
from onecopy.plan.layout import Mesh
from onecopy.plan.plan import Recipe
from onecopy.planner.activations import by_formula, layer_bytes, trace
from onecopy.planner.estimate import Work, crossing, split
from onecopy.planner.others import deepspeed_estimate, rule_of_thumb
from onecopy.planner.report import plan_report
from onecopy.planner.search import Choice, Question, cheapest_change, compare, fastest
from onecopy.planner.sources import activations_of, guess_inputs
from onecopy.planner.subject import Built, Numbers, Shape, facts, facts_from_model, facts_from_numbers
from onecopy.planner.write import as_config

pytestmark = pytest.mark.pure

STATES = ("parameter", "gradient", "master", "moments")


def report(subject: Any, plan: onecopy.Plan, cluster: Cluster, **work: Any) -> dict[str, Any]:
    return plan_report(facts(subject, plan, cluster.ranks), plan, cluster, Work(**work), shape=subject.shape)


def small_gpt() -> Built:
    with torch.device("meta"):
        model = gpt.GPT(gpt.config("25m"))
    return facts_from_model(model, "25m", inputs=guess_inputs(model))


# Subjects


@pytest.mark.parametrize("number", range(4))
def test_model_states_are_those_of_zero(number: int) -> None:
    """Figure 1 of the paper, 7.5e9 parameters on 64 ranks: 120, 31.4, 16.6 and 1.88 GB, to the byte."""
    psi, ranks = 7_500_000_000, 64
    cut = [(1, 1, 1), (1, 1, ranks), (1, ranks, ranks), (ranks, ranks, ranks)][number]
    plan = onecopy.stage(number, dtype="bf16")
    found = report(facts_from_numbers(psi), plan, Cluster(gpus=8, nodes=8))["per_rank"]["device"]
    assert [found["parameter"], found["gradient"], found["master"] + found["moments"]] == [
        size * psi // pieces for size, pieces in zip((2, 2, 12), cut, strict=True)
    ]
    assert found["peak"] >= sum(found[kind] for kind in STATES)


@pytest.mark.parametrize("params", [1, 97, 10**6, 7 * 10**9, 123_456_789_012])
@pytest.mark.parametrize("options", [{}, {"layers": 7, "hidden": 64}, {"layers": 3}, {"vocab": 1, "hidden": 1, "layers": 2}])
def test_units_of_numbers_have_all_parameters(params: int, options: dict[str, int]) -> None:
    subject = facts_from_numbers(params, **options)
    units = subject.units(onecopy.stage(3))
    assert sum(param.numel for unit in units for param in unit.params) == params == subject.parameters
    assert len({unit.name for unit in units}) == len(units)
    assert subject.shape is not None
    assert subject.shape.assumed == (not {"layers", "hidden"} <= set(options))


def test_the_largest_unit_is_the_largest() -> None:
    for largest in (10**6, 3 * 10**8, 10**9):
        sizes = [size for _, size in facts_from_numbers(10**9, largest).sizes]
        assert max(sizes) == largest and sum(sizes) == 10**9


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"params": 0}, "--params 0"),
        ({"params": 10, "layers": -1}, "--layers -1"),
        ({"params": 10, "largest_unit": 11}, "--largest-unit 11 is more than --params 10"),
        ({"params": 10, "vocab": 100, "hidden": 10}, "= 1000 is more than --params 10"),
        ({"params": 10**9, "hidden": 1}, "--hidden 1 would be"),
        ({"params": 10**9, "largest_unit": 1}, "units"),
        ({"params": 10**6, "hidden": 10, "heads": 3}, "--hidden 10 is not a multiple of --heads 3"),
    ],
)
def test_numbers_that_contradict(wrong: dict[str, int], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        facts_from_numbers(**wrong)


def test_a_model_has_the_engines_units() -> None:
    subject, plan = small_gpt(), onecopy.stage(3, units=onecopy.Units(min_numel=0))
    expected = [(unit.name, unit.numel(), unit.spans) for unit in find_units(subject.model, plan.units)]
    assert [(u.name, sum(p.numel for p in u.params), u.spans) for u in subject.units(plan)] == expected
    assert subject.parameters == gpt.config("25m").parameters
    half = subject.units(onecopy.stage(3, dtype="bf16"))
    assert {param.dtype for unit in half for param in unit.params} == {"bfloat16"}


@pytest.mark.parametrize(("recipe", "states"), [("AdamW", 2), ("SGD", 0), ("Adagrad", 1), ("RMSprop", 1)])
def test_moments_are_those_of_the_plans_optimizer(recipe: str, states: int) -> None:
    plan = onecopy.stage(2, optimizer=Recipe(recipe, {"lr": 0.1}))
    for subject in (small_gpt(), facts_from_numbers(10**6)):
        device = report(subject, plan, Cluster(gpus=2))["per_rank"]["device"]
        assert abs(device["moments"] - states * 4 * subject.parameters // 2) <= 4 * states * 100
    assert all(len(found) == 2 for found in small_gpt().moments(onecopy.stage(2)).values()), "AdamW where nothing is said"


# Links and time


@pytest.mark.parametrize(
    ("mesh", "group", "gpus", "share"),
    [
        (Mesh(8, 1), "within", 8, 0),
        (Mesh(16, 1), "within", 8, 1 / 8),
        (Mesh(4, 4), "within", 8, 0),
        (Mesh(8, 2), "across", 8, 1),
        (Mesh(4, 4), "across", 8, 1 / 2),
        (Mesh(64, 1), "world", 1, 1),
        (Mesh(1, 1), "world", 8, 0),
    ],
)
def test_hops_between_nodes(mesh: Mesh, group: Any, gpus: int, share: float) -> None:
    assert crossing(mesh, group, gpus) == share
    inside, between = split(mesh, group, 1001, Cluster(gpus=gpus, nodes=max(mesh.world // gpus, 1)))
    assert inside + between == 1001


def test_traffic_is_split_by_where_it_goes() -> None:
    subject, plan = facts_from_numbers(10**9), onecopy.stage(3, dtype="bf16")
    one, many = (report(subject, plan, Cluster(gpus=8, nodes=nodes))["traffic"] for nodes in (1, 4))
    assert one["inter_node"] == 0
    assert many["inter_node"] * 8 == pytest.approx(many["intra_node"] + many["inter_node"], rel=1e-6)
    for traffic in (one, many):
        assert traffic["intra_node"] + traffic["inter_node"] == sum(op["bytes"] for op in traffic["collectives"].values())
    grouped = report(subject, onecopy.hsdp(shard=8, dtype="bf16"), Cluster(gpus=8, nodes=4))["traffic"]
    votes = grouped["collectives"]["vote"]["bytes"]
    assert 0 <= grouped["inter_node"] - grouped["collectives"]["sum"]["bytes"] <= votes


def test_time_follows_what_it_is_made_of() -> None:
    subject, plan = facts_from_numbers(10**9, layers=20, hidden=2048), onecopy.stage(3, dtype="bf16")
    base = report(subject, plan, Cluster(gpus=8), seq=1024)["time"]
    tokens, peak = 1024, 312e12 * 0.4
    assert base["compute"] == pytest.approx((6 * 10**9 + 12 * 20 * 2048 * 1024) * tokens / peak)
    assert base["step"] >= base["compute"] + base["exposed"] + base["optimizer"]
    assert base["tokens_per_second"] == pytest.approx(8 * tokens / base["step"])
    assert report(subject, plan, Cluster(gpus=8), seq=1024, recompute=True)["time"]["compute"] == pytest.approx(
        base["compute"] * 8 / 6
    )
    slow = Cluster(replace(gpu("a100-80g"), link=1e9), 8)
    assert report(subject, plan, slow, seq=1024)["time"]["exposed"] > base["exposed"]
    host = report(subject, onecopy.offload(plan), Cluster(gpus=8), seq=1024)["time"]
    assert host["optimizer"] > base["optimizer"]
    without = report(subject, plan, Cluster(gpus=8))
    assert without["time"] == {} and any("--seq" in line for line in without["assumptions"])


# Activations


def saved_by(model: nn.Module, *args: torch.Tensor) -> int:
    """Bytes of distinct storages that autograd saves in a real forward, parameters left out."""
    own, seen = {param.untyped_storage()._cdata for param in model.parameters()}, {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            seen[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*args)
    return sum(storage.nbytes() for storage in seen.values())


def allocated(file: Path, model: nn.Module, *args: torch.Tensor) -> int:
    """The most bytes that torch's CPU allocator had given out at a time in a real forward and backward, as its profiler
    has it; gradients go as they come."""
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    model(*args).backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        model(*args).backward()
    profiler.export_chrome_trace(str(file))
    events = [event["args"] for event in json.loads(file.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    before = events[0]["Total Allocated"] - events[0]["Bytes"]
    return max(event["Total Allocated"] for event in events) - before


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_a_trace_counts_what_a_forward_saves(name: str) -> None:
    """On meta what real tensors say, to the byte; and the model is as it was."""
    model = gpt.GPT(gpt.config(name))
    before = list(model.parameters())
    subject = facts_from_model(model, inputs=guess_inputs(model))
    found = trace(subject, onecopy.stage(2), 64).run(1, False)
    ids = torch.zeros(1, 64, dtype=torch.long)
    assert sum(found.kept.values()) + ids.nbytes == saved_by(model, ids, ids) + 4, "the ids are not activations; the loss is"
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert not any("forward" in vars(module) or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_formula_is_what_is_traced(dtype: str) -> None:
    """But for the statistics of norms, which it leaves out: below 1 %."""
    shape, plan = Shape(8, 512, 8, 256), onecopy.stage(2, dtype=dtype, units=onecopy.Units(min_numel=0))
    traced = trace(small_gpt(), plan, 256)
    width = 4 if dtype == "fp32" else 2
    layer = layer_bytes(shape, 256, width, "flash", dropout=False)
    kept, again = traced.saved(1, False), traced.saved(1, True)
    assert kept.kept["blocks.3"] == pytest.approx(layer, rel=0.01)
    assert again.kept["blocks.3"] == width * 256 * 512, "its input"
    assert traced.saved(2, False).kept["blocks.3"] == 2 * kept.kept["blocks.3"]
    (backward,) = (stretch for stretch in again.backward if stretch.unit == "blocks.3")
    # In its backward a block is there once more, with the gradients of what it computes.
    assert 1 < (backward.peak - backward.then) / layer < 2


@pytest.mark.parametrize(("dtype", "recompute"), [("fp32", False), ("fp32", True), ("bf16", False), ("bf16", True)])
def test_the_formula_has_the_peak_of_large_logits(dtype: str, recompute: bool) -> None:
    """A vocabulary of 50,304 at width 512: what the loss has at once is most of the peak, and numbers alone say so."""
    with torch.device("meta"):
        model = gpt.GPT(gpt.GPTConfig(layers=4, heads=8, width=512, context=1024, vocab=50304))
    plan = onecopy.stage(2, dtype=dtype)
    found = trace(facts_from_model(model, inputs=guess_inputs(model)), plan, 1024).run(1, recompute).most
    units = ("embed", *(f"blocks.{index}" for index in range(4)))
    formula = by_formula(Shape(4, 512, 8, 50304), units, 1024, plan.precision.dtype, dropout=False)
    assert 0.99 * found <= formula.saved(1, recompute).most <= 1.25 * found


def test_policies_and_batches() -> None:
    """Recomputation by the planner is that of a model's own; a batch between two that were run lies between them."""
    traced = trace(small_gpt(), onecopy.stage(2, dtype="bf16"), 256)
    with torch.device("meta"):
        own = gpt.GPT(gpt.config("25m", recompute=True))
    itself = trace(facts_from_model(own, inputs=guess_inputs(own)), onecopy.stage(2, dtype="bf16"), 256)
    assert itself.run(4, False) == traced.run(4, True)
    sizes = [traced.saved(batch, False).most for batch in (4, 5, 6, 7, 8)]
    assert sizes == sorted(sizes) and len(set(sizes)) == 5
    exact = traced.run(6, False).most
    assert exact <= sizes[2] <= exact * 1.01
    assert traced.saved(6, False).most == exact, "once it was run"


def test_eager_attention_saves_its_scores() -> None:
    shape = Shape(1, 512, 8)
    assert layer_bytes(shape, 256, 2, "eager") == 256 * 512 * 34 + 5 * 8 * 256**2  # s h (34 + 5 a s / h)
    eager = trace(small_gpt(), onecopy.stage(2), 256, "eager").run(1, False)
    assert eager.most > trace(small_gpt(), onecopy.stage(2), 256).run(1, False).most


@pytest.mark.parametrize("recompute", [False, True])
def test_the_traced_peak_is_that_of_the_allocator(recompute: bool, tmp_path: Path) -> None:
    """Forward and backward of a model whose logits are large: what is alive on meta is what is alive in memory."""
    config = gpt.GPTConfig(layers=3, heads=2, width=64, context=128, vocab=2000, recompute=recompute)
    model, ids = gpt.GPT(config), torch.zeros(2, 128, dtype=torch.long)
    traced = trace(facts_from_model(model, inputs=guess_inputs(model)), onecopy.stage(2), 128)
    assert traced.run(2, False).most == pytest.approx(allocated(tmp_path / "trace.json", model, ids, ids), rel=0.02)


def test_the_peak_is_in_the_backward_that_has_it() -> None:
    subject, plan = small_gpt(), onecopy.stage(3, dtype="bf16", units=onecopy.Units(min_numel=0))
    found = plan_report(
        facts(subject, plan, 2), plan, Cluster(gpus=2), Work(4, 256), trace(subject, plan, 256), subject.shape
    )
    assert found["peak"]["device"]["at"].startswith("the backward ")
    assert sum(found["peak"]["device"]["holds"].values()) == found["per_rank"]["device"]["peak"]
    again = plan_report(
        facts(subject, plan, 2), plan, Cluster(gpus=2), Work(4, 256, True), trace(subject, plan, 256), subject.shape
    )
    assert again["per_rank"]["device"]["activations"] < found["per_rank"]["device"]["activations"] / 2


def test_a_model_that_cannot_be_traced_is_said_so() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.w * x.tolist()[0]

    subject = facts_from_model(Odd(), inputs=lambda batch, seq: (torch.zeros(batch, device="meta"),))
    found, said = activations_of(subject, onecopy.stage(2), Work(1, 8))
    assert found is None and "could not be traced" in said[0]


# Choices


def question(subject: Numbers, cluster: Cluster, plan: onecopy.Plan, **work: Any) -> Question:
    asked = Work(**{"seq": 2048, **work})
    return Question(subject, cluster, plan, asked, activations_of(subject, plan, asked)[0])


BIG = facts_from_numbers(7 * 10**9)
DESK = Cluster(gpu("24GB"), 4, host_memory=128 * 10**9)


def test_a_choice_is_a_plan_and_back() -> None:
    base = onecopy.stage(2, dtype="bf16", accumulation=3, clip=1.0)
    for choice in (Choice(0), Choice(1, "host"), Choice(3, "host", "host", "int8"), Choice(3, "disk", "disk", batch=4)):
        plan = choice.plan(base)
        assert Choice.of(plan, Work(choice.batch)) == choice
        assert plan.batch.accumulation == 3 and plan.clip == base.clip and plan.precision == base.precision


def test_seven_billion_on_four_cards_of_24_gb() -> None:
    """What a new user asks: it does not fit as it is, one change makes it fit, and the search says why."""
    plan = onecopy.stage(2, dtype="bf16")
    asked = question(BIG, DESK, plan)
    assert not report(BIG, plan, DESK, seq=2048)["fits"]
    change = cheapest_change(asked, Choice(2))
    assert change is not None and change[1].costs.fits
    found, why = fastest(asked)
    assert found.costs.fits and found.choice.moments is None, "numbers are not changed where that is not needed"
    assert found.speed is not None and change[1].speed is not None and found.speed >= 0.99 * change[1].speed
    larger = asked.ask(replace(found.choice, batch=found.choice.batch + 1))
    assert larger is not None and not larger.costs.fits, "the largest micro-batch"
    assert len(why) >= 3 and all("\n" not in line for line in why)
    everything = {f"stage {one.choice.number}" for one in compare(asked)}
    assert everything == {"stage 0", "stage 1", "stage 2", "stage 3"}


def test_nothing_fits() -> None:
    with pytest.raises(PlanError, match=r"no plan fits .* lacks .* memory; add ranks, memory or a disk"):
        fastest(question(facts_from_numbers(10**12), DESK, onecopy.stage(2, dtype="bf16")))
    assert cheapest_change(question(facts_from_numbers(10**12), DESK, onecopy.stage(2)), Choice(2)) is None


def test_what_fits_on_the_device_stays_there() -> None:
    found, _ = fastest(question(facts_from_numbers(10**8), Cluster(gpus=8), onecopy.stage(2, dtype="bf16")), batch=1)
    assert (found.choice.optimizer, found.choice.parameter) == ("device", "device")


def test_a_chosen_plan_is_written_and_read_back(tmp_path: Path) -> None:
    base = onecopy.stage(2, dtype="bf16", accumulation=2)
    elsewhere = Choice(1, "host"), Choice(3, "host", "host", None, True, 4), Choice(3, "disk", "disk", batch=2)
    for choice in (Choice(2), *elsewhere):
        written = as_config(choice, base.with_(scratch=onecopy.Scratch(str(tmp_path))), ["because"])
        read, plan = load_config(written, world_size=4), choice.plan(base)
        assert [rule.row for rule in read.rules] == [rule.row for rule in plan.rules], choice
        assert (read.batch.micro, read.batch.accumulation) == (choice.batch, 2)
        assert read.precision.dtype == "bfloat16"
        assert ("_recompute" in written) == choice.recompute
    with pytest.raises(ConfigError, match="int8"):
        as_config(Choice(2, moments="int8"), base, [])


def test_search_in_python() -> None:
    with torch.device("meta"):
        model = gpt.GPT(gpt.config("small"))
    plan = onecopy.search(model, onecopy.Cluster(gpus=2), seq=128)
    assert plan.batch.micro is not None and plan.batch.micro >= 1
    assert plan.notes and "on a rank" in plan.notes[0]
    again = onecopy.search(facts_from_numbers(10**9), onecopy.Cluster(gpus=2), batch=2)
    assert again.batch.micro == 2


def test_what_others_say() -> None:
    """7 billion parameters on 8 ranks: about 42 and 18 GB by the rules of thumb."""
    two, three = rule_of_thumb(2, 7 * 10**9, 8), rule_of_thumb(3, 7 * 10**9, 8)
    assert two is not None and round(two / 1e9) == 42
    assert three is not None and round(three / 1e9) == 18
    with pytest.raises(ConfigError, match="stages 2 and 3"):
        deepspeed_estimate(1, 10, 1, 1)


def test_a_larger_formula_has_every_layer() -> None:
    shape = Shape(12, 256, 4, 1000)
    units = ("embed", *(f"blocks.{index}" for index in range(6)))
    found = by_formula(shape, units, 128, "bfloat16")
    assert sum(found.inside.values()) == 12 * layer_bytes(shape, 128)
    assert found.kept["blocks.5"] - found.inside["blocks.5"] == 128 * (4 * 256 + (12 + 2) * 1000)
