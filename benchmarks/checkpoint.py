"""Saving and loading beside the disk itself, torch.distributed.checkpoint and DeepSpeed, and what an asynchronous save costs.

    python benchmarks/checkpoint.py --path /local/nvme --gb 1 --rounds 5
    python benchmarks/checkpoint.py --path /local/nvme --deepspeed-python ~/deepspeed/bin/python --json

One rank trains ``--gb`` of fp32 weights and AdamW moments. Every mode lives in a process of its own with its own state;
in each round each mode in turn saves, and then loads with its files dropped from the page cache. **raw** writes as many
bytes of memory to one file, in blocks of 8 MiB, and calls ``fsync``; it reads them back to where they were. **direct** does
the same past the page cache (O_DIRECT), two blocks at a time. Every other mode's save is timed until its files are durable:
torch's does that itself, DeepSpeed's files are given to ``fsync`` after. Ratios are medians over the rounds of the seconds
of that one of raw and direct which is faster (by its median) / the mode's, of the same round; memory is the peak of the
resident set above what it was before the call.

**hold** is how long an asynchronous ``engine.save`` keeps the caller, beside a copy of the same tensors to memory that
exists, by ``Tensor.copy_``.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

BLOCK = 8 << 20
WIDTH = 2048


def peak_above(call: Callable[[], Any]) -> tuple[float, int]:
    """Seconds that ``call`` takes, and the bytes by which the resident set grew at most meanwhile (Linux)."""
    from _common import peak, reset_peak, resident, trim

    trim()
    reset_peak()
    before, began = resident(), time.perf_counter()
    call()
    return time.perf_counter() - began, max(peak() - before, 0)


def model_of(size: float) -> nn.Module:
    """A model that has ``size`` bytes with its two moments, in fp32."""
    torch.manual_seed(0)
    layers = max(round(size / 12 / (WIDTH * WIDTH)), 1)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def forget(folder: Path) -> None:
    """Drop the files in ``folder`` from the page cache."""
    for path in files_of(folder):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# The modes: ``save(folder)`` and ``load(folder)`` of one state.


class Raw:
    """The disk itself."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.buffer = torch.randint(0, 255, (size,), dtype=torch.uint8).numpy().data

    def save(self, folder: Path) -> None:
        folder.mkdir()
        with open(folder / "bytes", "wb", buffering=0) as file:
            for at in range(0, self.size, BLOCK):
                file.write(self.buffer[at : at + BLOCK])
            os.fsync(file.fileno())

    def load(self, folder: Path) -> None:
        with open(folder / "bytes", "rb", buffering=0) as file:
            for at in range(0, self.size, BLOCK):
                file.readinto(self.buffer[at : at + BLOCK])


class Direct:
    """The disk itself, past the page cache: two threads, each with one block in flight."""

    def __init__(self, size: int) -> None:
        self.size = -(-size // BLOCK) * BLOCK
        self.buffer = mmap.mmap(-1, self.size)  # pages, as O_DIRECT wants them
        self.buffer.write(torch.randint(0, 255, (self.size,), dtype=torch.uint8).numpy().data)

    def move(self, path: Path, flags: int, call: Callable[[int, list[memoryview], int], int]) -> None:
        file, whole = os.open(path, flags | os.O_DIRECT, 0o644), memoryview(self.buffer)
        try:
            with ThreadPoolExecutor(2) as threads:
                for moved in threads.map(lambda at: call(file, [whole[at : at + BLOCK]], at), range(0, self.size, BLOCK)):
                    assert moved == BLOCK, f"{moved} bytes of a block of {BLOCK} were moved"
            os.fsync(file)
        finally:
            os.close(file)

    def save(self, folder: Path) -> None:
        folder.mkdir()
        self.move(folder / "bytes", os.O_WRONLY | os.O_CREAT, os.pwritev)

    def load(self, folder: Path) -> None:
        self.move(folder / "bytes", os.O_RDONLY, os.preadv)


class OneCopy:
    """``engine.save`` and ``engine.load``."""

    def __init__(self, size: int) -> None:
        import onecopy

        adamw = lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True)  # noqa: E731
        self.engine = onecopy.initialize(model_of(size), onecopy.stage(2), optimizer=adamw)
        self.engine(torch.ones(1, WIDTH)).sum().backward()
        self.engine.step()

    def save(self, folder: Path) -> None:
        self.engine.save(folder)

    def load(self, folder: Path) -> None:
        self.engine.load(folder)

    def hold(self, folder: Path) -> list[float]:
        """Seconds of the call, until it is durable, and of a copy of the tensors."""
        began = time.perf_counter()
        self.engine.save(folder, asynchronous=True)
        held = time.perf_counter() - began
        self.engine._saves.settle()
        written = time.perf_counter() - began
        states = self.engine.optimizer.state  # type: ignore[union-attr]
        tensors = [*states, *(value for state in states.values() for value in state.values() if value.numel() > 1)]
        if not hasattr(self, "copies"):
            self.copies = [torch.empty_like(tensor).fill_(1) for tensor in tensors]
        began = time.perf_counter()
        for copy, tensor in zip(self.copies, tensors, strict=True):
            copy.copy_(tensor.detach())
        return [held, written, time.perf_counter() - began]


class Torch:
    """torch.distributed.checkpoint of model and optimizer state."""

    def __init__(self, size: int) -> None:
        self.model = model_of(size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.model(torch.ones(1, WIDTH)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()["state"]}

    def save(self, folder: Path) -> None:
        from torch.distributed import checkpoint

        checkpoint.save(self.state(), storage_writer=checkpoint.FileSystemWriter(folder), no_dist=True)

    def load(self, folder: Path) -> None:
        from torch.distributed import checkpoint

        checkpoint.load(self.state(), storage_reader=checkpoint.FileSystemReader(folder), no_dist=True)


class DeepSpeed:
    """``save_checkpoint`` and ``load_checkpoint`` at stage 2."""

    def __init__(self, size: int) -> None:
        import deepspeed  # type: ignore[import-not-found]

        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29599")
        deepspeed.init_distributed("gloo")
        model = model_of(size)
        setup: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True}
        setup["zero_optimization"] = {"stage": 2}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        self.engine, *_ = deepspeed.initialize(model=model, config=setup, optimizer=optimizer)
        self.engine.backward(self.engine(torch.ones(1, WIDTH)).sum())
        self.engine.step()

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder))
        for path in files_of(folder):
            with open(path, "rb") as file:
                os.fsync(file.fileno())

    def load(self, folder: Path) -> None:
        self.engine.load_checkpoint(str(folder))


MODES: dict[str, Callable[[int], Any]] = {
    "raw": Raw,
    "direct": Direct,
    "onecopy": OneCopy,
    "torch": Torch,
    "deepspeed": DeepSpeed,
}


def serve(mode: str, size: int, folder: Path) -> None:
    """Answer commands from stdin, one line of JSON each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer
    torch.set_num_threads(1)
    made, place = MODES[mode](size), folder / mode
    print(json.dumps("ready"), file=answers, flush=True)
    for command in sys.stdin:
        what = command.strip()
        if what == "load":
            forget(place)
        else:
            shutil.rmtree(place, ignore_errors=True)
            os.sync()
        if what == "hold":
            found: list[float] = made.hold(place)
        else:
            found = list(peak_above(lambda what=what: getattr(made, what)(place)))  # type: ignore[misc]
        bytes_there = sum(path.stat().st_size for path in files_of(place))
        print(json.dumps([*found, bytes_there]), file=answers, flush=True)


def start(mode: str, args: argparse.Namespace) -> subprocess.Popen[str]:
    import onecopy

    python = args.deepspeed_python if mode == "deepspeed" else sys.executable
    command = [python, __file__, "--serve", mode, "--path", args.path, "--gb", str(args.gb)]
    paths = [
        str(Path(onecopy.__file__).parents[1]),
        os.environ.get("PYTHONPATH", ""),
    ]  # DeepSpeed's Python need not have ours
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def ask(child: subprocess.Popen[str], what: str) -> Any:
    assert child.stdin is not None and child.stdout is not None
    if what:
        child.stdin.write(what + "\n")
        child.stdin.flush()
    line = child.stdout.readline()
    if not line:
        raise SystemExit(f"a mode ended: {' '.join(map(str, child.args))}")  # type: ignore[arg-type]
    return json.loads(line)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    modes = [mode for mode in MODES if mode != "deepspeed" or args.deepspeed_python]
    children = {mode: start(mode, args) for mode in modes}
    for child in children.values():
        ask(child, "")
    rows: dict[str, dict[str, list[Any]]] = {mode: {"save": [], "load": []} for mode in modes}
    holds = []
    for count in range(args.rounds + 1):
        turn = modes[count % len(modes) :] + modes[: count % len(modes)]
        for what in ("save", "load"):
            for mode in turn:
                found = ask(children[mode], what)
                if count:  # the first round is for warming up
                    rows[mode][what].append(found)
        found = ask(children["onecopy"], "hold")
        if count:
            holds.append(found)
    for child in children.values():
        assert child.stdin is not None
        child.stdin.close()
        child.wait(60)
    return {"rows": rows, "holds": holds}


def median_of(found: list[Any]) -> float:
    return statistics.median(each[0] for each in found)


def report(result: dict[str, Any]) -> None:
    rows = result["rows"]
    fastest = {what: min(("raw", "direct"), key=lambda mode: median_of(rows[mode][what])) for what in ("save", "load")}
    print(f"The disk: {fastest['save']} writes, {fastest['load']} reads.\n")
    print("| mode | GB | save s | disk / save | load s | disk / load | memory in save MB | memory in load MB |")
    print("|---" * 8 + "|")
    for mode, found in rows.items():
        cells = [mode, f"{found['save'][0][2] / 1e9:.2f}"]
        for what in ("save", "load"):
            seconds = [each[0] for each in found[what]]
            ratios = [raw[0] / own for raw, own in zip(rows[fastest[what]][what], seconds, strict=True)]
            cells += [f"{statistics.median(seconds):.2f}", f"{statistics.median(ratios):.2f}"]
        cells += [f"{max(each[1] for each in found[what]) / 1e6:.0f}" for what in ("save", "load")]
        print("| " + " | ".join(cells) + " |")
    held, written, copy = (statistics.median(each[at] for each in result["holds"]) for at in range(3))
    ratio = statistics.median(each[0] / each[2] for each in result["holds"])
    print(f"\nasynchronous: holds {held:.3f} s, {ratio:.2f} x a copy of the tensors ({copy:.3f} s)", end="")
    print(f"; durable after {written:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--path", required=True, help="a folder on the disk that is measured")
    parser.add_argument("--gb", type=float, default=1.0, help="bytes of the state / 1e9")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--deepspeed-python", help="interpreter that has DeepSpeed")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, int(args.gb * 1e9), Path(args.path))
        return
    result = measure(args)
    if args.json:
        print(json.dumps(result))
    else:
        report(result)


if __name__ == "__main__":
    main()
