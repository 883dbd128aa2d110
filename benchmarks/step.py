"""The optimizer step on the host, beside torch's, DeepSpeed's and a copy of as many bytes.

    python benchmarks/step.py --params 50_000_000 --threads 1 2 --deepspeed-python PATH

A step reads a bf16 gradient (2 bytes), reads and writes fp32 master weight, exp_avg and exp_avg_sq (24) and writes a bf16
parameter (2): 28 bytes per parameter, all of it in host memory. **ours** is the engine's own step under
``onecopy.offload(onecopy.stage(2, dtype="bf16"))`` on one rank, on the gradients of a backward pass of a GPT; the vote (the
global norm) before it is timed by itself. **torch** casts all gradients, steps all weights with fused AdamW and casts all
weights. **deepspeed** does the same with ``DeepSpeedCPUAdam``, in an interpreter of its own, which compiles it on first use.
**copy** is ``Tensor.copy_`` of 14 bytes per parameter, which reads and writes as many bytes as a step does: 1.00 of it is a
step that costs no more than moving its bytes.

The contestants take turns. Times are medians over the repeats; ratios are medians of each repeat's own ratio, so that what
slows the whole machine down for a while does not enter them; repeats in which other programs run are done again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import onecopy
from _common import Others
from onecopy.gpt import GPT, GPTConfig
from onecopy.report.rates import STEP_BYTES, Copy

WIDTH, CONTEXT = 1024, 16


@dataclass
class Result:
    """Medians for one number of threads. ``seconds``, ``mparams`` (million parameters per second) and ``gbytes`` (GB/s at
    28 bytes per parameter) by contestant; ``vote``: seconds; ``over``: how many times as fast as each ours is, in each
    repeat; ``disturbed``: share of the repeats in which other programs took more than 5 % of a processor."""

    params: int
    threads: int
    tile: int | None
    disturbed: float
    seconds: dict[str, float]
    mparams: dict[str, float]
    gbytes: dict[str, float]
    vote: float
    over: dict[str, list[float]]


class Ours:
    """The engine's step, with the time of its parts."""

    def __init__(self, params: int, tile: int | None) -> None:
        layers = max(1, round(params / (12 * WIDTH**2)))
        torch.manual_seed(0)
        model = GPT(GPTConfig(layers=layers, heads=16, width=WIDTH, context=CONTEXT))
        self.params = sum(param.numel() for param in model.parameters())
        plan = onecopy.offload(onecopy.stage(2, dtype="bf16", step=onecopy.StepPolicy(tile=tile)))
        self.engine: Any = onecopy.initialize(
            model, plan, optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4, weight_decay=0.01, fused=True)
        )
        self.tokens = torch.randint(256, (1, CONTEXT))
        stepper = self.engine._core.stepper
        self.taken: dict[str, float] = {}
        stepper.agree, stepper.apply = self._timed("vote", stepper.agree), self._timed("apply", stepper.apply)

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            began = time.perf_counter()
            answer = call(*args)
            self.taken[name] = time.perf_counter() - began
            return answer

        return timed

    def __call__(self) -> float:
        self.engine(self.tokens, self.tokens).backward()
        self.engine.step()
        return self.taken["apply"]


class Torch:
    """Fused AdamW over whole tensors."""

    def __init__(self, params: int) -> None:
        self.master = torch.nn.Parameter(torch.randn(params) * 0.02)
        self.weights, self.gradients = self.master.detach().bfloat16(), torch.randn(params).bfloat16()
        self.master.grad = torch.empty(params)
        self.optimizer = torch.optim.AdamW([self.master], lr=3e-4, weight_decay=0.01, fused=True)

    @torch.no_grad()
    def __call__(self) -> float:
        assert self.master.grad is not None
        began = time.perf_counter()
        self.master.grad.copy_(self.gradients)
        self.optimizer.step()
        self.weights.copy_(self.master)
        return time.perf_counter() - began


class DeepSpeed:
    """One step of ``DeepSpeedCPUAdam`` per call, in a process of its own that sleeps between; :meth:`close` ends it."""

    def __init__(self, python: str, params: int, threads: int) -> None:
        self.process = subprocess.Popen(
            [python, str(Path(__file__).with_name("_deepspeed_step.py")), str(params), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": "cpu"},
            text=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self._asks, self._answers = self.process.stdin, self.process.stdout
        if self._answers.readline().strip() != "ready":
            raise RuntimeError(f"{python} cannot run DeepSpeedCPUAdam; its output is above")

    def __call__(self) -> float:
        self._asks.write("step\n")
        self._asks.flush()
        return float(self._answers.readline())

    def close(self) -> None:
        self._asks.close()
        self.process.wait()


def rounds(contestants: dict[str, Callable[[], float]], ours: Ours, args: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Seconds by contestant and of the vote. The first two rounds only warm up; disturbed ones do not count while there is
    time left to wait for quiet ones."""
    pids = [os.getpid(), *(c.process.pid for c in contestants.values() if isinstance(c, DeepSpeed))]
    give_up, done = time.monotonic() + args.quiet, -2
    while done < args.repeats:
        began, others = time.monotonic(), Others(*pids)
        taken = {name: step() for name, step in contestants.items()}
        disturbed = others.taken() > 0.05 * (time.monotonic() - began)
        if done >= 0 and disturbed and time.monotonic() < give_up:
            time.sleep(0.5)
            continue
        if done >= 0:
            yield {**taken, "vote": ours.taken["vote"], "disturbed": disturbed}
        done += 1


def measure(contestants: dict[str, Callable[[], float]], ours: Ours, threads: int, args: argparse.Namespace) -> Result:
    """Let ``contestants`` take turns."""
    taken = list(rounds(contestants, ours, args))
    middle = {name: statistics.median(row[name] for row in taken) for name in contestants}
    return Result(
        params=ours.params,
        threads=threads,
        tile=args.tile,
        disturbed=sum(row["disturbed"] for row in taken) / len(taken),
        seconds=middle,
        mparams={name: ours.params / seconds / 1e6 for name, seconds in middle.items()},
        gbytes={name: STEP_BYTES * ours.params / seconds / 1e9 for name, seconds in middle.items()},
        vote=statistics.median(row["vote"] for row in taken),
        over={name: [row[name] / row["ours"] for row in taken] for name in contestants if name != "ours"},
    )


def report(found: Result) -> str:
    lines = [f"{found.params:,} parameters, {found.threads} threads ({found.disturbed:.0%} of the repeats disturbed)"]
    lines += [
        f"  {name:<10} {found.seconds[name]:7.4f} s {found.mparams[name]:7.0f} Mparam/s {found.gbytes[name]:6.2f} GB/s"
        for name in found.seconds
    ]
    lines.append(f"  vote       {found.vote:7.4f} s")
    for name, ratios in found.over.items():
        lines.append(f"  ours / {name:<10} {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=50_000_000, help="about; whole transformer blocks are taken")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--quiet", type=float, default=60, help="seconds to wait, at most, for undisturbed repeats")
    parser.add_argument("--tile", type=int, help="elements stepped at a time (default: the engine's own)")
    parser.add_argument("--deepspeed-python", help="an interpreter with torch and deepspeed; without it, it is left out")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    ours, results = Ours(args.params, args.tile), []
    for threads in args.threads:
        torch.set_num_threads(threads)
        contestants: dict[str, Callable[[], float]] = {
            "ours": ours,
            "torch": Torch(ours.params),
            "copy": Copy(STEP_BYTES * ours.params // 2),
        }
        with ExitStack() as stack:
            if args.deepspeed_python:
                contestants["deepspeed"] = peer = DeepSpeed(args.deepspeed_python, ours.params, threads)
                stack.callback(peer.close)
            results.append(measure(contestants, ours, threads, args))
        if not args.json:
            print(report(results[-1]), flush=True)
    if args.json:
        print(json.dumps([asdict(found) for found in results]))


if __name__ == "__main__":
    main()
