"""Sections of a DeepSpeed JSON for tools around training (logs, profilers, tuners): none of them changes a weight, so they
are legal, their keys are checked, and what they would do here is said at the start."""

from __future__ import annotations

from typing import Annotated, Any

from onecopy.plan.keys import Count, MaybeSwitch, Note, Off, Section, Size, Switch, Word, checked
from onecopy.plan.values import ListOf, Number, Text

__all__ = ["Comet", "CommsLogger", "Compile", "FlopsProfiler", "Monitor", "Timers", "Tool", "Wandb"]

_LEDGER = "every collective is counted anyway: engine.measured()['collectives'], beside what was predicted"
_FLOPS = "no profiler runs; torch.utils.flop_counter and torch.profiler work on the engine's forward and backward"
_LOGS = "no log is written; engine.lr(), engine.grad_norm, engine.loss_scale and engine.measured() have what there is to log"
_COMPILE = "the schedule of gathers and reduces is not compiled; torch.compile of the model's blocks works"
_TIMERS = "engine.measured() is always kept, and no timer stops the device"


class Tool(Section):
    """A section of which nothing needs to be said while it is not enabled."""

    enabled: Switch = False


class CommsLogger(Tool):
    """Logs of collectives."""

    enabled: Annotated[Switch, Note(_LEDGER)] = False
    verbose: Annotated[Switch, Note(_LEDGER)] = False
    prof_all: Annotated[Switch, Note(_LEDGER)] = True
    prof_ops: Annotated[Any, Note(_LEDGER)] = None
    debug: Annotated[Switch, Note(_LEDGER)] = False


class FlopsProfiler(Tool):
    """Counts of operations."""

    enabled: Annotated[Switch, Note(_FLOPS)] = False
    profile_step: Annotated[Count, Note(_FLOPS)] = 1
    module_depth: Annotated[int, checked(Number(low=-1, whole=True)), Note(_FLOPS)] = -1
    top_modules: Annotated[Count, Note(_FLOPS)] = 1
    detailed: Annotated[Switch, Note(_FLOPS)] = True
    output_file: Annotated[Word, Note(_FLOPS)] = None
    recompute_fwd_factor: Annotated[Size, Note(_FLOPS)] = 0.0


class _Logged(Tool):
    """A log of losses and rates somewhere."""

    enabled: Annotated[Switch, Note(_LOGS)] = False


class Monitor(_Logged):
    """TensorBoard and CSV logs."""

    output_path: Annotated[Any, Note(_LOGS)] = ""
    job_name: Annotated[Word, Note(_LOGS)] = None


class Wandb(_Logged):
    """Logs at Weights & Biases."""

    group: Annotated[Word, Note(_LOGS)] = None
    team: Annotated[Word, Note(_LOGS)] = None
    project: Annotated[Word, Note(_LOGS)] = None


class Comet(_Logged):
    """Logs at Comet."""

    samples_log_interval: Annotated[Count, Note(_LOGS)] = 100
    project: Annotated[Word, Note(_LOGS)] = None
    workspace: Annotated[Word, Note(_LOGS)] = None
    api_key: Annotated[Word, Note(_LOGS)] = None
    experiment_name: Annotated[Word, Note(_LOGS)] = None
    experiment_key: Annotated[Word, Note(_LOGS)] = None
    online: Annotated[MaybeSwitch, Note(_LOGS)] = None
    mode: Annotated[Word, Note(_LOGS)] = None


class Throughput(Section):
    """A timer of samples per second."""

    enabled: Annotated[Switch, Note(_TIMERS)] = True
    synchronized: Annotated[Switch, Note(_TIMERS)] = True


class Timers(Section):
    """Timers."""

    throughput: Throughput | None = None


_OFFLOADED = "offload by the compiler"
_INSTEAD = "zero_optimization.offload_optimizer and offload_param do it at every stage that can"


class _CompileMoves(Section):
    """What DeepCompile frees and moves."""

    free_activation: Annotated[Switch, Note(_COMPILE)] = False
    free_activation_threshold: Annotated[Size, Note(_COMPILE)] = None
    offload_activation: Annotated[bool, checked(Off((False,), "offload of activations by the compiler"))] = False
    offload_activation_pin_memory: Annotated[Switch, Note(_COMPILE)] = True
    offload_opt_states: Annotated[bool, checked(Off((False,), _OFFLOADED, _INSTEAD))] = False
    offload_parameters: Annotated[bool, checked(Off((False,), _OFFLOADED, _INSTEAD))] = False


class _CompileOrder(Section):
    """When DeepCompile waits."""

    sync_before_reduce: Annotated[Switch, Note(_COMPILE)] = False
    sync_after_reduce: Annotated[Switch, Note(_COMPILE)] = False
    sync_before_allgather: Annotated[Switch, Note(_COMPILE)] = False
    sync_after_allgather: Annotated[Switch, Note(_COMPILE)] = False
    double_buffer: Annotated[Switch, Note(_COMPILE)] = True
    symmetric_memory: Annotated[Switch, Note(_COMPILE)] = False


class Compile(_CompileMoves, _CompileOrder):
    """DeepCompile: a compiled schedule, and what it moves off the device."""

    deepcompile: Annotated[Switch, Note(_COMPILE)] = False
    autoep_non_moe: Annotated[Switch, Note(_COMPILE)] = False
    debug_log: Annotated[Switch, Note(_COMPILE)] = False
    keep_int_input_tensors: Annotated[Switch, Note(_COMPILE)] = True
    keep_all_input_tensors: Annotated[Switch, Note(_COMPILE)] = False
    passes: Annotated[Any, checked(ListOf(Text(), optional=True)), Note(_COMPILE)] = None
    disable: Annotated[MaybeSwitch, Note(_COMPILE)] = None
    backend: Annotated[Word, Note(_COMPILE)] = None
