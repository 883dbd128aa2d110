"""Every key a DeepSpeed JSON may hold here, with what is legal for it and what it does.

A key is one of three: translated into the plan (see :mod:`onecopy.plan.config`); without effect, marked with a
:class:`Note` that says why and is reported when the key is used; or for a feature that does not exist here, whose kind
is :class:`Off` and admits only the values that leave the feature off. Anything else is not a key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, PlainValidator

from onecopy.plan.values import Choice, Flag, Kind, Number, Text, shown

__all__ = [
    "ALIASES", "AUTO_ALLOWED", "Aio", "Config", "Fp16", "Note", "OffloadOptimizer", "OffloadParam", "OptimizerSection",
    "Section", "ZeroOptimization",
]  # fmt: skip


@dataclass(frozen=True)
class Note:
    """Mark of a key without effect: why that is so."""

    why: str


@dataclass(frozen=True)
class Off:
    """A feature that does not exist here: only the values that leave it off are legal."""

    values: tuple[Any, ...]
    feature: str

    @property
    def legal(self) -> str:
        return " or ".join(shown(value) for value in self.values)

    def check(self, value: Any) -> Any:
        if any(type(value) is type(off) and value == off for off in self.values):
            return value
        raise ValueError(f"is not supported in this version: {self.feature}; legal: {self.legal}, or no such key")


@dataclass(frozen=True)
class OffSection:
    """A whole section for a feature that does not exist here; legal while its ``switch`` is off."""

    feature: str
    switch: str = "enabled"
    off: tuple[Any, ...] = (False,)

    @property
    def legal(self) -> str:
        return f"null or a section with {self.switch} {shown(self.off[0])}"

    def check(self, value: Any) -> Any:
        if value is None or value == {}:
            return value
        said = value.get(self.switch) if isinstance(value, dict) else None
        if any(type(said) is type(off) and said == off for off in self.off):
            return value
        raise ValueError(f"is not supported in this version: {self.feature}; legal: {self.legal}, or no such key")


def checked(kind: Kind) -> PlainValidator:
    """The mark that makes pydantic check a field with ``kind``."""
    return PlainValidator(kind.check)


Switch = Annotated[bool, checked(Flag())]
MaybeSwitch = Annotated[bool | None, checked(Flag(optional=True))]
Count = Annotated[int | None, checked(Number(low=1, whole=True, optional=True))]
Size = Annotated[float | None, checked(Number(low=0, optional=True))]
Word = Annotated[str | None, checked(Text(optional=True))]
Dtype = Annotated[str | None, checked(Choice(("fp32", "fp16", "bf16"), optional=True))]
Device = Annotated[str | None, checked(Choice(("none", "cpu", "nvme"), optional=True))]
AlwaysOn = Annotated[bool, checked(Off((True,), "switching this off"))]

_UNITS = "parameters are gathered and gradients reduced a unit at a time, so there are no buckets to size"
_FLAT = "gradients are always reduced from one contiguous buffer per unit"
_HELD = "only the units in the prefetch window are held gathered"
_SAME = "the arithmetic of the mean is fixed, so the factor would cancel out"
_SPEED = "it would change speed only, and there is nothing here that it applies to"


class Section(BaseModel):
    """A JSON object with known keys only."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Fp16(Section):
    """Half precision with loss scaling."""

    enabled: Switch = False
    auto_cast: Switch = False
    loss_scale: Annotated[float, checked(Number(low=0))] = 0
    initial_scale_power: Annotated[int, checked(Number(low=0, high=126, whole=True))] = 16
    loss_scale_window: Annotated[int, checked(Number(low=1, whole=True))] = 1000
    hysteresis: Annotated[int, checked(Number(low=1, whole=True))] = 2
    consecutive_hysteresis: Switch = False
    min_loss_scale: Annotated[float, checked(Number(low=0, above=True))] = 1
    fp16_master_weights_and_grads: Annotated[bool, checked(Off((False,), "master weights in float16"))] = False


class Bf16(Section):
    """bfloat16 compute."""

    enabled: Switch = False
    immediate_grad_update: Annotated[Switch, Note("gradients go where they accumulate during backward anyway")] = False
    check_grad_overflow: Annotated[Switch, Note("a step with a non-finite gradient is always skipped")] = True
    bf16_master_weights_and_grads: Switch = False
    bf16_optimizer_states: Switch = False


_PINNED = "host memory is always pinned where there is an accelerator to copy to"
_AHEAD = "while a tile is stepped the next is always read and the one before is written"
_STAGING = "reads and writes of a disk pass through at most onecopy.Scratch(staging=...) bytes, whatever a buffer's size"
_THREADS = "threads read and write with one request each, past the page cache and without libaio"


class OffloadOptimizer(Section):
    """Optimizer states off the device; see :mod:`onecopy.plan.offload_keys`."""

    device: Device = "none"
    nvme_path: Word = None
    ratio: Annotated[float, checked(Number(0, 1))] = 1.0
    pin_memory: Annotated[Switch, Note(_PINNED)] = False
    buffer_count: Annotated[Count, Note(_STAGING)] = None
    pipeline: Annotated[Switch, Note(_AHEAD)] = False
    pipeline_read: Annotated[Switch, Note(_AHEAD)] = False
    pipeline_write: Annotated[Switch, Note(_AHEAD)] = False
    fast_init: Annotated[Switch, Note("moments are made in the first step, so there is no start to make faster")] = False
    cpuadam_cores_perc: Annotated[float, checked(Number(0, 1)), Note("the step has OMP_NUM_THREADS threads")] = 0.8
    super_offload: Annotated[bool, checked(Off((False,), "SuperOffload"))] = False


class OffloadParam(Section):
    """Parameters off the device; see :mod:`onecopy.plan.offload_keys`."""

    device: Device = "none"
    nvme_path: Word = None
    pin_memory: Annotated[Switch, Note(_PINNED)] = False
    buffer_count: Annotated[Count, Note(_STAGING)] = None
    buffer_size: Annotated[Size, Note(_STAGING)] = None
    max_in_cpu: Annotated[Size, Note("parameters on disk are all there, and in memory while they are in use")] = None


class _ZeroUsed(Section):
    """Keys that say where states are kept."""

    stage: Annotated[int, checked(Number(0, 3, whole=True))] = 0
    stage3_prefetch_bucket_size: Size = None
    mics_shard_size: Annotated[int, checked(Number(low=-1, whole=True))] = -1
    offload_optimizer: OffloadOptimizer | None = None
    offload_param: OffloadParam | None = None


class _ZeroBuckets(Section):
    """Keys about buckets, of which there are none."""

    overlap_comm: Annotated[MaybeSwitch, Note("reductions always run while backward goes on")] = None
    contiguous_gradients: Annotated[Switch, Note(_FLAT)] = True
    reduce_scatter: Annotated[Switch, Note("what the stage shards is always reduce-scattered")] = True
    allgather_partitions: Annotated[Switch, Note("updated shards are always gathered a unit at a time")] = True
    reduce_bucket_size: Annotated[Size, Note(_UNITS)] = None
    allgather_bucket_size: Annotated[Size, Note(_UNITS)] = None
    sub_group_size: Annotated[Size, Note("the optimizer steps one shard of a unit at a time, off the device in tiles")] = None
    round_robin_gradients: Annotated[Switch, Note("every unit is cut evenly over the ranks")] = False
    use_multi_rank_bucket_allreduce: Annotated[Switch, Note(_UNITS)] = True
    parameter_alignment: Annotated[Switch, Note("parameters of 16-byte sizes are always laid on 16-byte bounds")] = False


class _ZeroStage3(Section):
    """Keys about how stage 3 gathers parameters, without effect on the plan."""

    stage3_param_persistence_threshold: Annotated[
        Size, Note("small parameters travel with their unit and cost no collective of their own")
    ] = None
    stage3_model_persistence_threshold: Annotated[Size, Note("no parameter is kept gathered between steps")] = None
    stage3_max_live_parameters: Annotated[Size, Note(_HELD)] = None
    stage3_max_reuse_distance: Annotated[Size, Note(_HELD)] = None
    # Of these two, onecopy.deepspeed's save_16bit_model takes notice; no plan depends on them.
    stage3_gather_16bit_weights_on_model_save: Switch = False
    stage3_gather_fp16_weights_on_model_save: Switch = False
    stage3_module_granularity_threshold: Annotated[Size, Note(_UNITS)] = None
    stage3_use_all_reduce_for_fetch_params: Annotated[Switch, Note(_SPEED)] = False
    stage3_allgather_sequential: Annotated[Switch, Note(_SPEED)] = False


class _ZeroAbsent(Section):
    """Features of sharding and communication that do not exist here."""

    elastic_checkpoint: Annotated[bool, checked(Off((False,), "elastic checkpoints"))] = False
    legacy_stage1: Annotated[bool, checked(Off((False,), "the legacy form of stage 1"))] = False
    save_muon_momentum_buffer_in_memory: Annotated[bool, checked(Off((False,), "Muon"))] = False
    mics_hierarchical_params_gather: Annotated[bool, checked(Off((False,), "hierarchical gathers"))] = False
    zero_hpz_partition_size: Annotated[int, checked(Off((0, 1), "a secondary shard of the parameters (hpZ)"))] = 1
    zero_quantized_weights: Annotated[bool, checked(Off((False,), "quantised gathers"))] = False
    zero_quantized_nontrainable_weights: Annotated[bool, checked(Off((False,), "quantised gathers"))] = False
    zero_quantized_gradients: Annotated[bool, checked(Off((False,), "quantised reductions"))] = False
    zeropp_loco_param: Annotated[Any, checked(Off((None,), "quantised reductions with error feedback"))] = None
    zenflow: Annotated[Any, checked(Off((None,), "delayed optimizer steps (ZenFlow)"))] = None


class _ZeroOld(Section):
    """Former names of the offload sections."""

    cpu_offload: MaybeSwitch = None
    cpu_offload_param: MaybeSwitch = None
    cpu_offload_use_pin_memory: Annotated[MaybeSwitch, Note(_PINNED)] = None


class ZeroOptimization(_ZeroUsed, _ZeroBuckets, _ZeroStage3, _ZeroAbsent, _ZeroOld):
    """The section ``zero_optimization``; its own fields are the remaining keys without effect."""

    ignore_unused_parameters: AlwaysOn = True
    compute_grad_norm: Annotated[Switch, Note("the norm costs one number per rank and is always measured")] = True
    load_from_fp32_weights: Annotated[Switch, Note("a load restores the fp32 master weights themselves")] = True
    memory_efficient_linear: Annotated[Switch, Note("torch's own linear keeps no gathered copy")] = True
    pipeline_loading_checkpoint: Annotated[Switch, Note(_SPEED)] = False
    override_module_apply: Annotated[Switch, Note("a sharded parameter accepts initialisers as it is")] = True
    log_trace_cache_warnings: Annotated[Switch, Note("a changed order costs overlap only and is no warning")] = False
    enable_sanity_checks: Annotated[Switch, Note("checks are always on")] = False
    leaf_module: Annotated[Any, Note("a block's parameters are gathered together whichever of them run")] = None


class OptimizerSection(Section):
    """``params`` are checked against the chosen class by :mod:`onecopy.plan.recipe`."""

    type: Annotated[str, checked(Text())]
    params: dict[str, Any] | None = None
    legacy_fusion: Annotated[Switch, Note(_SPEED)] = False


class SchedulerSection(Section):
    """``params`` are checked like the optimizer's."""

    type: Annotated[str, checked(Text())]
    params: dict[str, Any] | None = None


class ActivationCheckpointing(Section):
    """DeepSpeed's own activation checkpointing; legal while everything is off."""

    partition_activations: Annotated[bool, checked(Off((False,), "partitioned activations"))] = False
    cpu_checkpointing: Annotated[bool, checked(Off((False,), "offload of activations"))] = False
    contiguous_memory_optimization: Annotated[bool, checked(Off((False,), "contiguous activations"))] = False
    number_checkpoints: Annotated[Count, checked(Off((None,), "DeepSpeed's own checkpointing"))] = None
    synchronize_checkpoint_boundary: Annotated[bool, checked(Off((False,), "DeepSpeed's own checkpointing"))] = False
    profile: Annotated[bool, checked(Off((False,), "DeepSpeed's own checkpointing"))] = False


class Aio(Section):
    """How disks are read and written; see :mod:`onecopy.plan.offload_keys`."""

    block_size: Count = None
    intra_op_parallelism: Count = None
    thread_count: Count = None
    queue_depth: Annotated[Count, Note(_THREADS)] = None
    single_submit: Annotated[Switch, Note(_THREADS)] = False
    overlap_events: Annotated[Switch, Note(_THREADS)] = True
    use_gds: Annotated[Switch, Note("what is on disk passes through host memory")] = False


class DataTypes(Section):
    """Dtypes beside fp16 and bf16."""

    grad_accum_dtype: Dtype = None
    param_dtype: Annotated[Any, checked(Off((None,), "a parameter dtype beside fp16 and bf16"))] = None
    buffer_dtype: Annotated[Any, checked(Off((None,), "a buffer dtype of its own"))] = None
    keep_in_fp32_modules: Annotated[Any, checked(Off((None,), "modules left in float32"))] = None


class CheckpointSection(Section):
    """How checkpoints are written."""

    tag_validation: Annotated[
        str,
        checked(Choice(("Ignore", "Warn", "Fail"))),
        Note("ranks that save under different tags are always an error"),
    ] = "Warn"
    load_universal: Annotated[bool, checked(Off((False,), "universal checkpoints"))] = False
    use_node_local_storage: Annotated[bool, checked(Off((False,), "storage local to a node"))] = False
    parallel_write: Annotated[Any, Note("every rank writes its own shard")] = None
    checkpoint_serialization: Annotated[Switch, Note("a checkpoint is plain tensors and JSON")] = True
    writer: Annotated[Any, checked(Off((None,), "a writer of its own"))] = None


class _Used(Section):
    """Keys that are translated into the plan."""

    train_batch_size: Count = None
    train_micro_batch_size_per_gpu: Count = None
    gradient_accumulation_steps: Count = None
    gradient_clipping: Annotated[float | None, checked(Number(low=0, optional=True))] = None
    optimizer: OptimizerSection | None = None
    scheduler: SchedulerSection | None = None
    fp16: Fp16 | None = None
    bf16: Bf16 | None = None
    zero_optimization: ZeroOptimization | None = None
    communication_data_type: Dtype = None
    data_types: DataTypes | None = None


class _Absent(Section):
    """Features that do not exist here, one key each."""

    gradient_allreduce_op: Annotated[str, checked(Off(("mean",), "gradients that are not the mean"))] = "mean"
    managed_gradient_accumulation: AlwaysOn = True
    sparse_gradients: Annotated[bool, checked(Off((False,), "sparse gradients"))] = False
    disable_allgather: Annotated[bool, checked(Off((False,), "a step without gathers"))] = False
    model_parallel_size: Annotated[int, checked(Off((1,), "model parallelism"))] = 1
    sequence_parallel_size: Annotated[int, checked(Off((1,), "sequence parallelism"))] = 1
    data_parallel_size: Annotated[Any, checked(Off((None,), "a data-parallel size beside the world size"))] = None
    use_data_before_expert_parallelism: Annotated[bool, checked(Off((False,), "expert parallelism"))] = False
    sparse_attention: Annotated[Any, checked(Off((None,), "sparse attention"))] = None


class _AbsentTools(Section):
    """Sections of monitors, profilers and services that do not exist here."""

    comms_logger: Annotated[Any, checked(OffSection("logs of collectives; engine.measured() counts them"))] = None
    flops_profiler: Annotated[Any, checked(OffSection("the flops profiler"))] = None
    tensorboard: Annotated[Any, checked(OffSection("TensorBoard logs"))] = None
    wandb: Annotated[Any, checked(OffSection("wandb logs"))] = None
    comet: Annotated[Any, checked(OffSection("comet logs"))] = None
    csv_monitor: Annotated[Any, checked(OffSection("CSV logs"))] = None
    elasticity: Annotated[Any, checked(OffSection("elastic training"))] = None
    autotuning: Annotated[Any, checked(OffSection("autotuning"))] = None
    nebula: Annotated[Any, checked(OffSection("Nebula checkpoints"))] = None


class _AbsentTraining(Section):
    """Sections of ways to train that do not exist here."""

    quantize_training: Annotated[Any, checked(OffSection("quantised training"))] = None
    compression_training: Annotated[Any, checked(OffSection("compression"))] = None
    tensor_parallel: Annotated[Any, checked(OffSection("tensor parallelism", "autotp_size", (0, 1)))] = None
    expert_parallel: Annotated[Any, checked(OffSection("expert parallelism"))] = None
    pipeline: Annotated[Any, checked(OffSection("pipeline parallelism"))] = None
    compile: Annotated[Any, checked(OffSection("DeepCompile; torch.compile works", "deepcompile"))] = None
    torch_autocast: Annotated[Any, checked(OffSection("autocast; set fp16 or bf16"))] = None
    amp: Annotated[Any, checked(OffSection("apex amp; set fp16 or bf16"))] = None
    hybrid_engine: Annotated[Any, checked(OffSection("the hybrid engine"))] = None
    data_efficiency: Annotated[Any, checked(OffSection("data efficiency"))] = None
    curriculum_learning: Annotated[Any, checked(OffSection("curriculum learning"))] = None
    progressive_layer_drop: Annotated[Any, checked(OffSection("progressive layer drop"))] = None
    eigenvalue: Annotated[Any, checked(OffSection("eigenvalues"))] = None
    weight_quantization: Annotated[Any, checked(OffSection("weight quantisation"))] = None


class _Idle(Section):
    """Keys about printing, seeds and speed, without effect."""

    steps_per_print: Annotated[
        float | None,
        checked(Number(low=1, optional=True, endless=True)),
        Note("nothing is printed during training; read engine.lr(), engine.grad_norm and engine.measured()"),
    ] = None
    wall_clock_breakdown: Annotated[Switch, Note("engine.measured() is always kept")] = False
    memory_breakdown: Annotated[Switch, Note("engine.measured() is always kept")] = False
    dump_state: Annotated[Switch, Note("print engine.plan instead")] = False
    seed: Annotated[
        int | None,
        checked(Number(low=0, whole=True, optional=True)),
        Note("call torch.manual_seed in the script; initialize makes rank 0's weights everybody's"),
    ] = None
    log_level: Annotated[Word, Note("use the logging module's levels on the logger 'onecopy'")] = None
    disable_python_gc: Annotated[Switch, Note(_SPEED)] = False
    vocabulary_size: Annotated[Count, Note(_SPEED)] = None
    seq_parallel_communication_data_type: Annotated[Dtype, Note("sequences are not split")] = None
    timers: Annotated[Any, Note("engine.measured() is always kept")] = None


class Config(_Used, _Idle, _Absent, _AbsentTools, _AbsentTraining):
    """The whole file; its own fields are the remaining keys without effect."""

    prescale_gradients: Annotated[Switch, Note(_SAME)] = False
    gradient_predivide_factor: Annotated[float, checked(Number(low=0, above=True)), Note(_SAME)] = 1.0
    zero_allow_untested_optimizer: Annotated[Switch, Note("every optimizer that works element by element is fine")] = False
    zero_force_ds_cpu_optimizer: Annotated[Switch, Note("no optimizer is replaced behind the caller's back")] = True
    dataloader_drop_last: Annotated[Switch, Note("only the dataloader of onecopy.deepspeed.initialize obeys it")] = False
    activation_checkpointing: Annotated[
        ActivationCheckpointing | None, Note("use torch.utils.checkpoint in the model; it works at every stage")
    ] = None
    aio: Aio | None = None
    checkpoint: CheckpointSection | None = None


# Other names of a key, by section ("" is the top level). Stage-3 keys are also known without their prefix.
ALIASES: dict[str, dict[str, str]] = {
    "": {"bfloat16": "bf16"},
    "zero_optimization": {
        "cpu_offload_params": "cpu_offload_param",
        **{name.removeprefix("stage3_"): name for name in ZeroOptimization.model_fields if name.startswith("stage3_")},
    },
}
# Keys that may stay "auto": sizes nothing depends on, and batch numbers that follow from the others.
AUTO_ALLOWED = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.allgather_bucket_size",
        "zero_optimization.sub_group_size",
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
        "zero_optimization.stage3_model_persistence_threshold",
        "zero_optimization.stage3_max_live_parameters",
        "zero_optimization.stage3_max_reuse_distance",
    }
)
