"""Dynamic loss scaling for float16 (Micikevicius et al. 2018, section 3.2), driven by the step's verdict."""

from __future__ import annotations

from onecopy.plan.plan import LossScale

__all__ = ["LossScaler"]


class LossScaler:
    """The scale that gradients enter the model with. Without a policy it is 1 and stays so."""

    def __init__(self, policy: LossScale | None) -> None:
        self.policy = policy
        self.scale = policy.initial if policy is not None else 1.0
        self.good_steps = 0
        self.hysteresis = policy.hysteresis if policy is not None else 1

    @property
    def at_floor(self) -> bool:
        """Would a further overflow have to lower the scale below its minimum?"""
        policy = self.policy
        return policy is not None and policy.dynamic and self.scale <= policy.minimum and self.hysteresis <= 1

    def update(self, overflow: bool) -> None:
        """One boundary step is over. Call it on every rank with the same verdict."""
        policy = self.policy
        if policy is None or not policy.dynamic:
            return
        if overflow:
            self.good_steps = 0
            if self.hysteresis > 1:
                self.hysteresis -= 1
            else:
                self.scale = max(self.scale / 2, policy.minimum)
            return
        self.good_steps += 1
        if policy.refill_hysteresis:
            self.hysteresis = policy.hysteresis
        if self.good_steps % policy.window == 0:
            self.scale *= 2
            if not policy.refill_hysteresis:
                self.hysteresis = policy.hysteresis

    def state(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps, "hysteresis": self.hysteresis}

    def load(self, state: dict[str, float]) -> None:
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
        self.hysteresis = int(state["hysteresis"])
