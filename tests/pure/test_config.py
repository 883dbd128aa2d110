"""DeepSpeed JSON -> plan: what is right is translated, all else is one clear error or a note; nothing is lost."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onecopy.errors import ConfigError
from onecopy.plan import schema
from onecopy.plan.config import DEEPSPEED, load_config
from onecopy.plan.plan import Plan, Precision, Recipe
from onecopy.plan.presets import stage

pytestmark = pytest.mark.pure


def nested(path: str, value: Any) -> dict[str, Any]:
    """``nested("a.b", 1) == {"a": {"b": 1}}``, with what the section needs beside it."""
    head, _, tail = path.partition(".")
    inner = nested(tail, value) if tail else value
    if head in ("optimizer", "scheduler") and isinstance(inner, dict) and "type" not in inner:
        inner = {"type": "AdamW" if head == "optimizer" else "WarmupLR", **inner}
    return {head: inner}


def refused(config: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as info:
        load_config(config, **options)
    return str(info.value)


# ------------------------------------------------------------------------------------------------- unknown keys


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("gradient_clipp1ng", "gradient_clipping"),
        ("zero_optimization.stge", "zero_optimization.stage"),
        ("zero_optimization.Stage", "zero_optimization.stage"),
        ("zero_optimization.offload_optimizer.devise", "zero_optimization.offload_optimizer.device"),
        ("fp16.loss_scale_windw", "fp16.loss_scale_window"),
        ("optimizer.params.weight_deccay", "optimizer.params.weight_decay"),
        ("optimizer.parms", "optimizer.params"),
        ("scheduler.params.warmup_num_step", "scheduler.params.warmup_num_steps"),
        ("train_micro_batch_size_per_gpus", "train_micro_batch_size_per_gpu"),
        ("zero_optimisation", "zero_optimization"),
    ],
)
def test_a_misspelt_key_is_named_with_the_nearest_legal_one(path: str, meant: str) -> None:
    assert f"{path} is not a key - did you mean {meant}?" in refused(nested(path, 1))


def test_a_key_of_another_section_is_sent_there() -> None:
    assert refused({"stage": 2}) == "stage is not a key; it belongs inside 'zero_optimization'"


def test_all_problems_are_reported_at_once() -> None:
    text = refused(
        {"zero_optimization": {"stge": 2, "stage": True}, "train_batch_sze": 3, "optimizer": {"type": "lion"}}
    )
    for part in ("zero_optimization.stge", "zero_optimization.stage is true", "train_batch_sze", "torch has no Lion"):
        assert part in text


def legal_keys(model: type[schema.Section] = schema.Config, path: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        yield path + name
        for option in getattr(info.annotation, "__args__", ()):
            if isinstance(option, type) and issubclass(option, schema.Section):
                yield from legal_keys(option, f"{path}{name}.")


KEYS = sorted(legal_keys())


@given(key=st.sampled_from(KEYS), position=st.integers(0, 40), letter=st.sampled_from("abz_1"))
def test_no_misspelling_of_any_key_passes(key: str, position: int, letter: str) -> None:
    head, _, name = key.rpartition(".")
    wrong = name[: position % len(name)] + letter + name[position % len(name) + 1 :]
    path = f"{head}.{wrong}" if head else wrong
    if wrong.startswith("_") or path in KEYS or wrong in schema.ALIASES.get(head, {}):
        return
    assert f"{path} is not a key" in refused(nested(path, False))


JUNK = [True, False, None, 0, -1, 1, 0.5, 1e400, -1e400, math.nan, "", "3", "cpu", "auto", [], [1, "a"], {}, {"a": 1}]


@given(key=st.sampled_from(KEYS), value=st.sampled_from(JUNK))
def test_any_value_of_any_key_gives_a_plan_or_a_config_error(key: str, value: Any) -> None:
    try:
        plan = load_config(nested(key, value), world_size=1)
    except ConfigError as error:
        assert str(error)
    else:
        assert isinstance(plan, Plan)


def test_keys_with_an_underscore_are_comments_everywhere() -> None:
    config = {
        "_why": "x",
        "zero_optimization": {"_stage": 3, "stage": 1},
        "optimizer": {"type": "Adam", "params": {"_lr": 1, "lr": 0.5}},
    }
    plan = load_config(config)
    assert plan.rules == stage(1).rules
    assert plan.optimizer == Recipe("Adam", {"lr": 0.5})


def test_a_key_under_two_names_is_refused_and_under_its_other_name_is_known() -> None:
    assert load_config({"zero_optimization": {"stage": 3, "prefetch_bucket_size": 0}}).units.prefetch == 0
    assert load_config({"bfloat16": {"enabled": True}}).precision.dtype == "bfloat16"
    both = {"zero_optimization": {"prefetch_bucket_size": 0, "stage3_prefetch_bucket_size": 1}}
    assert "given twice" in refused(both)


def test_flat_dotted_names_are_read_as_the_path_they_spell() -> None:
    flat = {"zero_optimization.stage": 3, "zero_optimization.reduce_bucket_size": 0.9 * 64 * 64}
    plan = load_config(flat | {"zero_optimization.offload_optimizer.device": "cpu"})
    assert plan.rules == load_config({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}).rules
    both = load_config({"zero_optimization": {"stage": 3, "prefetch_bucket_size": "auto"}, "zero_optimization.stage": 2})
    assert both.rules == stage(2).rules and "'zero_optimization.stage' takes the place of 3 in its section" in both.notes
    assert "did you mean zero_optimization.stage" in refused({"zero_optimization.stge": 3})
    assert "is no section" in refused({"zero_optimization": 1, "zero_optimization.stage": 3})


def test_sections_of_other_programs_are_named_in_one_line() -> None:
    plan = load_config({"msamp": {"enabled": True}, "comms_config": {}, "monitor_config": {"tensorboard": {}}})
    (note,) = plan.notes
    assert note.startswith("comms_config, monitor_config, msamp do nothing: the section of another program")


def test_keys_are_strings() -> None:
    assert "keys are strings" in refused({1: 2})


# --------------------------------------------------------------------------------------------------- reading files


def write(folder: Path, text: str) -> Path:
    path = folder / "ds.json"
    path.write_text(text)
    return path


def test_files_and_dicts_give_the_same_plan(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5}
    path = write(tmp_path, "\ufeff" + json.dumps(config))
    assert load_config(path) == load_config(str(path)) == load_config(config)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ('{\n  "fp16": {,}\n}', "ds.json:2:12: not JSON"),
        ("", "ds.json:1:1: not JSON"),
        ("[1]", "one JSON object"),
        ('{\n "seed": 1,\n "fp16": {"enabled": true, "enabled":\nfalse}\n}', "ds.json:3:28: 'enabled' is given twice"),
        ('{"seed": 1, "se\\u0065d": 2}', "ds.json:1:13: 'seed' is given twice in one object, first in line 1"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_line_and_column(tmp_path: Path, text: str, where: str) -> None:
    assert where in refused(write(tmp_path, text))


def test_braces_inside_strings_and_equal_keys_of_different_objects_are_fine(tmp_path: Path) -> None:
    load_config(write(tmp_path, '{"_c": "{\\"seed\\": 1", "_d": [{"a": 1}, {"a": 2}], "_e": "}", "seed": 1}'))


def test_missing_files_and_other_types_are_config_errors(tmp_path: Path) -> None:
    assert "cannot read configuration" in refused(tmp_path / "none.json")
    assert "cannot read configuration" in refused(tmp_path)
    assert "not int" in refused(3)


# ------------------------------------------------------------------------------------------------ the batch triangle

TRAIN, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def batch_config(train: Any = None, micro: Any = None, accumulation: Any = None) -> dict[str, Any]:
    values = {TRAIN: train, MICRO: micro, ACCUMULATION: accumulation}
    return {key: value for key, value in values.items() if value is not None}


@pytest.mark.parametrize(
    ("given", "world", "micro", "accumulation"),
    [
        ((16, 2, 4), 2, 2, 4),
        ((8, None, None), 4, 2, 1),
        ((16, 2, None), 2, 2, 4),
        ((16, None, 4), 2, 2, 4),
        ((None, 3, 4), 2, 3, 4),
        ((None, 3, None), 2, 3, 1),
        ((None, None, 5), 2, None, 5),
        ((None, None, None), 2, None, 1),
        (("auto", 3, 4), 2, 3, 4),
        (("auto", 3, None), 2, 3, 1),
        ((16, 2, "auto"), 2, 2, 4),
        ((16, "auto", 4), 2, 2, 4),
        ((16, "auto", None), 2, 8, 1),
    ],
)
def test_two_batch_numbers_give_the_third(given: Any, world: int, micro: Any, accumulation: int) -> None:
    batch = load_config(batch_config(*given), world_size=world).batch
    assert (batch.micro, batch.accumulation) == (micro, accumulation)


@pytest.mark.parametrize(
    ("given", "world", "parts"),
    [
        ((16, 2, 2), 2, ("16 != 2*2*2 = 8", f"{TRAIN} to 8", f"{ACCUMULATION} to 4", f"{MICRO} to 4")),
        ((10, None, None), 4, ("10 is not divisible by 4 ranks", "8 or 12")),
        ((10, 3, None), 2, ("10 is not divisible by 2 ranks", f"{MICRO} 3 = 6", "6 or 12")),
        ((2, None, 3), 4, ("2 is not divisible by 4 ranks", f"{ACCUMULATION} 3 = 12", "to 12")),
        (("auto", "auto", "auto"), 2, ("still 'auto'", TRAIN, MICRO, ACCUMULATION)),
        ((None, 2, "auto"), 2, ("still 'auto'", ACCUMULATION)),
        ((16, "auto", "auto"), 2, ("still 'auto'", MICRO, ACCUMULATION)),
    ],
)
def test_batch_numbers_that_conflict_print_them_all_and_a_fix(given: Any, world: int, parts: tuple[str, ...]) -> None:
    text = refused(batch_config(*given), world_size=world)
    for part in parts:
        assert part in text


def test_the_world_size_comes_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert load_config(batch_config(8)).batch.micro == 2
    assert load_config(batch_config(8), world_size=2).batch.micro == 4
    monkeypatch.setenv("WORLD_SIZE", "four")
    assert "WORLD_SIZE is 'four'" in refused(batch_config(8))
    monkeypatch.delenv("WORLD_SIZE")
    assert any("1 rank was assumed" in note for note in load_config(batch_config(8)).notes)
    assert "1 rank was assumed" in refused(batch_config(8, 2, 2))
    for bad in (0, True, 2.0, "2"):
        assert "world_size is" in refused({}, world_size=bad)


# ------------------------------------------------------------------------------------------------------ bad values


@pytest.mark.parametrize(
    ("path", "values", "legal"),
    [
        ("fp16.loss_scale", [math.inf, math.nan, -1, True, "0"], "a finite number from 0"),
        ("fp16.loss_scale_window", [0, True, 1.5, -3, None], "a whole number from 1"),
        ("fp16.min_loss_scale", [0, -1, math.nan], "a finite number above 0"),
        ("fp16.hysteresis", [0, True], "a whole number from 1"),
        ("fp16.initial_scale_power", [-1, 127, 2.5], "a whole number from 0 to 126"),
        ("fp16.enabled", [1, 0, "true", None], "true or false"),
        ("gradient_clipping", [-1.0, math.inf, math.nan, True, "1"], "a finite number from 0"),
        ("train_batch_size", [0, -8, True, 2.5, "8", math.inf], "a whole number from 1"),
        ("gradient_accumulation_steps", [0, True, 1.5], "a whole number from 1"),
        ("zero_optimization.stage", [4, -1, True, "2", None, 2.5], "a whole number from 0 to 3"),
        ("zero_optimization.reduce_bucket_size", [-1, math.inf, True, "5e8"], "a finite number from 0"),
        ("steps_per_print", [0, True, math.nan], "a finite number from 1, or inf"),
        ("optimizer.params.lr", [-1e-3, math.nan, math.inf, True, "1e-3", [1e-3]], "a finite number from 0"),
        ("optimizer.params.betas", [[0.9], [0.9, 1.0], 0.9, [True, 0.9], [0.9, math.nan]], "from 0 and below 1"),
        ("optimizer.params.eps", [-1e-8, True], "a finite number from 0"),
        ("optimizer.params.fused", [1, "yes"], "true, false or null"),
        ("scheduler.params.warmup_num_steps", [0, -1, True, 1.5, "10"], "a whole number from 1"),
        ("scheduler.params.warmup_min_lr", [-1, math.nan, True, []], "a finite number from 0"),
        ("scheduler.params.warmup_type", ["cosine", 3], "one of 'log', 'linear'"),
        ("communication_data_type", ["float8", 16], "one of 'fp32', 'fp16', 'bf16'"),
        ("zero_optimization", [True, 2, [], "x"], "a section"),
        ("optimizer", ["AdamW", True], "a section"),
    ],
)
def test_nonsense_is_refused_with_key_value_and_legal_range(path: str, values: list[Any], legal: str) -> None:
    for value in values:
        text = refused(nested(path, value))
        assert text.startswith(f"{path} is "), text
        assert legal in text


def test_whole_numbers_may_be_written_as_floats() -> None:
    assert load_config({TRAIN: 8e0}, world_size=4).batch.micro == 2
    load_config({"zero_optimization": {"stage": 2, "reduce_bucket_size": 2e8}, "steps_per_print": math.inf})


def test_autos_are_one_list_and_sizes_may_stay_auto() -> None:
    config = {
        "zero_optimization": {
            "stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
        },
        TRAIN: "auto", MICRO: 2,
    }  # fmt: skip
    assert load_config(config).batch.micro == 2
    config |= {"fp16": {"enabled": "auto"}, "optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-8}}}
    (line,) = [line for line in refused(config).splitlines() if "auto" in line]
    assert line.endswith("fp16.enabled, optimizer.params.lr")


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled and bf16.enabled are both true"),
        ({"fp16": {"enabled": True, "min_loss_scale": 4, "initial_scale_power": 1}}, "above the initial scale"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "bf16_master_weights_and_grads"),
        ({"zero_optimization": {"stage": 2, "mics_shard_size": 2}}, "set stage to 3"),
        ({"optimizer": {"params": {}}}, "optimizer.type is missing"),
        ({"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}}, "use type 'Adam'"),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, "gradient_clipping"),
        ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, "bias_correction"),
        ({"optimizer": {"type": "Adam", "params": {"fused": True, "foreach": True}}}, "set one of them"),
        ({"optimizer": {"type": "SGD", "params": {"nesterov": True}}}, "needs momentum above 0"),
        ({"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.9]}}}, "optimizer.params.betas is not a key"),
        ({"optimizer": {"type": "Lion"}}, "the nearest that works here is 'AdamW'"),
        ({"optimizer": {"type": "OneBitAdam"}}, "not supported in this version"),
        ({"optimizer": {"type": "Muon"}}, "whole matrices"),
        ({"optimizer": {"type": "LAMB"}}, "norm of whole layers"),
        ({"optimizer": {"type": "AdmW"}}, "did you mean 'AdamW'?"),
        ({"scheduler": {"type": "WarmupDecay", "params": {}}}, "did you mean 'WarmupDecayLR'?"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2}}}, "total_num_steps"),
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 5, "total_num_steps": 5}}},
            "the warm-up must be shorter than the whole",
        ),
        ({"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 10}}}, "1000 (its default)"),
        ({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1}}}, "OneCycle needs scheduler.params.cycle"),
        ({"scheduler": {"type": "StepLR", "params": {"gama": 0.1}}}, "did you mean scheduler.params.gamma?"),
        ({"scheduler": {"type": "StepLR", "params": {}}}, "StepLR needs scheduler.params.step_size"),
        ({"scheduler": {"type": "LambdaLR", "params": {}}}, "no schedule that a file can describe"),
    ],
)
def test_contradictions_are_refused(config: dict[str, Any], part: str) -> None:
    assert part in refused(config)


# ------------------------------------------------------------------------------------- features that do not exist


@pytest.mark.parametrize(
    ("path", "on", "off"),
    [
        ("zero_optimization.offload_optimizer.super_offload", True, False),
        ("zero_optimization.zero_quantized_weights", True, False),
        ("zero_optimization.zero_quantized_gradients", True, False),
        ("zero_optimization.zero_hpz_partition_size", 8, 1),
        ("zero_optimization.ignore_unused_parameters", False, True),
        ("compile.offload_opt_states", True, False),
        ("torch_autocast.enabled", True, False),
        ("tensor_parallel.autotp_size", 2, 1),
        ("gradient_allreduce_op", "sum", "mean"),
        ("sequence_parallel_size", 2, 1),
        ("model_parallel_size", 2, 1),
        ("data_types.param_dtype", "bf16", None),
        ("fp16.fp16_master_weights_and_grads", True, False),
    ],
)
def test_a_feature_that_does_not_exist_is_refused_unless_it_is_off(path: str, on: Any, off: Any) -> None:
    text = refused(nested(path, on))
    assert path.split(".")[0] in text and "not supported in this version" in text
    load_config(nested(path, off))


# ----------------------------------------------------------------------------------------------------- translation


@pytest.mark.parametrize("number", range(4))
def test_an_ordinary_config_is_the_preset_of_its_stage(number: int) -> None:
    plan = load_config({"zero_optimization": {"stage": number}, "gradient_clipping": 1.0, ACCUMULATION: 2})
    assert plan == stage(number, clip=1.0, accumulation=2)


def test_clipping_is_off_unless_asked_for_but_on_where_deepspeed_has_it_on() -> None:
    assert load_config({}).clip.max_norm is None
    assert load_config({}, defaults=DEEPSPEED).clip.max_norm == 1.0
    for off in (0, 0.0, None):
        assert load_config({"gradient_clipping": off}, defaults=DEEPSPEED).clip.max_norm is None
    assert load_config({"gradient_clipping": 0.3}, defaults=DEEPSPEED).clip.max_norm == 0.3


def test_precision() -> None:
    assert load_config({}).precision == Precision()
    bf16 = load_config({"bf16": {"enabled": True}}).precision
    assert (bf16.dtype, bf16.master, bf16.accumulate, bf16.loss_scale) == ("bfloat16", "float32", "float32", None)
    fp16 = load_config({"fp16": {"enabled": True}}).precision
    assert fp16.dtype == "float16" and fp16.loss_scale is not None
    scale = fp16.loss_scale
    assert (scale.initial, scale.dynamic, scale.window, scale.hysteresis, scale.minimum) == (
        65536.0,
        True,
        1000,
        2,
        1.0,
    )
    static = load_config({"fp16": {"enabled": True, "loss_scale": 128}}).precision.loss_scale
    assert static is not None and (static.initial, static.dynamic) == (128.0, False)
    pure = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    assert load_config({"bf16": pure}).precision == Precision("bfloat16", master=None, accumulate="bfloat16")


def test_inputs_are_cast_by_default_only_outside_the_deepspeed_namespace() -> None:
    for config in ({"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}):
        assert load_config(config).precision.cast_inputs
        assert not load_config(config, defaults=DEEPSPEED).precision.cast_inputs
    auto = {"fp16": {"enabled": True, "auto_cast": True}}
    assert load_config(auto, defaults=DEEPSPEED).precision.cast_inputs


def test_wire_and_groups() -> None:
    plan = load_config(
        {"zero_optimization": {"stage": 3, "mics_shard_size": 2}, "communication_data_type": "fp32"}, world_size=4
    )
    assert plan.row("x").wire.reduce == "float32" and plan.row("x").wire.gather is None
    assert plan.group == 2
