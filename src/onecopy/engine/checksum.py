"""Values compared without keeping or sending them."""

from __future__ import annotations

import torch

__all__ = ["checksum"]

# Elements looked at together by checksum(): few enough to stay in a cache, enough for an accelerator.
_CHUNK = 1 << 18
_INTEGERS = {1: torch.uint8, 2: torch.int16}


def checksum(tensor: torch.Tensor) -> int:
    """A number that is another one, all but certainly, when any element is or when elements change places."""
    flat = tensor.detach().reshape(-1)
    bits = flat.view(_INTEGERS.get(flat.element_size(), torch.int32))
    draw = torch.Generator().manual_seed(1)
    odd = torch.randint(2**62, (min(_CHUNK, bits.numel()),), generator=draw, device="cpu").mul_(2).add_(1).to(bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in bits.split(_CHUNK):
        total = total * 1_000_003 + (part.to(torch.int64) * odd[: part.numel()]).sum()
    return int(total)
