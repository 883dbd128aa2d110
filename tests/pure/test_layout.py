"""The flat cut: every element has one owner, padding is at the end and small, and norms do not depend on the cut."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onecopy.plan.layout import WITHIN, WORLD, FlatLayout, Layout, Mesh, ParamFact, Slot, flatten, itemsize

pytestmark = pytest.mark.pure

DTYPES = ("float32", "bfloat16", "float16", "float64", "uint8", "int64")
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@st.composite
def layouts(draw: st.DrawFn) -> FlatLayout:
    dtype = draw(st.sampled_from(DTYPES))
    sizes = draw(st.lists(shapes, max_size=8))
    return flatten([ParamFact((f"p{i}",), s, dtype) for i, s in enumerate(sizes)], draw(st.integers(1, 9)))


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("uint8", 1), ("float64", 8)])
def test_itemsize(dtype: str, size: int) -> None:
    assert itemsize(dtype) == size


@pytest.mark.parametrize("word", ["bf16", "tensor", "float33", "", "nn"])
def test_itemsize_refuses_what_is_no_dtype(word: str) -> None:
    with pytest.raises(ValueError, match="not the name of a torch dtype"):
        itemsize(word)


@pytest.mark.parametrize(("shape", "numel"), [((), 1), ((0,), 0), ((3, 0), 0), ((3, 5), 15), ((1, 1, 1), 1)])
def test_numel_of_scalar_and_empty(shape: tuple[int, ...], numel: int) -> None:
    assert ParamFact(("p",), shape, "float32").numel == numel == torch.empty(shape).numel()


@given(layouts())
def test_slots_are_a_permutation_laid_side_by_side(layout: FlatLayout) -> None:
    place = 0
    for slot in layout.slots:
        assert slot.start == place
        place = slot.stop
    assert place == layout.numel
    assert sorted(s.param.name for s in layout.slots) == sorted({s.param.name for s in layout.slots})


@given(layouts())
def test_padding_is_smaller_than_the_world(layout: FlatLayout) -> None:
    assert 0 <= layout.padded - layout.numel < layout.pieces
    assert layout.padded == layout.shard * layout.pieces


@given(layouts())
def test_every_element_has_exactly_one_owner(layout: FlatLayout) -> None:
    place = 0
    for piece in range(layout.pieces):
        low, high = layout.bounds(piece)
        assert low == place
        assert 0 <= high - low <= layout.shard
        place = high
    assert place == layout.numel


@given(layouts())
def test_local_parts_of_a_slot_put_together_are_the_slot(layout: FlatLayout) -> None:
    for slot in layout.slots:
        parts = [slot.local(*layout.bounds(piece)) for piece in range(layout.pieces)]
        elements = [i for part in parts if part for i in range(*part)]
        assert elements == list(range(slot.start, slot.stop))


@given(layouts())
def test_vector_sized_parameters_start_on_16_bytes_and_keep_their_order(layout: FlatLayout) -> None:
    ragged_seen = False
    order: dict[bool, list[int]] = {True: [], False: []}
    for slot in layout.slots:
        aligned = slot.param.numel * itemsize(slot.param.dtype) % 16 == 0
        ragged_seen |= not aligned
        if aligned:
            assert not ragged_seen
            assert slot.start * itemsize(slot.param.dtype) % 16 == 0
        order[aligned].append(int(slot.param.name[1:]))
    assert order[True] == sorted(order[True])
    assert order[False] == sorted(order[False])


def test_five_and_seven_elements_on_two_ranks() -> None:
    layout = flatten([ParamFact(("a",), (5,), "float32"), ParamFact(("b",), (7,), "float32")], 2)
    assert (layout.numel, layout.shard, layout.padded) == (12, 6, 12)
    assert [layout.bounds(i) for i in range(2)] == [(0, 6), (6, 12)]
    assert layout.slots[1].local(0, 6) == (5, 6)
    assert layout.slots[1].local(6, 12) == (6, 12)
    assert layout.slots[0].local(6, 12) is None


def test_fewer_elements_than_ranks_leaves_empty_shards() -> None:
    layout = flatten([ParamFact(("a",), (3,), "float32")], 8)
    assert [layout.bounds(i) for i in range(8)] == [(0, 1), (1, 2), (2, 3)] + [(3, 3)] * 5


def test_nothing_to_lay_out() -> None:
    layout = flatten([], 4)
    assert (layout.numel, layout.shard, layout.padded) == (0, 0, 0)
    assert layout.bounds(3) == (0, 0)


def test_an_empty_slot_meets_nothing() -> None:
    assert Slot(ParamFact(("a",), (0, 8), "float32"), 4).local(0, 10) is None


@given(st.integers(1, 12), st.integers(1, 12))
def test_mesh_sizes(within: int, across: int) -> None:
    mesh = Mesh(within, across)
    assert mesh.world == within * across == mesh.size(WORLD)
    assert mesh.size(WITHIN) == within
    assert mesh.size(()) == 1
    assert mesh.size(("across",)) == across


def test_a_layout_without_axes_is_replicated() -> None:
    assert Layout().replicated
    assert not Layout(shards=WITHIN).replicated


@given(layouts(), st.sampled_from([1.0, 1.5, 2.0, 3.0, math.inf]), st.integers(0, 2**32 - 1))
def test_a_norm_of_shard_norms_is_the_norm(layout: FlatLayout, p: float, seed: int) -> None:
    """Poisoned padding changes nothing when the bounds are kept to, and no element is counted twice."""
    flat = torch.full((layout.padded,), math.nan, dtype=torch.float64)
    flat[: layout.numel] = torch.randn(layout.numel, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    parts = [flat[slice(*layout.bounds(piece))] for piece in range(layout.pieces)]
    if p == math.inf:
        joined = max((part.abs().max().item() for part in parts if part.numel()), default=0.0)
    else:
        joined = sum(part.abs().pow(p).sum().item() for part in parts) ** (1 / p)
    tensors = [flat[slot.start : slot.stop] for slot in layout.slots]
    whole = torch.nn.utils.get_total_norm([t for t in tensors if t.numel()], p).item() if layout.numel else 0.0
    assert joined == pytest.approx(whole, rel=1e-12, abs=1e-12)
