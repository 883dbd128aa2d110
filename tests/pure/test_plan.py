"""Plans: presets say what ZeRO says, the first matching rule wins, and ``check`` refuses with the reason and a fix."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest

from onecopy.errors import OneCopyError, PlanError
from onecopy.plan.check import check, legal_triple
from onecopy.plan.layout import WITHIN, WORLD, Layout, ParamFact, UnitFact
from onecopy.plan.plan import (
    Batch,
    Caps,
    Clip,
    LossScale,
    Plan,
    Precision,
    Recipe,
    Row,
    Rule,
    Scratch,
    State,
    StepPolicy,
    Units,
    Wire,
    difference,
)
from onecopy.plan.presets import hsdp, low_precision, mics, offload, stage

pytestmark = pytest.mark.pure

UNITS = [
    UnitFact("block", (ParamFact(("block.weight",), (4, 4), "float32"), ParamFact(("block.bias",), (4,), "float32")))
]
FULL, CUT = Layout(), Layout(shards=WITHIN)


def row_of(plan: Plan) -> tuple[bool, ...]:
    """Is each of (parameter at rest, parameter held, gradient at rest, optimizer) cut?"""
    row = plan.row("block.weight")
    return tuple(bool(x.shards) for x in (row.parameter.rest, row.parameter.held, row.gradient.rest, row.optimizer))


@pytest.mark.parametrize(
    ("number", "cut"),
    [
        (0, (False, False, False, False)),
        (1, (False, False, False, True)),
        (2, (False, False, True, True)),
        (3, (True, True, True, True)),
    ],
)
def test_stages_cut_what_zero_says(number: int, cut: tuple[bool, ...]) -> None:
    plan = stage(number)
    assert row_of(plan) == cut
    for world in (1, 2, 3, 8):
        check(plan, UNITS, world)


def test_stage_3_without_reshard_holds_the_whole_parameter() -> None:
    assert row_of(stage(3, reshard_after_forward=False)) == (True, False, True, True)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_reshard_off_is_not_ignored_where_nothing_is_resharded(number: int) -> None:
    """Nothing is ignored in silence: it is refused or noted."""
    try:
        plan = stage(number, reshard_after_forward=False)
    except PlanError as error:
        assert "reshard" in str(error)
    else:
        assert any("reshard" in note for note in plan.notes)


@pytest.mark.parametrize("number", [-1, 4, True, False, "2", None, 2.5, math.nan])
def test_a_stage_that_does_not_exist(number: Any) -> None:
    with pytest.raises(PlanError, match=r"0, 1, 2 or 3"):
        stage(number)


def test_hsdp_and_mics_group_ranks() -> None:
    for plan in (hsdp(shard=2), mics(shard=2)):
        assert plan.group == 2
        assert row_of(plan) == (True,) * 4
        mesh = plan.mesh(6)
        assert (mesh.within, mesh.across, mesh.world) == (2, 3, 6)
    assert row_of(hsdp(shard=2, number=1)) == (False, False, False, True)
    assert stage(3).mesh(6).within == 6


def test_options_reach_their_policy() -> None:
    plan = stage(2, dtype="bf16", accumulation=4, clip=1.5, norm_type=math.inf)
    assert plan.precision.dtype == "bfloat16"
    assert plan.precision.loss_scale is None
    assert plan.batch.accumulation == 4
    assert plan.clip == Clip(1.5, math.inf)
    assert stage(2, dtype="fp16").precision.loss_scale == LossScale()
    assert hsdp(shard=2, dtype="fp16", accumulation=3).batch.accumulation == 3


@pytest.mark.parametrize(
    ("option", "policy"),
    [({"dtype": "bf16"}, {"precision": Precision()}), ({"accumulation": 4}, {"batch": Batch()})],
)
def test_an_option_beside_its_policy_is_refused(option: dict[str, Any], policy: dict[str, Any]) -> None:
    """Given both the short form and the policy object, one of the two would be ignored in silence."""
    with pytest.raises((PlanError, TypeError)):
        stage(2, **option, **policy)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises((TypeError, PlanError)):
        stage(2, gradient_clipp1ng=1.0)


def test_first_matching_rule_wins() -> None:
    one, two = stage(0).rules[0].row, stage(3).rules[0].row
    plan = Plan(rules=(Rule("*.bias", one), Rule("block.*", two)))
    assert plan.row("block.bias") is one
    assert plan.row("block.weight") is two
    with pytest.raises(KeyError):
        plan.row("other.weight")
    with pytest.raises(PlanError, match=r"'other.weight'.*end the rules with '\*'"):
        check(plan, [UnitFact("other", (ParamFact(("other.weight",), (1,), "float32"),))], 2)


def test_plans_are_values() -> None:
    assert stage(2, clip=1.0) == stage(2, clip=1.0)
    assert hash(stage(3)) == hash(stage(3))
    assert stage(2) != stage(3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        stage(2).group = 4  # type: ignore[misc]
    assert stage(2).with_(group=4).group == 4
    assert stage(2).group is None


def test_ten_of_27_triples_are_legal() -> None:
    cuts = [Layout(), Layout(shards=WITHIN), Layout(shards=WORLD)]
    legal = [t for t in itertools.product(cuts, repeat=3) if legal_triple(*t)]
    assert len(legal) == 10
    for p, g, o in legal:
        assert len(p.shards) <= len(g.shards) <= len(o.shards)


def with_row(
    parameter: Layout = FULL, held: Layout | None = None, gradient: Layout = FULL, optimizer: Layout = FULL
) -> Plan:
    held = parameter if held is None else held
    return Plan(rules=(Rule("*", Row(State(parameter, held), State(gradient, gradient), optimizer)),))


def with_moments(moments: Layout) -> Plan:
    row = stage(0).rules[0].row
    return Plan(rules=(Rule("*", dataclasses.replace(row, moments=moments)),))


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (with_row(parameter=CUT), "parameter over the ranks of a group, gradient over nobody"),
        (with_row(gradient=CUT), "gradient over the ranks of a group, optimizer over nobody"),
        (with_row(held=CUT, gradient=CUT, optimizer=CUT), "held more finely"),
        (with_row(optimizer=Layout(shards=("across",))), "is cut over"),
        (with_row(optimizer=Layout(tier="hots")), "'hots'; did you mean 'host'"),
        (offload(stage(2), "cpu"), "'cpu'; did you mean 'host'"),  # type: ignore[arg-type]
        (offload(stage(3), "nvme", scratch="/tmp"), "'nvme'; did you mean 'disk'"),  # type: ignore[arg-type]  # type: ignore[arg-type]
        (with_row(optimizer=Layout(tier="disk")), r"names no folder for it; give scratch=onecopy.Scratch\(folder\)"),
        (with_row(optimizer=Layout(grain="row")), "grain"),
        (offload(stage(2), "host", "host"), "parameter '.*' rests on tier 'host' and is not sharded"),
        (with_row(gradient=Layout(tier="host")), "gradient of '.*' is on tier 'host' and is not sharded"),
        (offload(stage(2), gradient="disk"), "names no folder for it"),
        (with_moments(Layout(tier="host")), "master of '.*' is on 'device' and its moments are on 'host'"),
        (with_moments(CUT), "moments of '.*' are cut over"),
        (low_precision(stage(1), "int7"), "has codec 'int7'; did you mean 'int"),
        (offload(low_precision(stage(2), "int8", "bfloat16_sr")), "it is stepped where that rests"),
        (stage(2, step=StepPolicy(ratio=1.5)), "step ratio is 1.5; it must be"),
        (stage(2, step=StepPolicy(tile=0)), "step tile is 0; it must be"),
        (stage(2, scratch=Scratch("/tmp", staging=0)), "scratch staging is 0"),
        (stage(2, scratch=Scratch(" ")), "scratch folder is ' '"),
        (stage(2, scratch=Scratch(7)), "scratch folder is 7"),  # type: ignore[arg-type]
        (stage(2, caps=Caps(host=-1)), "cap of host memory in bytes is -1"),
    ],
)
def test_layouts_that_cannot_be(plan: Plan, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        check(plan, UNITS, 4)


def test_gradients_that_every_rank_has_whole_stay_on_the_device() -> None:
    for number in (0, 1):
        with pytest.raises(PlanError, match=r"gradient='disk' beside gradients that every rank has whole: .* stage\(2\)"):
            offload(stage(number), "disk", gradient="disk", scratch="/tmp")
    assert offload(stage(1), gradient="device") == offload(stage(1))


def test_layouts_that_cannot_be_are_found_behind_other_rules() -> None:
    good, bad = stage(2).rules[0].row, with_row(gradient=CUT).rules[0].row
    with pytest.raises(PlanError, match=r"block\.bias"):
        check(Plan(rules=(Rule("*.weight", good), Rule("*", bad))), UNITS, 2)


@pytest.mark.parametrize(
    ("shard", "world", "near"), [(3, 4, "2|4"), (5, 4, "4"), (0, 4, "1"), (-2, 4, "1"), (4, 6, "3|6")]
)
def test_groups_that_do_not_divide_the_world(shard: int, world: int, near: str) -> None:
    with pytest.raises(PlanError, match=rf"{shard} ranks do not divide {world} ranks.*is ({near})$"):
        check(hsdp(shard=shard), UNITS, world)


@pytest.mark.parametrize("world", [0, -1])
def test_no_ranks(world: int) -> None:
    with pytest.raises(PlanError, match="world size"):
        check(stage(2), UNITS, world)


BAD_NUMBERS: list[tuple[Plan, str]] = [
    *[(stage(2, clip=value), "clip") for value in (0.0, -1.0, math.inf, math.nan, True)],
    *[(stage(2, norm_type=value), "norm type") for value in (0.0, -1.0, -math.inf, math.nan, True)],
    *[(stage(2, accumulation=value), "accumulation") for value in (0, -1, True, 1.5)],  # type: ignore[arg-type]
    *[(stage(2, units=Units(prefetch=value)), "prefetch") for value in (-1, True)],
    (stage(2, units=Units(min_numel=-1)), "min_numel"),
    *[
        (stage(2, precision=Precision("float16", loss_scale=LossScale(**{key: value}))), key)
        for key in ("initial", "minimum")
        for value in (0.0, -1.0, math.inf, math.nan, True)
    ],
    *[
        (stage(2, precision=Precision("float16", loss_scale=LossScale(**{key: value}))), key)
        for key in ("window", "hysteresis")
        for value in (0, -1, True)
    ],
    (stage(2, precision=Precision("float16", loss_scale=LossScale(initial=1.0, minimum=2.0))), "minimum"),
    (hsdp(shard=True), "group"),
]


@pytest.mark.parametrize(("plan", "word"), BAD_NUMBERS, ids=[f"{word}-{i}" for i, (_, word) in enumerate(BAD_NUMBERS)])
def test_nonsense_numbers_are_refused_by_name(plan: Plan, word: str) -> None:
    with pytest.raises(PlanError, match=f"(?i){word}"):
        check(plan, UNITS, 2)


@pytest.mark.parametrize(
    ("word", "near"), [("bfloat61", "bfloat16"), ("flaot32", "float32"), ("half_", "float16|float32")]
)
def test_a_misspelt_dtype_is_answered_with_the_nearest(word: str, near: str) -> None:
    with pytest.raises(PlanError, match=f"{word}.*({near})"):
        check(stage(2, dtype=word), UNITS, 2)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool", "complex64"])
def test_a_compute_dtype_is_floating_point(dtype: str) -> None:
    with pytest.raises(PlanError, match=dtype):
        check(stage(2, dtype=dtype), UNITS, 2)


@pytest.mark.parametrize("field", ["master", "accumulate"])
def test_every_precision_word_is_checked(field: str) -> None:
    with pytest.raises(PlanError, match="flaot32"):
        check(stage(2, precision=Precision("bfloat16", **{field: "flaot32"})), UNITS, 2)


@pytest.mark.parametrize("wire", [Wire(gather="flaot32"), Wire(reduce="flaot32")])
def test_wire_codecs_are_checked(wire: Wire) -> None:
    row = dataclasses.replace(stage(2).rules[0].row, wire=wire)
    with pytest.raises(PlanError, match="flaot32"):
        check(stage(2).with_(rules=(Rule("*", row),)), UNITS, 2)


def test_a_layout_codec_is_checked() -> None:
    with pytest.raises(PlanError, match="nf5"):
        check(with_row(optimizer=Layout(codec="nf5")), UNITS, 2)


def test_plan_errors_are_value_errors_of_the_library() -> None:
    assert issubclass(PlanError, OneCopyError)
    assert issubclass(PlanError, ValueError)


def test_two_plans_are_told_apart_by_the_fields_that_differ() -> None:
    plan = stage(2, dtype="bf16").with_(optimizer=Recipe("AdamW", {"lr": 1e-3, "eps": 1e-8}), notes=("a",))
    assert difference(plan, plan) == ""
    assert difference(plan, plan.with_(group=2)) == "group: None and 2"
    assert difference(stage(2, dtype="bf16"), stage(2, dtype="fp32")) == "precision.dtype: 'bfloat16' and 'float32'"
    said = difference(stage(2), stage(3))
    assert "rules[0].row.parameter.rest.shards: () and ('within',)" in said and "gradient" not in said
    other = plan.with_(optimizer=Recipe("AdamW", {"lr": 1e-4}), notes=("a", "b"))
    assert difference(plan, other) == (
        "optimizer.params['lr']: 0.001 and 0.0001; optimizer.params['eps']: 1e-08 and absent; notes: ('a',) and ('a', 'b')"
    )
    assert difference(plan, plan.with_(optimizer=None)).startswith("optimizer: Recipe(type='AdamW'")
    assert difference(stage(2, clip=1.0), stage(2, clip=2.0)) == "clip.max_norm: 1.0 and 2.0"
