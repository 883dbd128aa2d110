"""Which plan: variants side by side, the cheapest change that makes one fit, and the fastest that fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from onecopy.cluster import Cluster
from onecopy.errors import PlanError
from onecopy.plan.layout import Tier
from onecopy.plan.plan import Plan
from onecopy.plan.presets import low_precision, offload, stage
from onecopy.planner.activations import Activations
from onecopy.planner.estimate import Work, estimate
from onecopy.planner.report import Costs, costs, human_gb, schedule_for, traffic_on
from onecopy.planner.subject import Subject
from onecopy.planner.subject import facts as facts_of
from onecopy.report.measure import human_count
from onecopy.schedule.walk import Saved

__all__ = ["Choice", "Found", "Question", "cheapest_change", "compare", "fastest"]

SCRATCH = "scratch"
_MOST = 1024  # sequences of a micro-batch
_POLICIES = ("group", "precision", "batch", "clip", "step", "scratch", "caps", "units", "optimizer", "scheduler")


@dataclass(frozen=True)
class Choice:
    """The settings that a search turns: how many states are cut, where they rest, in which codec, and the micro-batch."""

    number: int
    optimizer: Tier = "device"
    parameter: Tier = "device"
    moments: str | None = None
    recompute: bool = False
    batch: int = 1

    @classmethod
    def of(cls, plan: Plan, work: Work) -> Choice:
        """The settings of ``plan``, by its last rule, which matches most."""
        row = plan.rules[-1].row
        number = sum(bool(layout.shards) for layout in (row.optimizer, row.gradient.rest, row.parameter.rest))
        tiers = row.optimizer.tier, row.parameter.rest.tier
        return cls(number, *tiers, row.moment.codec, work.recompute, work.batch)

    def plan(self, base: Plan) -> Plan:
        """``base`` with these settings; its other policies stay."""
        policies = {name: getattr(base, name) for name in _POLICIES}
        policies["batch"] = replace(base.batch, micro=self.batch, total=None)
        made = stage(self.number, **policies)
        if (self.optimizer, self.parameter) != ("device", "device"):
            folder = base.scratch or (SCRATCH if "disk" in (self.optimizer, self.parameter) else None)
            made = offload(made, self.optimizer, self.parameter, ratio=base.step.ratio, scratch=folder)
        return low_precision(made, self.moments) if self.moments is not None else made

    def work(self, base: Work) -> Work:
        """``base`` with this micro-batch and recomputation."""
        return replace(base, batch=self.batch, recompute=self.recompute)

    @property
    def settings(self) -> str:
        """In words, without the micro-batch."""
        said = [f"stage {self.number}"]
        if self.optimizer == self.parameter != "device":
            said.append(f"all on {self.optimizer}")
        elif self.optimizer != "device":
            said.append(f"optimizer on {self.optimizer}")
            if self.parameter != "device":
                said.append(f"parameters on {self.parameter}")
        if self.moments is not None:
            said.append(f"moments in {self.moments}")
        if self.recompute:
            said.append("recomputed activations")
        return ", ".join(said)

    def __str__(self) -> str:
        return f"{self.settings}, micro-batch {self.batch}"


@dataclass(frozen=True)
class Found:
    """A choice, what it costs and how fast it is estimated to be (tokens per second of all ranks; None: not known)."""

    choice: Choice
    costs: Costs
    speed: float | None

    @property
    def headline(self) -> str:
        """In one line."""
        rate = f", about {human_count(self.speed)} tokens/s" if self.speed else ""
        return f"{self.choice}: {human_gb(self.costs.peak['device'].total)} on a rank{rate}"


class Question:
    """A subject, a cluster, the policies that stay as they are and the work of a rank."""

    def __init__(self, subject: Subject, cluster: Cluster, base: Plan, work: Work, activations: Activations | None) -> None:
        self.subject, self.cluster, self.base, self.work, self.activations = subject, cluster, base, work, activations
        self._facts = facts_of(subject, base, cluster.ranks)
        self._schedules: dict[Choice, Any] = {}

    def ask(self, choice: Choice) -> Found | None:
        """What ``choice`` costs; None where no engine could run it."""
        key = replace(choice, batch=1, recompute=False)
        if key not in self._schedules:
            try:
                self._schedules[key] = schedule_for(key.plan(self.base), self._facts, self.cluster)
            except PlanError:
                self._schedules[key] = None
        if (schedule := self._schedules[key]) is None:
            return None
        work = choice.work(self.work)
        saved = self.activations.saved(work.batch, work.recompute) if self.activations is not None else Saved()
        time = estimate(schedule, self.cluster, work, self.subject.shape)
        return Found(choice, costs(schedule, self.cluster, saved), time.get("tokens_per_second"))

    def moves(self, found: Found) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a step of ``found`` sends and moves, and its seconds by what takes them; empty where not known."""
        schedule = self._schedules[replace(found.choice, batch=1, recompute=False)]
        time = estimate(schedule, self.cluster, found.choice.work(self.work), self.subject.shape)
        return traffic_on(schedule, self.cluster), {key: value for key, value in time.items() if key != "assumptions"}

    def largest(self, choice: Choice) -> Found | None:
        """``choice`` with the largest micro-batch that fits; None when not even one sequence does. Without activations
        nothing depends on it, and it stays as it is."""
        first = self.ask(replace(choice, batch=1))
        if first is None or not first.costs.fits:
            return None
        if self.activations is None:
            return self.ask(choice)
        low, best, high = 1, first, _MOST + 1
        while high - low > 1:
            middle = min(2 * low, (low + high) // 2) if high > _MOST else (low + high) // 2
            found = self.ask(replace(choice, batch=middle))
            if found is not None and found.costs.fits:
                low, best = middle, found
            else:
                high = middle
        return best


def _tiers(question: Question) -> list[tuple[Tier, Tier]]:
    """Where optimizer and parameters may rest. Disks only where there is one, and on a CPU host memory is no more room."""
    places: list[tuple[Tier, Tier]] = [("device", "device")]
    if not question.cluster.gpu.shared:
        places += [("host", "device"), ("host", "host")]
    if question.cluster.nvme is not None:
        places += [("disk", "device"), ("disk", "host"), ("disk", "disk")]
    return places


def compare(question: Question) -> Iterator[Found]:
    """Stages 0 to 3, and each with its states elsewhere, at the micro-batch and recomputation that were asked for."""
    for number in range(4):
        for optimizer, parameter in _tiers(question):
            choice = Choice(number, optimizer, parameter, None, question.work.recompute, question.work.batch)
            found = question.ask(choice)
            if found is not None:
                yield found


def _changes(choice: Choice, question: Question) -> Iterator[tuple[str, Choice]]:
    """Single changes to ``choice``, in words."""
    disk, host = question.cluster.nvme is not None, not question.cluster.gpu.shared
    for number in range(choice.number + 1, 4):
        yield f"stage {number} instead of {choice.number}", replace(choice, number=number)
    if host and choice.optimizer != "host" and choice.parameter != "disk":
        yield "the optimizer's states on the host", replace(choice, optimizer="host")
    if choice.moments is None:
        yield "moments in 8 bits", replace(choice, moments="int8")
    if host and choice.parameter == "device":
        yield "stage 3 with everything on the host", replace(choice, number=3, optimizer="host", parameter="host")
    if disk and choice.optimizer != "disk":
        yield "the optimizer's states on disk", replace(choice, optimizer="disk")
        yield "stage 3 with everything on disk", replace(choice, number=3, optimizer="disk", parameter="disk")
    if not choice.recompute and question.activations is not None:
        yield "recomputed activations", replace(choice, recompute=True)
    batch = choice.batch // 2 if question.activations is not None else 0
    while batch:
        yield f"micro-batches of {batch}", replace(choice, batch=batch)
        batch //= 2


def cheapest_change(question: Question, choice: Choice) -> tuple[str, Found] | None:
    """The change to ``choice`` after which it fits and is fastest; two changes where no single one does; None where none do.
    Without an estimate of time, the first of the list."""
    tries = list(_changes(choice, question))
    for _ in range(3):
        fitting = [(said, found) for said, changed in tries if (found := question.ask(changed)) and found.costs.fits]
        if fitting:
            return max(fitting, key=lambda item: item[1].speed or 0.0)
        tries = list(_more(tries, question))
    return None


def _more(tries: list[tuple[str, Choice]], question: Question) -> Iterator[tuple[str, Choice]]:
    """Each of ``tries`` with one more change, every choice once."""
    known = {choice for _, choice in tries}
    for said, first in tries:
        for more, changed in _changes(first, question):
            if changed not in known:
                known.add(changed)
                yield f"{said}, {more}", changed


def fastest(question: Question, batch: int | None = None) -> tuple[Found, list[str]]:
    """The fastest choice that fits, with its largest micro-batch (or ``batch``), and a line on every setting; the simplest of
    those within 1 % of it. Moments in 8
    bits, which change numbers, are tried only where nothing else fits. Raises :class:`PlanError` when nothing does."""

    def best(choice: Choice) -> Found | None:
        if batch is None:
            return question.largest(choice)
        found = question.ask(replace(choice, batch=batch))
        return found if found is not None and found.costs.fits else None

    known: dict[Choice, Found | None] = {}
    for moments in (None, "int8"):
        again = (False, True) if question.activations is not None else (False,)
        for number in range(4):
            for optimizer, parameter in _tiers(question):
                for recompute in again:
                    choice = Choice(number, optimizer, parameter, moments, recompute)
                    known[choice] = best(choice)
        fitting = [found for found in known.values() if found is not None]
        if fitting:
            most = max(found.speed or 0.0 for found in fitting)
            chosen = min((found for found in fitting if (found.speed or 0.0) >= 0.99 * most), key=_moving_parts)
            return chosen, list(_explain(question, chosen, known))
    raise PlanError(_nothing_fits(question, batch or 1))


def _moving_parts(found: Found) -> tuple[int, int, int]:
    """What there is to choose between plans whose estimates differ by less than 1 %: less moved, less cut, less computed."""
    choice = found.choice
    return (choice.optimizer != "device") + (choice.parameter != "device"), choice.number, choice.recompute


def _nothing_fits(question: Question, batch: int) -> str:
    """What comes nearest, and what it lacks."""
    again = question.activations is not None
    tried = [
        found
        for optimizer, parameter in _tiers(question)
        for moments in (None, "int8")
        if (found := question.ask(Choice(3, optimizer, parameter, moments, again, batch))) is not None
    ]
    nearest = min(tried, key=lambda found: sum(found.costs.over.values()))
    more = "add ranks, memory or a disk (--nvme)" if question.cluster.nvme is None else "add ranks or memory"
    return (
        f"no plan fits {question.subject.name} on {question.cluster.ranks} ranks; the nearest, {nearest.choice}, lacks "
        f"{_lacks(nearest)}; {more}"
    )


def _explain(question: Question, chosen: Found, known: dict[Choice, Found | None]) -> Iterator[str]:
    """Each setting beside what it would be otherwise, the rest unchanged."""
    own = replace(chosen.choice, batch=1)
    stages = [_best_of(question, known, number) for number in range(4) if number != own.number]
    yield f"stage {own.number}: {'; '.join(stages)}"
    places = [replace(own, optimizer=one, parameter=two) for one, two in _tiers(question)]
    reasons = [_beside(question, choice, known) for choice in places if choice != own and choice in known]
    if any(reasons):
        yield f"optimizer on {own.optimizer}, parameters on {own.parameter}: {'; '.join(filter(None, reasons))}"
    if question.activations is not None:
        name, other = ("recomputed", "keeping them") if own.recompute else ("kept", "computing them again")
        yield f"activations {name}: {other} {_outcome(question, replace(own, recompute=not own.recompute), known)}"
    if own.moments is not None:
        yield f"moments in {own.moments}: with moments as they are nothing fits; this changes numbers a little"
    if question.activations is not None:
        yield f"micro-batch {chosen.choice.batch}: the largest that fits, or the one asked for"


def _best_of(question: Question, known: dict[Choice, Found | None], number: int) -> str:
    """The fastest of the other settings at ``number``, or what comes nearest."""
    fitting = [found for choice, found in known.items() if choice.number == number and found is not None]
    if fitting:
        best = max(fitting, key=lambda found: found.speed or 0.0)
        return f"the best of stage {number} {_speed(best)} ({best.choice})"
    failed = [found for choice in known if choice.number == number and (found := question.ask(choice)) is not None]
    nearest = min(failed, key=lambda found: sum(found.costs.over.values()))
    return f"stage {number} lacks {_lacks(nearest)} at least ({nearest.choice})"


def _beside(question: Question, choice: Choice, known: dict[Choice, Found | None]) -> str:
    said = _outcome(question, choice, known)
    return f"optimizer on {choice.optimizer} and parameters on {choice.parameter} {said}" if said else ""


def _outcome(question: Question, choice: Choice, known: dict[Choice, Found | None]) -> str:
    """How fast ``choice`` is, or what it lacks; nothing for one that no engine runs."""
    if (found := known.get(choice)) is not None:
        return _speed(found)
    least = question.ask(choice)
    return f"lacks {_lacks(least)}" if least is not None else ""


def _speed(found: Found) -> str:
    return f"gives {human_count(found.speed)} tokens/s" if found.speed else "fits too"


def _lacks(found: Found) -> str:
    return " and ".join(f"{human_gb(size)} of {tier} memory" for tier, size in found.costs.over.items())
