"""Resuming is going on: under another stage and precision, in a new process with data and dropout, on other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

import onecopy
import onecopy.deepspeed as deepspeed
from onecopy.errors import CheckpointError
from onecopy.plan.plan import LossScale, Precision
from tests.ranks import harness, models
from tests.ranks.cases.everywhere import everywhere, json_plans
from tests.ranks.checkpoints import everything, unequal
from tests.ranks.harness import run_ranks

pytestmark = pytest.mark.ranks

# ------------------------------------------------------------------------------- row 53: another stage and precision

STATES = ("exp_avg", "exp_avg_sq")
PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision("bfloat16"),
}


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def exact_steps(engine: Any, rank: int, numbers: range) -> None:
    for number in numbers:
        engine.backward(engine(*models.batch("exact", number, 0, rank)).float())
        assert engine.step()


def truth_of(world: int, steps: int) -> list[dict[str, Tensor]]:
    """The oracle: weights, moments and step counts of plain torch in fp32 after each of ``steps`` steps."""
    model = models.build("exact")
    optimizer = adam(model.parameters())
    out = []
    for number in range(steps):
        for rank in range(world):
            (model(*models.batch("exact", number, 0, rank)) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
        named = {name: p for name, p in model.named_parameters() if p.numel()}
        found = {name: p.detach().clone() for name, p in named.items()}
        found |= {f"{key} {name}": optimizer.state[p][key].clone() for name, p in named.items() for key in STATES}
        out.append(found)
    return out


def gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max((one[key] - value).abs().max().item() for key, value in other.items())


def save_matrix(rank: int, world: int, folder: str, kinds: list[str]) -> None:
    for kind in kinds:
        for name, plan in everywhere(world, precision=PRECISIONS[kind]).items():
            engine = onecopy.initialize(models.build("exact"), plan, optimizer=adam)
            exact_steps(engine, rank, range(2))
            engine.save(f"{folder}/{kind} {name}")
            engine.close()


def load_matrix(
    rank: int, world: int, folder: str, kinds: list[str], truth: list[dict[str, Tensor]]
) -> tuple[int, list[str]]:
    """How many cells there are, and those that differ from the run that was never stopped, then or two steps later."""
    wrong, cells = [], 0
    for kind in kinds:
        for name, plan in everywhere(world, precision=PRECISIONS[kind]).items():
            torch.manual_seed(5)
            engine = onecopy.initialize(models.BUILDERS["exact"](), plan, optimizer=adam)
            for source in (f"{other} {saved}" for other in kinds for saved in everywhere(world)):
                cell = f"{source} -> {kind} {name}"
                engine.load(f"{folder}/{source}")
                off = gap(everything(engine, STATES), truth[1])
                counts = {float(state["step"]) for state in engine.optimizer.state.values() if state}
                if off > 1e-6 or counts - {2.0} or engine.global_steps != 2:
                    wrong.append(f"{cell}: off by {off}, Adam's steps {counts}")
                exact_steps(engine, rank, range(2, 4))
                if (off := gap(everything(engine, STATES), truth[3])) > 2e-6:
                    wrong.append(f"{cell}: two steps later off by {off}")
                cells += 1
            engine.close()
    return cells, wrong


@pytest.mark.parametrize(("world", "kinds"), [(2, ["fp32", "bf16"]), (4, ["bf16"])])
def test_every_stage_and_precision_resumes_every_other(tmp_path: Path, world: int, kinds: list[str]) -> None:
    """Saved at each stage in fp32 or bf16, loaded at each other: weights, moments and step counts are those
    of plain torch, which never stopped, in every cell; so are two more steps. Adds stage and precision changed at once,
    and hybrid sharding; offload is in ``../test_offload.py``. (row 53)"""
    run_ranks(save_matrix, world, str(tmp_path), kinds)
    for cells, wrong in run_ranks(load_matrix, world, str(tmp_path), kinds, truth_of(world, 4)):
        assert cells == (len(kinds) * len(everywhere(world))) ** 2
        assert not wrong, f"{len(wrong)} of {cells}: {wrong[:5]}"


ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "betas": [0.9, 0.999]}}
# Gradients of these cases are small whole numbers: at this scale they fit fp16 exactly.
JSON_PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 6}},
}


def json_matrix(rank: int, world: int, folder: str, truth: list[dict[str, Tensor]]) -> list[str]:
    setups = {
        f"{kind} {name}": setup
        for kind, keys in JSON_PRECISIONS.items()
        for name, setup in json_plans(world, optimizer=ADAM, **keys).items()
    }
    engines, wrong = {}, []
    for name, setup in setups.items():
        engines[name] = deepspeed.initialize(model=models.build("exact"), config=setup)[0]
        exact_steps(engines[name], rank, range(2))
        engines[name].save_checkpoint(folder, name.replace(" ", "-"))
    for source in setups:
        for name, engine in engines.items():
            engine.load_checkpoint(folder, source.replace(" ", "-"))
            if (off := gap(everything(engine, STATES), truth[1])) > 1e-6:
                wrong.append(f"{source} -> {name}: off by {off}")
        for engine in engines.values():
            exact_steps(engine, rank, range(2, 3))
        offs = {name: gap(everything(engine, STATES), truth[2]) for name, engine in engines.items()}
        wrong += [f"{source} -> {name}: a step later off by {off}" for name, off in offs.items() if off > 2e-6]
    return wrong


def test_every_json_resumes_every_other(tmp_path: Path) -> None:
    """The same with ``save_checkpoint`` and ``load_checkpoint``: 8 x 8 cells of configurations in fp32 and
    fp16. (row 53)"""
    assert run_ranks(json_matrix, 2, str(tmp_path), truth_of(2, 3)) == [[], []]


# ------------------------------------------------------------------------------------- row 54: resuming is going on


@dataclass
class Place:
    """Where the loop is in its data."""

    epoch: int = 0
    position: int = 0


class Loop:
    """Shuffled data without end, two micro-batches a step, dropout, a cosine, fp16 with a scale that moves."""

    SAMPLES = 28  # 14 for each of two ranks: 7 micro-batches an epoch, so that a save falls into the middle of one

    def __init__(self, engine: Any, rank: int, world: int) -> None:
        self.engine, self.place = engine, Place()
        source = torch.Generator().manual_seed(7)
        self.data = torch.randint(models.VOCAB, (self.SAMPLES, models.SEQ + 1), generator=source)
        self.sampler = DistributedSampler(range(self.SAMPLES), world, rank, shuffle=True, seed=3)

    def batch(self) -> tuple[Tensor, Tensor]:
        self.sampler.set_epoch(self.place.epoch)
        order = list(self.sampler)
        tokens = self.data[order[self.place.position : self.place.position + models.MICRO]]
        self.place.position += models.MICRO
        if self.place.position >= len(order):
            self.place = Place(self.place.epoch + 1)
        return tokens[:, :-1], tokens[:, 1:]

    def run(self, steps: int) -> list[Any]:
        """A line for each step: rates, scale, skipped, losses, and a digest of this rank's random state."""
        lines, engine = [], self.engine
        for _ in range(steps):
            losses = []
            for _ in range(engine.plan.batch.accumulation):
                loss = engine(*self.batch())
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            state = torch.get_rng_state().to(torch.int64)
            digest = int((state * torch.arange(1, len(state) + 1)).sum())
            lines.append((engine.lr(), engine.loss_scale, engine.skipped_steps, engine.global_steps, losses, digest))
        return lines

    def state_dict(self) -> dict[str, Any]:
        """What a data loader keeps: the position."""
        return {"epoch": self.place.epoch, "position": self.place.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = Place(state["epoch"], state["position"])


MOVING = LossScale(initial=2.0**19, window=2)


def loops(rank: int, world: int, seed: int) -> dict[str, Any]:
    """Makers of loops by name: a function, so that one engine exists at a time."""

    def plain(plan: Any) -> Loop:
        torch.manual_seed(seed)
        cosine = lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=10)  # noqa: E731
        engine = onecopy.initialize(models.BUILDERS["gpt dropout"](), plan, optimizer=adam, scheduler=cosine)
        torch.manual_seed(seed + 100 + rank)
        return Loop(engine, rank, world)

    def by_json(setup: dict[str, Any]) -> Loop:
        torch.manual_seed(seed)
        engine, *_ = deepspeed.initialize(model=models.BUILDERS["gpt dropout"](), config=setup)
        torch.manual_seed(seed + 100 + rank)
        return Loop(engine, rank, world)

    found = {}
    half = {"precision": Precision("float16", loss_scale=MOVING)}
    names = ("stage 0", "stage 1", "stage 2", "stage 3") if world == 2 else ("pairs, stage 1", "pairs, stage 3")
    for kind, options, chosen in (("fp16", half, names), ("fp32", {}, ("stage 2", "stage 3 held")[: 4 // world])):
        plans = everywhere(world, accumulation=2, clip=0.5, **options)
        for name in chosen:
            found[f"{kind} {name}"] = lambda plan=plans[name]: plain(plan)
    cosine = {"type": "WarmupCosineLR", "params": {"total_num_steps": 12, "warmup_num_steps": 3}}
    scale = {"enabled": True, "initial_scale_power": 19, "loss_scale_window": 2, "hysteresis": 1}
    setups = json_plans(world, optimizer=ADAM, scheduler=cosine, fp16=scale, gradient_accumulation_steps=2)
    for name in ("json 1", "json 3") if world == 2 else ("json 3 in pairs",):
        found[name] = lambda setup=setups[name]: by_json(setup)
    return found


def ten_straight(rank: int, world: int, folder: str) -> dict[str, Any]:
    out = {}
    for name, make in loops(rank, world, 0).items():
        loop = make()
        first = loop.run(5)
        loop.engine.save(f"{folder}/{name}", data=loop)
        out[name] = first, loop.run(5), everything(loop.engine, STATES)
        loop.engine.close()
    return out


def five_more(rank: int, world: int, folder: str, random: bool) -> dict[str, Any]:
    out = {}
    for name, make in loops(rank, world, 50).items():
        loop = make()
        loop.engine.load(f"{folder}/{name}", data=loop, random_states=random)
        out[name] = loop.run(5), everything(loop.engine, STATES)
        loop.engine.close()
    return out


def fresh_processes() -> None:
    """The ranks of the next run are new processes."""
    harness._workers().close()


@pytest.mark.long
@pytest.mark.parametrize("world", [2])
def test_ten_steps_are_five_and_five_in_new_processes(tmp_path: Path, world: int) -> None:
    """Dropout, shuffled data stopped within an epoch, a cosine, a loss scale that moves: rates, scales, skipped
    steps, losses, random states, weights and moments of steps 6 to 10 are bit-equal after a restart. Adds new processes,
    dropout and data to what holds for engines; the position goes through ``data=``. (row 54)"""
    straight = run_ranks(ten_straight, world, str(tmp_path))
    fresh_processes()
    again = run_ranks(five_more, world, str(tmp_path), True)
    for rank, (expected, found) in enumerate(zip(straight, again, strict=True)):
        for name, (first, lines, states) in expected.items():
            assert found[name][0] == lines, f"rank {rank}, {name}"
            assert not unequal(states, found[name][1]), name
            scales = [line[1] for line in (*first, *lines)]
            assert len(set(scales)) > 1 or name.startswith("fp32"), "the scale never moved"
            assert lines[-1][2] > 0 or name.startswith("fp32"), "no step was skipped"
    if world == 2:
        blind = run_ranks(five_more, world, str(tmp_path), False)
        assert blind[0]["fp32 stage 2"][0] != straight[0]["fp32 stage 2"][1], "dropout makes no difference here"


def own_states(rank: int, world: int, folder: str) -> list[Any]:
    """Every rank passes its own ``client_state``, as a loop that keeps its own random state does."""
    out = []
    for name, plan in everywhere(world).items():
        engine = onecopy.initialize(models.build("mlp"), plan, optimizer=adam)
        engine.backward(engine(*models.batch("mlp", 0, 0, rank)))
        engine.step()
        try:
            engine.save(f"{folder}/{name}", client_state={"rank": rank, "epoch": 3})
            out.append((name, dict(engine.load(f"{folder}/{name}"))))
        except CheckpointError as error:
            out.append((name, str(error)))
        engine.close()
    return out


@pytest.mark.parametrize("world", [2, 3])
def test_client_state_of_each_rank_comes_back_to_it(tmp_path: Path, world: int) -> None:
    """Random states differ by rank. ``client_state`` that differs by rank comes back to each as it was, or is
    refused when saving; another rank's must not come back in silence. (row 54)"""
    wrong = []
    for rank, run in enumerate(run_ranks(own_states, world, str(tmp_path))):
        for name, got in run:
            kept = isinstance(got, dict) and got["rank"] == rank
            refused = isinstance(got, str) and "client_state" in got and "rank" in got
            if not (kept or refused):
                wrong.append(f"rank {rank}, {name}: {got}")
    assert not wrong, wrong


# -------------------------------------------------------------------------------------------- row 56: padding is no state

SIZES = {"a": 5, "b": 7, "c": 11}


class Part(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, size))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x[: self.w.numel()]).sum()


class Parts(nn.Module):
    """A parameter for each group, each in a unit of its own where units are small."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: Part(size) for name, size in SIZES.items()})

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x) for part in self.parts.values()]).sum()


def groups_of(model: Parts) -> list[dict[str, Any]]:
    return [{"params": [part.w], "lr": 0.1 * (at + 1), "weight_decay": 0.1 * at} for at, part in
            enumerate(model.parts.values())]  # fmt: skip


def counted(at: int, size: int) -> tuple[Tensor, Tensor]:
    """Moments that tell where they belong."""
    return torch.arange(100.0 * at, 100.0 * at + size), 1 + torch.arange(0.0, size) / 64


def engines_of(world: int) -> dict[str, Any]:
    """Makers by name: small units, one unit, and JSON."""

    def plain(plan: Any) -> Any:
        model = Parts()
        return onecopy.initialize(model, plan, optimizer=torch.optim.AdamW(groups_of(model)))

    def by_json(setup: dict[str, Any]) -> Any:
        model = Parts()
        return deepspeed.initialize(model=model, model_parameters=groups_of(model), config=setup)[0]

    found: dict[str, Any] = {"stage 3, one unit": lambda: plain(onecopy.stage(3))}
    for name, plan in everywhere(world).items():
        if name not in ("stage 1", "stage 3 held", "pairs, stage 1"):  # which keep the same pieces as others here
            found[name] = lambda plan=plan: plain(plan)
    setups = json_plans(world, optimizer={"type": "AdamW", "params": {"lr": 0.5}})
    for name in ("json 1", "json 3"):
        found[name] = lambda setup=setups[name]: by_json(setup)
    return found


def save_counted(rank: int, world: int, folder: str) -> list[str]:
    names = []
    for name, make in engines_of(world).items():
        engine = make()
        engine.backward(engine(torch.ones(11)))
        engine.step()
        for at, (key, size) in enumerate(SIZES.items()):
            for state, value in zip(STATES, counted(at, size), strict=True):
                onecopy.set_full_state(engine.module.parts[key].w, state, value)
            onecopy.set_full_param(engine.module.parts[key].w, torch.linspace(-1, 1, size))
        tag = f"{world}-{name}".replace(", ", "-").replace(" ", "-")
        engine.save(folder, tag)
        names.append(tag)
        engine.close()
    return names


def load_counted(rank: int, world: int, folder: str, tags: list[str], after: dict[str, Tensor]) -> list[str]:
    """Cells whose moments are not the counting numbers, or not the oracle's one step later."""
    wrong = []
    for name, make in engines_of(world).items():
        engine = make()
        for tag in tags:
            engine.load(folder, tag)
            for at, (key, size) in enumerate(SIZES.items()):
                for state, value in zip(STATES, counted(at, size), strict=True):
                    found = onecopy.full_state(engine.module.parts[key].w, state)
                    if not torch.equal(found, value):
                        wrong.append(f"{tag} -> {world} {name}: {state} of {key} is {found.tolist()}")
            if engine.lr() != pytest.approx([0.1, 0.2, 0.3]):
                wrong.append(f"{tag} -> {world} {name}: rates {engine.lr()}")
            engine.backward(engine(torch.ones(11)))
            engine.step()
            if (off := gap(everything(engine, STATES), after)) > 1e-5:
                wrong.append(f"{tag} -> {world} {name}: a step later off by {off}")
        engine.close()
    return wrong


def a_step_from_counted() -> dict[str, Tensor]:
    """The oracle: plain torch, from the same moments."""
    model = Parts()
    optimizer = torch.optim.AdamW(groups_of(model))
    model(torch.ones(11)).backward()
    optimizer.step()
    with torch.no_grad():
        for at, part in enumerate(model.parts.values()):
            for state, value in zip(STATES, counted(at, part.w.numel()), strict=True):
                optimizer.state[part.w][state].copy_(value)
            part.w.copy_(torch.linspace(-1, 1, part.w.numel()))
    optimizer.step()
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    return found | {f"{s} {name}": optimizer.state[p][s].clone() for s in STATES for name, p in model.named_parameters()}


@pytest.mark.long
def test_moments_of_odd_sizes_come_back_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Groups of 5, 7 and 11 elements with counting numbers as moments, saved on 2 ranks, loaded on 4, 3 and 1, and
    the other way round: exactly the counting numbers, and the step after that is plain torch's. Adds other numbers of
    ranks, several units or one, DeepSpeed's groups, and the next step. (row 56)"""
    tags, after = [], a_step_from_counted()
    for world in (2, 3):
        tags += run_ranks(save_counted, world, str(tmp_path))[0]
    tags = [tag for tag in tags if tag in ("2-stage-0", "2-stage-2", "2-json-3", "3-stage-3-one-unit", "3-stage-3")]
    assert len(tags) == 5
    for world in (1, 2, 3, 4):
        for wrong in run_ranks(load_counted, world, str(tmp_path), tags, after):
            assert not wrong, f"{len(wrong)}: {wrong[:4]}"
