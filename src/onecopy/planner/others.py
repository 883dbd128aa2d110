"""What others estimate, by their own conventions, to be printed beside ours: DeepSpeed's estimators and rules of thumb.

None of these know buffers, activations or where in a step the peak is; each says what it leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from onecopy.cluster import Cluster
from onecopy.errors import ConfigError
from onecopy.planner.report import STATES, human_gb
from onecopy.planner.search import Choice

__all__ = ["beside", "deepspeed_estimate", "rule_of_thumb"]

_WITHOUT_MASTER = (2,)  # stages whose rule of thumb has no term for master weights, and whole gradients
# What DeepSpeed multiplies host memory with, "to be on the safe side" in the words of its documentation.
_BUFFER = 1.5


def deepspeed_estimate(
    number: int,
    params: int,
    largest_layer: int,
    gpus: int,
    nodes: int = 1,
    *,
    offload: str = "none",
    zero_init: bool = True,
    factor: float = _BUFFER,
) -> dict[str, float]:
    """``{"gpu": bytes, "host": bytes}``, on a GPU and on a node of ``gpus``, as DeepSpeed's
    ``estimate_zero2_model_states_mem_needs`` and its like for stage 3 have them (``runtime/zero/stage_1_and_2.py`` and
    ``stage3.py``, release 0.19).

    ``offload``: "none", "opt" or "opt+param"; ``zero_init``: the model is made under ``zero.Init``. Their bytes for each
    parameter are 2 in 16 bits and 16 for gradient, master and moments in fp32; ``largest_layer`` counts 4; ``factor``
    is theirs on the host. Activations, buffers and fragmentation are not in it.
    """
    kinds = {2: _zero2, 3: _zero3}
    if number not in kinds:
        raise ConfigError(f"DeepSpeed estimates stages 2 and 3, not {number!r}")
    if offload not in ("none", "opt", "opt+param"):
        raise ConfigError(f"offload {offload!r} is not one of 'none', 'opt', 'opt+param'")
    gpu, host = kinds[number](params, largest_layer, gpus, nodes, offload, zero_init)
    return {"gpu": gpu, "host": host * factor}


def _zero2(params: int, layer: int, gpus: int, nodes: int, offload: str, init: bool) -> tuple[float, float]:
    ranks = gpus * nodes
    if offload == "none":
        return 2 * params + 18 * params / ranks, params * 4 * gpus
    return 2 * params, params * max(4 * ranks, 16)


def _zero3(params: int, layer: int, gpus: int, nodes: int, offload: str, init: bool) -> tuple[float, float]:
    ranks, made = gpus * nodes, 0 if init else 4 * gpus
    if offload == "none":
        return 4 * layer + int(18 * params / ranks), layer * 4 * gpus if init else params * made
    if offload == "opt":
        return 4 * layer + int(2 * params / ranks), params * max(made, 16 / nodes)
    return 4 * layer, params * max(made, 18 / nodes)


_THUMBS = {
    2: "1.2 x (parameters + gradients + Adam states / ranks)",
    3: "1.3 x (parameters + gradients + master + Adam states) / ranks",
}


def rule_of_thumb(number: int, params: int, ranks: int) -> float | None:
    """Bytes on a GPU by the rule that goes from hand to hand: 1.2 x (parameters + gradients + Adam states / N) at stage 2,
    1.3 x (parameters + gradients + master + Adam states) / N at stage 3; None for others. Parameters and gradients have 16
    bits."""
    rules = {2: 1.2 * (4 + 8 / ranks), 3: 1.3 * 16 / ranks}
    return rules[number] * params if number in rules else None


def beside(
    choice: Choice, params: int, largest: int, cluster: Cluster, device: Mapping[str, int]
) -> Iterator[str]:
    """Lines with what others say of the same stage and offload, where they have something to say. ``device``: our bytes on a
    rank by kind, as :func:`~onecopy.planner.report.plan_report` has them."""
    thumb = rule_of_thumb(choice.number, params, cluster.ranks)
    if thumb is None:
        return
    on_device = (choice.optimizer, choice.parameter) == ("device", "device")
    if on_device:
        held = human_gb(sum(device.get(state, 0) for state in STATES))
        yield (
            f"rule of thumb, {_THUMBS[choice.number]}: {human_gb(thumb)} on a rank, beside {held} of states and a peak of "
            f"{human_gb(device['peak'])} here. It misses {_missed(choice.number, params, device)}"
        )
    else:
        yield f"rule of thumb: {human_gb(thumb)} on a rank; it knows no offload"
    offload = "opt+param" if choice.parameter != "device" else "opt" if choice.optimizer != "device" else "none"
    theirs = deepspeed_estimate(choice.number, params, largest, cluster.gpus, cluster.nodes, offload=offload)
    yield (
        f"DeepSpeed's estimator: {human_gb(theirs['gpu'])} on a rank and {human_gb(theirs['host'])} of host memory on a "
        f"node, {_BUFFER:g} times what it counts; it has no activations or buffers"
    )


def _missed(number: int, params: int, device: Mapping[str, int]) -> str:
    """What the rule of stage ``number`` has no term for, in our bytes; its factor stands for all of it."""
    own = {
        "master weights": device.get("master", 0) if number in _WITHOUT_MASTER else 0,
        "gathered parameters": device.get("gather_buffer", 0),
        "what is being reduced": device.get("reduce_buffer", 0),
        "activations": device.get("activations", 0),
    }
    said = [f"{name} ({human_gb(size)})" for name, size in own.items() if size]
    surplus = 2 * params - device.get("gradient", 0)
    cut = f", and has gradients whole: {human_gb(surplus)} too many" if number in _WITHOUT_MASTER and surplus > 0 else ""
    return f"{', '.join(said) or 'nothing that is counted here'}{cut}; its factor is for what it misses"
