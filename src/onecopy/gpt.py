"""A byte-level GPT: the model of ``onecopy train``, the benchmarks and the examples.

Pre-norm decoder blocks with causal attention, learned positions and one matrix that is both embedding and head.
Nothing here knows about sharding; the blocks sit in one ``ModuleList``, which is where the engine finds its units.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from onecopy.errors import ConfigError

__all__ = ["GPT", "SIZES", "Block", "GPTConfig", "config"]


@dataclass(frozen=True)
class GPTConfig:
    """Shape of a :class:`GPT`.

    ``context``: longest sequence, in bytes. ``vocab`` is 256, one token per byte value. ``recompute``: drop the
    activations of every block after its forward and compute them again in backward.
    """

    layers: int
    heads: int
    width: int
    context: int
    vocab: int = 256
    recompute: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "width", "context", "vocab"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of a GPT is {getattr(self, name)}; it is a whole number from 1")
        if self.width % self.heads:
            raise ConfigError(f"width {self.width} is not a multiple of heads {self.heads}")

    @property
    def parameters(self) -> int:
        """Trainable elements: 12 width^2 + 13 width per block, embeddings and the last norm."""
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + (self.vocab + self.context + 2) * self.width

    def flops_per_token(self) -> int:
        """Floating-point operations of forward and backward for one token: 6 per parameter that multiplies it (the
        position table only adds) and 12 x layers x width x context for attention scores and values, not halved for
        the causal mask."""
        return 6 * (self.parameters - self.context * self.width) + 12 * self.layers * self.width * self.context


SIZES: Mapping[str, GPTConfig] = MappingProxyType(
    {
        "tiny": GPTConfig(layers=2, heads=2, width=64, context=64),
        "small": GPTConfig(layers=4, heads=4, width=256, context=128),
        "25m": GPTConfig(layers=8, heads=8, width=512, context=256),
        "100m": GPTConfig(layers=14, heads=12, width=768, context=512),
    }
)


def config(name: str, *, context: int | None = None, recompute: bool = False) -> GPTConfig:
    """The :class:`GPTConfig` called ``name``, some fields replaced. Raises :class:`ConfigError` for another name."""
    if name not in SIZES:
        raise ConfigError(f"model {name!r} does not exist; choose one of {', '.join(SIZES)}")
    found = replace(SIZES[name], recompute=recompute)
    return found if context is None else replace(found, context=context)


class Attention(nn.Module):
    """Causal self-attention, (batch, time, width) -> the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        # (3, batch, heads, time, width / heads)
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return out


class Block(nn.Module):
    """One pre-norm decoder block, (batch, time, width) -> the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x))
        added: Tensor = self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))
        return x + added


class GPT(nn.Module):
    """The model. Weights come from torch's default generator: the same seed gives the same weights."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.head.weight = self.embed.weight
        self._initialise()

    def _initialise(self) -> None:
        """GPT-2's: normal(0, 0.02) for matrices, 0 for biases, and the two matrices that write into the residual
        stream smaller by sqrt(2 x layers), so its variance does not grow with depth. In place only, because a
        sharded parameter takes in-place initialisers and nothing else."""
        residual = 0.02 / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" in name:
                nn.init.ones_(parameter)
            elif name.endswith(("out.weight", "down.weight")):
                nn.init.normal_(parameter, std=residual)
            else:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """``tokens``: (batch, time) int64 byte values, time at most ``config.context``.

        Without ``targets``: logits (batch, time, vocab) in the parameters' dtype. With ``targets`` (batch, time)
        int64: the mean cross entropy, a float32 scalar in nats per byte. Raises ``ValueError`` for a longer sequence.
        """
        time = tokens.shape[1]
        if time > self.config.context:
            raise ValueError(f"sequence of {time} tokens is longer than the model's context {self.config.context}")
        x = self.embed(tokens) + self.position(torch.arange(time, device=tokens.device))
        for block in self.blocks:
            if self.config.recompute and self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        logits: Tensor = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
