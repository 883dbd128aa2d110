"""Python functions called per unit and training step: what a library costs where the device waits for the interpreter.

    python benchmarks/calls.py --ranks 2 --model 25m

Counts, with ``sys.setprofile``, every Python function entered ("call") and every C function called from Python
("c_call") in forward, backward and optimizer step. On a CPU the hooks of backward run in the thread that called it, so
one thread's count is all of it. ``own`` are functions whose code lies in the library itself (for FSDP2, in
``torch.distributed``); ``extra`` is everything beyond what the same model costs in a plain torch loop, which adds what the
library makes others do (tensor subclasses, hooks, contexts).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from _common import CONTEXT, free_port, join, make_batches, make_model
from modes import build

DEFAULT = ("ddp", "fsdp2", "fsdp2-held", "onecopy1", "onecopy2", "onecopy3", "onecopy3-held")
LIBRARIES = ("/torch/distributed/", "/torch/nn/parallel/", "/onecopy/", "/deepspeed/")
MODEL = ("/onecopy/gpt.py", "/onecopy/text.py")


@dataclass
class Calls:
    """Counts per step by phase ("gradients": forward and backward; "update": optimizer step and zero_grad), each a dict
    of ``python``, ``c``, ``own_python`` and ``own_c``. ``top``: the library's functions that are called most."""

    mode: str
    units: int
    phases: dict[str, dict[str, int]]
    top: list[tuple[str, int]]

    def total(self, what: str) -> int:
        return sum(phase[what] for phase in self.phases.values())


def _is_own(filename: str) -> bool:
    return any(part in filename for part in LIBRARIES) and not filename.endswith(MODEL)


class Counting:
    """Context manager that counts the calls of this thread by (event, file, function)."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str, str]] = Counter()

    def __enter__(self) -> Counting:
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *exception: Any) -> None:
        sys.setprofile(None)

    def _seen(self, frame: FrameType, event: str, argument: Any) -> None:
        # For "c_call" the frame is the caller's: the library's own C calls are those that its code makes.
        if event in ("call", "c_call"):
            self.calls[event, frame.f_code.co_filename, frame.f_code.co_name] += 1

    def summary(self) -> dict[str, int]:
        found = dict.fromkeys(("python", "c", "own_python", "own_c"), 0)
        for (event, file, _), number in self.calls.items():
            kind = "python" if event == "call" else "c"
            found[kind] += number
            found[f"own_{kind}"] += number if _is_own(file) else 0
        return found


def count(mode: str, model: str, dtype: str, rank: int, world: int) -> Calls:
    """Calls of the fourth step of ``mode`` on this rank; the first ones set things up."""
    trainer = build(mode, make_model(model), dtype)
    batch = make_batches(rank, world, 1, CONTEXT)
    for step in range(3):
        trainer.step(*batch(step))
    x, y = batch(3)
    gradients, update = Counting(), Counting()
    with gradients:
        trainer.gradients(x, y)
    with update:
        trainer.update()
    own: Counter[str] = Counter()
    for (event, file, name), number in (gradients.calls + update.calls).items():
        if event == "call" and _is_own(file):
            own[f"{Path(file).stem}.{name}"] += number
    phases = {"gradients": gradients.summary(), "update": update.summary()}
    return Calls(mode, trainer.units(), phases, own.most_common(12))


def _rank(rank: int, args: argparse.Namespace, mode: str, port: int, results: Any) -> None:
    join(rank, args.ranks, port)
    found = count(mode, args.model, args.dtype, rank, args.ranks)
    if rank == 0:
        results.put(asdict(found))
    dist.barrier()


def measure(args: argparse.Namespace) -> list[Calls]:
    """The plain loop's counts first, then those of each mode asked for."""
    found = []
    for mode in ("plain", *args.modes):
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(_rank, (args, mode, free_port(), results), nprocs=args.ranks)
        found.append(Calls(**results.get()))
    return found


def report(found: list[Calls], top: bool) -> str:
    plain, *others = found
    lines = [
        "Functions per unit and step:",
        "| mode | units | own, forward+backward | own, optimizer step | own in all | own C calls | extra | extra C calls |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for calls in others:
        own = [calls.phases[phase]["own_python"] for phase in ("gradients", "update")]
        extra = [calls.total(kind) - plain.total(kind) for kind in ("python", "c")]
        numbers = [*own, sum(own), calls.total("own_c"), *extra]
        lines.append(f"| {calls.mode} | {calls.units} | " + " | ".join(f"{n / calls.units:.0f}" for n in numbers) + " |")
    lines.append(f"The plain loop calls {plain.total('python')} Python and {plain.total('c')} C functions a step.")
    if top:
        for calls in others:
            lines.append(f"{calls.mode}: " + ", ".join(f"{name} {n}" for name, n in calls.top))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="25m")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--modes", default=",".join(DEFAULT))
    parser.add_argument("--top", action="store_true", help="also name the library's functions that are called most")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.modes = [mode for mode in args.modes.split(",") if mode != "plain"]
    found = measure(args)
    print(json.dumps([asdict(calls) for calls in found], indent=1) if args.json else report(found, args.top))


if __name__ == "__main__":
    main()
