"""onecopy: ZeRO training for PyTorch. Every training state is kept once across the ranks.

>>> engine = onecopy.initialize(model, onecopy.stage(2), optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4))
>>> loss = engine(x, y)
>>> loss.backward()
>>> engine.step()
"""

from onecopy import errors
from onecopy.api import (
    full_grad,
    full_param,
    full_state,
    gathered,
    initialize,
    set_full_grad,
    set_full_param,
    set_full_state,
)
from onecopy.cluster import Cluster
from onecopy.engine.deferred import deferred
from onecopy.engine.engine import Engine
from onecopy.plan.config import load_config
from onecopy.plan.plan import Batch, Caps, Clip, LossScale, Plan, Precision, Rule, Scratch, StepPolicy, Units
from onecopy.plan.presets import hsdp, infinity, low_precision, mics, offload, stage
from onecopy.planner.public import search

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Caps",
    "Clip",
    "Cluster",
    "Engine",
    "LossScale",
    "Plan",
    "Precision",
    "Rule",
    "Scratch",
    "StepPolicy",
    "Units",
    "deferred",
    "errors",
    "full_grad",
    "full_param",
    "full_state",
    "gathered",
    "hsdp",
    "infinity",
    "initialize",
    "load_config",
    "low_precision",
    "mics",
    "offload",
    "search",
    "set_full_grad",
    "set_full_param",
    "set_full_state",
    "stage",
]
