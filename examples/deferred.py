"""A model that is never whole on any rank: born sharded, trained sharded, read where it is needed.

    onecopy launch --nproc 2 examples/deferred.py

The weights are bit for bit those of the model built the ordinary way with the same seed.
"""

import argparse
import os

import torch

import onecopy
from onecopy.gpt import GPT, config
from onecopy.report.measure import human_bytes

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="small")
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()

torch.manual_seed(0)
with onecopy.deferred():
    model = GPT(config(args.model))
engine = onecopy.initialize(
    model,
    onecopy.stage(3, dtype="bf16"),
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
)

rank = int(os.environ.get("RANK", 0))
generator = torch.Generator().manual_seed(rank)
for _ in range(args.steps):
    tokens = torch.randint(0, 256, (4, model.config.context + 1), generator=generator).to(engine.device)
    engine(tokens[:, :-1], tokens[:, 1:]).backward()
    engine.step()

# A sharded parameter says what it is, and shows its values inside `gathered` only.
embedding = model.embed.weight
with onecopy.gathered(embedding):
    norm = embedding.float().norm().item()

if rank == 0:
    held = engine.measured()["resident"]["device"]
    print(f"embedding {tuple(embedding.shape)} has norm {norm:.3f}")
    print("rank 0 holds " + ", ".join(f"{kind} {human_bytes(size)}" for kind, size in held.items()))
engine.close()
