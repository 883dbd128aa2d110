"""Small models whose forward returns the loss, and the data each rank sees.

``BUILD[name]()`` makes a model under seed 0; ``batch(name, step, micro, rank)`` is that rank's micro-batch, so a test
and its oracle agree on data without sending any.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, SEQ, MICRO = 32, 16, 8, 2


class Block(nn.Module):
    """Pre-norm transformer block without biases in attention (a key bias has gradient 0, which Adam turns to noise)."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(-2, -3) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3).flatten(-2)
        x = x + F.dropout(self.out(mixed), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout, self.training)


class GPT(nn.Module):
    """Embedding -> blocks -> norm -> head; ``tied`` shares the embedding with the head."""

    def __init__(self, blocks: int = 3, tied: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class MLP(nn.Module):
    """Eight linear layers, one pair of them tied; odd sizes that divide no world."""

    def __init__(self, width: int = 7, depth: int = 8, tied: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        if tied:
            self.layers[-1].weight = self.layers[0].weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x.float(), y.float())


class Even(nn.Module):
    """Every tensor's size divides 4 ranks, so traffic and bytes have no padding. 4 blocks + 2 leaves = 6 units."""

    UNITS = 6

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(4))
        self.last = nn.Linear(16, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(self.last(x).float(), y.float())


class Toy(nn.Module):
    """``loss = w * x`` with w = 1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x).sum()


class Exact(nn.Module):
    """A loss linear in parameters of awkward shapes; inputs are small integers, so gradients have no rounding.

    Whatever order sums are taken in, every gradient is the same number: optimizers can be compared to the last bit
    of their own arithmetic. ``x`` is [batch, 30].
    """

    SHAPES = ((3, 5), (7,), (), (2, 0), (1,), (2, 2))

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(shape) for shape in self.SHAPES)

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.cat([part.flatten() for part in self.parts])
        return (x[:, : flat.numel()].to(flat.dtype) @ flat).sum()


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "gpt": GPT,
    "gpt untied": lambda: GPT(tied=False),
    "gpt dropout": lambda: GPT(dropout=0.1),
    "mlp": MLP,
    "even": Even,
    "exact": Exact,
    "toy": Toy,
}


def build(name: str) -> nn.Module:
    """The model ``name`` as seed 0 makes it."""
    torch.manual_seed(0)
    return BUILDERS[name]()


def batch(name: str, step: int, micro: int, rank: int) -> tuple[Tensor, ...]:
    """What ``rank`` feeds to ``model(*batch)`` in micro-batch ``micro`` of optimizer step ``step``."""
    source = torch.Generator().manual_seed(((step * 64) + micro) * 64 + rank)
    if name.startswith("gpt"):
        tokens = torch.randint(VOCAB, (MICRO, SEQ + 1), generator=source)
        return tokens[:, :-1], tokens[:, 1:]
    if name == "exact":
        return (torch.randint(-4, 5, (1, 30), generator=source).float(),)
    if name == "toy":
        return (torch.tensor([1.0 + rank + 2 * micro]),)
    width = {"mlp": 7, "even": 16}[name]
    return tuple(torch.randn(4, width, generator=source) for _ in range(2))


def bare(model: nn.Module) -> dict[str, Any]:
    """Clones of all named parameters, tied ones once."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
