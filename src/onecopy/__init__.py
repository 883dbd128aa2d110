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
from onecopy.engine.deferred import deferred
from onecopy.engine.engine import Engine
from onecopy.plan.config import load_config
from onecopy.plan.plan import Batch, Clip, LossScale, Plan, Precision, Rule, Units
from onecopy.plan.presets import hsdp, mics, stage

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Clip",
    "Engine",
    "LossScale",
    "Plan",
    "Precision",
    "Rule",
    "Units",
    "deferred",
    "errors",
    "full_grad",
    "full_param",
    "full_state",
    "gathered",
    "hsdp",
    "initialize",
    "load_config",
    "mics",
    "set_full_grad",
    "set_full_param",
    "set_full_state",
    "stage",
]
