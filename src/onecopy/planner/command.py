"""The body of ``onecopy plan``: what the options say becomes a subject, a cluster and a plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from onecopy.cluster import Cluster, gpu, here, quantity
from onecopy.errors import ConfigError
from onecopy.place import Place
from onecopy.plan.auto import auto_keys, batch_auto, check_dtype, precision_auto
from onecopy.plan.batch import ACCUMULATION, MICRO
from onecopy.plan.config import load_config, read_config
from onecopy.plan.plan import Plan
from onecopy.plan.presets import DTYPES, stage
from onecopy.plan.reading import override
from onecopy.planner.activations import ATTENTION
from onecopy.planner.estimate import Work
from onecopy.planner.html import Variant, page, write_page
from onecopy.planner.others import beside
from onecopy.planner.report import human_gb, plan_report
from onecopy.planner.search import SCRATCH, Choice, Found, Question, cheapest_change, compare, fastest
from onecopy.planner.show import show_comparison, show_report, show_simulation
from onecopy.planner.simulate import simulate
from onecopy.planner.sources import activations_of, load_subject
from onecopy.planner.subject import Built, Subject, facts, facts_from_numbers
from onecopy.planner.write import as_config, write_config
from onecopy.templates import resolve

__all__ = ["Asked", "Machine", "Method", "Wanted", "run_plan"]

_NOWHERE = Place()
# What a sequence is taken to be where only numbers are given.
_SEQ = 2048


@dataclass(frozen=True)
class Machine:
    """The options that describe the cluster; None: not given."""

    gpu: str | None = None
    gpus: int | None = None
    nodes: int | None = None
    ranks: int | None = None
    host_memory: str | None = None
    nvme: str | None = None
    link: float | None = None
    here: bool = False

    def cluster(self) -> Cluster:
        """The cluster meant. Raises :class:`ConfigError` for numbers that contradict each other."""
        for name, value in (("--gpus", self.gpus), ("--nodes", self.nodes), ("--ranks", self.ranks), ("--link", self.link)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} {value}: it is a number above 0")
        base = here() if self.here else Cluster()
        changes: dict[str, Any] = {"gpu": gpu(self.gpu)} if self.gpu is not None else {}
        changes["gpus"], changes["nodes"] = self._place(base)
        if self.host_memory is not None:
            changes["host_memory"] = _memory(self.host_memory, "--host-memory")
        if self.nvme is not None:
            changes["nvme"] = _memory(self.nvme, "--nvme")
        if self.link is not None:
            changes["network"] = self.link * 1e9
        cluster = replace(base, **changes)
        if cluster.gpu.shared and cluster.host_memory is not None:
            cluster = replace(cluster, gpu=replace(cluster.gpu, memory=cluster.host_memory // cluster.gpus))
        return cluster

    def _place(self, base: Cluster) -> tuple[int, int]:
        """Ranks of a node, and nodes."""
        gpus, nodes, ranks = self.gpus, self.nodes, self.ranks
        if ranks is None:
            return gpus or base.gpus, nodes or 1
        if gpus is None:
            gpus = -(-ranks // nodes) if nodes else min(ranks, 8)
        nodes = nodes or -(-ranks // gpus)
        if gpus * nodes != ranks:
            raise ConfigError(f"--ranks {ranks} is not {nodes} nodes of {gpus} GPUs = {gpus * nodes}; give both of those")
        return gpus, nodes


@dataclass(frozen=True)
class Method:
    """The options that describe the plan and the work; None: not given."""

    stage: int | None = None
    place: Place = _NOWHERE
    config: str | None = None
    dtype: str | None = None
    batch_size: int | None = None
    accumulation: int | None = None
    seq: int | None = None
    recompute: bool = False
    attention: str = "flash"
    changes: Mapping[str, Any] = field(default_factory=dict)

    def plan(self, cluster: Cluster) -> Plan:
        """The plan meant. Raises :class:`ConfigError` when a file and an option say the same thing."""
        self._check()
        if self.config is not None:
            self._refuse(self.place.decided_by_file() | {"--stage": (self.stage, "")})
            raw = override(read_config(resolve(self.config)), self.changes)
            left = auto_keys(raw)
            dtype = None if {"fp16.enabled", "bf16.enabled"} & left else self.dtype
            accumulation = None if ACCUMULATION in left else self.accumulation
            self._refuse({"--dtype": (dtype, ""), "--accumulation": (accumulation, "")})
            plan = load_config(raw, world_size=cluster.ranks, auto=self._auto(raw))
            micro = plan.batch.micro if raw.get(MICRO) != "auto" else None
            if self.batch_size is not None and micro is not None:
                raise ConfigError(f"--batch-size {self.batch_size} beside --config {self.config}: the file says {micro}")
            check_dtype(self.dtype, plan, self.config, left)
            return self.place.apply(plan)
        if self.changes:
            raise ConfigError(f"--set {next(iter(self.changes))} without --config: there is no file to change")
        plan = stage(2 if self.stage is None else self.stage, dtype=self.dtype or "bf16", accumulation=self.accumulation or 1)
        disk = "disk" in (self.place.optimizer, self.place.parameters)
        return replace(self.place, scratch=SCRATCH if disk else None).apply(plan)

    def _refuse(self, decided: Mapping[str, tuple[Any, str]]) -> None:
        """Options beside a file that decides them."""
        for option, (value, _) in decided.items():
            if value is not None:
                raise ConfigError(f"{option} {value} beside --config {self.config}: the file decides; drop one")

    def _auto(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """What keys that say "auto" are taken to be. Rates and lengths of schedules cost nothing, so any will do."""
        rates = {"optimizer.params.lr": 1e-4, "optimizer.params.betas": (0.9, 0.999), "optimizer.params.eps": 1e-8}
        rates |= {"optimizer.params.weight_decay": 0.0, "gradient_clipping": 1.0}
        ticks = {"scheduler.params.total_num_steps": 1000, "scheduler.params.warmup_num_steps": 100}
        sizes = batch_auto(raw, self.batch_size, self.accumulation, 1)
        return {**rates, **ticks, **sizes, **precision_auto(self.dtype or "bf16")}

    def _check(self) -> None:
        for name, value, legal in (
            ("dtype", self.dtype, tuple(DTYPES)),
            ("attention", self.attention, ATTENTION),
        ):
            if value is not None and value not in legal:
                raise ConfigError(f"--{name} {value}: it is one of {', '.join(legal)}")
        for name in ("batch_size", "accumulation", "seq"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: it is a whole number from 1")

    def work(self, plan: Plan) -> Work:
        """What a rank computes."""
        batch = self.batch_size or plan.batch.micro or 1
        return Work(batch, self.seq or _SEQ, self.recompute, self.attention)


@dataclass(frozen=True)
class Wanted:
    """What to do with it, beside a plan's report: one of the first three, and files for what they find."""

    compare: bool = False
    search: bool = False
    simulate: bool = False
    write: Path | None = None
    html: Path | None = None

    def check(self) -> None:
        """Raise :class:`ConfigError` for what does not go together."""
        if self.write is not None and not self.search:
            raise ConfigError(f"--write {self.write} without --search: there is no chosen plan to write")
        if self.html is not None and not self.compare:
            raise ConfigError(f"--html {self.html} without --compare: there are no variants to plot")
        asked = [f"--{name}" for name in ("compare", "search", "simulate") if getattr(self, name)]
        if asked == ["--compare", "--search"]:
            raise ConfigError("--compare and --search were both given; the search says what it chose among")
        if len(asked) > 1:
            raise ConfigError(f"{' and '.join(asked)} were given; take one of them")


@dataclass(frozen=True)
class Asked:
    """Everything that was asked: ``model`` or ``numbers``, and what is ``wanted`` of it."""

    machine: Machine
    method: Method
    model: str | None = None
    numbers: dict[str, Any] | None = None
    wanted: Wanted = Wanted()

    def subject(self) -> Subject:
        """What is planned for."""
        numbers: dict[str, Any] = {name: value for name, value in (self.numbers or {}).items() if value is not None}
        if self.model is not None:
            if numbers:
                name = next(iter(numbers)).replace("_", "-")
                raise ConfigError(f"--{name} beside the model {self.model!r}: give one of them")
            return load_subject(self.model, self.method.attention)
        if "params" not in numbers:
            raise ConfigError("nothing to plan for: name a model (config.json, folder, module:function) or give --params 7e9")
        for name in {"params", "largest_unit"} & set(numbers):
            numbers[name] = quantity(numbers[name], f"--{name.replace('_', '-')}")
        return facts_from_numbers(**numbers)


def run_plan(asked: Asked, console: Console) -> dict[str, Any]:
    """Do what was asked, show it on ``console``, and return it as the JSON object that ``docs/planner.md`` describes."""
    wanted = asked.wanted
    wanted.check()
    cluster = asked.machine.cluster()
    plan = asked.method.plan(cluster)
    subject, work = asked.subject(), asked.method.work(plan)
    if wanted.simulate:
        return _simulate(subject, plan, cluster, work, console)
    activations, said = activations_of(subject, plan, work)
    question = Question(subject, cluster, plan, work, activations)
    if wanted.compare:
        return _compare(question, said, wanted.html, console)
    chosen: list[str] = []
    if wanted.search:
        found, chosen = fastest(question, asked.method.batch_size)
        plan, work = found.choice.plan(plan), found.choice.work(work)
        if wanted.write is not None:
            write_config(wanted.write, as_config(found.choice, question.base, chosen))
            chosen = [*chosen, f"written to {wanted.write}"]
    report = {
        "model": {"name": subject.name, "parameters": subject.parameters, "units": len(subject.units(plan))},
        "cluster": _cluster(cluster),
        "plan": _plan(plan, work),
        **plan_report(facts(subject, plan, cluster.ranks), plan, cluster, work, activations, subject.shape),
    }
    largest = max(sum(param.numel for param in unit.params) for unit in subject.units(plan))
    report["others"] = list(beside(Choice.of(plan, work), subject.parameters, largest, cluster, report["per_rank"]["device"]))
    report["assumptions"] = [*said, *_assumed(asked, cluster), *plan.notes, *report["assumptions"]]
    if chosen:
        report["chosen"] = chosen
    if not report["fits"] and (change := cheapest_change(question, Choice.of(plan, work))) is not None:
        text = f"{change[0]}: {human_gb(change[1].costs.peak['device'].total)} on a rank"
        if host := _host_of(change[1], cluster):
            text += f", {human_gb(host)} of host memory on a node"
        report["change"] = {"text": text, **_found(change[1])}
    elif not report["fits"]:
        report["change"] = None
    show_report(report, console)
    return report


def _memory(text: str, option: str) -> int:
    size = quantity(text, option, size=True)
    if size < 1 << 20:
        raise ConfigError(f"{option} {text}: no node has {size} bytes; a size has a unit, such as {text.strip('bB')}GB")
    return size


def _host_of(found: Found, cluster: Cluster) -> int:
    peak = found.costs.peak.get("host")
    return peak.total * cluster.gpus if peak is not None and not cluster.gpu.shared else 0


def _assumed(asked: Asked, cluster: Cluster) -> Iterator[str]:
    if asked.method.seq is None:
        yield f"sequences of {_SEQ} tokens (--seq)"
    if asked.machine.gpu is None and not asked.machine.here:
        yield "GPUs are a100-80g (--gpu)"
    if not cluster.gpu.shared:
        yield "cards have GiB where GB are counted: those 7 % are for the driver's context, NCCL and gaps of the allocator"


def _compare(question: Question, said: list[str], html: Path | None, console: Console) -> dict[str, Any]:
    found = list(compare(question))
    show_comparison(found, question.cluster.gpu.memory, console)
    for line in said:
        console.print(f"[dim]assumed: {line}[/dim]", highlight=False)
    if html is not None:
        title = f"{question.subject.name} on {_cluster(question.cluster)['text']}"
        work = f"micro-batches of {question.work.batch} x {question.work.seq} tokens"
        write_page(html, page(title, work, [_variant(question, one) for one in found], question.cluster.gpu.memory, said))
        console.print(f"written to {html}", highlight=False)
    variants = [{**_found(one), **dict(zip(("traffic", "time"), question.moves(one), strict=True))} for one in found]
    return {"cluster": _cluster(question.cluster), "variants": variants, "assumptions": said}


def _variant(question: Question, found: Found) -> Variant:
    """``found`` as the page shows it."""
    peaks = found.costs.peak
    elsewhere = {tier: peak.total for tier, peak in peaks.items() if tier != "device"}
    return Variant(found.choice.settings, peaks["device"].then, elsewhere, found.costs.over, *question.moves(found))


def _simulate(subject: Subject, plan: Plan, cluster: Cluster, work: Work, console: Console) -> dict[str, Any]:
    if not isinstance(subject, Built):
        raise ConfigError(f"--simulate runs a model's engine, and {subject.name} are numbers: name a model")
    found = simulate(subject, plan, cluster, work)
    show_simulation(found, cluster, console)
    return {"model": {"name": subject.name, "parameters": subject.parameters}, "cluster": _cluster(cluster),
            "plan": _plan(plan, work), **found.report()}  # fmt: skip


def _found(found: Found) -> dict[str, Any]:
    choice, peaks = found.choice, found.costs.peak
    return {
        "plan": str(choice),
        "stage": choice.number,
        "optimizer": choice.optimizer,
        "parameter": choice.parameter,
        "moments": choice.moments,
        "recompute": choice.recompute,
        "batch_size": choice.batch,
        "per_rank": {tier: {**found.costs.at_rest.get(tier, {}), "peak": peak.total} for tier, peak in peaks.items()},
        "tokens_per_second": found.speed,
        "fits": found.costs.fits,
        "lacks": dict(found.costs.over),
    }


def _cluster(cluster: Cluster) -> dict[str, Any]:
    host = f", {human_gb(cluster.host_memory)} of host memory" if cluster.host_memory is not None else ""
    disk = f", {human_gb(cluster.nvme)} of disk" if cluster.nvme is not None else ""
    nodes = f"{cluster.nodes} nodes of " if cluster.nodes > 1 else ""
    return {
        "text": f"{nodes}{cluster.gpus} x {cluster.gpu.name} ({human_gb(cluster.gpu.memory)}){host}{disk}",
        "gpu": cluster.gpu.name,
        "gpus": cluster.gpus,
        "nodes": cluster.nodes,
        "ranks": cluster.ranks,
        "device_memory": cluster.gpu.memory,
        "host_memory": cluster.host_memory,
        "nvme": cluster.nvme,
    }


def _plan(plan: Plan, work: Work) -> dict[str, Any]:
    choice = Choice.of(plan, work)
    dtype = plan.precision.dtype or "float32"
    return {
        "text": f"{choice} of {work.seq} tokens, {dtype}, accumulation {plan.batch.accumulation}",
        "stage": choice.number,
        "optimizer": choice.optimizer,
        "parameter": choice.parameter,
        "moments": choice.moments,
        "recompute": work.recompute,
        "batch_size": work.batch,
        "seq": work.seq,
        "dtype": dtype,
        "accumulation": plan.batch.accumulation,
    }
