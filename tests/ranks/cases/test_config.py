"""Configurations: misspelt keys, batch sizes, "auto", nonsense numbers, learning rates, settings without effect."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onecopy
import onecopy.deepspeed as deepspeed
from onecopy.errors import CheckpointError, ConfigError, OneCopyError, PlanError
from onecopy.plan import schema
from onecopy.plan.plan import Batch, LossScale, Precision
from tests.ranks import models
from tests.ranks.cases.doors import feed7, json_config, sgd1
from tests.ranks.harness import run_ranks
from tests.ranks.oracle import largest_gap, sgd

pytestmark = pytest.mark.ranks

FULL: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 9}},
    "fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 100, "hysteresis": 2},
    "bf16": {"enabled": False},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 1000},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """``FULL`` with the value at the dotted ``path`` set."""
    config = copy.deepcopy(FULL)
    *sections, key = path.split(".")
    place = config
    for section in sections:
        place = place.setdefault(section, {})
    place[key] = value
    return config


def refusal(config: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        onecopy.load_config(config, **options)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------------- misspelt keys


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("gradient_clipp1ng", "gradient_clipping"),
        ("zero_optimization.stge", "zero_optimization.stage"),
        ("zero_optimization.Stage", "zero_optimization.stage"),
        ("zero_optimization.offload_optimizer.devise", "zero_optimization.offload_optimizer.device"),
        ("fp16.los_scale", "fp16.loss_scale"),
        ("bf16.enable", "bf16.enabled"),
        ("optimizer.params.weight_decy", "optimizer.params.weight_decay"),
        ("optimizer.prams", "optimizer.params"),
        ("scheduler.params.warmup_num_step", "scheduler.params.warmup_num_steps"),
        ("gradient_acumulation_steps", "gradient_accumulation_steps"),
    ],
)
def test_a_misspelt_key_is_an_error_with_its_path_and_the_nearest_key(wrong: str, right: str) -> None:
    """A wrong key at any depth stops the run; the message has the full path and the key that was meant (row 01)."""
    onecopy.load_config(FULL, world_size=1)
    said = refusal(changed(wrong, 1.0), world_size=1)
    assert wrong in said
    assert f"did you mean {right}?" in said


def test_every_key_with_a_letter_too_few_is_an_error() -> None:
    """No key of the whole configuration is swallowed when it is misspelt, and each is recognised (row 01)."""
    keys = [f"{name}" for name in schema.Config.model_fields]
    keys += [f"zero_optimization.{name}" for name in schema.ZeroOptimization.model_fields]
    keys += [f"fp16.{name}" for name in schema.Fp16.model_fields]
    legal = {key.rsplit(".", 1)[-1] for key in keys}
    tried = 0
    for key in keys:
        section, _, name = key.rpartition(".")
        short = name[: len(name) // 2] + name[len(name) // 2 + 1 :]
        if short in legal or len(name) < 5:
            continue
        wrong = f"{section}.{short}" if section else short
        said = refusal(changed(wrong, None), world_size=1)
        assert wrong in said, said
        assert "did you mean" in said, said
        tried += 1
    assert tried > 60


def test_several_misspellings_are_one_list_and_comments_are_allowed(tmp_path: Path) -> None:
    """All wrong keys are told at once, in a file too; a key that begins with "_" is a comment (row 01)."""
    config = changed("gradient_clipp1ng", 1.0)
    config["zero_optimization"]["stge"] = 3
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    said = refusal(str(path), world_size=1)
    assert "gradient_clipp1ng" in said and "zero_optimization.stge" in said
    plain = onecopy.load_config(FULL, world_size=1)
    for comment in ("_gradient_clipp1ng", "zero_optimization._stge", "optimizer.params._why"):
        assert onecopy.load_config(changed(comment, "off for now"), world_size=1) == plain


def misspelt_at_start(rank: int, world: int) -> None:
    wrong = [json_config(2, gradient_clipp1ng=1.0), json_config(0) | {"zero_optimization": {"stge": 3}}]
    for config in wrong:
        model = models.build("even")
        places = [p.data_ptr() for p in model.parameters()]
        with pytest.raises(ConfigError, match=r"did you mean (gradient_clipping|zero_optimization\.stage)\?"):
            deepspeed.initialize(model=model, config=config, optimizer=sgd)
        assert [p.data_ptr() for p in model.parameters()] == places, "the model was touched"
        built = []
        with pytest.raises(ConfigError, match="did you mean"), deepspeed.zero.Init(config_dict_or_path=config):
            built.append(nn.Linear(4, 4))
        assert not built, "weights were allocated before the configuration was read"


def test_a_misspelt_key_stops_before_any_weight_is_allocated() -> None:
    """The error comes before the model is sharded, and before a model is built sharded (row 01)."""
    run_ranks(misspelt_at_start, 2)


# --------------------------------------------------------------------------------------------------------- batch sizes


def test_batch_sizes_that_conflict_show_all_numbers_and_a_fix() -> None:
    """16 != 2*2*2 = 8 on 2 ranks, with what to set instead (row 02)."""
    config = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    said = refusal(config, world_size=2)
    assert "16 != 2*2*2 = 8" in said
    assert "train_batch_size to 8" in said and "gradient_accumulation_steps to 4" in said
    assert onecopy.load_config(config | {"train_batch_size": 8}, world_size=2).batch == Batch(2, micro=2, total=8)


def test_batch_sizes_are_derived_from_any_two() -> None:
    """8 on 4 ranks is 2 per rank and no accumulation; any two of the three numbers give the third (row 02)."""
    assert onecopy.load_config({"train_batch_size": 8}, world_size=4).batch == Batch(1, micro=2, total=8)
    for world in (1, 2, 3, 4, 7):
        for micro in (1, 2, 5):
            for steps in (1, 2, 3):
                numbers = {
                    "train_batch_size": world * micro * steps,
                    "train_micro_batch_size_per_gpu": micro,
                    "gradient_accumulation_steps": steps,
                }
                for absent in ("", *numbers):
                    given = {key: value for key, value in numbers.items() if key != absent}
                    batch = onecopy.load_config(given, world_size=world).batch
                    assert (batch.micro, batch.accumulation) == (micro, steps), (given, world)


@pytest.mark.parametrize(("train", "world"), [(10, 4), (7, 2), (1, 3)])
def test_a_batch_that_does_not_divide_says_so(train: int, world: int) -> None:
    """10 samples on 4 ranks: the message has both numbers (row 02)."""
    assert f"{train} is not divisible by {world} ranks" in refusal({"train_batch_size": train}, world_size=world)


def batch_before_the_group(rank: int, world: int, door: str) -> tuple[int, int, int]:
    """The sharded model is built before there is a process group; samples per rank, world, and local elements."""
    config = {"train_batch_size": 4 * world, "zero_optimization": {"stage": 3}}
    if door == "onecopy":
        plan = onecopy.load_config(config)
        with onecopy.deferred():
            model = nn.Linear(12, 12, bias=False)
        engine: Any = onecopy.initialize(model, plan, optimizer=sgd)
    else:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = nn.Linear(12, 12, bias=False)
        engine = deepspeed.initialize(model=model, config=config, optimizer=sgd)[0]
        assert engine.dp_world_size == engine.world_size == world
        assert engine.train_batch_size() == 4 * world
    held = engine.predicted()["resident"]["device"]["parameter"]
    return engine.plan.batch.micro or 0, torch.distributed.get_world_size(), held


@pytest.mark.parametrize("door", ["onecopy", "deepspeed"])
def test_batch_sizes_before_the_process_group_know_the_launchers_ranks(door: str) -> None:
    """A model built sharded before the process group exists counts the ranks that were launched, never 1 (row 02)."""
    for world in (2, 3):
        assert run_ranks(batch_before_the_group, world, door, init_group=False) == [(4, world, 144 * 4 // world)] * world


def conflict_on_ranks(rank: int, world: int) -> str:
    config = {"train_batch_size": 8 * world, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    with pytest.raises(ConfigError) as caught:
        deepspeed.initialize(model=models.build("toy"), config=config, optimizer=sgd)
    # The same numbers read for another number of ranks.
    plan = onecopy.load_config({"train_batch_size": 8}, world_size=world + 1 if 8 % (world + 1) == 0 else 8)
    with pytest.raises(PlanError, match="8"):
        onecopy.initialize(models.build("toy"), plan, optimizer=sgd)
    return str(caught.value)


def test_batch_sizes_that_conflict_are_refused_on_every_rank() -> None:
    """The same refusal on all ranks that run, with the number of ranks there really are (row 02)."""
    for world in (2, 3):
        for said in run_ranks(conflict_on_ranks, world):
            assert f"{8 * world} != 2*2*{world} = {4 * world}" in said


# ---------------------------------------------------------------------------------------------------------------- auto


class TwoTowers(nn.Module):
    """An encoder and a decoder of different widths, with a configuration that has no hidden_size."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"encoder": {"d_model": 7}, "decoder": {"width": 5}}
        self.encoder, self.decoder = nn.Linear(7, 5), nn.Linear(5, 7)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.decoder(self.encoder(x).tanh()) - y).square().mean()


AUTO_SIZES = {
    "reduce_bucket_size": "auto",
    "allgather_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
}


def auto_sizes(rank: int, world: int) -> None:
    torch.manual_seed(0)
    twin = TwoTowers()
    plain = sgd1(twin.parameters())
    for other in range(world):
        (twin(*feed7(0, other)) / world).backward()
    plain.step()
    for stage in range(4):
        config = json_config(stage) | {"zero_optimization": {"stage": stage, **AUTO_SIZES}}
        for door in ("onecopy", "deepspeed"):
            torch.manual_seed(0)
            model = TwoTowers()
            if door == "onecopy":
                engine: Any = onecopy.initialize(model, onecopy.load_config(config), optimizer=sgd1)
            else:
                engine = deepspeed.initialize(model=model, config=config, optimizer=sgd1)[0]
            engine(*feed7(0, rank)).backward()
            engine.step()
            assert largest_gap(model, twin) <= 1e-6, (stage, door)
            engine.close()


def test_automatic_sizes_need_nothing_of_the_model() -> None:
    """Bucket sizes may stay "auto" for a model without a hidden_size, with no trainer around (row 03)."""
    run_ranks(auto_sizes, 2)


def test_what_is_still_automatic_is_one_list() -> None:
    """Every key that is still "auto" after all that could be derived is named in one error, not a TypeError (row 03)."""
    config = copy.deepcopy(FULL)
    left = ["optimizer.params.lr", "optimizer.params.betas", "scheduler.params.total_num_steps", "fp16.enabled"]
    left += ["gradient_clipping", "zero_optimization.stage"]
    for path in left:
        *sections, key = path.split(".")
        place = config
        for section in sections:
            place = place[section]
        place[key] = "auto"
    said = refusal(config, world_size=2)
    (line,) = [line for line in said.splitlines() if "auto" in line]
    for path in left:
        assert path in line
    for alone in left:
        assert alone in refusal(changed(alone, "auto"), world_size=2)


def test_automatic_batch_sizes_follow_or_are_listed() -> None:
    """One of the three batch sizes may be "auto" when the others say it; two may not (row 03)."""
    given = {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto"}
    assert onecopy.load_config(given, world_size=3).batch.accumulation == 2
    said = refusal({"train_batch_size": 12, **{k: "auto" for k in list(given)[1:]}}, world_size=3)
    assert "train_micro_batch_size_per_gpu" in said and "gradient_accumulation_steps" in said and "auto" in said


# ------------------------------------------------------------------------------------------------------------- numbers

NONSENSE: list[tuple[str, Any]] = [
    *[("fp16.loss_scale", value) for value in (math.inf, -math.inf, math.nan, -1, True, "1")],
    *[("fp16.loss_scale_window", value) for value in (0, -1, True, 1.5, math.nan)],
    *[("fp16.min_loss_scale", value) for value in (0, -1, math.nan, math.inf, True)],
    *[("fp16.initial_scale_power", value) for value in (-1, 4000, True, math.nan)],
    *[("fp16.hysteresis", value) for value in (0, True)],
    *[("gradient_clipping", value) for value in (-1, math.nan, math.inf, True)],
    *[("zero_optimization.stage", value) for value in (4, -1, True, 2.5, "2", None)],
    *[("optimizer.params.lr", value) for value in (True, math.nan, math.inf, -1.0, "1e-3")],
    *[("optimizer.params.betas", value) for value in ([0.9], [0.9, 1.0], [0.9, math.nan], True)],
    *[("optimizer.params.weight_decay", value) for value in (True, math.nan, -0.1)],
    *[("scheduler.params.warmup_num_steps", value) for value in (0, -1, True, math.nan, 9, 10)],
    *[("scheduler.params.total_num_steps", value) for value in (0, 2, True)],
    *[("train_micro_batch_size_per_gpu", value) for value in (0, -1, True, 1.5)],
    *[("gradient_accumulation_steps", value) for value in (0, -2, True)],
]


@pytest.mark.parametrize(("path", "value"), NONSENSE, ids=lambda part: repr(part))
def test_nonsense_numbers_are_refused_with_key_value_and_range(path: str, value: Any) -> None:
    """Infinity, NaN, negatives, zero windows, true as a number: an error at once with what would be legal (row 04)."""
    said = refusal(changed(path, value), world_size=1)
    (line, *_) = [line for line in said.splitlines() if path in line or path.rsplit(".", 1)[-1] in line]
    shown = {True: "true", None: "null"}.get(value) if isinstance(value, bool) or value is None else repr(value)
    assert str(shown) in line or json.dumps(value) in line, f"the value {shown} is not in {line!r}"
    assert any(word in line for word in ("must be", "legal", "below", "less", "shorter", "<", "from")), line


SCALES = [{"initial": math.inf}, {"initial": math.nan}, {"initial": -1.0}, {"initial": True}, {"window": 0}, {"minimum": 0.0}]


def nonsense_plans(rank: int, world: int) -> None:
    plans = [onecopy.stage(2, precision=Precision("float16", loss_scale=LossScale(**bad))) for bad in SCALES]
    plans += [onecopy.stage(2, clip=bad) for bad in (math.nan, -1.0, math.inf, True)]
    plans += [onecopy.stage(2, accumulation=bad) for bad in (0, -1, 1.5)]
    for plan in plans:
        with pytest.raises(PlanError, match="must be"):
            onecopy.initialize(models.build("toy"), plan, optimizer=sgd)


def test_nonsense_in_a_plan_is_refused_too() -> None:
    """The same numbers given in Python are refused when the engine is made (row 04)."""
    run_ranks(nonsense_plans, 2)


def test_schedules_made_by_hand_refuse_nonsense() -> None:
    """A warm-up of no steps, or one as long as the whole schedule, never divides by zero later (row 04)."""
    optimizer = sgd1([nn.Parameter(torch.ones(1))])
    for name, options in (
        ("WarmupLR", {"warmup_num_steps": 0}),
        ("WarmupDecayLR", {"warmup_num_steps": 0, "total_num_steps": 5}),
        ("WarmupDecayLR", {"warmup_num_steps": 5, "total_num_steps": 5}),
        ("WarmupCosineLR", {"warmup_num_steps": 5, "total_num_steps": 5}),
        ("WarmupDecayLR", {"warmup_num_steps": math.nan, "total_num_steps": 5}),
    ):
        with pytest.raises(ConfigError, match="warmup_num_steps"):
            getattr(deepspeed.lr_schedules, name)(optimizer, **options)


def save_nowhere(rank: int, world: int, folder: str, bad: int) -> str:
    engine: Any = deepspeed.initialize(model=models.build("toy"), config=json_config(2), optimizer=sgd)[0]
    engine(torch.ones(1)).backward()
    engine.step()
    directory = "" if rank == bad else folder
    said = []
    for save in (engine.save, engine.save_checkpoint):
        with pytest.raises(CheckpointError) as caught:
            save(directory)
        said.append(str(caught.value))
    assert engine.save(folder), "a save after the refused one works"
    return said[0]


@pytest.mark.parametrize("bad", [1, pytest.param(0, marks=pytest.mark.long)])
def test_an_empty_folder_name_on_one_rank_is_an_error_on_all(tmp_path: Path, bad: int) -> None:
    """One rank saves to "": every rank gets the error and none is left waiting (row 04)."""
    said = run_ranks(save_nowhere, 2, str(tmp_path / "here"), bad)
    assert said[0] == said[1]
    assert "directory" in said[0] or "folder" in said[0] or "''" in said[0], said[0]


def test_no_error_class_is_foreign() -> None:
    """What a configuration is refused with is a onecopy error and a ValueError, so either can be caught (row 01)."""
    assert issubclass(ConfigError, OneCopyError) and issubclass(ConfigError, ValueError)
