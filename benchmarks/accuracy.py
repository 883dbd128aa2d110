"""What the planner predicts beside what engines do: bytes owned and sent, peaks of memory, and the time of a step.

    python benchmarks/accuracy.py                          # the table of docs/accuracy.md
    python benchmarks/accuracy.py --ranks 2 --stages 3 --models 14m --dtypes fp32 --json result.json

Every case is trained in processes of its own, one for each rank: a GPT (sequences of 256 tokens) that is predicted from the
meta device alone. *owned* and *sent* are all states at rest and all collectives; *accounted* is the peak of what the engine
allocates; *process* is the peak of the resident set in the second step (``VmHWM``, reset through
``/proc/self/clear_refs``) above the process before the model was built, with libraries loaded and kernels run once, and
glibc told to hand freed memory back (``mallopt``: blocks from 64 kB are mapped by themselves, the heap is trimmed at 64
kB): the engine has it keep freed memory, which is faster. What other ranks wrote is counted by the system where this
one reads it in shared memory, so it is added to the prediction.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import onecopy
from _common import free_port, join, peak, reset_peak, resident, trim, warm_kernels
from onecopy.cluster import Cluster, gpu
from onecopy.gpt import GPT, GPTConfig
from onecopy.planner.activations import Traced
from onecopy.planner.estimate import Work
from onecopy.planner.report import plan_report, schedule_for
from onecopy.planner.sources import guess_inputs
from onecopy.planner.subject import facts, facts_from_model
from onecopy.schedule.messages import message_slots, on_shelf

SEQ = 256
# By their parameters; sequences of a micro-batch.
MODELS = {
    "4m": (GPTConfig(layers=4, heads=4, width=256, context=SEQ, vocab=4096), 2),
    "14m": (GPTConfig(layers=6, heads=6, width=384, context=SEQ, vocab=8192), 1),
    "30m": (GPTConfig(layers=8, heads=8, width=512, context=SEQ, vocab=8192), 1),
    "1.3b": (GPTConfig(layers=24, heads=16, width=2048, context=2048, vocab=50304), 2),  # for gpu_accuracy.py
}
MB = 1e6
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    model: str
    ranks: int
    stage: int
    dtype: str
    accumulation: int = 1
    recompute: bool = False

    @property
    def plan(self) -> onecopy.Plan:
        return onecopy.stage(self.stage, dtype=self.dtype, accumulation=self.accumulation)

    def build(self) -> GPT:
        config, _ = MODELS[self.model]
        return GPT(GPTConfig(**{**asdict(config), "recompute": self.recompute}))

    @property
    def batch(self) -> int:
        return MODELS[self.model][1]

    def __str__(self) -> str:
        again = ", recomputed" if self.recompute else ""
        return f"{self.model} stage {self.stage} {self.dtype} x{self.accumulation}{again} on {self.ranks}"


def predict(case: Case, kind: str = "cpu") -> dict[str, Any]:
    """What the planner says of ranks on ``kind``, from the model on the meta device."""
    with torch.device("meta"):
        model = case.build()
    subject, plan, cluster = facts_from_model(model, inputs=guess_inputs(model)), case.plan, Cluster(gpu(kind), case.ranks)
    seq = MODELS[case.model][0].context
    known, work = facts(subject, plan, case.ranks), Work(case.batch, seq, case.recompute)
    traced = Traced(subject, plan, seq)
    traced.run(case.batch, False)
    states = plan_report(known, plan, cluster, work)
    # The model checkpoints its own blocks, which the trace sees.
    whole = plan_report(known, plan, cluster, Work(case.batch, seq, False), traced)
    schedule = schedule_for(plan, known, cluster)
    spread, piece = message_slots(schedule)
    shelf = sum(b.layout.shard * getattr(torch, b.dtype).itemsize for b in schedule.buffers if on_shelf(b))
    # Every peer's messages and shards, and of what peers send to several ranks this rank's part.
    mapped = (case.ranks - 1) * (spread.bytes + shelf) + piece.bytes
    device = states["per_rank"]["device"]
    return {
        "owned": {kind: device[kind] for kind in ("parameter", "gradient", "master", "moments")},
        "sent": states["traffic"]["collectives"],
        "accounted": device["peak"],
        "process": whole["per_rank"]["device"]["peak"] + (mapped if case.ranks > 1 else 0),
        "at": whole["peak"]["device"]["at"],
        "activations": whole["per_rank"]["device"].get("activations", 0),
        "time": states["time"],
    }


def hand_back_at_once() -> None:
    """Make glibc map every block from 64 kB by itself, so that what is freed leaves the process. By itself it keeps freed
    blocks for later, which the engine asks it to as that is faster; then a process has gaps that no tensor is in."""
    for option, value in ((M_MMAP_THRESHOLD, 1 << 16), (M_TRIM_THRESHOLD, 1 << 16), (M_TOP_PAD, 1 << 12)):
        ctypes.CDLL(None).mallopt(option, value)


def warm_up(case: Case) -> None:
    """Run everything once. The pages of a library are in a process once it has used them, and libraries of kernels keep
    buffers by the sizes that they have met: neither is part of a plan."""
    config, batch = MODELS[case.model]
    x = torch.randint(0, config.vocab, (batch, SEQ))
    GPT(replace(config, layers=1)).to(torch.bfloat16 if case.dtype == "bf16" else torch.float32)(x, x).backward()
    engine = onecopy.initialize(
        GPT(replace(config, layers=1, heads=1, width=16, recompute=case.recompute)),
        case.plan,
        optimizer=lambda params: torch.optim.AdamW(params, fused=True),
    )
    hand_back_at_once()
    for _ in range(2 * case.accumulation):
        engine(x, x).backward()
        engine.step()
    engine.measured()
    engine.close()


def train(case: Case, rank: int, port: int) -> dict[str, Any]:
    """One rank: two steps, the second measured."""
    hand_back_at_once()
    join(rank, case.ranks, port)
    warm_kernels()
    warm_up(case)
    trim()
    start = resident()
    torch.manual_seed(0)
    engine = onecopy.initialize(case.build(), case.plan, optimizer=lambda params: torch.optim.AdamW(params, fused=True))
    hand_back_at_once()
    draw = torch.Generator().manual_seed(rank)
    vocab = MODELS[case.model][0].vocab

    def step(micro: int) -> None:
        for index in range(micro):
            engine.set_boundary(index == micro - 1)
            x, y = (torch.randint(0, vocab, (case.batch, SEQ), generator=draw) for _ in range(2))
            engine(x, y).backward()
            engine.step()

    step(1)
    dist.barrier()
    trim()
    reset_peak()
    began, work = time.perf_counter(), time.process_time()
    step(case.accumulation)
    took = time.perf_counter() - began, time.process_time() - work
    measured = engine.measured()
    found = {
        "owned": measured["resident"]["device"],
        "sent": measured["collectives"],
        "accounted": measured["peak"]["device"]["total"],
        "process": peak() - start,
        "seconds": took[0],
        "work": took[1],
    }
    return found


def _rank(case: Case, rank: int, port: int, pipe: Connection) -> None:
    pipe.send(train(case, rank, port))
    dist.barrier()
    os._exit(0)


def measure(case: Case) -> list[dict[str, Any]]:
    """What every rank says. Raises ``EOFError`` when one fails, whose traceback is on standard error."""
    context, port = multiprocessing.get_context("forkserver"), free_port()
    context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "onecopy.planner.report"])
    pipes, ranks = [], []
    for rank in range(case.ranks):
        mine, theirs = context.Pipe(False)
        ranks.append(context.Process(target=_rank, args=(case, rank, port, theirs), daemon=True))
        ranks[-1].start()
        theirs.close()
        pipes.append(mine)
    answers = [pipe.recv() for pipe in pipes]
    for process in ranks:
        process.join()
    return answers


def compare(case: Case) -> dict[str, Any]:
    """Prediction and measurement of one case; of the rank that took most where they differ."""
    said, ranks = predict(case), measure(case)
    found = {kind: max(rank[kind] for rank in ranks) for kind in ("accounted", "process", "seconds", "work")}
    return {
        **asdict(case),
        "owned": all(rank["owned"] == said["owned"] for rank in ranks),
        "sent": all(rank["sent"] == said["sent"] for rank in ranks),
        **{f"{kind}_said": said[kind] for kind in ("accounted", "process")},
        **{f"{kind}_found": found[kind] for kind in ("accounted", "process")},
        **{f"{kind}_error": said[kind] / found[kind] - 1 for kind in ("accounted", "process")},
        "at": said["at"],
        "activations": said["activations"],
        "step_said": said["time"]["step"],
        "step_found": found["seconds"],
        "work_found": found["work"],
    }


def row(one: dict[str, Any]) -> str:
    equal = ("equal", "DIFFER")
    cells = [
        one["model"], one["ranks"], one["stage"], one["dtype"], one["accumulation"], "on" if one["recompute"] else "off",
        equal[not one["owned"]], equal[not one["sent"]],
        f"{one['accounted_said'] / MB:.1f}", f"{one['accounted_found'] / MB:.1f}", f"{one['accounted_error']:+.1%}",
        f"{one['process_said'] / MB:.1f}", f"{one['process_found'] / MB:.1f}", f"{one['process_error']:+.1%}",
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


HEAD = (
    "| model | ranks | stage | dtype | accumulation | recompute | owned | sent | accounted, predicted MB | measured | error "
    "| process, predicted MB | measured | error |\n|" + " --- |" * 14
)


def cases(args: argparse.Namespace) -> Iterator[Case]:
    chosen = (args.models, args.ranks, args.stages, args.dtypes, args.accumulations, args.recompute)
    for model, ranks, stage, dtype, accumulation, recompute in itertools.product(*chosen):
        yield Case(model, ranks, stage, dtype, accumulation, bool(recompute))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["4m", "14m", "30m"], choices=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--accumulations", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--recompute", nargs="+", type=int, default=[0, 1], help="0: as it is, 1: blocks computed again")
    parser.add_argument("--json", type=Path, help="every result, a line each; those that are there already are not run again")
    args = parser.parse_args()
    known = [json.loads(line) for line in args.json.read_text().splitlines()] if args.json and args.json.exists() else []
    print(HEAD, flush=True)
    for case in cases(args):
        if any(one | asdict(case) == one for one in known):
            continue
        one = compare(case)
        print(row(one), flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps(one) + "\n")


if __name__ == "__main__":
    main()
