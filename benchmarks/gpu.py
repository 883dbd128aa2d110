"""One accelerator: speed, memory and overlap of a 1B GPT in bfloat16, and two ranks that share it for correctness.

    python benchmarks/gpu.py

1. At world size 1, plain torch, FSDP2 and onecopy's stages train a GPT of 1.0e9 parameters: tokens per second, model
   FLOPs utilisation (MFU), peak allocated memory, and how much of the work on side streams ran under other work.
   MFU = tokens/s x FLOPs per token / peak FLOPs of the device; FLOPs per token = 6 x (parameters that multiply) +
   12 x layers x width x context (attention, not halved for the causal mask, nothing counted for recomputation).
2. Two gloo ranks on the one device train a 25M GPT in float32 under every stage; their losses must be those of plain
   torch on both ranks' batches, or the streams' ownership of buffers is broken. Exit status 1 when they are not.

Each mode runs in processes of its own. The whole takes less than five minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from _common import free_port
from modes import build
from onecopy.gpt import GPT, GPTConfig, config
from onecopy.text import Rows, open_corpora

SPEED_MODES = ("plain", "fsdp2", "onecopy0", "onecopy1", "onecopy2", "onecopy3")
TRUTH_MODES = ("onecopy0", "onecopy1", "onecopy2", "onecopy3", "onecopy3-held")
BILLION = GPTConfig(layers=20, heads=16, width=2048, context=1024)
# Dense bfloat16 peaks from the vendors' data sheets, FLOPs per second.
PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12}
# The sum of two ranks' gradients and one process's mean differ in the last bit; this is far above it and far below a race.
TOLERANCE = 1e-3


@dataclass
class Task:
    """What one process does. ``measure``: time, profile and report instead of only recording losses."""

    mode: str
    model: str
    dtype: str
    device: str
    rows: int
    steps: int
    rank: int = 0
    world: int = 1
    port: int = 0
    measure: bool = True


def shape(name: str) -> GPTConfig:
    return BILLION if name == "1b" else config(name)


def run_task(task: Task) -> dict[str, Any]:
    """Train as ``task`` says, in this process."""
    _join(task)
    device = torch.device(task.device)
    torch.manual_seed(0)
    with device:
        model = GPT(shape(task.model))
    trainer = build(task.mode, model, task.dtype)
    del model
    rows = Rows(open_corpora((), shape(task.model).context)[0], shape(task.model).context)

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        # A single process trains on what two ranks would share, so that both see the same global batch.
        x, y = rows.micro_batch(step * task.rows * task.world, 0, task.rank, task.world, task.rows)
        return x.to(device), y.to(device)

    if not task.measure:
        return {"losses": [float(trainer.step(*batch(step))) for step in range(task.steps)]}
    batches = [batch(step) for step in range(task.steps)]
    for x, y in batches[:3]:
        loss = trainer.step(x, y)
    _synchronize(device)
    _reset_peak(device)
    begin = time.perf_counter()
    for x, y in batches:
        loss = trainer.step(x, y)
    _synchronize(device)
    seconds = (time.perf_counter() - begin) / task.steps
    answer = {"seconds": seconds, "loss": float(loss), "peak": _peak(device), "ledger": trainer.ledger()}
    answer["overlap"] = _overlap(lambda: trainer.step(*batches[0]), device)
    return answer


def _join(task: Task) -> None:
    # Both ranks of the second part are on device 0, so LOCAL_RANK says 0 on both.
    names = {"RANK": task.rank, "WORLD_SIZE": task.world, "LOCAL_RANK": 0, "MASTER_PORT": task.port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    on_device = task.device != "cpu" and task.world == 1
    dist.init_process_group(dist.get_default_backend_for_device(task.device) if on_device else "gloo")


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()


def _reset_peak(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).reset_peak_memory_stats()


def _peak(device: torch.device) -> int:
    return 0 if device.type == "cpu" else int(torch.get_device_module(device).max_memory_allocated())


def _overlap(step: Any, device: torch.device) -> dict[str, Any]:
    """Where one step's device work ran: milliseconds per stream, and of each side stream's the share during which the
    busiest stream worked too."""
    if device.type == "cpu":
        return {}
    with torch.profiler.profile() as profiler:
        step()
        _synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    streams: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            streams.setdefault(event["args"]["stream"], []).append((event["ts"], event["ts"] + event["dur"]))
    busy = {stream: _union(spans) for stream, spans in streams.items()}
    total = {stream: sum(stop - start for start, stop in spans) for stream, spans in busy.items()}
    main = max(total, key=lambda stream: total[stream], default=None)
    return {
        str(stream): {
            "ms": total[stream] / 1e3,
            "main": stream == main,
            "under_main": None if stream == main else _shared(spans, busy[main]) / max(total[stream], 1e-9),
        }
        for stream, spans in busy.items()
        if main is not None
    }


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """``spans`` in order with those that touch joined."""
    joined: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def _shared(left: list[tuple[float, float]], right: list[tuple[float, float]]) -> float:
    """Length of the intersection of two lists of disjoint spans in order."""
    shared, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        shared += max(0.0, min(left[i][1], right[j][1]) - max(left[i][0], right[j][0]))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return shared


def start(tasks: list[Task], limit: float = 120.0) -> list[dict[str, Any]]:
    """Run ``tasks`` side by side, each in a process; their answers. Raises ``RuntimeError`` when one fails."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        ranks = []
        for number, task in enumerate(tasks):
            said = json.dumps({**asdict(task), "port": port})
            command = [sys.executable, __file__, "--task", said, "--answer", str(Path(folder) / str(number))]
            ranks.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        try:
            for task, process in zip(tasks, ranks, strict=True):
                _, error = process.communicate(timeout=limit)
                if process.returncode:
                    raise RuntimeError(f"{task.mode}, rank {task.rank}, failed:\n{error[-3000:]}")
        finally:
            for process in ranks:
                process.kill()
        return [json.loads((Path(folder) / str(number)).read_text()) for number in range(len(tasks))]


def speed(args: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    tokens, flops = args.rows * shape(args.model).context, shape(args.model).flops_per_token()
    for mode in SPEED_MODES:
        try:
            (answer,) = start([Task(mode, args.model, "bf16", args.device, args.rows, args.steps)])
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            # One mode that does not fit must not cost the others their time on the device.
            print(f"{mode}: {error}", flush=True)
            found.append({"mode": mode, "error": str(error)})
            continue
        rate = tokens / answer["seconds"]
        answer |= {"mode": mode, "tokens_per_second": rate, "mfu": rate * flops / args.peak if args.peak else None}
        side = {s: o for s, o in answer["overlap"].items() if not o["main"]}
        overlap = ", ".join(f"stream {s}: {o['ms']:.2f} ms, {o['under_main']:.0%} overlapped" for s, o in side.items())
        mfu = f"{answer['mfu']:.1%}" if args.peak else "unknown"
        memory = f"{answer['peak'] / 2**30:.2f} GiB"
        print(f"{mode}: {rate:.0f} tokens/s, MFU {mfu}, peak {memory}, loss {answer['loss']:.4f}; {overlap}", flush=True)
        found.append(answer)
    return found


def truth(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Losses of two ranks that share the device, beside plain torch on the whole batch."""
    name = "25m" if args.device != "cpu" else args.model
    (plain,) = start([Task("plain", name, "fp32", args.device, 4, 8, measure=False)])
    found = []
    for mode in TRUTH_MODES:
        two = start([Task(mode, name, "fp32", args.device, 2, 8, rank, 2, measure=False) for rank in range(2)])
        losses = [sum(pair) / 2 for pair in zip(*(answer["losses"] for answer in two), strict=True)]
        off = max(abs(a - b) for a, b in zip(losses, plain["losses"], strict=True))
        good = "right" if off <= TOLERANCE else "WRONG"
        print(f"2 ranks, {mode}: losses differ from plain torch by at most {off:.2e}: {good}", flush=True)
        found.append({"mode": mode, "losses": losses, "plain": plain["losses"], "off": off, "right": off <= TOLERANCE})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="1b", help="1b, or the name of a smaller GPT")
    parser.add_argument("--rows", type=int, default=8, help="sequences per step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", help="cpu tries the script itself out, with --model tiny; default: the accelerator")
    parser.add_argument("--peak", type=float, help="the device's peak FLOPs per second in bfloat16, where not known by name")
    parser.add_argument("--json", type=Path, help="write everything here")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        args.answer.write_text(json.dumps(run_task(Task(**json.loads(args.task)))))
        # Left to itself a process group may wait for a peer that has already gone.
        os._exit(0)
    if args.device is None:
        if not torch.accelerator.is_available():
            print("no accelerator: torch sees no device beside the CPU; this benchmark needs one", file=sys.stderr)
            return 2
        args.device = f"{torch.accelerator.current_accelerator()}:0"
    name = "cpu" if args.device == "cpu" else torch.get_device_module(args.device).get_device_name()
    args.peak = args.peak or next((peak for part, peak in PEAKS.items() if part in name), None)
    print(f"{name}, torch {torch.__version__}, {shape(args.model).parameters / 1e6:.0f}M parameters, peak {args.peak} FLOP/s")
    found: dict[str, Any] = {"device": name, "speed": speed(args), "truth": truth(args)}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0 if all(one["right"] for one in found["truth"]) else 1


if __name__ == "__main__":
    sys.exit(main())
