"""A GPT whose states take about 6 GB, trained with all of them on disk in a process that may not have more than 2 GB.

    python benchmarks/capped.py --path /local/nvme               # prints losses, seconds and the highest resident memory
    python benchmarks/capped.py --uncapped                       # the same run with everything in memory, to compare with

The engine keeps its own caps, and where a memory cgroup can be made (root, cgroup v1 or v2) the kernel holds the whole
process, interpreter and torch included, to ``--limit``. The losses of the two runs are equal to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch

import onecopy
from onecopy.gpt import GPT, GPTConfig

CONFIG = GPTConfig(layers=27, heads=16, width=1024, context=128, recompute=True)


def enclose(limit: int) -> str:
    """Put this process into a memory cgroup of ``limit`` bytes; says what came of it."""
    for root, name in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        folder = Path(root) / "onecopy-capped"
        try:
            folder.mkdir(exist_ok=True)
            (folder / name).write_text(str(limit))
            (folder / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:  # no such controller here, or no right to it
            continue
        return f"cgroup {folder} holds the process to {limit / 1e9:.2f} GB"
    return "no memory cgroup can be made here: only the engine's caps hold"


def highest() -> float:
    """The most memory this process had resident at a time, in GB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", default=".", help="folder of the scratch files")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--limit", type=float, default=2.0, help="GB the process may have")
    parser.add_argument("--uncapped", action="store_true", help="everything in memory")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    print("none" if options.uncapped else enclose(int(options.limit * 1e9)))
    with torch.device("meta"):
        model = GPT(CONFIG)
    units = onecopy.Units(min_numel=0)
    if options.uncapped:
        plan = onecopy.stage(3, dtype="bf16", clip=1.0, units=units)
    else:
        caps = onecopy.Caps(device=400 << 20, host=1000 << 20)
        plan = onecopy.infinity(options.path, dtype="bf16", clip=1.0, units=units, caps=caps)
    torch.manual_seed(0)
    engine = onecopy.initialize(model, plan, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3, fused=True))
    losses, seconds = [], []
    generator = torch.Generator().manual_seed(1)
    for step in range(options.steps):
        tokens = torch.randint(0, 256, (2, CONFIG.context + 1), generator=generator)
        start = time.perf_counter()
        loss = engine(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        before = time.perf_counter()
        engine.step()
        losses.append(loss.item())
        seconds.append((before - start, time.perf_counter() - before))
        passes, stepped = seconds[-1]
        print(f"step {step}: loss {losses[-1]:.6f}, forward and backward {passes:.1f} s, step {stepped:.1f} s", flush=True)
    states = sum(sum(kinds.values()) for kinds in engine.measured()["resident"].values())
    print(f"{CONFIG.parameters / 1e6:.0f}M parameters, {states / 1e9:.2f} GB of states, at most {highest():.2f} GB resident")
    if options.json:
        found = {"losses": losses, "seconds": seconds, "states": states, "resident": highest()}
        print(json.dumps({**found, **engine.measured()}))
    engine.close()


if __name__ == "__main__":
    main()
