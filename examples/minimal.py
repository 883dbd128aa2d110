"""A plain PyTorch loop with every optimizer state and gradient kept once across the ranks.

    onecopy launch --nproc 2 examples/minimal.py --steps 50

Alone (``python examples/minimal.py``) it trains the same model on one process.
"""

import argparse
import os

import torch

import onecopy
from onecopy.gpt import GPT, config
from onecopy.text import Rows, open_corpora

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--stage", type=int, default=2)
args = parser.parse_args()

torch.manual_seed(0)
model = GPT(config("tiny"))
engine = onecopy.initialize(
    model,
    onecopy.stage(args.stage, clip=1.0),
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
)

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
train, _ = open_corpora([], context=64)  # the sources of Python's standard library
rows, batch = Rows(train, context=64), 32 // world

for step in range(args.steps):
    x, y = rows.micro_batch(step * 32, micro=0, rank=rank, world=world, size=batch)
    loss = engine(x.to(engine.device), y.to(engine.device))
    loss.backward()
    engine.step()
    if rank == 0 and (step + 1) % 10 == 0:
        print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)

weights = engine.full_state_dict(rank0_only=True)  # plain tensors under the model's own names
if rank == 0:
    print(f"{len(weights)} tensors, {sum(t.numel() for t in weights.values()):,} elements")
engine.close()
