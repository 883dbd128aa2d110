"""The name ``deepspeed``: one set of modules under two names, found as programs look for it, never beside the real one."""

from __future__ import annotations

import base64
import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import onecopy.deepspeed as deepspeed
from onecopy.deepspeed import alias
from onecopy.deepspeed.launcher.runner import parse_args, parse_resource_filter
from onecopy.deepspeed.ops.adam import DeepSpeedCPUAdam
from onecopy.deepspeed.ops.lion import DeepSpeedCPULion
from onecopy.deepspeed.version import version
from onecopy.errors import ConfigError
from onecopy.plan.recipe import SCHEDULES

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[2]
SCRIPT = """
import importlib.metadata, importlib.util, json, subprocess, sys
assert importlib.util.find_spec("deepspeed") is not None
assert importlib.metadata.metadata("deepspeed")["Name"] == "deepspeed"
assert importlib.metadata.version("deepspeed") == "{version}"
import deepspeed, deepspeed.ops.adam, deepspeed.utils.logging
import deepspeed.runtime.zero.partition_parameters as parameters
from deepspeed.runtime.engine import DeepSpeedEngine
import onecopy.deepspeed as real
from onecopy.deepspeed.runtime.zero import partition_parameters
assert deepspeed is real and parameters is partition_parameters and parameters.__spec__.name.startswith("onecopy.")
assert deepspeed.DeepSpeedEngine is DeepSpeedEngine is real.engine.DeepSpeedEngine
assert importlib.util.find_spec("deepspeed.nothing_of_this_name") is None
if len(sys.argv) < 3:
    subprocess.run([sys.executable, *sys.argv[:1], "below", "twice"], check=True)
print(json.dumps(sys.argv[1:]))
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT / "src"), *filter(None, [environment.pop("PYTHONPATH", "")])]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run([sys.executable, *arguments], env=variables, capture_output=True, text=True, timeout=120)


def test_a_script_and_what_it_starts_find_onecopy_under_the_name(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("{version}", version))
    found = run("-m", "onecopy.deepspeed", str(script), "own")
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == ['["below", "twice"]', '["own"]']


def test_the_real_one_is_never_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "deepspeed-0.19.8.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.8\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for refuse in (alias.environment, lambda: alias.take_over("deepspeed")):
        with pytest.raises(ConfigError, match=r"DeepSpeed 0\.19\.8 is installed .*pip uninstall deepspeed"):
            refuse()
    (folder / "METADATA").unlink()
    folder.rmdir()
    (tmp_path / "deepspeed").mkdir()
    importlib.invalidate_caches()
    assert alias.environment()["PYTHONPATH"].startswith(alias.search_path()), "a folder of that name gives way"
    (tmp_path / "deepspeed" / "__init__.py").touch()
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match="a package named deepspeed is there already"):
        alias.environment()


def test_the_distribution_is_what_the_search_path_says() -> None:
    project = (ROOT / "deepspeed-shim" / "pyproject.toml").read_text()
    metadata = next(Path(alias.search_path()).glob("deepspeed-*.dist-info")) / "METADATA"
    assert f'version = "{version}"' in project and f"\nVersion: {version}\n" in metadata.read_text()
    assert metadata.parent.name == f"deepspeed-{version}.dist-info"
    for line in (line for line in project.splitlines() if ":main" in line):
        module = line.split('"')[1].removesuffix(":main")
        assert callable(importlib.import_module(module).main)
    package = project.split("force-include]\n")[1].split('"')[1]
    assert (ROOT / "deepspeed-shim" / package / "__init__.py").resolve() == Path(alias.search_path(), "deepspeed/__init__.py")


# ------------------------------------------------------------------------------------------------------- the surface

# What programs reach for: Accelerate 1.15, Transformers 5.24, PEFT 0.21, TRL 1.16, Lightning 2.6, ms-swift 4.6.
SURFACE = """
. DeepSpeedEngine DeepSpeedOptimizer initialize init_distributed add_config_arguments __version__ version log_dist logger
. zero comm utils ops runtime checkpointing checkpoint accelerator git_version_info get_accelerator
git_version_info version
comm is_initialized init_distributed get_rank get_world_size get_local_rank barrier all_reduce broadcast all_gather
comm all_gather_into_tensor reduce_scatter_tensor new_group ReduceOp destroy_process_group all_gather_object
zero Init GatheredParameters register_external_parameter unregister_external_parameter
utils logger log_dist logging groups safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state
utils safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state set_z3_leaf_modules is_initialized
utils unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module safe_get_local_fp32_param safe_get_local_grad
utils safe_get_local_optimizer_state safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state
utils safe_update_full_grad_vectorized RepeatingLoader log_dist_once set_log_level_from_string
utils set_z3_leaf_modules_by_name set_z3_leaf_modules_by_suffix
utils.tensor_fragment safe_get_full_fp32_param safe_set_local_grad fragment_address
utils.zero_to_fp32 get_fp32_state_dict_from_zero_checkpoint get_model_state_file get_optim_files
utils.logging logger log_dist
utils.groups _get_sequence_parallel_group _get_sequence_parallel_world_size _get_sequence_parallel_rank
utils.groups _get_data_parallel_group _get_data_parallel_world_size _get_data_parallel_rank
runtime.engine DeepSpeedEngine
runtime.base_optimizer DeepSpeedOptimizer
runtime.lr_schedules VALID_LR_SCHEDULES WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest WARMUP_LOG_RATE
runtime.zero.partition_parameters ZeroParamStatus zero_wrapper_for_fp_tensor_constructor _orig_torch_arange get_accelerator
runtime.zero.partition_parameters GatheredParameters Init
runtime.zero.config ZeroStageEnum
runtime.zero.offload_config OffloadDeviceEnum
runtime.fp16.loss_scaler LossScaler DynamicLossScaler
checkpoint.constants DS_VERSION OPTIMIZER_STATE_DICT PARAM_SHAPES FROZEN_PARAM_FRAGMENTS AUTOEP_LAYERS_KEY
checkpoint.utils clone_tensors_for_torch_save
checkpointing configure checkpoint is_configured reset
ops __compatible_ops__
ops.adam DeepSpeedCPUAdam FusedAdam
ops.adagrad DeepSpeedCPUAdagrad
ops.lion DeepSpeedCPULion FusedLion
ops.op_builder CPUAdamBuilder FusedAdamBuilder AsyncIOBuilder
runtime.dataloader RepeatingLoader
launcher.runner DEEPSPEED_ENVIRONMENT_NAME main
accelerator get_accelerator is_current_accelerator_supported
"""
SIGNATURES = {
    "initialize": "args model optimizer model_parameters training_data lr_scheduler distributed_port mpu dist_init_required "
    "collate_fn config mesh_param config_params",
    "init_distributed": "dist_backend auto_mpi_discovery distributed_port verbose timeout init_method dist_init_required "
    "config rank world_size",
    "zero.Init": "module data_parallel_group mem_efficient_linear remote_device pin_memory config_dict_or_path config "
    "enabled dtype mpu",
    "zero.GatheredParameters": "params modifier_rank fwd_module enabled",
    "DeepSpeedEngine.load_checkpoint": "self load_dir tag load_module_strict load_optimizer_states load_lr_scheduler_states "
    "load_module_only",
    "DeepSpeedEngine.save_checkpoint": "self save_dir tag client_state save_latest exclude_frozen_parameters",
    "DeepSpeedEngine.backward": "self loss retain_graph scale_wrt_gas",
    "DeepSpeedEngine.set_gradient_accumulation_boundary": "self is_boundary",
    "DeepSpeedEngine._zero3_consolidated_16bit_state_dict": "self exclude_frozen_parameters",
    "DeepSpeedEngine.compile": "self backend compile_kwargs",
    "ops.adam.DeepSpeedCPUAdam": "model_params lr bias_correction betas eps weight_decay amsgrad adamw_mode "
    "fp32_optimizer_states",
    "checkpointing.configure": "mpu_ deepspeed_config partition_activations contiguous_checkpointing num_checkpoints "
    "checkpoint_in_cpu synchronize profile",
    "utils.set_z3_leaf_modules": "model leaf_module_classes raise_if_not_found",
    "utils.set_z3_leaf_modules_by_name": "model module_names flag raise_if_not_found",
    "launcher.runner.parse_resource_filter": "host_info include_str exclude_str",
}
ENGINE = (
    "backward step train eval forward zero_grad no_sync set_gradient_accumulation_boundary get_global_grad_norm "
    "is_gradient_accumulation_boundary was_step_applied save_checkpoint load_checkpoint get_lr destroy compile config "
    "zero_optimization_stage zero_gather_16bit_weights_on_model_save _zero3_consolidated_16bit_state_dict "
    "_consolidated_16bit_state_dict train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps "
    "gradient_clipping fp16_enabled bfloat16_enabled local_rank global_rank world_size dp_world_size optimizer lr_scheduler "
    "zero_optimization_partition_weights device loss_scale zero_optimization get_mom get_batch_info empty_partition_cache"
).split()


@pytest.mark.parametrize("line", SURFACE.split("\n")[1:-1])
def test_every_symbol_is_there(line: str) -> None:
    path, *names = line.split()
    module = importlib.import_module("onecopy.deepspeed" + ("" if path == "." else f".{path}"))
    assert [name for name in names if not hasattr(module, name)] == []


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_begin_as_deepspeeds_do(name: str) -> None:
    thing: Any = deepspeed
    for part in name.split("."):
        thing = getattr(thing, part)
    expected = SIGNATURES[name].split()
    assert list(inspect.signature(thing).parameters)[: len(expected)] == expected


def test_the_engines_names() -> None:
    assert [name for name in ENGINE if not hasattr(deepspeed.DeepSpeedEngine, name)] == []
    assert issubclass(deepspeed.DeepSpeedEngine, torch.nn.Module)


def test_what_is_not_there_says_so() -> None:
    with pytest.raises(AttributeError, match="tensor parallelism"):
        deepspeed.tp_model_init  # noqa: B018
    assert not hasattr(deepspeed, "init_inference")


# ------------------------------------------------------------------------------------------------------- small parts


def test_devices_of_the_command_line() -> None:
    hosts = {"localhost": [0, 1, 2], "other": [0, 1]}
    assert parse_resource_filter(hosts, include_str="other@localhost:2,0") == {"localhost": [0, 2], "other": [0, 1]}
    assert list(parse_resource_filter(hosts, "other@localhost")) == ["localhost", "other"]
    assert parse_resource_filter(hosts, include_str="localhost:1,1@localhost:0") == {"localhost": [0, 1]}
    assert parse_resource_filter(hosts, exclude_str="other:0@other:1") == {"localhost": [0, 1, 2]}
    assert parse_resource_filter(hosts, exclude_str="other@localhost:1") == {"localhost": [0, 2]}
    for wrong, said in (("nobody", "not there"), ("other:5", "no device 5"), ("other:a", "whole numbers")):
        with pytest.raises(ConfigError, match=said):
            parse_resource_filter(hosts, include_str=wrong)
    with pytest.raises(ConfigError, match="one of them"):
        parse_resource_filter(hosts, include_str="other", exclude_str="other")
    asked = parse_args(["--num_gpus", "2", "--no_local_rank", "train.py", "--deepspeed_config", "x.json"])
    assert (asked.num_gpus, asked.user_script, asked.user_args) == (2, "train.py", ["--deepspeed_config", "x.json"])


def test_lion_is_what_the_paper_says() -> None:
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(7))
    weights, moment = param.detach().clone(), torch.zeros(7)
    optimizer = DeepSpeedCPULion([param], lr=0.1, betas=(0.9, 0.99), weight_decay=0.01)
    for _ in range(3):
        grad = torch.randn(7)
        param.grad = grad.clone()
        optimizer.step()
        weights -= 0.1 * ((0.9 * moment + 0.1 * grad).sign() + 0.01 * weights)
        moment = 0.99 * moment + 0.01 * grad
    assert torch.allclose(param, weights, atol=1e-6) and torch.allclose(optimizer.state[param]["exp_avg"], moment, atol=1e-6)
    with pytest.raises(ConfigError, match="betas"):
        DeepSpeedCPULion([param], betas=(1.0, 0.9))


def test_tensors_are_copied_out_of_their_storage() -> None:
    whole = torch.arange(10.0)
    made = deepspeed.checkpoint.utils.clone_tensors_for_torch_save({"a": [whole[2:4]], "n": (1, "x")})
    assert made["a"][0].untyped_storage().nbytes() == 8 and torch.equal(made["a"][0], whole[2:4]) and made["n"] == (1, "x")


def test_a_configuration_in_base64() -> None:
    text = base64.urlsafe_b64encode(json.dumps({"zero_optimization": {"stage": 1}}).encode()).decode()
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(2, 2), config=text)
    assert engine.zero_optimization_stage() == 1
    with pytest.raises(ConfigError, match=r"cannot read configuration 'no_such\.json'"):
        deepspeed.initialize(model=torch.nn.Linear(2, 2), config="no_such.json")


def test_the_accelerator_and_activation_checkpointing() -> None:
    accelerator = deepspeed.get_accelerator()
    assert accelerator is deepspeed.get_accelerator()
    assert accelerator.on_accelerator(torch.ones(1, device=accelerator.device_name()))
    assert accelerator.total_memory() > accelerator.available_memory() > 0
    deepspeed.checkpointing.configure(mpu_=None, partition_activations=False, profile=None)
    x = torch.ones(3, requires_grad=True)
    calls: list[int] = []
    loss = deepspeed.checkpointing.checkpoint(lambda t: (calls.append(1), (t * t).sum())[1], x)
    loss.backward()
    assert len(calls) == 2 and torch.equal(x.grad, 2 * torch.ones(3))


def test_leaf_modules() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    leaves = deepspeed.utils.set_z3_leaf_modules(model, [torch.nn.Linear])
    assert leaves == [model[0]] == deepspeed.utils.get_z3_leaf_modules(model) and model[0]._z3_leaf
    deepspeed.utils.unset_z3_leaf_modules(model, ["Linear"])
    assert deepspeed.utils.get_z3_leaf_modules(model) == []
    with pytest.raises(ValueError, match="no module"):
        deepspeed.utils.set_z3_leaf_modules(model, ["Nobody"])
    assert deepspeed.utils.set_z3_leaf_modules(model, ["Nobody"], raise_if_not_found=False) == []


def test_leaf_modules_by_their_names() -> None:
    model = torch.nn.ModuleDict({each: torch.nn.Sequential(torch.nn.Linear(2, 2)) for each in ("a", "b")})
    by_name, by_suffix = deepspeed.utils.set_z3_leaf_modules_by_name, deepspeed.utils.set_z3_leaf_modules_by_suffix
    with pytest.raises(ValueError, match=r"called 'c'"):
        by_name(model, ["a", "c"])
    assert deepspeed.utils.get_z3_leaf_modules(model) == []
    assert by_name(model, ["b", "c"], raise_if_not_found=False) == ([model["b"]], ["c"])
    assert by_suffix(model, [".0", "a.0", "b.1"], raise_if_not_found=False) == ([model["a"][0], model["b"][0]], ["b.1"])
    assert deepspeed.utils.get_z3_leaf_modules(model) == [model["a"][0], model["b"], model["b"][0]]
    assert by_suffix(model, ["0", "b"], flag=False)[1] == []
    assert deepspeed.utils.get_z3_leaf_modules(model) == []


def test_the_names_of_schedules_and_their_keys() -> None:
    """A section of the JSON that a program writes with these names is one that is known here."""
    constants = {name: value for name, value in vars(deepspeed.runtime.lr_schedules).items() if name.isupper()}
    kinds, rates = constants.pop("VALID_LR_SCHEDULES"), [constants.pop(f"WARMUP_{each}_RATE") for each in ("LOG", "LINEAR")]
    assert sorted(kinds) == sorted(SCHEDULES) == sorted(set(constants.values()) & set(SCHEDULES))
    keys = {value: name for name, value in constants.items() if value not in SCHEDULES}
    assert all(name == value.upper() for value, name in keys.items())
    known = {key for each in SCHEDULES.values() for key in each}
    assert known - set(keys) == {"last_batch_iteration", "cycle_momentum"} and set(keys) <= known
    assert rates == ["log", "linear"]


@pytest.mark.parametrize("decoupled", [True, False])
def test_moments_of_narrow_parameters_are_wide(decoupled: bool) -> None:
    """``DeepSpeedCPUAdam`` stepped by hand on bf16: what fp32 Adam does, rounded once a step, also after a reload."""
    torch.manual_seed(0)
    param, other = (torch.nn.Parameter(torch.randn(9).to(dtype)) for dtype in (torch.bfloat16, torch.float32))
    weights = torch.nn.Parameter(param.detach().float())
    options: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}
    optimizer = DeepSpeedCPUAdam([param, other], **options, adamw_mode=decoupled)
    reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)([weights], **options)
    before = other.detach().clone()
    for step in range(4):
        param.grad = torch.randn(9).bfloat16()
        other.grad = torch.ones(9)
        weights.grad = param.grad.float()
        if step == 2:
            kept = optimizer.state_dict()
            optimizer = DeepSpeedCPUAdam([param, other], **options, adamw_mode=decoupled)
            optimizer.load_state_dict(kept)
        assert optimizer.step(lambda: 7) == 7 and param.grad is not None
        reference.step()
        weights.data.copy_(weights.detach().bfloat16())
    assert torch.equal(param.float(), weights) and not torch.equal(other, before)
    for key, value in reference.state[weights].items():
        torch.testing.assert_close(optimizer.state[param][key], value, rtol=1e-6, atol=1e-7)
    plain = DeepSpeedCPUAdam([param], fp32_optimizer_states=False)
    plain.step()
    assert plain.state[param]["exp_avg"].dtype == torch.bfloat16


def test_an_engine_decides_the_dtype_of_moments_itself() -> None:
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    for section, dtype in (({"enabled": True}, torch.float32), (bf16, torch.bfloat16)):
        model = torch.nn.Linear(4, 4).bfloat16()
        optimizer = DeepSpeedCPUAdam(model.parameters())
        setup = {"train_batch_size": 1, "bf16": section, "zero_optimization": {"stage": 1}}
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=setup)
        engine.backward(engine(torch.ones(1, 4).bfloat16()).sum())
        engine.step()
        assert {value.dtype for state in optimizer.state.values() for key, value in state.items() if key != "step"} == {dtype}
        engine.destroy()
