"""Every key of a DeepSpeed JSON is translated, or noted, or a feature that is off; where offload keys put states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onecopy.plan import schema
from onecopy.plan.config import load_config
from onecopy.plan.plan import Scratch, StepPolicy
from onecopy.plan.presets import infinity, offload, stage
from tests.pure.test_config import ACCUMULATION, KEYS, MICRO, TRAIN, nested, refused

pytestmark = pytest.mark.pure

# ----------------------------------------------------------------------------------- nothing is ignored in silence


def zero(number: int, sections: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"zero_optimization": {"stage": number, **(sections or {})}}


TRANSLATED: dict[str, Any] = {
    "train_batch_size": {TRAIN: 8},
    "train_micro_batch_size_per_gpu": {MICRO: 3},
    "gradient_accumulation_steps": {ACCUMULATION: 2},
    "gradient_clipping": {"gradient_clipping": 0.5},
    "optimizer.type": {"optimizer": {"type": "SGD"}},
    "optimizer.params": {"optimizer": {"type": "SGD", "params": {"lr": 1.0}}},
    "scheduler.type": {"scheduler": {"type": "WarmupLR"}},
    "scheduler.params": {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}}},
    "fp16.enabled": {"fp16": {"enabled": True}},
    "fp16.auto_cast": {"fp16": {"enabled": True, "auto_cast": False}},
    "fp16.loss_scale": {"fp16": {"enabled": True, "loss_scale": 8}},
    "fp16.initial_scale_power": {"fp16": {"enabled": True, "initial_scale_power": 5}},
    "fp16.loss_scale_window": {"fp16": {"enabled": True, "loss_scale_window": 5}},
    "fp16.hysteresis": {"fp16": {"enabled": True, "hysteresis": 5}},
    "fp16.consecutive_hysteresis": {"fp16": {"enabled": True, "consecutive_hysteresis": True}},
    "fp16.min_loss_scale": {"fp16": {"enabled": True, "min_loss_scale": 4}},
    "bf16.enabled": {"bf16": {"enabled": True}},
    "bf16.bf16_master_weights_and_grads": {
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    },
    "bf16.bf16_optimizer_states": {
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    },
    "zero_optimization.stage": {"zero_optimization": {"stage": 2}},
    "zero_optimization.stage3_prefetch_bucket_size": {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0}},
    "zero_optimization.mics_shard_size": {"zero_optimization": {"stage": 3, "mics_shard_size": 2}},
    **{f"zero_optimization.{key}": zero(3, {key: True}) for key in ("cpu_offload", "cpu_offload_param")},
    "communication_data_type": {"communication_data_type": "fp32"},
    "data_types.grad_accum_dtype": {"data_types": {"grad_accum_dtype": "bf16"}},
}


# Keys of a section inside a section, or that count beside another: a configuration without one, and with it.
CPU, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/scratch"}
BESIDE: dict[str, tuple[Any, Any]] = {
    "zero_optimization.offload_optimizer.device": (zero(1), zero(1, {"offload_optimizer": CPU})),
    "zero_optimization.offload_optimizer.ratio": (
        zero(1, {"offload_optimizer": CPU}), zero(1, {"offload_optimizer": {**CPU, "ratio": 0.5}}),
    ),
    "zero_optimization.offload_optimizer.nvme_path": (
        zero(1, {"offload_optimizer": NVME}), zero(1, {"offload_optimizer": {**NVME, "nvme_path": "/other"}}),
    ),
    "zero_optimization.offload_param.device": (zero(3), zero(3, {"offload_param": CPU})),
    "zero_optimization.offload_param.nvme_path": (
        zero(3, {"offload_param": NVME}), zero(3, {"offload_param": {**NVME, "nvme_path": "/other"}}),
    ),
    **{
        f"aio.{key}": (zero(3, {"offload_param": NVME}), zero(3, {"offload_param": NVME}) | {"aio": {key: value}})
        for key, value in {"block_size": 8192, "thread_count": 1, "intra_op_parallelism": 4}.items()
    },
}  # fmt: skip


# Read by onecopy.deepspeed (tests/ranks/test_export.py, test_activation_checkpointing.py here); no plan depends on them.
OF_THE_ENGINE = (
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save",
    "activation_checkpointing.cpu_checkpointing",
)


def info_of(key: str) -> Any:
    model: Any = schema.Config
    for part in key.split("."):
        info = model.model_fields[part]
        model = next((o for o in getattr(info.annotation, "__args__", ()) if hasattr(o, "model_fields")), None)
    return info, model


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_translated_noted_or_a_feature_that_is_off(key: str) -> None:
    info, section = info_of(key)
    if section is not None:
        return
    if key in BESIDE:
        without, with_it = (load_config(config, world_size=1) for config in BESIDE[key])
        assert without.with_(notes=()) != with_it.with_(notes=())
        return
    if key in TRANSLATED:
        without = {k: v for k, v in TRANSLATED[key].items() if "." in key}
        for name, inner in without.items():
            without[name] = {k: v for k, v in inner.items() if f"{name}.{k}" != key or k == "type"}
        if key in ("fp16.enabled", "bf16.enabled", "optimizer.type", "scheduler.type") or "bf16_" in key:
            without = {}
        assert load_config(TRANSLATED[key], world_size=1) != load_config(without, world_size=1)
        return
    if key in OF_THE_ENGINE:
        assert load_config(nested(key, True)).with_(notes=()) == load_config(zero(0), world_size=1)
        return
    kinds = [mark.func.__self__ for mark in info.metadata if hasattr(mark, "func")]
    noted = any(isinstance(mark, schema.Note) for mark in info.metadata)
    assert noted or any(isinstance(kind, schema.Off | schema.OffSection) for kind in kinds), key
    if noted:
        head = key.split(".")[0]
        config, kind = nested(key, info.default), schema.section_of(schema.Config, head)
        if kind is not None and issubclass(kind, schema.Tool):
            assert load_config(config).notes == ()  # nothing is said of a tool that is not enabled
            config[head]["enabled"] = True
        plan = load_config(config)
        assert any(key in note for note in plan.notes), f"{key} is not among {plan.notes}"


def test_notes_name_the_key_the_stage_and_the_reason() -> None:
    config = {
        "zero_optimization": {
            "stage": 2, "reduce_bucket_size": 5e8, "allgather_bucket_size": 5e8, "stage3_prefetch_bucket_size": 1,
        },
        "fp16": {"enabled": False, "loss_scale_window": 1000},
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": 1, "decay_lr_rate": 0.1}},
    }  # fmt: skip
    notes = "\n".join(load_config(config).notes)
    assert "zero_optimization.allgather_bucket_size, zero_optimization.reduce_bucket_size do nothing: " in notes
    assert "stage3_prefetch_bucket_size does nothing: zero_optimization.stage is 2, and only stage 3 gathers" in notes
    assert "fp16.loss_scale_window does nothing: fp16 is not enabled" in notes
    assert "decay_lr_rate does nothing: scheduler.params.decay_step_size is 0" in notes


# -------------------------------------------------------------------------------------------------------------- offload


def disk(**options: Any) -> Scratch:
    return Scratch("/scratch", **options)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_optimizer_is_offloaded_as_the_preset_does_it(number: int) -> None:
    for section in ({"offload_optimizer": CPU}, {"cpu_offload": True}, {"cpu_offload": True, "offload_optimizer": CPU}):
        assert load_config(zero(number, section)) == offload(stage(number))
    assert load_config(zero(number, {"offload_optimizer": {**CPU, "ratio": 0.3}})) == offload(stage(number), ratio=0.3)
    assert load_config(zero(number, {"offload_optimizer": NVME})) == offload(stage(number), "disk", scratch=disk())


def test_parameters_are_offloaded_as_the_presets_do_it() -> None:
    base = stage(3)
    assert load_config(zero(3, {"offload_param": CPU})) == offload(base, "device", "host")
    for name in ("cpu_offload_param", "cpu_offload_params"):
        assert load_config(zero(3, {name: True, "cpu_offload": True})) == offload(base, "host", "host")
    both = {"offload_param": NVME, "offload_optimizer": NVME}
    assert load_config(zero(3, both)) == infinity(disk())
    mixed = {"offload_param": CPU, "offload_optimizer": NVME}
    assert load_config(zero(3, mixed)) == offload(base, "disk", "host", scratch=disk())
    aio = {"block_size": 262144, "thread_count": 4, "intra_op_parallelism": 4}
    assert load_config(zero(3, both) | {"aio": aio}) == infinity(disk(block=262144, threads=4))


@pytest.mark.parametrize("off", [{}, {"device": "none"}, {"device": None}])
def test_sections_that_are_off_change_nothing(off: dict[str, Any]) -> None:
    for number in range(4):
        sections = {"offload_optimizer": off, "offload_param": off, "cpu_offload": False, "cpu_offload_params": False}
        plan = load_config(zero(number, sections))
        assert plan == stage(number) and plan.step == StepPolicy()


def test_offload_goes_with_the_other_keys_of_a_stage() -> None:
    config = zero(3, {"mics_shard_size": 2, "offload_optimizer": CPU}) | {"communication_data_type": "fp32"}
    plan = load_config(config, world_size=4)
    row = plan.row("x")
    assert plan.group == 2 and row.wire.reduce == "float32"
    assert row.optimizer.tier == row.gradient.rest.tier == "host" and row.parameter.rest.tier == "device"


SECTION = "zero_optimization.offload_"


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        (zero(0, {"offload_optimizer": CPU}), (f"{SECTION}optimizer.device is 'cpu'", "stage is 0", "set stage to 1")),
        (zero(0, {"cpu_offload": True}), ("zero_optimization.cpu_offload is true", "stage is 0", "set stage to 1")),
        (
            zero(2, {"offload_optimizer": {"device": "nvme"}}),
            (f"{SECTION}optimizer.device is 'nvme'", f"{SECTION}optimizer.nvme_path is not given", "device to 'cpu'"),
        ),
        (
            zero(3, {"offload_optimizer": NVME, "offload_param": {"device": "nvme"}}),
            (f"{SECTION}param.nvme_path is not given; set it to '/scratch'",),
        ),
        (
            zero(3, {"offload_optimizer": NVME, "offload_param": {**NVME, "nvme_path": "/b"}}),
            (f"{SECTION}optimizer.nvme_path is '/scratch'", f"{SECTION}param.nvme_path is '/b'", "set both to '/scratch'"),
        ),
        (
            zero(3, {"offload_optimizer": NVME, "cpu_offload": True}),
            ("cpu_offload is true, which means device 'cpu'", f"{SECTION}optimizer.device is 'nvme'", "remove it"),
        ),
        (zero(3, {"offload_optimizer": NVME, "cpu_offload": False}), ("cpu_offload is false", "'nvme'", "remove it")),
        (zero(3, {"offload_param": CPU, "cpu_offload_param": False}), ("cpu_offload_param is false", "remove it")),
        (zero(3, {"cpu_offload_param": True, "cpu_offload_params": True}), ("given twice",)),
        (
            zero(2, {"offload_optimizer": NVME}) | {"aio": {"thread_count": 1, "intra_op_parallelism": 2}},
            ("aio.thread_count is 1", "aio.intra_op_parallelism is 2", "keep one"),
        ),
        (
            zero(2, {"offload_optimizer": NVME}) | {"aio": {"block_size": 1000}},
            ("aio.block_size is 1000", "a multiple of 4096 bytes, such as 4096"),
        ),
        (zero(2, {"offload_optimizer": {"device": "gpu"}}), ("must be one of 'none', 'cpu', 'nvme'",)),
        (zero(2, {"offload_optimizer": {**CPU, "ratio": 1.5}}), ("from 0 to 1",)),
        (zero(2, {"offload_optimizer": {**CPU, "buffer_size": 1}}), ("buffer_size is not a key",)),
    ],
)  # fmt: skip
def test_offload_keys_that_contradict_are_refused(config: dict[str, Any], parts: tuple[str, ...]) -> None:
    said = refused(config)
    for part in parts:
        assert part in said


def test_all_that_is_wrong_with_offload_is_said_at_once() -> None:
    said = refused(zero(0, {"offload_optimizer": {"device": "nvme"}, "offload_param": CPU}) | {"aio": {"block_size": 1}})
    assert len(said.splitlines()) == 3


@pytest.mark.parametrize("number", [0, 1, 2])
def test_parameters_that_a_stage_keeps_whole_are_not_offloaded_and_it_is_said(number: int) -> None:
    why = f"zero_optimization.stage is {number}, where the parameters are whole on every rank and in use all the time"
    nvme = {"device": "nvme", "nvme_path": "/another"}  # neither a folder nor a second one is needed for nothing
    for section, key in (
        ({"offload_param": CPU}, f"{SECTION}param.device does"),
        ({"offload_param": {"device": "nvme"}}, f"{SECTION}param.device does"),
        ({"offload_param": nvme}, f"{SECTION}param.device, {SECTION}param.nvme_path do"),
        ({"cpu_offload_params": True}, "zero_optimization.cpu_offload_param does"),
    ):
        plan = load_config(zero(number, section))
        assert plan.with_(notes=()) == stage(number)
        assert plan.notes == (f"{key} nothing: {why}; only stage 3 honours it",)
    if number:
        assert load_config(zero(number, {"offload_param": nvme, "offload_optimizer": NVME})).scratch == disk()


def test_a_folder_that_is_not_there_is_no_error_of_the_configuration(tmp_path: Path) -> None:
    path = str(tmp_path / "later")
    plan = load_config(zero(3, {"offload_param": {"device": "nvme", "nvme_path": path}}))
    assert plan.scratch == Scratch(path)


def test_offload_keys_that_do_not_apply_are_noted_and_only_those() -> None:
    path = {"nvme_path": "/scratch"}
    config = zero(3, {"offload_optimizer": {**CPU, **path, "ratio": 0.5}, "offload_param": path})
    notes = load_config(config | {"aio": {"block_size": 1, "queue_depth": 8}}).notes
    assert f"{SECTION}optimizer.nvme_path does nothing: device is 'cpu'" in notes
    assert f"{SECTION}param.nvme_path does nothing: device is 'none'" in notes
    assert "aio.block_size does nothing: nothing is offloaded to disk" in notes
    assert not [note for note in notes if "ratio" in note]
    used = zero(3, {"offload_param": NVME}) | {"aio": {"block_size": 4096, "thread_count": 1}}
    assert load_config(used).notes == ()
    off = load_config(zero(3, {"offload_optimizer": {"ratio": 0.5}})).notes
    assert off == (f"{SECTION}optimizer.ratio does nothing: device is 'none'",)
