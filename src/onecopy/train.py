"""``onecopy train``: a byte-level GPT on real text, from the command line to the report.

The parent process checks the settings and starts the ranks (:func:`train`); each rank runs :func:`main`, which builds
the model, trains it with the engine, saves, resumes and writes ``report.json`` into the output folder.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import onecopy
from onecopy import errors, gpt
from onecopy.checkpoint.store import complete_tags
from onecopy.errors import ConfigError
from onecopy.launch import Failure, Outcome, run_ranks
from onecopy.method import ROWS, Method
from onecopy.place import Place
from onecopy.plan.check import check
from onecopy.plan.presets import DTYPES
from onecopy.report.measure import compare_table, human_bytes, human_count, lines, plan_table
from onecopy.report.progress import RunDisplay, memory_in_use
from onecopy.text import Rows, open_corpora

__all__ = ["SAVE_EVERY", "Method", "Run", "Settings", "Task", "claim", "main", "show_report", "train", "what_is_kept"]

UNIFORM = math.log(256)  # nats per byte of a model that knows nothing
_TASK, _REPORT, _LOG = "task.json", "report.json", "log.jsonl"
_HELD_OUT_ROWS = 256
SAVE_EVERY = 50  # steps: the most that an interruption costs
_SHOW_EVERY = 5
_BETAS, _DECAY = (0.9, 0.95), 0.1  # of AdamW


@dataclass(frozen=True)
class Task:
    """What is learned from what: a run resumes only with the same one. ``data`` empty: the standard library."""

    model: str = "small"
    context: int | None = None
    data: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Run:
    """How long and where. Checkpoints are made every ``save_every`` steps and at the end; the newest ``keep`` stay."""

    out: str
    steps: int
    save_every: int = SAVE_EVERY
    keep: int = 2


@dataclass(frozen=True)
class Settings:
    """Everything a rank needs to know."""

    task: Task
    method: Method
    run: Run

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """The inverse of :meth:`to_json`."""
        found = json.loads(text)
        task = Task(**{**found["task"], "data": tuple(found["task"]["data"])})
        method = Method(**{**found["method"], "place": Place(**found["method"]["place"])})
        return cls(task, method, Run(**found["run"]))

    def to_json(self) -> str:
        """One line, as the ranks get it on their command line."""
        return json.dumps(asdict(self))

    def rate(self) -> float:
        """The highest learning rate: as given, or smaller for wider models."""
        return self.method.lr or 2e-3 * min(1.0, 256 / gpt.config(self.task.model).width)

    def plan(self, world: int) -> onecopy.Plan:
        """The plan for ``world`` ranks. What a file leaves "auto" is what this run does without a file."""
        params = {"lr": self.rate(), "betas": _BETAS, "eps": 1e-8, "weight_decay": _DECAY}
        auto = {f"optimizer.params.{key}": value for key, value in params.items()}
        ticks = {"total_num_steps": self.run.steps, "warmup_num_steps": _warm(self.run.steps)}
        return self.method.plan(world, auto | {f"scheduler.params.{key}": value for key, value in ticks.items()})

    def check(self, world: int) -> None:
        """Raise the :class:`onecopy.errors.OneCopyError` that every rank would, before any is started."""
        if world < 1:
            raise ConfigError(f"--nproc {world}: the number of ranks on this machine is 1 or more")
        for name, value in (
            ("--steps", self.run.steps),
            ("--save-every", self.run.save_every),
            ("--keep", self.run.keep),
        ):
            if value < 1:
                raise ConfigError(f"{name} {value}: it is a whole number from 1")
        for name, number in (("--batch-size", self.method.batch_size), ("--accumulation", self.method.accumulation)):
            if number is not None and number < 1:
                raise ConfigError(f"{name} {number}: it is a whole number from 1")
        if self.method.lr is not None and not (math.isfinite(self.method.lr) and self.method.lr > 0):
            raise ConfigError(f"--lr {self.method.lr}: it is a finite number above 0")
        if self.method.dtype not in (None, *DTYPES, *DTYPES.values()):
            raise ConfigError(f"--dtype {self.method.dtype}: it is one of {', '.join(DTYPES)}")
        check(self.plan(world), (), world)
        self.method.place.check_folder()
        model = gpt.config(self.task.model, context=self.task.context)
        open_corpora(self.task.data, model.context)


def train(settings: Settings, ranks: int) -> tuple[Outcome, dict[str, Any]]:
    """Start ``ranks`` ranks on this machine and wait. Returns how it ended and, when it ended well, the report.

    Raises :class:`onecopy.errors.OneCopyError` for bad settings, those found by the ranks included.
    """
    settings.check(ranks)
    claim(settings)
    outcome = run_ranks(["-m", "onecopy.train", settings.to_json()], ranks)
    if outcome.failure is not None:
        _raise_if_bad_input(outcome.failure)
    if outcome.exit_code:
        return outcome, {}
    return outcome, json.loads((Path(settings.run.out) / _REPORT).read_text())


def _checkpoints(settings: Settings) -> Path:
    return Path(settings.run.out) / "checkpoints"


def claim(settings: Settings) -> None:
    """Write down what the output folder is for, or check that it is for this task."""
    path = Path(settings.run.out) / _TASK
    text, _ = open_corpora(settings.task.data, gpt.config(settings.task.model, context=settings.task.context).context)
    ours = {**asdict(settings.task), "data": text.fingerprint}
    try:
        if path.exists() and any(_checkpoints(settings).glob("step*")):
            _same_task(settings, ours, json.loads(path.read_text()))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(ours, indent=1))
    except FileExistsError:
        raise ConfigError(f"--out {settings.run.out} is a file; name a folder") from None
    except OSError as error:
        raise ConfigError(f"--out {settings.run.out} cannot be written ({error}); name another folder") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is damaged: it is not JSON ({error}); name another folder with --out") from error


def _same_task(settings: Settings, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    for key, value in ours.items():
        if theirs.get(key) != value:
            raise ConfigError(
                f"--out {settings.run.out} holds a run with {key} {theirs.get(key)!r}, this one has {value!r}; "
                "name another folder, or give the same to resume it"
            )


def what_is_kept(settings: Settings) -> str:
    """What of an interrupted run the same command goes on from."""
    tags = complete_tags(_checkpoints(settings))
    if not tags:
        return f"no checkpoint was written yet (--save-every {settings.run.save_every}), so the same command begins anew"
    return f"the same command resumes from {_checkpoints(settings) / max(tags)}"


def show_report(report: dict[str, Any], console: Console) -> None:
    """Predicted beside measured and the losses of a finished run."""
    if report["ranks"]:
        console.print(compare_table(report["ranks"][0]["predicted"], report["ranks"][0]["measured"]))
        off = [
            f"rank {rank} {line.section} {line.name} {line.verdict}"
            for rank, ledger in enumerate(report["ranks"])
            for line in lines(ledger["predicted"], ledger["measured"])
            if line.exact and line.verdict != "equal"
        ]
        verdict = "not as predicted: " + "; ".join(off) if off else "bytes held and sent are as predicted on every rank"
        console.print(verdict, highlight=False, soft_wrap=True)
    speed = report["tokens_per_second"]
    console.print(
        f"step {report['steps']}: validation loss [bold]{report['validation_loss']:.3f}[/bold] nats per byte "
        f"(knowing nothing: {report['uniform_loss']:.2f})" + (f", {human_count(speed)} tokens/s" if speed else ""),
        highlight=False,
        soft_wrap=True,
    )


def _raise_if_bad_input(failure: Failure) -> None:
    for name in failure.classes:
        module, _, cls = name.rpartition(".")
        if module == errors.__name__:
            raise getattr(errors, cls)(failure.message)


@dataclass
class Consumed:
    """The place in the data: training rows used by all ranks so far, which is the same number on every rank."""

    rows: int = 0

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave."""
        self.rows = state["rows"]


class Trainer:
    """One rank's part of the run."""

    def __init__(self, settings: Settings, console: Console) -> None:
        self.settings, self.console = settings, console
        self.shape = gpt.config(settings.task.model, context=settings.task.context, recompute=settings.method.recompute)
        train_text, held_text = open_corpora(settings.task.data, self.shape.context)
        self.rows, self.held = (
            Rows(train_text, self.shape.context, settings.task.seed),
            Rows(held_text, self.shape.context),
        )
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        plan = settings.plan(self.world)
        self.micro = plan.batch.micro or settings.method.batch_size or ROWS
        self.engine = self._engine(plan)
        self.place = Consumed()
        self.resumed_from = 0

    def _engine(self, plan: onecopy.Plan) -> onecopy.Engine:
        steps = self.settings.run.steps
        torch.manual_seed(self.settings.task.seed)
        with onecopy.deferred():
            model = gpt.GPT(self.shape)
        if plan.optimizer is not None:
            return onecopy.initialize(model, plan)
        decayed = [p for p in model.parameters() if p.ndim >= 2]
        others = [p for p in model.parameters() if p.ndim < 2]

        def optimizer(_: Any) -> torch.optim.Optimizer:
            groups = [{"params": decayed, "weight_decay": _DECAY}, {"params": others, "weight_decay": 0.0}]
            return torch.optim.AdamW(groups, lr=self.settings.rate(), betas=_BETAS, fused=True)

        scheduler = None if plan.scheduler is not None else (lambda built: LambdaLR(built, warm_up_and_cosine(steps)))
        return onecopy.initialize(model, plan, optimizer=optimizer, scheduler=scheduler)

    @property
    def rows_per_step(self) -> int:
        return self.micro * self.engine.plan.batch.accumulation * self.world

    def step(self) -> Tensor:
        """One optimizer step. Returns this rank's mean loss over its micro-batches, a float32 scalar."""
        accumulation = self.engine.plan.batch.accumulation
        total: Tensor = torch.zeros((), device=self.engine.device)
        for number in range(accumulation):
            x, y = self.rows.micro_batch(self.place.rows, number, self.rank, self.world, self.micro)
            loss = self.engine(x.to(self.engine.device), y.to(self.engine.device))
            loss.backward()
            self.engine.step()
            total += loss.detach()
        self.place.rows += self.rows_per_step
        return total.div_(accumulation)

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss over fixed held-out rows, in nats per byte, the same on every rank."""
        self.engine.eval()
        batches = -(-_HELD_OUT_ROWS // (self.micro * self.world))
        total = torch.zeros((), device=self.engine.device)
        for x, y in self.held.spread(self.rank, self.world, self.micro, batches):
            total += self.engine(x.to(self.engine.device), y.to(self.engine.device))
        self.engine.train()
        return self.mean(total / batches)

    def mean(self, value: Tensor) -> float:
        """``value`` averaged over the ranks. Collective."""
        if dist.is_initialized():
            dist.all_reduce(value)
            value /= self.world
        return value.item()

    def save(self) -> Path:
        """Write a checkpoint, then remove all but the newest. Collective."""
        return Path(self.engine.save(_checkpoints(self.settings), data=self.place, keep_last=self.settings.run.keep))

    def resume(self) -> None:
        """Load the newest complete checkpoint, if there is one. Collective."""
        folder = _checkpoints(self.settings)
        there = sorted(path.name for path in folder.glob("step*"))
        if there:
            # A run that was killed may have left the newest unreadable; one older is better than none.
            complete = [tag for tag in there if tag in complete_tags(folder)]
            tag = complete[-1] if complete else there[-1]
            if tag != there[-1]:
                self.console.print(f"note: {folder / there[-1]} is not complete; {tag} is", highlight=False, soft_wrap=True)
            self.engine.load(folder, tag=tag, data=self.place)
            self.resumed_from = self.engine.global_steps
            self.console.print(
                f"resuming from step {self.resumed_from} in {self.settings.run.out}", highlight=False, soft_wrap=True
            )

    def show_plan(self) -> None:
        """What is about to run and what it will take, on rank 0's console."""
        plan, shape = self.engine.plan, self.shape
        self.console.print(
            f"{self.settings.task.model}: {human_count(shape.parameters)} parameters, context {shape.context}; "
            f"{human_bytes(len(self.rows.corpus))} of text, {human_bytes(len(self.held.corpus))} held out; "
            f"{self.world} rank{'s' * (self.world > 1)} on {self.engine.device.type}, each with "
            f"{plan.batch.accumulation} x {self.micro} rows a step",
            highlight=False,
            soft_wrap=True,
        )
        self.console.print(plan_table(self.engine.predicted()))

    def run(self) -> dict[str, Any]:
        """Train what is left, save, validate. Returns the report, the same on every rank."""
        steps, done = self.settings.run.steps, self.engine.global_steps
        if done >= steps:
            self.console.print(
                f"all {steps} steps are done already (at step {done}); validating", highlight=False, soft_wrap=True
            )
        seconds = 0.0
        loss: float | None = None
        with RunDisplay(self.console, done, steps) as display:
            for step in range(done + 1, steps + 1):
                start = time.monotonic()
                own = self.step()
                if step % _SHOW_EVERY == 0 or step in (done + 1, steps):
                    loss = self.mean(own)
                    self._show(display, step, loss, time.monotonic() - start)
                seconds += time.monotonic() - start
                if step % self.settings.run.save_every == 0 and step < steps:
                    self.save()
                    found = self.validate()
                    self._log(step=step, validation=found)
                    display.say(f"step {step}: saved, validation loss {found:.3f}")
        ledgers = self._ledgers() if done < steps else []
        path = self.save() if done < steps else None
        value = self.validate()
        self._log(step=self.engine.global_steps, validation=value)
        tokens = (steps - done) * self.rows_per_step * self.shape.context
        return {
            "steps": self.engine.global_steps,
            "resumed_from": self.resumed_from,
            "skipped_steps": self.engine.skipped_steps,
            "train_loss": loss,
            "validation_loss": value,
            "uniform_loss": UNIFORM,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds if seconds else None,
            "world": self.world,
            "parameters": self.shape.parameters,
            "checkpoint": str(path) if path else None,
            "settings": asdict(self.settings),
            "ranks": ledgers,
        }

    def _show(self, display: RunDisplay, step: int, loss: float, seconds: float) -> None:
        speed = self.rows_per_step * self.shape.context / seconds
        display.update(step, loss, speed, memory_in_use(self.engine.device))
        self._log(step=step, loss=loss, lr=self.engine.lr()[0], grad_norm=self.engine.grad_norm, tokens_per_second=speed)

    def _log(self, **values: Any) -> None:
        if self.rank == 0:
            with open(Path(self.settings.run.out) / _LOG, "a") as file:
                file.write(json.dumps(values) + "\n")

    def _ledgers(self) -> list[dict[str, Any]]:
        """Predicted and measured of every rank, of the last step. Collective."""
        mine = {"predicted": self.engine.predicted(), "measured": self.engine.measured()}
        found: list[Any] = [mine] * self.world
        if dist.is_initialized():
            dist.all_gather_object(found, mine)
        return found


def _warm(steps: int) -> int:
    """Steps of the warm-up of a run of ``steps``."""
    return max(1, min(100, steps // 10))


def warm_up_and_cosine(steps: int) -> Any:
    """Factor of the learning rate by step: up to 1 over the first tenth (at most 100 steps), then down a cosine to 0.05
    at ``steps``, where it stays."""
    warm = _warm(steps)

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        done = min(1.0, (step - warm) / max(1, steps - warm))
        return 0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2

    return factor


def main() -> None:
    """One rank: ``python -m onecopy.train SETTINGS`` under torchrun's environment."""
    # The checkpoint on disk is what a run resumes from, so Ctrl-C may end a rank at once.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    settings = Settings.from_json(sys.argv[1])
    first = os.environ["RANK"] == "0"
    trainer = Trainer(settings, Console(stderr=True, quiet=not first, force_terminal=None if first else False))
    trainer.show_plan()
    trainer.resume()
    report = trainer.run()
    if first:
        (Path(settings.run.out) / _REPORT).write_text(json.dumps(report, indent=1))
    trainer.engine.close()


if __name__ == "__main__":
    main()
