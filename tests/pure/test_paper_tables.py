"""Published figures, asked of our own fold: the schedule of a plan, the closed formulas of activations, the estimate of time.

``tests/data/paper_tables.json`` has the figures with their sources, inputs and tolerances. ``ASKED`` says how each is asked;
``NOT_ASKED`` lists, one by one or by a beginning that several share, those that are not, and why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onecopy
from onecopy.cluster import GPUS, Cluster
from onecopy.gpt import GPTConfig
from onecopy.plan.plan import Plan, Rule, State, Units, Wire
from onecopy.planner.activations import by_formula, layer_bytes
from onecopy.planner.estimate import Work
from onecopy.planner.others import deepspeed_estimate
from onecopy.planner.report import plan_report
from onecopy.planner.subject import Numbers, Shape, facts, facts_from_model, facts_from_numbers
from onecopy.schedule.lower import TILE

pytestmark = pytest.mark.pure

TABLE: dict[str, dict[str, Any]] = {
    entry["id"]: entry
    for entry in json.loads((Path(__file__).parents[1] / "data" / "paper_tables.json").read_text(encoding="utf-8"))
}

NOT_ASKED = {
    "zero.t2.measured.": "a coefficient fitted to the paper's own runs",
    "zero.fused_buf.3B": "one fused fp32 buffer for all parameters; here no buffer is larger than a unit",
    "zero.Pa.overhead": "partitioned activations of model parallelism, which onecopy has not",
    "zoff.comm.L2L": "bytes that another system moves",
    "zoff.t4.speedup.": "a ratio of times measured on the paper's machine",
    "zinf.f2a.states.": "20 bytes for each parameter, with gradients kept in 16 and in 32 bits; here they are kept once",
    "zinf.eff.": "efficiency by a formula of arithmetic intensity that knows no overlap",
    "zinf.t3.agg.x100": "a product of two numbers of the paper, no plan",
    "zpp.": "quantized gathers and reduces, which are not in this version",
    "ds.z2.doc.t5-3b.gpu.none.OLD": "printed in the documentation; the formula was replaced since",
    "bound.hide.": "tokens that hide communication at an infinite number of ranks",
}

STAGES = {"baseline": 0, "P_os": 1, "P_os+g": 2, "P_os+g+p": 3}


def report(params: int, plan: Plan, ranks: int, cluster: Cluster | None = None) -> dict[str, Any]:
    subject = facts_from_numbers(params)
    return plan_report(facts(subject, plan, ranks), plan, cluster or Cluster(gpus=ranks), Work(1, 1))


def states(params: int, plan: Plan, ranks: int = 1, tier: str = "device") -> int:
    found = report(params, plan, ranks)["per_rank"][tier]
    return sum(found[kind] for kind in ("parameter", "gradient", "master", "moments"))


def zero(entry: dict[str, Any], psi: int | None = None, ranks: int | None = None) -> int:
    """Bytes of model states of the stage that the entry's name ends in."""
    parts = entry["id"].removesuffix(f".Nd{entry['inputs'].get('Nd')}").split(".")
    inputs = entry["inputs"]
    return states(psi or inputs["psi"], onecopy.stage(STAGES[parts[-1]], dtype="bf16"), ranks or inputs["Nd"])


def in_gb(entry: dict[str, Any]) -> float:
    return zero(entry) / 1e9


def fewest_ranks(entry: dict[str, Any]) -> int:
    return next(4**n for n in range(8) if zero(entry, ranks=4**n) <= entry["inputs"]["C"])


def largest_model(entry: dict[str, Any]) -> float:
    """The most parameters whose states fit, to a thousandth."""
    low, high = 10**8, 10**12
    while high - low > low // 1000:
        middle = (low + high) // 2
        low, high = (middle, high) if zero(entry, psi=middle) <= entry["inputs"]["C"] else (low, middle)
    return float(low * entry["inputs"]["MP"])


def volume(number: int) -> Fraction:
    """Elements sent in a step for each parameter, on infinitely many ranks."""
    ranks, params = 1000, 10**9
    ops = report(params, onecopy.stage(number, dtype="bf16"), ranks)["traffic"]["collectives"]
    sent = sum(op["elements"] for kind, op in ops.items() if kind != "vote")
    return round(Fraction(sent, params) * Fraction(ranks, ranks - 1), 3)


def sent_gb(plan: Plan, inputs: dict[str, Any]) -> float:
    traffic = report(inputs["P"], plan, inputs["N"])["traffic"]
    return (traffic["intra_node"] + traffic["inter_node"]) / 1e9


def in_16_bits(inputs: dict[str, Any]) -> Shape:
    return Shape(inputs["L"], inputs.get("h", inputs.get("hd")), inputs.get("heads", 1))


def checkpoints(inputs: dict[str, Any]) -> int:
    """Bytes kept of the blocks with every block computed again."""
    shape, seq = in_16_bits(inputs), inputs.get("s", inputs.get("seq"))
    units = tuple(f"blocks.{index}" for index in range(shape.layers))
    saved = by_formula(shape, units, seq, "bfloat16").saved(inputs.get("b", inputs.get("bsz")), True)
    return sum(saved.kept.values())


def one_layer(inputs: dict[str, Any]) -> int:
    return layer_bytes(in_16_bits(inputs), inputs["seq"], 2, "eager", dropout=False)


def working_memory(inputs: dict[str, Any]) -> int:
    """The largest operator of a block, h x 4h, gathered and its gradient, in a unit of its own without prefetch."""
    largest = 4 * inputs["hd"] ** 2
    subject = facts_from_numbers(2 * largest, largest, layers=1, hidden=inputs["hd"])
    plan = onecopy.stage(3, dtype="bf16", units=Units(prefetch=0))
    device = plan_report(facts(subject, plan, 64), plan, Cluster(gpus=64))["per_rank"]["device"]
    return device["gather_buffer"] + device["reduce_buffer"]


def gpt(inputs: dict[str, Any]) -> int:
    """Parameters of our own GPT without its embeddings."""
    shape = GPTConfig(inputs["L"], 1, inputs.get("h", inputs.get("hd")), 1, 1)
    return shape.parameters - 4 * shape.width


class Llama(nn.Module):
    """A module with the shapes of a Llama, grouped-query attention and gated MLP, for its units on the meta device."""

    def __init__(self, V: int, h: int, L: int, kv: int, f: int) -> None:
        super().__init__()
        sizes = [(h, h), (h, kv), (h, kv), (h, h), (h, f), (h, f), (f, h)]
        self.embed = nn.Embedding(V, h)
        self.blocks = nn.ModuleList(
            nn.ModuleList([*(nn.Linear(*size, bias=False) for size in sizes), nn.RMSNorm(h), nn.RMSNorm(h)]) for _ in range(L)
        )
        self.norm = nn.RMSNorm(h)
        self.head = nn.Linear(h, V, bias=False)


def llama(inputs: dict[str, Any]) -> int:
    with torch.device("meta"):
        subject = facts_from_model(Llama(**inputs))
    return sum(param.numel for unit in subject.units(onecopy.stage(3)) for param in unit.params)


def gradients_on_host(plan: Plan) -> Plan:
    row = plan.rules[0].row
    rest = replace(row.gradient.rest, tier="host")
    return plan.with_(rules=(Rule("*", replace(row, gradient=State(rest, rest))),))


def moments(codec: str) -> float:
    """Bytes of Adam's two states for each parameter, of whole tiles: what a tile is padded with is not in the figures."""
    subject = Numbers("whole tiles", (("blocks.0", 4 * TILE["device"]),))
    plan = onecopy.low_precision(onecopy.stage(2, dtype="bf16"), codec)
    found = plan_report(facts(subject, plan, 1), plan, Cluster())
    return float(found["per_rank"]["device"]["moments"] / subject.parameters)


def optimizer_bytes(params: int) -> float:
    """What a step on the host reads and writes, from the time it is estimated to take at 1 GB/s."""
    cluster = Cluster(replace(GPUS["v100-32g"], pcie=1e18), host_bandwidth=1e9)
    return float(report(params, onecopy.offload(onecopy.stage(2, dtype="fp16")), 1, cluster)["time"]["optimizer"] * 1e9)


def seconds_on_link(inputs: dict[str, Any]) -> float:
    cluster = Cluster(replace(GPUS["h200"], link=inputs["bw"]), inputs["N"])
    return float(report(inputs["P"], onecopy.stage(3, dtype="bf16"), inputs["N"], cluster)["time"]["communication"])


def fp32_reduce(plan: Plan) -> Plan:
    return plan.with_(rules=tuple(Rule(rule.pattern, replace(rule.row, wire=Wire(reduce="float32"))) for rule in plan.rules))


def deepspeed(entry: dict[str, Any]) -> float:
    """``ds.z3.code.<model>.<gpus>x<nodes>.gpu.offload=opt,init=1`` and its like."""
    name, inputs = entry["id"], entry["inputs"]
    offload = next((kind for kind in ("opt+param", "opt") if f"offload={kind}," in name), "none")
    if name.startswith("ds.z2"):
        offload = "opt" if name.endswith((".offload=True", ".gpu.offload", "doc.t5-3b.cpu")) else "none"
    number, largest = int(name[4]), inputs.get("Lg", 0)
    found = deepspeed_estimate(
        number, inputs["P"], largest, inputs["gpn"], inputs["nodes"], offload=offload, zero_init="init=0" not in name
    )
    return found["gpu" if ".gpu." in name else "host"] / 2**30


def deepspeed_t5(entry: dict[str, Any], offload: str) -> float:
    inputs = entry["inputs"]
    return deepspeed_estimate(3, inputs["P"], inputs["Lg"], 4, offload=offload)["gpu"] / 2**20


def offloaded(number: int, psi: int = 10**9) -> float:
    """Bytes on the device for each parameter with the optimizer on the host, on one rank."""
    return states(psi, onecopy.offload(onecopy.stage(number, dtype="fp16"))) / psi


def pcie(params: int) -> int:
    moved: int = report(params, onecopy.offload(onecopy.stage(2, dtype="fp16")), 1)["traffic"]["pcie"]
    return moved


BF16_2, BF16_3 = onecopy.stage(2, dtype="bf16"), onecopy.stage(3, dtype="bf16")
Ask = Callable[[dict[str, Any]], Any]
ASKED: dict[str, Ask] = {
    "zero.fig1.": in_gb,
    "zero.t1.min_Nd.": fewest_ranks,
    "zero.t1.": in_gb,
    "zero.t2.MP": largest_model,
    "zero.comm.DDP": lambda e: volume(0),
    "zero.comm.P_os+g": lambda e: volume(2),
    "zero.comm.ratio.p_over_dp": lambda e: volume(3) / volume(0),
    "zero.act.ckpt_100B.sec6.1": lambda e: checkpoints(e["inputs"]) / 2 / 1e9,
    "zero.act.ckpt_100B": lambda e: checkpoints(e["inputs"]) / 1e9,
    "zero.states.1T": lambda e: states(10**12, onecopy.stage(0, dtype="bf16")) / 1e12,
    "zero.1T_on_1024": lambda e: states(10**12, BF16_3, 1024) / 1e9,
    "zero.params.": lambda e: gpt(e["inputs"]) / 1e9,
    "zoff.comm.fp16p_on_gpu_rest_cpu": lambda e: pcie(10**9) / 1e9,
    "zoff.t1.mem.none": lambda e: states(10**9, onecopy.stage(0, dtype="fp16")) / 1e9,
    "zoff.t1.mem.g16 to CPU": lambda e: states(10**9, gradients_on_host(onecopy.stage(2, dtype="fp16"))) / 1e9,
    "zoff.t1.red.update to CPU": lambda e: 16 / offloaded(1),
    "zoff.t1.mem.g16+update to CPU": lambda e: offloaded(2),
    "zoff.t3.": lambda e: gpt(e["inputs"]) / 1e9,
    "zoff.t4.bw.": lambda e: optimizer_bytes(e["inputs"]["P"]) / e["inputs"]["t"] / 1e9,
    "zoff.states.": lambda e: states(round(e["inputs"]["P"] * 10**9), onecopy.stage(0, dtype="fp16")) / 1e9,
    "zinf.f2a.params.": lambda e: gpt(e["inputs"]) / 1e12,
    "zinf.f2a.actckpt.": lambda e: checkpoints(e["inputs"]) / e["inputs"]["ci"] / 2**40,
    "zinf.f2a.act.": lambda e: one_layer(e["inputs"]) * e["inputs"]["bsz"] * e["inputs"]["L"] / 2**40,
    "zinf.f2a.awm.": lambda e: one_layer(e["inputs"]) * e["inputs"]["b"] / 2**30,
    "zinf.f2a.mswm.": lambda e: working_memory(e["inputs"]) / 2**30,
    "ds.z3.doc.t5-large.case2": lambda e: deepspeed_t5(e, "opt+param"),
    "ds.z3.doc.t5-large.case3": lambda e: deepspeed_t5(e, "opt"),
    "ds.": deepspeed,
    "params.Llama": lambda e: llama(e["inputs"]),
    "params.GPT2-XL": lambda e: GPTConfig(48, 25, 1600, e["inputs"]["T"], e["inputs"]["V"]).parameters,
    "ao.8bit.B": lambda e: moments("int8"),
    "ao.4bit.B": lambda e: moments("int4"),
    "ao.l2-7b.save8": lambda e: (moments("bfloat16_sr") - moments("int8")) * e["inputs"]["P"] / 2**30,
    "bound.comm.8B.N8.zero1/2_bf16": lambda e: sent_gb(BF16_2, e["inputs"]),
    "bound.comm.8B.N8.zero3_bf16_ag_fp32_rs": lambda e: sent_gb(fp32_reduce(BF16_3), e["inputs"]),
    "bound.comm.8B.N8.zero3_bf16": lambda e: sent_gb(BF16_3, e["inputs"]),
    "bound.comm.8B.N8.time_bf16": lambda e: seconds_on_link(e["inputs"]),
    "bound.cpuadam.": lambda e: optimizer_bytes(10**9) / 1e9,
    "bound.offload.pcie": lambda e: pcie(e["inputs"]["P"]) / e["inputs"]["bw"],
}


def longest(name: str, table: dict[str, Any]) -> str | None:
    """The key of ``table`` that ``name`` begins with, the longest of several."""
    return max((key for key in table if name.startswith(key)), key=len, default=None)


def is_asked(name: str) -> bool:
    ours, reason = longest(name, ASKED), longest(name, NOT_ASKED)
    assert ours or reason, f"{name} is neither asked nor listed with a reason"
    return reason is None or (ours is not None and len(ours) > len(reason))


@pytest.mark.parametrize("name", [name for name in TABLE if is_asked(name)])
def test_our_fold_gives_the_published_figure(name: str) -> None:
    entry = TABLE[name]
    key = longest(name, ASKED)
    assert key is not None
    found, expected, tolerance = ASKED[key](entry), entry["expected"], entry["tolerance"]
    slack = tolerance["abs"] if "abs" in tolerance else tolerance["rel"] * abs(expected)
    assert math.isclose(found, expected, rel_tol=1e-9, abs_tol=slack), f"{found} and {expected} of {entry['source']}"


def test_what_is_not_asked_is_listed() -> None:
    left = [name for name in TABLE if not is_asked(name)]
    assert len(TABLE) == 281
    assert len(left) == 27
    for reason in NOT_ASKED:
        assert any(name.startswith(reason) for name in left), f"{reason} names nothing"
    for key in ASKED:
        assert any(longest(name, ASKED) == key for name in TABLE), f"{key} asks nothing"
