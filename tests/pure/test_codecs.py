"""Codecs: stated sizes and errors hold for every element count, nothing becomes finite or negative by itself, Adam trains."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from onecopy.codecs import FORMATS, NAMES, NONNEGATIVE, _borders, codec, dynamic_code, linear_code, resolve
from onecopy.errors import EngineError, PlanError

pytestmark = pytest.mark.pure

BLOCKS = ("int8_block", "uint8_block", "int4_block", "uint4_block")
SIGNED, UNSIGNED = ("int8_block", "int4_block"), ("uint8_block", "uint4_block")
CODES = {
    "int8_block": dynamic_code(8, signed=True),
    "uint8_block": dynamic_code(8, signed=False),
    "int4_block": dynamic_code(4, signed=True),
    "uint4_block": linear_code(4),
}
# Of the largest magnitude in the block.
ERROR = {"int8_block": 0.45 / 64, "uint8_block": 0.45 / 128, "int4_block": 0.45 / 4, "uint4_block": 1 / 16}
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def random(elements: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    """Values of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.randn(elements, generator=generator).mul(spread).exp()
    return size * torch.randn(elements, generator=generator).sign()


def fit(name: str, values: torch.Tensor) -> torch.Tensor:
    return values.abs() if name in UNSIGNED else values


def encode(name: str, values: torch.Tensor) -> torch.Tensor:
    raw = torch.full((codec(name).size(values.numel()),), 0xA5, dtype=torch.uint8, device=values.device)
    codec(name).encode(values, raw)
    return raw


def trip(name: str, values: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(values, 12345.0)
    codec(name).decode(encode(name, values), out)
    return out


def scales(name: str, values: torch.Tensor) -> torch.Tensor:
    """The largest magnitude in each element's block."""
    block = codec(name).block
    padded = nn.functional.pad(values.abs(), (0, -len(values) % block)).view(-1, block)
    return padded.amax(1).repeat_interleave(block)[: len(values)]


# Code tables


@pytest.mark.parametrize(("name", "length"), [(n, 256 if "8" in n else 16) for n in BLOCKS])
def test_a_code_is_ascending_and_ends_at_one(name: str, length: int) -> None:
    code = CODES[name]
    assert len(code) == length == len(set(code))
    assert list(code) == sorted(code)
    assert code[-1] == 1.0 and (0.0 in code) == (name != "uint4_block")
    if name in SIGNED:
        assert {-value for value in code if value < 0} == {value for value in code if 0 < value < 1}
    else:
        assert code[0] >= 0


def test_small_codes_by_hand() -> None:
    half = [0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875]
    assert dynamic_code(4, signed=True) == pytest.approx([*(-v for v in reversed(half)), 0, *half, 1])
    assert linear_code(2) == (0.25, 0.5, 0.75, 1.0)
    assert dynamic_code(8, signed=True)[0] == pytest.approx(-(1 - 0.45 / 64))
    assert dynamic_code(8, signed=False)[1:4] == pytest.approx((3.25e-7, 7.75e-7, 2.125e-6))


@pytest.mark.parametrize("name", BLOCKS)
def test_every_code_value_is_kept(name: str) -> None:
    """Blocks with a 1 in them and every value of the code: what is read is what was written."""
    values = torch.tensor([v for low in range(0, 256, 100) for v in (1.0, *CODES[name][low : low + 100])])
    blocks = torch.cat([nn.functional.pad(part, (0, codec(name).block - len(part)), value=1.0) for part in values.split(101)])
    assert torch.equal(trip(name, blocks * 8), blocks * 8)


# Sizes and errors


@pytest.mark.parametrize("name", NAMES)
def test_size(name: str) -> None:
    codecs = codec(name)
    assert codecs.size(0) == 0
    whole = {"int8_block": 260, "uint8_block": 260, "int4_block": 68, "uint4_block": 68, "float32": 4}.get(name, 2)
    assert codecs.size(codecs.block * 7) == whole * 7
    if name in BLOCKS:
        assert codecs.size(codecs.block + 3) == whole + 4 + (3 if "8" in name else 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
@given(st.one_of(st.integers(0, 600), st.integers(131_000, 132_000)), st.integers(0, 99), st.integers(0, 3))
@settings(max_examples=40)
def test_round_trip_within_the_stated_error(name: str, device: str, elements: int, seed: int, shift: int) -> None:
    """Bytes may begin anywhere; those before and after are left alone."""
    values = fit(name, random(elements, seed)).clamp(-65000, 65000).to(device)
    size = codec(name).size(elements)
    memory = torch.full((shift + size + 5,), 0xA5, dtype=torch.uint8, device=device)
    codec(name).encode(values, memory[shift : shift + size])
    out = torch.empty(elements + 1, device=device)[1:]
    codec(name).decode(memory[shift : shift + size], out)
    assert bool((memory[:shift] == 0xA5).all()) and bool((memory[shift + size :] == 0xA5).all())
    if name in BLOCKS:
        bound = scales(name, values) * ERROR[name] * (1 + 1e-5)
    else:
        relative = {"float32": 0.0, "bfloat16": 2**-8, "bfloat16_sr": 2**-7, "float16": 2**-11}[name]
        bound = values.abs() * relative + (2**-25 if name == "float16" else 0)
    assert bool(((out - values).abs() <= bound).all())


@pytest.mark.parametrize("name", [n for n in NAMES if n != "bfloat16_sr"])
def test_ranges_of_blocks_stand_alone(name: str) -> None:
    values, held = fit(name, random(256 * 9 + 77)), codec(name)
    raw = encode(name, values)
    for low, high in ((0, 256), (256, 1024), (1024, len(values)), (512, 512)):
        piece = raw[held.size(low) : held.size(high)]
        assert torch.equal(piece, encode(name, values[low:high]))


@pytest.mark.parametrize(("name", "most"), [("int8_block", 6), ("uint8_block", 7), ("int4_block", 2)])
def test_error_in_each_decade(name: str, most: int) -> None:
    """The stated error of small values; below the last decade they become 0 or, unsigned, the smallest value."""
    values = fit(name, torch.logspace(-9, 0, codec(name).block * 40).flip(0))
    block = codec(name).block
    blocks = values.view(-1, block)
    blocks[:, 0] = 1.0
    blocks[:, 1::2] *= 1 if name in UNSIGNED else -1
    read, last = trip(name, values), {"int8_block": 6, "uint8_block": 6, "int4_block": 2}[name]
    decade = torch.floor(-values.abs().double().log10() + 1e-7).clamp(max=last)
    bound = 0.45 * 10**-decade / 2 ** (most - decade)
    if name in UNSIGNED:
        bound = bound.where(values >= 1e-7, CODES[name][1])
    assert bool(((read - values).abs() <= bound * 1.00001).all())


@pytest.mark.parametrize("name", BLOCKS)
def test_the_nearest_value_is_taken(name: str) -> None:
    """On and right beside every border too. The one exception: nothing positive becomes 0 in a code of second moments."""
    code, block = torch.tensor(CODES[name]), codec(name).block
    borders = _borders(CODES[name])
    edges = torch.cat([borders, borders.nextafter(torch.tensor(9.0)), borders.nextafter(torch.tensor(-9.0))])
    some = fit(name, torch.cat([random(5000, 1, 4.0), torch.linspace(-1, 1, 5000)]))
    ratios = torch.cat([edges.clamp(0 if name in UNSIGNED else -1, 1), some[some.abs() <= 1]])
    ratios = nn.functional.pad(ratios, (0, -len(ratios) % (block - 1))).view(-1, block - 1)
    values = nn.functional.pad(ratios, (1, 0), value=1.0).view(-1)
    read = trip(name, values)
    assert torch.equal(read, code[torch.bucketize(values, borders)])
    nearest = (values.double()[:, None] - code.double()).abs().amin(1)
    smallest = values if name == "uint8_block" else torch.zeros(())
    free = (smallest > 0) & (smallest < code[code > 0].min())
    off = (read.double() - values.double()).abs()
    assert bool((off <= nearest + 3e-7 * values.abs())[~free.expand_as(off)].all())
    if name in UNSIGNED:
        assert bool((read[values > 0] > 0).all())


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_magnitude_is_exact(name: str, sign: int) -> None:
    values = fit(name, sign * torch.linspace(0.1, 3.7, 200))
    assert trip(name, values)[-1] == values[-1]
    again = trip(name, trip(name, values))
    assert torch.allclose(again, trip(name, values), rtol=1e-6), "a second trip changes nothing more"


# What is not an ordinary number


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros(name: str) -> None:
    for zero in (0.0, -0.0):
        assert not trip(name, torch.full((700,), zero)).any()
    if name in BLOCKS:
        beside_one = encode(name, torch.tensor([0.0, 0.0, 1.0, 0.0]))
        assert encode(name, torch.zeros(2))[4] == beside_one[4], "the same bytes on every device, not those of 0 / 0"
    values = fit(name, random(1024))
    values[256:512] = 0
    assert not trip(name, values)[256:512].any()
    if name not in ("uint4_block",):
        values[::2] = 0
        assert not trip(name, values)[::2].any(), "zeros beside other values"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, -math.nan])
def test_what_is_not_finite_stays_so(name: str, device: str, bad: float) -> None:
    values = fit(name, random(1000)).clamp(-65000, 65000).to(device)
    values[300] = bad
    values[999] = bad
    read = trip(name, values)
    assert not read[[300, 999]].isfinite().any()
    hit = torch.zeros(1000, dtype=torch.bool, device=device)
    for place in (300, 999):
        hit[place // codec(name).block * codec(name).block :][: codec(name).block] = True
    assert bool((read.isfinite() == ~hit).all()), "whole blocks, and no others"


def test_every_nan_survives_stochastic_rounding() -> None:
    """Whatever its payload and sign: a carry must not make a number of it."""
    low, high = torch.tensor([1, 0xFFFF, 0x3FFFFF, 0x400000, 0x7FFFFF, 0x7FFF00]), torch.tensor([0x7F800000, 0xFF800000])
    bits = (low[:, None] + high).view(-1).repeat(2000)
    assert not trip("bfloat16_sr", bits.to(torch.int32).view(torch.float32)).isfinite().any()


@pytest.mark.parametrize("name", UNSIGNED)
def test_an_unsigned_code_refuses_negative_values(name: str) -> None:
    values = fit(name, random(512))
    values[300] = -1e-20
    block = codec(name).block
    read = trip(name, values)
    assert bool(read[300 // block * block :][:block].isnan().all())
    assert bool(read[: 300 // block * block].isfinite().all())


@pytest.mark.parametrize("name", BLOCKS)
def test_extreme_scales(name: str) -> None:
    for scale in (1e-45, 1e-39, 1e-30, 3e38):
        values = fit(name, torch.linspace(-1, 1, 500)) * scale
        assert bool(((trip(name, values) - values).abs() <= scales(name, values) * ERROR[name] * 1.01 + 1e-45).all())


def test_what_does_not_fit_is_an_error() -> None:
    held, values = codec("int8_block"), torch.zeros(10)
    for wrong, raw in (
        (values, torch.zeros(13, dtype=torch.uint8)),
        (values.double(), torch.zeros(14, dtype=torch.uint8)),
        (values, torch.zeros(14, dtype=torch.int8)),
        (values.view(2, 5), torch.zeros(14, dtype=torch.uint8)),
        (torch.zeros(20)[::2], torch.zeros(14, dtype=torch.uint8)),
    ):
        with pytest.raises(EngineError, match="int8_block"):
            held.encode(wrong, raw)
        with pytest.raises(EngineError, match="int8_block"):
            held.decode(raw, wrong)


# Stochastic rounding


def test_stochastic_rounding_is_right_on_average() -> None:
    """The mean of n roundings of x is within 5 standard errors of x, for all x; rounding to nearest is not."""
    values, held, rounds = random(500), codec("bfloat16_sr", seed=3), 2000
    raw, out, total = torch.empty(1000, dtype=torch.uint8), torch.empty(500), torch.zeros(500, dtype=torch.float64)
    seen = set()
    for _ in range(rounds):
        held.encode(values, raw)
        held.decode(raw, out)
        total += out
        seen.add(float(out[0]))
    step = values.abs().log2().floor().exp2() * 2**-7
    below = (values.view(torch.int32) & 0xFFFF).double() / 65536
    error = step * (below * (1 - below) / rounds).sqrt()
    assert bool(((total / rounds - values).abs() <= 5 * error + 1e-9 * values.abs()).all())
    assert len(seen) == 2
    assert not bool(((trip("bfloat16", values) - values).abs() <= 5 * error).all())


def test_stochastic_rounding_keeps_small_steps() -> None:
    """A second moment that decays by 0.1 % a step: rounded to nearest it stands still."""
    held, exact = codec("bfloat16_sr", seed=1), torch.ones(4000)
    raw, moving, still = torch.empty(8000, dtype=torch.uint8), exact.clone(), exact.clone()
    for _ in range(500):
        exact, moving, still = exact * 0.999, moving * 0.999, still * 0.999
        held.encode(moving, raw)
        held.decode(raw, moving)
        still = trip("bfloat16", still)
    assert float(moving.mean()) == pytest.approx(float(exact[0]), rel=2e-3)
    assert float(still[0]) == 1.0


def test_stochastic_rounding_can_be_repeated() -> None:
    values = random(200_001)

    def draw(seed: int, first: int, count: int) -> list[torch.Tensor]:
        held = codec("bfloat16_sr", seed=seed)
        held.calls = first  # type: ignore[attr-defined]
        raws = [torch.empty(held.size(values.numel()), dtype=torch.uint8) for _ in range(count)]
        for raw in raws:
            held.encode(values, raw)
        return raws

    one, two = draw(0, 0, 4), draw(0, 2, 2)
    assert torch.equal(one[2], two[0]) and torch.equal(one[3], two[1]), "a run goes on where it stopped"
    assert not torch.equal(one[0], one[1]) and not torch.equal(one[0], draw(1, 0, 1)[0])


@pytest.mark.parametrize("name", NAMES)
def test_no_codec_touches_the_random_numbers_of_torch(name: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = trip(name, fit(name, random(1000)))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert torch.equal(trip(name, fit(name, random(1000))), first)


# Names


def test_names() -> None:
    assert [codec(name).name for name in NAMES] == list(NAMES)
    assert codec("int8_block") is codec("int8_block") and codec("bfloat16_sr") is not codec("bfloat16_sr")
    for word, near in (("bf16", "bfloat16"), ("int8_blok", "int8_block"), ("fp32", "float32"), ("", "")):
        with pytest.raises(PlanError, match=f"did you mean '{near}"):
            codec(word)


def test_resolve() -> None:
    assert [resolve(f, sign).name for f in ("int8", "int4") for sign in (False, True)] == [*BLOCKS]
    for name in NAMES:
        assert resolve(name, nonnegative=True).name == name
    with pytest.raises(PlanError, match="use 'int4_block'"):
        resolve("uint4_block", nonnegative=False)
    with pytest.raises(PlanError, match="did you mean 'int8'"):
        resolve("int-8", nonnegative=True)
    assert {"int8", "int4"} < set(FORMATS)


def test_which_states_are_never_negative() -> None:
    """Every elementwise optimizer of torch, with all its states on, stepped with gradients of both signs."""
    makers: list[Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = [
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.RAdam(p),
        lambda p: torch.optim.Adamax(p),
        lambda p: torch.optim.Adagrad(p),
        lambda p: torch.optim.Adadelta(p),
        lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Rprop(p),
        lambda p: torch.optim.ASGD(p),
    ]
    lowest: dict[str, float] = {}
    for maker in makers:
        param = nn.Parameter(random(64))
        optimizer = maker([param])
        for step in range(6):
            param.grad = random(64, 10 + step)
            optimizer.step()
        for name, state in optimizer.state[param].items():
            if isinstance(state, torch.Tensor) and state.shape == param.shape:
                lowest[name] = min(lowest.get(name, 0.0), float(state.min()))
    assert {name for name, low in lowest.items() if low >= 0} == NONNEGATIVE


# Training


@cache
def train(moments: str | None, steps: int = 1500) -> tuple[float, float, float]:
    """AdamW fits a two-layer network to noisy values in small batches; between steps the moments rest in ``moments``.

    The loss over all samples before and after, and the bytes of the moments per parameter.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2048, 20, generator=generator)
    y = torch.sin(x @ torch.randn(20, 4, generator=generator) / 2) + 0.3 * torch.randn(2048, 4, generator=generator)
    shapes = ((20, 64), (64,), (64, 4), (4,))
    flat = nn.Parameter(torch.randn(sum(math.prod(s) for s in shapes), generator=generator) * 0.2)
    optimizer = torch.optim.AdamW([flat], lr=3e-3, weight_decay=0.01)

    def loss(batch: torch.Tensor | slice) -> torch.Tensor:
        w1, b1, w2, b2 = (t.view(s) for t, s in zip(flat.split([math.prod(s) for s in shapes]), shapes, strict=True))
        return nn.functional.mse_loss(torch.tanh(x[batch] @ w1 + b1) @ w2 + b2, y[batch])

    held: dict[str, torch.Tensor] = {}
    names = ("exp_avg", "exp_avg_sq")
    codecs = {n: resolve(moments or "float32", n in NONNEGATIVE, seed) for seed, n in enumerate(names)}
    first = loss(slice(None)).item()
    for _ in range(steps):
        (flat.grad,) = torch.autograd.grad(loss(torch.randint(0, 2048, (64,), generator=generator)), [flat])
        for name, raw in held.items():
            codecs[name].decode(raw, optimizer.state[flat][name])
        optimizer.step()
        for name in names if moments else ():
            held[name] = torch.empty(codecs[name].size(flat.numel()), dtype=torch.uint8)
            codecs[name].encode(optimizer.state[flat][name], held[name])
            optimizer.state[flat][name].fill_(math.nan)  # nothing but the bytes goes on
    return first, loss(slice(None)).item(), sum(raw.numel() for raw in held.values()) / flat.numel()


@pytest.mark.parametrize(
    ("moments", "within", "cost"),
    [("float32", 0.0, 8.0), ("bfloat16_sr", 0.01, 4.0), ("int8", 0.03, 2.04), ("int4", 0.04, 1.07)],
)
def test_adam_converges_with_moments_at_rest_in_few_bits(moments: str, within: float, cost: float) -> None:
    """The last loss differs from that of float32 moments by less than ``within`` of it."""
    first, exact, _ = train(None)
    _, last, size = train(moments)
    print(f"{moments}: {first:.4f} -> {last:.5f}, float32 {exact:.5f}: {last / exact - 1:+.2%}")
    assert exact < first / 3
    assert abs(last / exact - 1) <= within
    assert size <= cost


def test_small_second_moments_do_not_become_zero() -> None:
    """Gradients of one block differ by 10^4 and stop: a second moment of 0 would divide what is left of the first by eps."""
    for moments in ("int8", "int4"):
        param = nn.Parameter(torch.zeros(256))
        optimizer = torch.optim.Adam([param], lr=1e-3)
        for step in range(20):
            param.grad = torch.where(torch.arange(256) % 2 == 0, 1.0, 3e-4 if step < 5 else 0.0)
            optimizer.step()
            for name in ("exp_avg", "exp_avg_sq"):
                held, state = resolve(moments, name in NONNEGATIVE), optimizer.state[param][name]
                held.decode(encode(held.name, state), state)
        assert float(param.detach().abs().max()) < 0.03
