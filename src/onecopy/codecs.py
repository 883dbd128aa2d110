"""In which format a flat state rests between steps. It is computed with in float32.

A codec writes ``elements`` float32 values into exactly ``size(elements)`` bytes and reads them back:

==============  =================  ==========================================================================
name            bytes per element  largest error of a value ``x``; ``s``: the largest magnitude of its block
==============  =================  ==========================================================================
float32         4                  0
bfloat16        2                  2^-8 |x|
bfloat16_sr     2                  2^-7 |x|, 0 on average
float16         2                  2^-11 |x| or 2^-25, the larger (above 65504: inf, as in every cast)
int8_block      1 + 4/256          0.0071 s; a value of decade ``[0.1, 1] 10^-e s``: 0.45 * 10^-e * 2^(e-6) s,
                                   for e = 0 ... 6
uint8_block     1 + 4/256          0.0036 s; a value of decade ``[0.1, 1] 10^-e s``: 0.45 * 10^-e * 2^(e-7) s;
                                   what is below 3.25e-7 s and not 0 reads as that
int4_block      1/2 + 4/128        0.1125 s
uint4_block     1/2 + 4/128        0.03125 s; below s/16, which reads as s/16, 0.0625 s
==============  =================  ==========================================================================

The ``int`` codecs keep, for each block of consecutive elements, one float32 scale followed by the numbers of the code values
nearest to ``x / scale``. A block therefore stands alone: with ``low`` a multiple of ``codec.block``, the bytes
``[size(low), size(high))`` of a whole state are those of its elements ``[low, high)``, so a state may be cut, sent and
stepped by ranges of blocks. Bytes may begin anywhere in memory; no alignment is asked for.

Sources: Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861), sections 1.3, 2.1 and 2.2;
Li et al. 2023, "Memory Efficient Optimizers with 4-bit States" (arXiv 2309.01507), on block size 128 and on the zero point.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from typing import Protocol

import torch

from onecopy.errors import EngineError, PlanError

__all__ = ["FORMATS", "NAMES", "NONNEGATIVE", "Codec", "codec", "dynamic_code", "linear_code", "resolve"]

NONNEGATIVE = frozenset(
    {"exp_avg_sq", "max_exp_avg_sq", "exp_inf", "sum", "square_avg", "acc_delta", "step_size"}  # Adam ... Adadelta, Rprop
)
"""Names of the per-element states of torch's optimizers that are never negative; every other may be."""

_CHUNK = {"cpu": 1 << 17, "cuda": 1 << 22}
"""Elements worked on at a time, a multiple of every block; scratch of at most 12 bytes each stays in a CPU's cache."""


class Codec(Protocol):
    """A format of flat states. ``block``: elements that share bytes; a state may be cut at its multiples."""

    name: str
    block: int

    def size(self, elements: int) -> int:
        """Bytes of ``elements`` values, scales included."""
        ...

    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        """Write ``values`` (flat float32) into ``out`` (flat uint8, ``size(values.numel())`` of them, same device)."""
        ...

    def decode(self, raw: torch.Tensor, out: torch.Tensor) -> None:
        """Write the values that ``raw`` holds into ``out``: the inverse of :meth:`encode`, as far as there is one."""
        ...


def _check(codec: Codec, values: torch.Tensor, raw: torch.Tensor) -> None:
    size = codec.size(values.numel())
    if values.dtype != torch.float32 or raw.dtype != torch.uint8 or values.device != raw.device or raw.numel() != size:
        raise EngineError(
            f"{codec.name} puts {values.numel()} float32 values into {size} uint8 on their device; got {values.dtype} on "
            f"{values.device} and {raw.numel()} {raw.dtype} on {raw.device}"
        )
    if values.dim() != 1 or raw.dim() != 1 or not values.is_contiguous() or not raw.is_contiguous():
        raise EngineError(
            f"{codec.name} wants flat contiguous tensors; got strides {values.stride()} of shape {tuple(values.shape)} and "
            f"{raw.stride()} of shape {tuple(raw.shape)}"
        )


def _chunks(elements: int, device: torch.device) -> Iterator[tuple[int, int]]:
    step = _CHUNK.get(device.type, _CHUNK["cuda"])
    for low in range(0, elements, step):
        yield low, min(low + step, elements)


def _scratch(buffers: int, elements: int, device: torch.device) -> torch.Tensor:
    """``buffers`` int32 rows, as long as the longest chunk of ``elements``."""
    longest = next((high for _, high in _chunks(elements, device)), 0)
    return torch.empty(buffers, longest, dtype=torch.int32, device=device)


# Plain dtypes


class _Plain:
    """A torch dtype, rounded to nearest even."""

    block = 1

    def __init__(self, dtype: torch.dtype) -> None:
        self.name = str(dtype).removeprefix("torch.")
        self.dtype = dtype

    def size(self, elements: int) -> int:
        return elements * self.dtype.itemsize

    @torch.no_grad()
    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        _check(self, values, out)
        if out.storage_offset() % self.dtype.itemsize:
            out.copy_(values.to(self.dtype).view(torch.uint8))
        else:
            out.view(self.dtype).copy_(values)

    @torch.no_grad()
    def decode(self, raw: torch.Tensor, out: torch.Tensor) -> None:
        _check(self, out, raw)
        if raw.storage_offset() % self.dtype.itemsize:
            raw = raw.clone()
        out.copy_(raw.view(self.dtype))


class _Stochastic(_Plain):
    """bfloat16 with stochastic rounding: of the two bfloat16 around ``x``, the one further from zero is taken with
    probability ``(|x| - nearer) / (further - nearer)``, so the mean over the random bits is ``x`` itself.

    With ``b`` the bits of ``x`` and ``r`` uniform in [0, 2^16), the result is the upper half of ``b + r``. What is not finite
    stays so; a value above the largest bfloat16 may become inf, as it does when rounded to nearest.

    Random bits are a function of ``seed`` and ``calls``, the number of :meth:`encode` calls so far: write ``calls`` down and
    set it again to go on where a run stopped. They come from a generator of the call's own, torch's are left alone. Ranks
    that hold copies of one state give it one seed and stay equal.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__(torch.bfloat16)
        self.name = "bfloat16_sr"
        self.seed = seed
        self.calls = 0

    @torch.no_grad()
    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        _check(self, values, out)
        generator = torch.Generator(values.device).manual_seed(_mix(self.seed, self.calls))
        self.calls += 1
        scratch = _scratch(2, values.numel(), values.device)
        # 16 random bits for each element; whole draws are of 64.
        draws = torch.empty(-(-scratch.shape[1] // 4), dtype=torch.int64, device=values.device)
        for low, high in _chunks(values.numel(), values.device):
            bits = values[low:high].view(torch.int32)
            total, flipped = scratch[:, : high - low]
            draws.random_(-(1 << 63), None, generator=generator)
            torch.add(bits, draws.view(torch.int16)[: high - low], out=total).add_(1 << 15)
            # A carry out of the exponent flips the sign: only a NaN has such bits. All ones are a NaN too.
            torch.bitwise_xor(total, bits, out=flipped).bitwise_right_shift_(31)
            upper = total.bitwise_or_(flipped).bitwise_right_shift_(16).to(torch.int16)
            out[2 * low : 2 * high].copy_(upper.view(torch.uint8))


def _mix(seed: int, calls: int) -> int:
    """A generator seed for call number ``calls``: 32 bits (all that torch's CPU generator takes) of SplitMix64 (Steele et
    al. 2014, "Fast Splittable Pseudorandom Number Generators") started at ``seed``."""
    mask = (1 << 64) - 1
    word = (seed * 0xD1342543DE82EF95 + (calls + 1) * 0x9E3779B97F4A7C15) & mask
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
    return (word ^ (word >> 31)) >> 32


# Codes: the values that a number of few bits stands for


@cache
def dynamic_code(bits: int, signed: bool) -> tuple[float, ...]:
    """The 2^bits ascending values of dynamic (tree) quantisation (Dettmers et al., sections 1.3 and 2.2).

    Decade ``[0.1, 1] 10^-e`` is split into ``2^(f - e)`` equal parts, each represented by its middle, for ``e = 0 ... bits -
    2``: a zero bit more for the exponent is a bit less for the fraction. ``f`` is ``bits - 2`` with a sign bit, ``bits - 1``
    without. To these come 0 and 1; signed codes have the negatives of all but 1.
    """
    parts = [(e, 2 ** (bits - 1 - signed - e)) for e in range(bits - 1)]
    positive = [10.0**-e * (0.1 + 0.9 * (part + 0.5) / count) for e, count in parts for part in range(count)]
    return tuple(sorted([*positive, 0.0, 1.0, *(-value for value in positive if signed)]))


@cache
def linear_code(bits: int) -> tuple[float, ...]:
    """``(i + 1) / 2^bits`` for ``i = 0 ... 2^bits - 1``: without zero, because an optimizer divides by the root of a second
    moment, and a small one that becomes 0 makes a huge step (Li et al., the zero-point problem)."""
    return tuple((i + 1) / 2**bits for i in range(2**bits))


_CODES = {
    "int8_block": dynamic_code(8, signed=True),
    "uint8_block": dynamic_code(8, signed=False),
    "int4_block": dynamic_code(4, signed=True),
    "uint4_block": linear_code(4),
}


def _borders(code: tuple[float, ...]) -> torch.Tensor:
    """Where one value of ``code`` gives way to the next: ``x`` becomes number ``i`` when ``borders[i-1] < x <= borders[i]``.

    Halfway, except that no positive ``x`` becomes 0 in a code of second moments, which needs it as :func:`linear_code` does.
    """
    exact = torch.tensor(code, dtype=torch.float64)
    middle = ((exact[:-1] + exact[1:]) / 2).float()
    if code[0] == 0:
        middle[0] = 0
    return middle


@cache
def _tables(name: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest value of code ``name``, found by looking into tables instead of a binary search.

    The upper 16 bits of a float32 name a cell of neighbouring floats. ``first[cell]`` is the number of the lowest float in
    the cell; ``border[cell]`` the border inside it (inf: none), above which it is one more. Cells are fine enough that none
    contains two borders. Cells of NaN and inf have numbers too, legal ones.
    """
    borders = _borders(_CODES[name])
    cells = torch.arange(1 << 16, dtype=torch.int64).bitwise_left_shift_(16)
    ends = torch.stack((cells, cells + 0xFFFF)).to(torch.int32).view(torch.float32)
    ends.masked_fill_(~ends.isfinite().all(0), 0)
    first, last = torch.bucketize(ends.amin(0), borders), torch.bucketize(ends.amax(0), borders)
    if bool((last - first > 1).any()):
        raise EngineError(f"code {name} is too fine for tables of 2^16 cells")
    border = torch.where(last > first, borders[first.clamp(max=len(borders) - 1)], torch.inf)
    return first.to(torch.int32).to(device), border.to(device)


@cache
def _values(name: str, device: torch.device) -> torch.Tensor:
    """What a byte stands for in code ``name``: one float32 or, as one int64, two, that of the upper half byte first."""
    value = torch.tensor(_CODES[name], dtype=torch.float32, device=device)
    if len(value) == 256:
        return value
    return torch.stack((value.repeat_interleave(16), value.repeat(16)), 1).view(torch.int64).view(-1)


# Block-wise codecs


class _Blocks:
    """Block-wise quantisation (Dettmers et al., section 2.1): ``scale = the value of largest magnitude in the block``,
    ``x`` is kept as the number of the code value nearest to ``x / scale``, and read as ``code[number] * scale``.

    The scale carries its value's sign, so that this value always becomes 1, which every code has, and is kept exactly; -1
    is in no code. A block of zeros reads as zeros. A block with inf or NaN in it reads as inf and NaN throughout. So does
    one with a negative value under an unsigned code, which is a wrong choice of codec and must not train on.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._signed = _CODES[name][0] < 0
        self._packed = 2 if len(_CODES[name]) == 16 else 1
        self.block = 256 // self._packed

    def size(self, elements: int) -> int:
        whole, rest = divmod(elements, self.block)
        return whole * self._row + (4 - (-rest // self._packed) if rest else 0)

    @property
    def _row(self) -> int:
        """Bytes of a whole block."""
        return 4 + self.block // self._packed

    @torch.no_grad()
    def encode(self, values: torch.Tensor, out: torch.Tensor) -> None:
        _check(self, values, out)
        whole = values.numel() - values.numel() % self.block
        scratch = _scratch(3, whole, values.device)
        for low, high in _chunks(whole, values.device):
            rows = out[self.size(low) : self.size(high)].view(-1, self._row)
            self._pack(values[low:high].view(-1, self.block), rows, *scratch[:, : high - low])
        if whole < values.numel():
            last, row = values.new_zeros(1, self.block), out.new_empty(1, self._row)
            last[0, : values.numel() - whole] = values[whole:]
            self._pack(last, row, *_scratch(3, self.block, values.device))
            out[self.size(whole) :] = row[0, : out.numel() - self.size(whole)]

    @torch.no_grad()
    def decode(self, raw: torch.Tensor, out: torch.Tensor) -> None:
        _check(self, out, raw)
        whole = out.numel() - out.numel() % self.block
        scratch = _scratch(2, whole, out.device)
        for low, high in _chunks(whole, out.device):
            rows = raw[self.size(low) : self.size(high)].view(-1, self._row)
            self._unpack(rows, out[low:high].view(-1, self.block), *scratch[:, : high - low])
        if whole < out.numel():
            last, row = out.new_empty(1, self.block), raw.new_zeros(1, self._row)
            row[0, : raw.numel() - self.size(whole)] = raw[self.size(whole) :]
            self._unpack(row, last, *_scratch(2, self.block, out.device))
            out[whole:] = last[0, : out.numel() - whole]

    def _scale(self, values: torch.Tensor) -> torch.Tensor:
        high, low = values.amax(1), values.amin(1)
        if self._signed:
            return torch.where(high >= -low, high, low)
        return torch.where(low < 0, torch.nan, high)

    def _pack(self, values: torch.Tensor, rows: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        """Write whole blocks, one per row, working in three int32 buffers of their size."""
        first, border = _tables(self.name, values.device)
        scale = self._scale(values)
        rows[:, :4] = scale.view(torch.uint8).view(-1, 4)
        ratio, found = a.view(torch.float32), c.view(torch.float32)
        torch.div(values, scale.masked_fill_(scale == 0, 1).unsqueeze(1), out=ratio.view_as(values))
        cell = torch.bitwise_right_shift(a, 16, out=b).bitwise_and_(0xFFFF)
        torch.index_select(border, 0, cell, out=found)
        found.sub_(ratio)
        above = c.bitwise_right_shift_(31)  # -1 where the ratio is above the border, else 0
        number = torch.index_select(first, 0, cell, out=a).sub_(above).view_as(values)
        if self._packed == 1:
            rows[:, 4:] = number
        else:
            torch.add(number[:, 1::2], number[:, 0::2], alpha=16, out=rows[:, 4:])

    def _unpack(self, rows: torch.Tensor, values: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        """Read whole blocks, one per row, working in two int32 buffers of their size."""
        table = _values(self.name, rows.device)
        index = a[: values.numel() // self._packed]
        index.view(len(rows), -1).copy_(rows[:, 4:])
        torch.index_select(table, 0, index, out=b.view(table.dtype))
        scale = rows[:, :4].clone(memory_format=torch.contiguous_format).view(torch.float32)
        torch.mul(b.view(torch.float32).view_as(values), scale, out=values)


# By name

_PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BY_SIGN = {"int8": ("int8_block", "uint8_block"), "int4": ("int4_block", "uint4_block")}

NAMES: tuple[str, ...] = (*_PLAIN, "bfloat16_sr", *_CODES)
"""What :func:`codec` knows."""

FORMATS: tuple[str, ...] = (*_BY_SIGN, *NAMES)
"""What :func:`resolve` knows."""


def codec(name: str, seed: int = 0) -> Codec:
    """The codec of that name. ``seed`` matters to ``bfloat16_sr`` alone, which is made anew in every call because it counts
    its own; give states that should not round alike different ones."""
    if name == "bfloat16_sr":
        return _Stochastic(seed)
    if name not in NAMES:
        raise PlanError(_unknown(name, NAMES))
    return _shared(name)


@cache
def _shared(name: str) -> Codec:
    return _Plain(_PLAIN[name]) if name in _PLAIN else _Blocks(name)


def resolve(name: str, nonnegative: bool, seed: int = 0) -> Codec:
    """The codec for a state by the name of a format: ``"int8"`` and ``"int4"`` stand for the signed codec or, for a state
    that is never negative (:data:`NONNEGATIVE`), the unsigned one, which is twice as fine; codecs go by their own names."""
    if name not in FORMATS:
        raise PlanError(_unknown(name, FORMATS))
    for signed, unsigned in _BY_SIGN.values():
        if name == unsigned and not nonnegative:
            raise PlanError(f"codec {name!r} cannot hold a state that may be negative; use {signed!r}")
    chosen = _BY_SIGN[name][nonnegative] if name in _BY_SIGN else name
    return codec(chosen, seed)


def _unknown(name: str, known: tuple[str, ...]) -> str:
    near = get_close_matches(str(name), known, n=1, cutoff=0.0)[0]
    return f"codec {name!r} is not one of {', '.join(known)}; did you mean {near!r}?"


def draw(coded: Codec, number: int) -> None:
    """Let the next :meth:`Codec.encode` round with the random bits of call ``number``, where ``coded`` draws any."""
    if isinstance(coded, _Stochastic):
        coded.calls = number


def stored(elements: int, dtype: torch.dtype, coded: Codec | None) -> int:
    """Bytes that ``elements`` of ``dtype`` rest in."""
    return elements * dtype.itemsize if coded is None else coded.size(elements)


def stride(tile: int, dtype: torch.dtype, coded: Codec | None, align: int) -> int:
    """Bytes from the start of one tile of ``tile`` elements to that of the next, a multiple of ``align``."""
    return -(-stored(tile, dtype, coded) // align) * align


ALIGN = 4096
"""Bytes that O_DIRECT's addresses, offsets and sizes are multiples of, and so are tiles of states on disk or encoded."""


def blocks(elements: int, tile: int, dtype: str, coded: Codec | None = None) -> int:
    """Bytes that ``elements`` take on disk, or encoded, in tiles of ``tile`` that begin on a disk's blocks and end there."""
    kind: torch.dtype = getattr(torch, dtype)
    full, rest = divmod(elements, tile)
    return full * stride(tile, kind, coded, ALIGN) + stride(rest, kind, coded, ALIGN)
