"""Where ``onecopy train`` keeps its states: the options of the command line as a change of the plan."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from onecopy.errors import ConfigError
from onecopy.plan.plan import Caps, Plan, Scratch
from onecopy.plan.presets import low_precision, offload

__all__ = ["STATES", "Place"]

STATES: dict[str, str | None] = {"fp32": None, "bf16": "bfloat16_sr", "int8": "int8", "int4": "int4"}
_TIERS = ("host", "disk")


@dataclass(frozen=True)
class Place:
    """Tiers of the optimizer's states, of the parameters and of the gradients, the format of the moments, and caps in bytes;
    None: none, and gradients where the plan has them."""

    optimizer: str | None = None
    parameters: str | None = None
    ratio: float | None = None
    scratch: str | None = None
    states: str = "fp32"
    device_memory: int | None = None
    host_memory: int | None = None
    gradients: str | None = None

    def decided_by_file(self) -> dict[str, tuple[Any, str]]:
        """Options that a DeepSpeed JSON decides: their values, and the key that does it."""
        optimizer, parameter = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"
        return {
            "--offload": (self.optimizer, f"{optimizer}.device"),
            "--offload-parameters": (self.parameters, f"{parameter}.device"),
            "--offload-gradients": (self.gradients, f"{optimizer}.device"),
            "--offload-ratio": (self.ratio, f"{optimizer}.ratio"),
            "--scratch": (self.scratch, f"{optimizer}.nvme_path and {parameter}.nvme_path"),
        }

    def apply(self, plan: Plan) -> Plan:
        """``plan`` with its states there. Raises :class:`ConfigError` with everything that contradicts."""
        problems = self._problems(plan)
        if problems:
            raise ConfigError("; ".join(problems))
        if (self.optimizer, self.parameters, self.gradients) != (None, None, None):
            tiers: Any = {"optimizer": self.optimizer or "device", "parameter": self.parameters or "device"}
            tiers["gradient"] = self.gradients
            ratio = 1.0 if self.ratio is None else self.ratio
            plan = offload(plan, **tiers, ratio=ratio, scratch=Scratch(self.scratch) if self.scratch else None)
        codec = STATES[self.states]
        if codec is not None:
            plan = low_precision(plan, codec)
        return plan.with_(caps=Caps(self.device_memory, self.host_memory))

    def check_folder(self) -> None:
        """Raise :class:`ConfigError` when the scratch folder is not there, as every rank would later."""
        if self.scratch is not None and not Path(self.scratch).is_dir():
            raise ConfigError(f"--scratch {self.scratch} is no folder; make it, on a disk of this host")

    def _problems(self, plan: Plan) -> list[str]:
        found = []
        tiers = {"": self.optimizer, "-parameters": self.parameters, "-gradients": self.gradients}
        for option, tier in ((f"--offload{what}", tier) for what, tier in tiers.items()):
            if tier is not None and tier not in _TIERS:
                found.append(f"{option} {tier}: it is host or disk")
        if self.states not in STATES:
            near = get_close_matches(self.states, STATES, n=1, cutoff=0.0)[0]
            found.append(f"--states {self.states}: it is one of {', '.join(STATES)}; the nearest is {near}")
        if any(rule.row.parameter.rest.replicated for rule in plan.rules) and self.parameters is not None:
            found.append(
                f"--offload-parameters {self.parameters} beside --stage 0, 1 or 2, which keep the parameters whole on every "
                "rank: add --stage 3, or offload the optimizer alone"
            )
        if any(rule.row.gradient.rest.replicated for rule in plan.rules) and self.gradients is not None:
            found.append(
                f"--offload-gradients {self.gradients} beside --stage 0 or 1, which keep gradients whole on every rank: add "
                "--stage 2"
            )
        if self.ratio is not None and not 0 <= self.ratio <= 1:
            found.append(f"--offload-ratio {self.ratio}: it is a share from 0 to 1")
        if self.ratio is not None and self.optimizer is None:
            found.append(f"--offload-ratio {self.ratio} without --offload: add --offload host, or drop it")
        on_disk = "disk" in tiers.values()
        if on_disk and not self.scratch:
            found.append("states on disk need --scratch FOLDER, on a disk of this host; states on the host need none")
        if self.scratch is not None and not on_disk:
            found.append(f"--scratch {self.scratch} and nothing on disk: add --offload disk, or drop it")
        return found
