"""Every key a DeepSpeed JSON may hold here, with what is legal for it and what it does.

A key is one of three: translated into the plan (see :mod:`onecopy.plan.config`), marked with :class:`Means`; without effect,
marked with a :class:`Note` that says why and is reported when the key is used; or for a feature that does not exist here,
whose kind is :class:`Off` and admits only the values that leave the feature off. Anything else is not a key.
"""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic.fields import FieldInfo

from onecopy.plan.keys import (
    AlwaysOn,
    Count,
    Device,
    Dtype,
    MaybeSwitch,
    Means,
    Note,
    Off,
    OffSection,
    Section,
    Size,
    Switch,
    Word,
    checked,
)  # fmt: skip
from onecopy.plan.tool_keys import Comet, CommsLogger, Compile, FlopsProfiler, Monitor, Timers, Tool, Wandb
from onecopy.plan.values import Choice, Number, Text

__all__ = [
    "ALIASES", "Aio", "Config", "Fp16", "Means", "Note", "Off", "OffSection", "OffloadOptimizer", "OffloadParam",
    "OptimizerSection", "Section", "Tool", "ZeroOptimization", "fields_of", "mark_of", "section_of",
]  # fmt: skip

_UNITS = "parameters are gathered and gradients reduced a unit at a time, so there are no buckets to size"
_FLAT = "gradients are always reduced from one contiguous buffer per unit"
_HELD = "only the units in the prefetch window are held gathered"
_SAME = "the arithmetic of the mean is fixed, so the factor would cancel out"
_SPEED = "it would change speed only, and there is nothing here that it applies to"


class Fp16(Section):
    """Half precision with loss scaling."""

    enabled: Annotated[Switch, Means("parameters, buffers and gradients in float16, fp32 masters, loss scaling")] = False
    auto_cast: Annotated[Switch, Means("floating-point inputs are cast to float16")] = False
    loss_scale: Annotated[float, checked(Number(low=0)), Means("0: dynamic; above 0: that scale for ever")] = 0
    initial_scale_power: Annotated[
        int, checked(Number(low=0, high=126, whole=True)), Means("first dynamic scale, as a power of 2")
    ] = 16
    loss_scale_window: Annotated[
        int, checked(Number(low=1, whole=True)), Means("steps without overflow after which the scale doubles")
    ] = 1000
    hysteresis: Annotated[
        int,
        checked(Number(low=1, whole=True)),
        Means("overflows that halve the scale (the earlier ones only skip their step)"),
    ] = 2
    consecutive_hysteresis: Annotated[Switch, Means("whether a good step refills the hysteresis at once")] = False
    min_loss_scale: Annotated[float, checked(Number(low=0, above=True)), Means("the scale's floor")] = 1
    fp16_master_weights_and_grads: Annotated[bool, checked(Off((False,), "master weights in float16"))] = False


_PURE = "no fp32 masters; moments and accumulated gradients in bfloat16"


class Bf16(Section):
    """bfloat16 compute."""

    enabled: Annotated[Switch, Means("parameters, buffers and gradients in bfloat16, fp32 masters")] = False
    immediate_grad_update: Annotated[Switch, Note("gradients go where they accumulate during backward anyway")] = False
    check_grad_overflow: Annotated[Switch, Note("a step with a non-finite gradient is always skipped")] = True
    bf16_master_weights_and_grads: Annotated[Switch, Means(_PURE)] = False
    bf16_optimizer_states: Annotated[Switch, Means(_PURE)] = False


_PINNED = "host memory is always pinned where there is an accelerator to copy to"
_AHEAD = "while a tile is stepped the next is always read and the one before is written"
_STAGING = "reads and writes of a disk pass through at most onecopy.Scratch(staging=...) bytes, whatever a buffer's size"
_LENT = (
    "transfers always pass through page-aligned staging buffers that are kept, past the page cache, and what crosses to a "
    "device then is pinned"
)
_THREADS = "threads read and write with one request each, past the page cache and without libaio"


_STEPS = "onecopy.StepPolicy(when=...) steps on the host beside training"
_FOLDER = "folder of the disk tier, for device nvme, the same in both sections; it has to exist when the engine is made"


class OffloadOptimizer(Section):
    """Optimizer states off the device; see :mod:`onecopy.plan.offload_keys`."""

    device: Annotated[
        Device, Means("where the optimizer's states rest and are stepped from, from stage 1 on")
    ] = "none"
    nvme_path: Annotated[Word, Means(_FOLDER)] = None
    ratio: Annotated[float, checked(Number(0, 1)), Means("share of the elements that is offloaded, at every stage")] = 1.0
    pin_memory: Annotated[Switch, Note(_PINNED)] = False
    buffer_count: Annotated[Count, Note(_STAGING)] = None
    pipeline: Annotated[Switch, Note(_AHEAD)] = False
    pipeline_read: Annotated[Switch, Note(_AHEAD)] = False
    pipeline_write: Annotated[Switch, Note(_AHEAD)] = False
    fast_init: Annotated[Switch, Note("moments are made in the first step, so there is no start to make faster")] = False
    cpuadam_cores_perc: Annotated[float, checked(Number(0, 1)), Note("the step has OMP_NUM_THREADS threads")] = 0.8
    fast_readwrite: Annotated[Switch, Note(_LENT)] = False
    super_offload: Annotated[bool, checked(Off((False,), "SuperOffload", _STEPS))] = False


class OffloadParam(Section):
    """Parameters off the device; see :mod:`onecopy.plan.offload_keys`."""

    device: Annotated[Device, Means("where the parameters rest, at stage 3")] = "none"
    nvme_path: Annotated[Word, Means(_FOLDER)] = None
    pin_memory: Annotated[Switch, Note(_PINNED)] = False
    buffer_count: Annotated[Count, Note(_STAGING)] = None
    buffer_size: Annotated[Size, Note(_STAGING)] = None
    max_in_cpu: Annotated[Size, Note("parameters on disk are all there, and in memory while they are in use")] = None
    fast_readwrite: Annotated[Switch, Note(_LENT)] = False


class _ZeroUsed(Section):
    """Keys that say where states are kept."""

    stage: Annotated[
        int,
        checked(Number(0, 3, whole=True)),
        Means("0: every rank keeps everything; 1: optimizer states are cut over ranks; 2: gradients too; 3: parameters too"),
    ] = 0
    stage3_prefetch_bucket_size: Annotated[
        Size, Means("0: the next unit is not prefetched; any other size: one unit ahead, whatever its size")
    ] = None
    mics_shard_size: Annotated[
        int, checked(Number(low=-1, whole=True)), Means("stage 3 inside groups of that many ranks; -1: no groups")
    ] = -1
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


_SAVE = "whether save_16bit_model of onecopy.deepspeed makes weights whole that are cut (stage 3); no plan depends on it"


class _ZeroStage3(Section):
    """Keys about how stage 3 gathers parameters, without effect on the plan."""

    stage3_param_persistence_threshold: Annotated[
        Size, Note("small parameters travel with their unit and cost no collective of their own")
    ] = None
    stage3_model_persistence_threshold: Annotated[Size, Note("no parameter is kept gathered between steps")] = None
    stage3_max_live_parameters: Annotated[Size, Note(_HELD)] = None
    stage3_max_reuse_distance: Annotated[Size, Note(_HELD)] = None
    stage3_gather_16bit_weights_on_model_save: Annotated[Switch, Means(_SAVE)] = False
    stage3_gather_fp16_weights_on_model_save: Annotated[Switch, Means(_SAVE)] = False
    stage3_module_granularity_threshold: Annotated[Size, Note(_UNITS)] = None
    stage3_use_all_reduce_for_fetch_params: Annotated[Switch, Note(_SPEED)] = False
    stage3_allgather_sequential: Annotated[Switch, Note(_SPEED)] = False


_GROUPS = "mics_shard_size keeps gathers inside groups of ranks"


class _ZeroAbsent(Section):
    """Features of sharding and communication that do not exist here."""

    elastic_checkpoint: Annotated[bool, checked(Off((False,), "elastic checkpoints"))] = False
    legacy_stage1: Annotated[bool, checked(Off((False,), "the legacy form of stage 1"))] = False
    save_muon_momentum_buffer_in_memory: Annotated[bool, checked(Off((False,), "Muon"))] = False
    mics_hierarchical_params_gather: Annotated[bool, checked(Off((False,), "hierarchical gathers"))] = False
    zero_hpz_partition_size: Annotated[int, checked(Off((0, 1), "a secondary shard of the parameters (hpZ)", _GROUPS))] = 1
    zero_quantized_weights: Annotated[bool, checked(Off((False,), "quantised gathers"))] = False
    zero_quantized_nontrainable_weights: Annotated[bool, checked(Off((False,), "quantised gathers"))] = False
    zero_quantized_gradients: Annotated[bool, checked(Off((False,), "quantised reductions"))] = False
    zeropp_loco_param: Annotated[Any, checked(Off((None,), "quantised reductions with error feedback"))] = None
    zenflow: Annotated[Any, checked(Off((None,), "delayed optimizer steps by importance (ZenFlow)", _STEPS))] = None


class _ZeroOld(Section):
    """Former names of the offload sections."""

    cpu_offload: Annotated[MaybeSwitch, Means("old name of offload_optimizer with device cpu")] = None
    cpu_offload_param: Annotated[MaybeSwitch, Means("old name of offload_param with device cpu")] = None
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

    type: Annotated[str, checked(Text()), Means("torch optimizer that is built over the shards")]
    params: Annotated[dict[str, Any] | None, Means("its arguments")] = None
    legacy_fusion: Annotated[Switch, Note(_SPEED)] = False


class SchedulerSection(Section):
    """``params`` are checked like the optimizer's."""

    type: Annotated[str, checked(Text()), Means("schedule of the learning rate; ticks once per optimizer step taken")]
    params: Annotated[dict[str, Any] | None, Means("its arguments")] = None


_CHECKPOINTS = "activations are the model's own: torch.utils.checkpoint in its blocks works at every stage"
_ON_HOST = (
    "what checkpoint of onecopy.deepspeed.checkpointing keeps waits in host memory; other activations: "
    "torch.autograd.graph.save_on_cpu around a block"
)
_PARTITION = "activations are divided over tensor-parallel ranks, and model_parallel_size is 1"


class ActivationCheckpointing(Section):
    """How DeepSpeed's own checkpoint function keeps what it keeps; there is none here, and no number depends on it."""

    partition_activations: Annotated[Switch, Note(_PARTITION)] = False
    cpu_checkpointing: Annotated[Switch, Means(_ON_HOST)] = False
    contiguous_memory_optimization: Annotated[Switch, Note(_CHECKPOINTS)] = False
    number_checkpoints: Annotated[Count, Note(_CHECKPOINTS)] = None
    synchronize_checkpoint_boundary: Annotated[Switch, Note(_CHECKPOINTS)] = False
    profile: Annotated[Switch, Note(_CHECKPOINTS)] = False


class Aio(Section):
    """How disks are read and written; see :mod:`onecopy.plan.offload_keys`."""

    block_size: Annotated[Count, Means("bytes of a request to the disk, a multiple of 4096")] = None
    intra_op_parallelism: Annotated[Count, Means("requests to the disk under way at a time")] = None
    thread_count: Annotated[Count, Means("old name of intra_op_parallelism")] = None
    queue_depth: Annotated[Count, Note(_THREADS)] = None
    single_submit: Annotated[Switch, Note(_THREADS)] = False
    overlap_events: Annotated[Switch, Note(_THREADS)] = True
    use_gds: Annotated[Switch, Note("what is on disk passes through host memory")] = False


class DataTypes(Section):
    """Dtypes beside fp16 and bf16."""

    grad_accum_dtype: Annotated[Dtype, Means("dtype in which micro-batches accumulate")] = None
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

    train_batch_size: Annotated[Count, Means("samples of an optimizer step on all ranks")] = None
    train_micro_batch_size_per_gpu: Annotated[Count, Means("samples of one micro-batch on one rank")] = None
    gradient_accumulation_steps: Annotated[Count, Means("micro-batches of an optimizer step")] = None
    gradient_clipping: Annotated[
        float | None, checked(Number(low=0, optional=True)), Means("largest global 2-norm of the gradients; 0: no clipping")
    ] = None
    optimizer: OptimizerSection | None = None
    scheduler: SchedulerSection | None = None
    fp16: Fp16 | None = None
    bf16: Bf16 | None = None
    zero_optimization: ZeroOptimization | None = None
    communication_data_type: Annotated[Dtype, Means("dtype in which gradients are reduced")] = None
    data_types: DataTypes | None = None


_TENSOR = "tensor parallelism is not there yet"
_RANKS = "every rank is data-parallel; zero_optimization.stage 3 cuts the parameters over all of them"


class _Absent(Section):
    """Features that do not exist here, one key each."""

    gradient_allreduce_op: Annotated[str, checked(Off(("mean",), "gradients that are not the mean"))] = "mean"
    managed_gradient_accumulation: AlwaysOn = True
    sparse_gradients: Annotated[bool, checked(Off((False,), "sparse gradients"))] = False
    disable_allgather: Annotated[bool, checked(Off((False,), "a step without gathers"))] = False
    model_parallel_size: Annotated[int, checked(Off((1,), _TENSOR, _RANKS))] = 1
    sequence_parallel_size: Annotated[int, checked(Off((1,), "sequence parallelism"))] = 1
    data_parallel_size: Annotated[Any, checked(Off((None,), "a data-parallel size beside the world size"))] = None
    use_data_before_expert_parallelism: Annotated[bool, checked(Off((False,), "expert parallelism"))] = False
    sparse_attention: Annotated[Any, checked(Off((None,), "sparse attention"))] = None
    elasticity: Annotated[Any, checked(OffSection("elastic training"))] = None
    nebula: Annotated[Any, checked(OffSection("Nebula checkpoints"))] = None


class _Tools(Section):
    """Tools around training."""

    comms_logger: CommsLogger | None = None
    flops_profiler: FlopsProfiler | None = None
    tensorboard: Monitor | None = None
    wandb: Wandb | None = None
    comet: Comet | None = None
    csv_monitor: Monitor | None = None
    timers: Timers | None = None
    compile: Compile | None = None
    autotuning: Annotated[Any, Note("onecopy plan --search finds the settings before a run")] = None
    graph_harvesting: Annotated[Switch, Note(_SPEED)] = False
    datastates_ckpt: Annotated[Any, Note("a checkpoint is plain tensors and JSON; every rank writes its own shard")] = None


_AUTOCAST = "call the engine inside torch.autocast, or set bf16"
_HYBRID = "the model's own generate works on the engine"


class _AbsentTraining(Section):
    """Sections of ways to train that do not exist here."""

    quantize_training: Annotated[Any, checked(OffSection("quantised training"))] = None
    compression_training: Annotated[Any, checked(OffSection("compression"))] = None
    tensor_parallel: Annotated[Any, checked(OffSection(_TENSOR, "autotp_size", (0, 1), _RANKS))] = None
    expert_parallel: Annotated[Any, checked(OffSection("expert parallelism"))] = None
    pipeline: Annotated[Any, checked(OffSection("pipeline parallelism"))] = None
    torch_autocast: Annotated[Any, checked(OffSection("autocast", instead=_AUTOCAST))] = None
    amp: Annotated[Any, checked(OffSection("apex amp; set fp16 or bf16"))] = None
    hybrid_engine: Annotated[Any, checked(OffSection("the hybrid engine", instead=_HYBRID))] = None
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


class Config(_Used, _Idle, _Absent, _Tools, _AbsentTraining):
    """The whole file; its own fields are the remaining keys without effect."""

    prescale_gradients: Annotated[Switch, Note(_SAME)] = False
    gradient_predivide_factor: Annotated[float, checked(Number(low=0, above=True)), Note(_SAME)] = 1.0
    zero_allow_untested_optimizer: Annotated[Switch, Note("every optimizer that works element by element is fine")] = False
    zero_force_ds_cpu_optimizer: Annotated[Switch, Note("no optimizer is replaced behind the caller's back")] = True
    dataloader_drop_last: Annotated[Switch, Note("only the dataloader of onecopy.deepspeed.initialize obeys it")] = False
    activation_checkpointing: ActivationCheckpointing | None = None
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


def fields_of(path: str) -> dict[str, FieldInfo]:
    """The keys of the section at the dotted ``path`` ("" is the top level); none for what is no section."""
    model: type[Section] | None = Config
    for part in path.split(".") if path else ():
        model = section_of(model, part)
    return dict(model.model_fields) if model is not None else {}


def section_of(model: type[Section] | None, name: str) -> type[Section] | None:
    """The class of section ``name`` of ``model``; None when it is no section with keys of its own."""
    info = model.model_fields.get(name) if model is not None else None
    if info is None:
        return None
    for option in (info.annotation, *get_args(info.annotation)):
        if isinstance(option, type) and issubclass(option, Section):
            return option
    return None


def mark_of(info: FieldInfo, kind: type[Any]) -> Any:
    """The mark of that kind on a key, or None."""
    return next((mark for mark in info.metadata if isinstance(mark, kind)), None)
