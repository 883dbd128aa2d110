"""DDP, FSDP2, DeepSpeed and onecopy train the same GPT on the same text, taking turns; their time and memory side by side.

    python benchmarks/peers.py --ranks 2 --model 25m --dtype fp32 --rounds 6 --steps 4

Every mode's ranks are alive all the time (or, with ``--apart``, started anew for each turn, where memory does not hold
all modes at once). In every round each mode in turn trains one untimed and then ``--steps`` timed steps while the others
sleep, so noise from the machine hits all alike; the order rotates from round to round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from _common import CONTEXT
from _ranks import Job, RankFailed, Ranks
from modes import MODES

__all__ = ["Result", "main", "measure"]

MB = 1e6
# Steps before any is measured: buffers take their final shape, orders are learnt, the allocator settles.
SETTLE = 3


@dataclass
class Result:
    """Measurements of one mode. ``rounds``: per round, seconds of each timed step on its slowest rank. ``work``: the same
    in processor seconds of one rank (all its threads, the mean over ranks), which other programs disturb less.

    Memory is in bytes above the process before the model existed, on the rank that took most: ``process`` is the
    resident set's peak in timed steps, ``setup`` the same from there through the first steps, ``allocator`` the peak of
    torch's CPU allocator in a step. ``losses`` are those of rank 0 in the last round.
    """

    mode: str
    rounds: list[list[float]] = field(default_factory=list)
    work: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    process: int = 0
    setup: int = 0
    allocator: int | None = None
    ledger: dict[str, Any] | None = None

    @property
    def median(self) -> float:
        return statistics.median([time for times in self.rounds for time in times])

    @property
    def processor(self) -> float:
        return statistics.median([work for works in self.work for work in works])

    @property
    def best(self) -> float:
        return min(time for times in self.rounds for time in times)

    def add(self, answers: list[dict[str, Any]]) -> None:
        self.rounds.append([max(times) for times in zip(*(answer["times"] for answer in answers), strict=True)])
        self.work.append([statistics.mean(w) for w in zip(*(answer["work"] for answer in answers), strict=True)])
        self.losses = answers[0]["losses"]
        self.process = max(answer["peak_process"] for answer in answers)
        self.setup = max(answer["peak_setup"] for answer in answers)
        self.ledger = answers[0]["ledger"]


def ranks_of(job: Job, args: argparse.Namespace) -> Ranks:
    return Ranks(job, str(args.deepspeed_python) if job.mode.startswith("deepspeed") else sys.executable)


def measure(args: argparse.Namespace, start: Callable[[Job, argparse.Namespace], Ranks] = ranks_of) -> list[Result]:
    """One result per mode that can run here, in the order asked for; ``start`` starts the ranks of one. Raises
    :class:`RankFailed` when one breaks."""
    modes = _runnable(args)
    jobs = {mode: Job(mode, args.model, args.dtype, args.ranks, args.rows, args.context) for mode in modes}
    results = {mode: Result(mode) for mode in modes}
    with ExitStack() as stack:
        alive: dict[str, Ranks] = {}
        if not args.apart:
            for mode in modes:
                alive[mode] = stack.enter_context(start(jobs[mode], args))
                alive[mode].train(1, warm=SETTLE)
        for number in range(args.rounds):
            turn = number % len(modes)
            for mode in (*modes[turn:], *modes[:turn]):
                if args.apart:
                    with start(jobs[mode], args) as ranks:
                        results[mode].add(ranks.train(args.steps, warm=SETTLE))
                else:
                    results[mode].add(alive[mode].train(args.steps, warm=1))
            done = "  ".join(f"{mode} {statistics.median(results[mode].rounds[-1]):.3f}" for mode in modes)
            print(f"round {number + 1}/{args.rounds}, seconds a step: {done}", file=sys.stderr, flush=True)
    if args.account:
        for mode in modes:
            with start(replace(jobs[mode], account=True), args) as ranks:
                results[mode].allocator = max(answer["peak_allocator"] for answer in ranks.train(1, warm=2))
    return list(results.values())


def _runnable(args: argparse.Namespace) -> list[str]:
    """The modes asked for, without DeepSpeed's where it is not installed."""
    if not any(mode.startswith("deepspeed") for mode in args.modes):
        return list(args.modes)
    found = subprocess.run([args.deepspeed_python, "-c", "import deepspeed"], capture_output=True, check=False)
    if found.returncode == 0:
        return list(args.modes)
    print(
        f"{args.deepspeed_python} cannot import deepspeed, which is left out; name one that can with --deepspeed-python",
        file=sys.stderr,
    )
    return [mode for mode in args.modes if not mode.startswith("deepspeed")]


def rival(mode: str, against: str) -> str:
    """The mode of ``against`` ("ddp", "fsdp2", "deepspeed") that ``mode`` is compared with: DeepSpeed's same stage."""
    if against != "deepspeed":
        return against
    stage = "".join(c for c in mode.removesuffix("-held") if c.isdigit())
    return {"ddp": "deepspeed1", "fsdp2": "deepspeed3", "fsdp2-held": "deepspeed3"}.get(mode, f"deepspeed{stage}")


def table(results: list[Result]) -> str:
    """The results as a Markdown table."""
    by_mode = {result.mode: result for result in results}
    head = ["mode", "median s", "min s", "cpu s", "x DDP", "x FSDP2", "x DeepSpeed"]
    head += ["process MB", "allocator MB", "set-up MB", "last loss"]
    rows = []
    for result in results:
        ratios = []
        for against in ("ddp", "fsdp2", "deepspeed"):
            other = by_mode.get(rival(result.mode, against))
            ratios.append("" if other is None else f"{result.median / other.median:.2f}")
        times = [f"{seconds:.3f}" for seconds in (result.median, result.best, result.processor)]
        allocator = "" if result.allocator is None else f"{result.allocator / MB:.0f}"
        memory = [f"{result.process / MB:.0f}", allocator, f"{result.setup / MB:.0f}"]
        rows.append([result.mode, *times, *ratios, *memory, f"{result.losses[-1]:.4f}"])
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in lines)


def as_json(args: argparse.Namespace, results: list[Result]) -> str:
    setting = {k: v for k, v in vars(args).items() if k not in ("json", "deepspeed_python")}
    modes = [
        {**vars(result), "median": result.median, "processor": result.processor, "min": result.best} for result in results
    ]
    return json.dumps({"setting": setting, "torch": torch.__version__, "modes": modes}, indent=1)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="25m", help="name of a GPT size (25m, 100m, ...)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4, help="timed steps per mode and round")
    parser.add_argument("--rows", type=int, default=1, help="sequences per rank and step")
    parser.add_argument("--context", type=int, default=CONTEXT, help="bytes in a sequence")
    parser.add_argument("--modes", default=",".join(MODES), help="comma-separated, of: " + ", ".join(MODES))
    parser.add_argument("--deepspeed-python", default=sys.executable, help="interpreter that can import deepspeed")
    parser.add_argument("--apart", action="store_true", help="start the ranks anew for each turn")
    parser.add_argument("--account", action="store_true", help="also count the allocator's bytes, in a run of its own")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    args.modes = args.modes.split(",")
    unknown = [mode for mode in args.modes if mode not in MODES]
    if unknown:
        parser.error(f"no such mode: {', '.join(unknown)}; choose from {', '.join(MODES)}")
    return args


def report(args: argparse.Namespace, measured: Callable[[], list[Result]], kind: str) -> None:
    """Print what ``measured`` finds of models of this kind, or exit with the error of the rank that failed."""
    try:
        results = measured()
    except RankFailed as error:
        sys.exit(str(error))
    if args.json:
        print(as_json(args, results))
        return
    print(f"{args.model} {kind}, {args.dtype}, {args.ranks} ranks, {args.rows} x {args.context} bytes per rank and step")
    print(table(results))


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    report(args, lambda: measure(args), "GPT")


if __name__ == "__main__":
    main()
