"""``initialize``: from a model and a plan to an engine, one unit at a time, the same on every rank or an error on all."""

from __future__ import annotations

import itertools
import math
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from onecopy.comm import meeting, watch
from onecopy.comm.collectives import Message, edge_for
from onecopy.comm.groups import Ranks, control, ensure_process_group, everybody, form_groups, local_rank, world_size
from onecopy.engine.deferred import Materialise, whole_values
from onecopy.engine.edges import Edges, make_edges
from onecopy.engine.gathering import Gathering, Others
from onecopy.engine.gradients import Gradients
from onecopy.engine.hooks import Hooks
from onecopy.engine.ledger import Ledger
from onecopy.engine.parameter import home_of, set_data
from onecopy.engine.quantised import described, refuse_opaque, settle
from onecopy.engine.rounds import Rounds
from onecopy.engine.run import Run, UnitRun
from onecopy.engine.step import Stepper
from onecopy.engine.unit import UnitModules, find_units, named_parameters
from onecopy.engine.weights import Weights
from onecopy.errors import EngineError, PlanError, RankMismatchError
from onecopy.optim import Factory, Moments, States, Tiles, build, prefer_fused, probe
from onecopy.plan.check import check
from onecopy.plan.layout import UnitFact
from onecopy.plan.plan import Plan, difference
from onecopy.recipes import build_optimizer, build_scheduler
from onecopy.schedule.lower import Facts, Schedule, lower
from onecopy.schedule.predict import check_needs
from onecopy.schedule.rest import moment_codecs, scratch_bytes, uses_disk
from onecopy.tiers.disk import Disk
from onecopy.tiers.memory import give_back_freed_memory, keep_freed_memory
from onecopy.tiers.tiers import Tiers

__all__ = ["Core", "build_core", "default_device"]

# Engines in the order in which this process makes them; rank 0's number counts.
_ENGINES = itertools.count()

SchedulerFactory = Callable[[Optimizer], LRScheduler]


@dataclass
class Core:
    """Everything an engine runs on, made once by :func:`build_core`."""

    plan: Plan
    schedule: Schedule
    ranks: Ranks
    tiers: Tiers
    ledger: Ledger
    run: Run
    gathering: Gathering
    rounds: Rounds
    hooks: Hooks
    optimizer: Optimizer | None
    scheduler: LRScheduler | None
    tiles: Tiles | None
    stepper: Stepper | None
    names: dict[nn.Parameter, list[str]]


def default_device() -> torch.device:
    """This rank's accelerator, by ``LOCAL_RANK``; the CPU where there is none."""
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        index, count = local_rank(), torch.accelerator.device_count()
        if index >= count:
            raise EngineError(f"LOCAL_RANK is {index} and there are {count} devices here; start at most {count} ranks")
        torch.accelerator.set_device_index(index)
        return torch.device(kind.type, index)
    return torch.device("cpu")


def build_core(
    model: nn.Module,
    plan: Plan,
    optimizer: Optimizer | Factory | None,
    scheduler: LRScheduler | SchedulerFactory | None,
    device: torch.device,
) -> Core:
    """Shard ``model`` by ``plan`` and attach to it. Nothing of the model changes before every check has passed."""
    if not isinstance(model, nn.Module) or not isinstance(plan, Plan):
        raise PlanError(f"initialize takes a module and a plan; got {type(model).__name__} and {type(plan).__name__}")
    ensure_process_group(device)
    world = world_size()
    meeting.meet("initialize")
    meeting.all_or_none(lambda: check(plan, (), world))
    names = named_parameters(model)
    units = meeting.all_or_none(lambda: find_units(model, plan.units))
    dtype = getattr(torch, plan.precision.dtype) if plan.precision.dtype else None
    facts = tuple(unit.fact(names, dtype) for unit in units)
    meeting.all_or_none(lambda: _refuse_models(model, names))
    _agree(plan, facts, world)
    _same_everywhere(described(model), world)
    made = meeting.all_or_none(lambda: _make_optimizer(model, plan, optimizer, facts))
    _same_everywhere(_describe_optimizer(made), world)
    moments = meeting.all_or_none(lambda: _moments_of(made, plan, device, names))
    ticker = meeting.all_or_none(lambda: _make_scheduler(made, scheduler, plan))
    facts = facts if made is not None else tuple(_forward_only(unit) for unit in facts)
    mesh, ledger = plan.mesh(world), Ledger()
    ranks = form_groups(mesh, device)
    across = edge_for(ranks.across, ledger.sent)
    schedule, edges = make_edges(lower(plan, Facts(facts, mesh, moments)), ranks, ledger)
    number = _engine_number()
    tiers = meeting.all_or_none(lambda: _make_tiers(schedule, ranks, number, ledger))

    if device.type == "cpu":
        keep_freed_memory(False)  # an earlier engine may have said otherwise
    on_meta = _everywhere_meta(names) and device.type != "meta"
    runs = _make_units(schedule, units, names, ranks.piece, edges, tiers, number)
    away = _hold_moments(runs, schedule, tiers)
    if tiers.disk is not None:
        meeting.all_or_none(tiers.disk.open)
    run = Run(schedule, runs, across, edges)
    gathering = Gathering(run, Others(number, ledger))
    with run.writing():
        _adopt(run, gathering, world, Materialise(model, device, names) if on_meta else None)
    _adopt_rest(model, names, device, dtype, world)
    give_back_freed_memory()
    if device.type == "cpu":
        keep_freed_memory()
    rounds = Rounds(run, gathering, plan.units.reduce_ahead)
    hooks = Hooks(model, run, gathering, rounds, dtype if plan.precision.cast_inputs else None)

    tiles = stepper = None
    if made is not None:
        tiles = Tiles(made, [weights for unit in runs for weights in unit.weights if weights.spec.trainable], away)
        stepper = Stepper(run, tiles, ranks, edge_for(control(use=1), ledger.sent), tiers)
    core = Core(plan, schedule, ranks, tiers, ledger, run, gathering, rounds, hooks, made, ticker, tiles, stepper, names)
    for weights in (weights for unit in runs for weights in unit.weights):
        weights.core = weakref.ref(core)
    return core


# Checks


def _agree(plan: Plan, facts: tuple[UnitFact, ...], world: int) -> None:
    """Check the plan, and that all ranks were given the same plan and model."""
    meeting.all_or_none(lambda: check(plan, facts, world))
    plans = [plan] if meeting.alike(plan) else meeting.tell(plan)
    for rank, theirs in enumerate(plans):
        if apart := difference(plans[0], theirs):
            raise RankMismatchError(f"ranks 0 and {rank} disagree about the plan: {apart}; give every rank the same")
    _same_everywhere({f"parameter {param.name!r}": repr(param) for unit in facts for param in unit.params}, world)


def _same_everywhere(mine: dict[str, str], world: int) -> None:
    """Raise :class:`RankMismatchError` on every rank unless all ranks say the same; collective.

    A digest is compared first: what is said is sent only when somebody says something else.
    """
    if world == 1:
        return
    if meeting.alike(mine):
        return
    everyone = meeting.tell(mine)
    for rank, theirs in enumerate(everyone):
        for what in [*everyone[0], *theirs]:
            if everyone[0].get(what) != theirs.get(what):
                raise RankMismatchError(
                    f"ranks disagree about the {what}: rank 0 has {everyone[0].get(what, 'none')}, rank {rank} has "
                    f"{theirs.get(what, 'none')}; give every rank the same"
                )
    raise RankMismatchError("ranks hold the model's parameters in different orders; give every rank the same model")


def _describe_optimizer(optimizer: Optimizer | None) -> dict[str, str]:
    """The optimizer's class and the options of its groups, each by itself."""
    if optimizer is None:
        return {"optimizer": "none"}
    told = {"optimizer": type(optimizer).__name__, "number of optimizer groups": str(len(optimizer.param_groups))}
    for index, group in enumerate(optimizer.param_groups):
        told[f"number of tensors in optimizer group {index}"] = str(len(group["params"]))
        options = {key: value for key, value in group.items() if key != "params"}
        told |= {f"optimizer's {key!r} in group {index}": repr(value) for key, value in options.items()}
    return told


def _refuse_models(model: nn.Module, names: dict[nn.Parameter, list[str]]) -> None:
    """Raise for a model whose parameters cannot be cut, or would drift apart."""
    refuse_opaque(names)
    _refuse_shared_storage(names)
    _refuse_renorm(model)


def _refuse_shared_storage(names: dict[nn.Parameter, list[str]]) -> None:
    """Two parameter objects over the same memory would be sharded apart and drift."""
    seen: dict[tuple[int, int], str] = {}
    for param, known in names.items():
        if home_of(param) is not None or param.device.type == "meta" or not param.numel():
            continue
        place = (param.untyped_storage()._cdata, int(param.storage_offset()))
        if place in seen:
            raise PlanError(
                f"parameters {seen[place]!r} and {known[0]!r} are different objects over the same memory, which cannot stay "
                f"tied; tie the parameter itself: module.weight = other.weight"
            )
        seen[place] = known[0]


def _refuse_renorm(model: nn.Module) -> None:
    """A module that edits its weight in forward, by the rows that this rank's data reads, parts the ranks."""
    for name, module in model.named_modules():
        if getattr(module, "max_norm", None) is not None and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise PlanError(
                f"{name!r} has max_norm={module.max_norm}: it edits its weight in forward by each rank's own data, so the "
                "ranks would drift apart; set max_norm=None"
            )


def _everywhere_meta(names: dict[nn.Parameter, list[str]]) -> bool:
    """True when no rank has real values; False when rank 0 has all of them. Anything else is an error on all ranks."""
    meta = sum(home_of(param) is None and param.device.type == "meta" for param in names)
    counts = meeting.tell(meta)
    if counts[0] == 0:
        return False
    if all(count == counts[0] for count in counts):
        return True
    raise RankMismatchError(
        f"parameters on the meta device per rank: {counts}. Build the model on meta everywhere, or load it on rank 0"
    )


def _forward_only(unit: UnitFact) -> UnitFact:
    """Without an optimizer nothing is trained: no gradient, no master weights."""
    frozen = tuple(param.__class__(param.names, param.shape, param.dtype, trainable=False) for param in unit.params)
    return UnitFact(unit.name, frozen, unit.spans)


def _make_optimizer(
    model: nn.Module, plan: Plan, optimizer: Optimizer | Factory | None, facts: tuple[UnitFact, ...]
) -> Optimizer | None:
    if not any(param.trainable for unit in facts for param in unit.params):
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise PlanError("an optimizer was given but no parameter of the model requires a gradient")
        return None
    if optimizer is None and plan.optimizer is not None:
        optimizer = partial(build_optimizer, plan.optimizer)
    if optimizer is None:
        return None
    made = build(optimizer, model)
    for index, group in enumerate(made.param_groups):
        for key, value in group.items():
            if isinstance(value, float) and (math.isnan(value) or (key == "lr" and math.isinf(value))):
                raise PlanError(f"{key!r} is {value} in group {index} of {type(made).__name__}; it must be a finite number")
    return made


def _make_scheduler(
    optimizer: Optimizer | None, scheduler: LRScheduler | SchedulerFactory | None, plan: Plan
) -> LRScheduler | None:
    if optimizer is None:
        if scheduler is not None:
            raise PlanError("a scheduler was given and there is no optimizer for it; give initialize both, or neither")
        return None
    if scheduler is None:
        return build_scheduler(plan.scheduler, optimizer) if plan.scheduler is not None else None
    given = hasattr(scheduler, "step") and not isinstance(scheduler, type)
    made: Any = scheduler if given else scheduler(optimizer)  # type: ignore[operator]
    if isinstance(made, ReduceLROnPlateau):
        raise PlanError("ReduceLROnPlateau wants a metric at every step: do not pass it, call its step(metric) yourself")
    if not hasattr(made, "step"):
        raise PlanError(f"the scheduler function returned {type(made).__name__}, which has no step()")
    over = getattr(made, "optimizer", optimizer)
    if over is not optimizer and getattr(over, "optimizer", None) is not optimizer:
        raise PlanError(
            f"the scheduler {type(made).__name__} is over another optimizer ({type(over).__name__}) than the one that is "
            f"trained with ({type(optimizer).__name__}), whose rate would never move; give initialize the optimizer that the "
            "scheduler was made for, or a function that makes a scheduler"
        )
    return made  # type: ignore[no-any-return]


# Construction


def _moments_of(
    made: Optimizer | None, plan: Plan, device: torch.device, names: dict[nn.Parameter, list[str]]
) -> dict[str, States]:
    """What states the optimizer keeps of each parameter, found where it will run. Raises :class:`PlanError` when they must
    be known and are not."""
    if made is None:
        return {}
    if _off_device(plan) and device.type != "meta":
        prefer_fused(made)
    found = probe(made, torch.device("cpu") if _off_device(plan) or device.type == "meta" else device)
    rests = [rule.row.moment for rule in plan.rules]
    if None in found and any(layout.tier == "disk" or layout.codec is not None for layout in rests):
        raise PlanError(
            f"{type(made).__name__} cannot be made afresh from its options, so the states it will keep are not known and "
            "cannot be given room on disk or a codec; keep its moments on 'device' or 'host' as they are"
        )
    groups = zip(made.param_groups, found, strict=True)
    return {names[param][0]: states or () for group, states in groups for param in group["params"] if param in names}


def _off_device(plan: Plan) -> bool:
    """Does the optimizer run on the host, of some parameters at least?"""
    return any(rule.row.optimizer.tier != "device" for rule in plan.rules)


def _make_tiers(schedule: Schedule, ranks: Ranks, engine: int, ledger: Ledger) -> Tiers:
    """The memory of this engine, after asking whether its caps can hold."""
    plan, scratch = schedule.plan, schedule.plan.scratch
    _warn(schedule)
    check_needs(schedule, ranks.piece)
    disk = None
    if scratch is not None and uses_disk(schedule):
        options = {"staging": scratch.staging, "threads": scratch.threads, "block": scratch.block}
        disk = Disk(scratch.folder, f"engine{engine}", ranks.rank, **options)
    tiers = Tiers(ranks.device, plan.caps, disk, ledger.moved, plan.step.when != "boundary")
    tiers.device.count("exchange buffer", schedule.facts.exchange)
    if disk is not None:
        tiers.host.count("staging", scratch_bytes(schedule))
    return tiers


def _warn(schedule: Schedule) -> None:
    """Say so where steps are delayed, and where whole units make another share on the host than the one asked for."""
    if schedule.plan.step.when == "delayed":
        warnings.warn(
            "StepPolicy(when='delayed') changes the mathematics: each step's update reaches the parameters one step later",
            stacklevel=2,
        )
    ratio, trained = schedule.plan.step.ratio, [buffer for buffer in schedule.buffers if buffer.trainable]
    total = sum(buffer.layout.numel for buffer in trained)
    away = sum(buffer.layout.numel for buffer in trained if buffer.row.optimizer.tier != "device")
    if 0 < ratio < 1 and total and abs(away / total - ratio) > 0.2:
        warnings.warn(
            f"ratio {ratio:g} asked for, and {away / total:.0%} of the elements are stepped off the device: units are whole, "
            f"and the model has {len(schedule.facts.units)}; smaller ones come from units=onecopy.Units(min_numel=...)",
            stacklevel=2,
        )


def _hold_moments(runs: list[UnitRun], schedule: Schedule, tiers: Tiers) -> dict[Weights, Moments]:
    """Room for the optimizer's states that rest where it cannot compute with them."""
    held: dict[Weights, Moments] = {}
    for weights in (weights for unit in runs for weights in unit.weights):
        spec = weights.spec
        if not (spec.trainable and spec.moments_away):
            continue
        layout = spec.row.moment
        held[weights] = Moments(
            {
                name: tiers.hold("moments", name, layout.tier, spec.grid(), getattr(torch, own or spec.weight), codec)
                for name, own, codec in moment_codecs(schedule.facts.moments_of(spec), layout, weights.piece_name)
            }
        )
    return held


def _engine_number() -> int:
    """A number that no other engine of these ranks has: rank 0's, as a process may have made engines alone before."""
    return meeting.from_rank0(lambda: next(_ENGINES))


def _make_units(
    schedule: Schedule,
    units: list[UnitModules],
    names: dict[nn.Parameter, list[str]],
    piece: int,
    edges: Edges,
    tiers: Tiers,
    engine: int,
) -> list[UnitRun]:
    by_name = {known[0]: param for param, known in names.items()}
    place = {buffer: index for index, buffer in enumerate(schedule.buffers)}
    runs = []
    for unit in units:
        run = UnitRun(unit.name, unit.entries, spans=unit.spans)
        for buffer in schedule.of(unit.name):
            params = [by_name[slot.param.name] for slot in buffer.layout.slots]
            index = place[buffer]
            moves = "gather" if buffer.parameter_away else "spread"
            message = Message(moves, engine, index, unit.name)
            run.weights.append(Weights(buffer, params, piece, edges.source(buffer, message), tiers))
            if buffer.trainable:
                messages = (
                    Message("reduce", engine, index, unit.name),
                    Message("spread", engine, index, unit.name, second=True),
                )
                run.gradients.append(Gradients(buffer, piece, edges.reduce, tiers, messages))
        run.trainable = sum(len(gradients.marks.used) for gradients in run.gradients)
        run.expected_uses = len(run.entries)
        run.waits_for_input = any(not weights.spec.trainable and weights.away for weights in run.weights)
        runs.append(run)
    return runs


def _adopt(run: Run, gathering: Gathering, world: int, materialise: Materialise | None) -> None:
    """Unit by unit, rank 0's values become everybody's and go to where the plan keeps them; of a model on the meta device
    they are made first."""

    def agree(whole: torch.Tensor) -> None:
        if world > 1:
            with watch.waiting("the weights of rank 0"):
                dist.broadcast(whole.view(torch.uint8), 0, group=everybody(whole.device))

    for unit in run.units:
        if materialise is not None:
            materialise(param for weights in unit.weights for param in weights.params)
        for weights in unit.weights:
            weights.adopt(whole_values, agree, gathering.demand)


def _adopt_rest(
    model: nn.Module, params: Iterable[nn.Parameter], device: torch.device, dtype: torch.dtype | None, world: int
) -> None:
    """What no unit holds: parameters without elements, module buffers and scales of quantised parameters, of which rank 0's
    become everybody's.

    Both go to ``device``, floating-point ones in the compute dtype.
    """
    for param in params:
        if not param.numel():
            cast = dtype if dtype is not None and param.is_floating_point() else param.dtype
            set_data(param, torch.empty(param.shape, dtype=cast, device=device))

    def agree(flat: torch.Tensor) -> None:
        if world > 1:
            with watch.waiting("the module buffers of rank 0"):
                dist.broadcast(flat, 0, group=everybody(device))

    settle(model, agree, device)
    made: dict[int, torch.Tensor] = {}
    kept: list[torch.Tensor] = []
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if id(buffer) in made:  # two modules share it, and go on to
                module._buffers[name] = made[id(buffer)]
                continue
            cast = dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype
            moved = torch.empty_like(buffer, device=device, dtype=cast) if buffer.device.type == "meta" else None
            moved = buffer.to(device=device, dtype=cast) if moved is None else moved
            if world > 1 and moved.numel():
                flat = moved.contiguous().reshape(-1)
                agree(flat.view(torch.uint8))
                moved = flat.view(moved.shape)
            made[id(buffer)] = module._buffers[name] = moved
            kept.append(buffer)  # alive, so that its id stays its own
