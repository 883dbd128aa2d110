"""Checkpoint files without ranks: what JSON can hold, tensors as files, folders that appear at once, and what is found."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.optim import lr_scheduler

import onecopy
from onecopy.checkpoint import store, tensors
from onecopy.checkpoint.format import MANIFEST, Span, State, decode, dtype_name, encode, parse, seal
from onecopy.checkpoint.tensors import file_bytes
from onecopy.checkpoint.writer import write_tensors
from onecopy.errors import CheckpointError, OneCopyError

pytestmark = pytest.mark.pure

# ------------------------------------------------------------------------------------------------------- JSON values

keys = st.one_of(st.text(max_size=4), st.sampled_from(["$tuple", "$items", "$tensor"]), st.integers(), st.booleans())
leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=4), inner, max_size=3),
        st.dictionaries(keys, inner, max_size=3),
        st.dictionaries(st.integers(), st.integers(0, 9), max_size=3).map(Counter),
    ),
    max_leaves=12,
)


def through_json(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value, "value"), allow_nan=False)))


def kinds(value: Any) -> Any:
    """``value`` with the type of everything in it, so that ``1 == True`` and ``[1] == (1,)`` are told apart."""
    if isinstance(value, list | tuple):
        return type(value), [kinds(item) for item in value]
    if isinstance(value, dict):
        return type(value), [(kinds(key), kinds(item)) for key, item in value.items()]
    return type(value), repr(value)


@given(values)
def test_values_come_back_with_their_types(value: Any) -> None:
    assert kinds(through_json(value)) == kinds(value)


def test_values_json_has_no_word_for() -> None:
    assert math.isnan(through_json(math.nan))
    assert through_json([math.inf, -math.inf]) == [math.inf, -math.inf]
    assert through_json(np.float64(0.1)) == 0.1
    assert through_json(np.int32(7)) == 7
    for tensor in (torch.tensor(3.0), torch.tensor([1.5, math.inf]), torch.zeros(2, 0), torch.tensor(True)):
        back = through_json(tensor)
        assert back.dtype == tensor.dtype
        assert torch.equal(back, tensor)


def test_what_cannot_be_written_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"client_state\['a'\]\[1\] is a tensor of shape \(3,\).*tolist"):
        encode({"a": [1, torch.zeros(3)]}, "client_state", tensors=False)
    with pytest.raises(CheckpointError, match=r"client_state\['f'\] is a function"):
        encode({"f": lambda: 0}, "client_state")
    with pytest.raises(CheckpointError, match="is a set"):
        encode({1}, "client_state")
    with pytest.raises(CheckpointError, match="tensor of shape"):
        encode(torch.zeros(10_000), "client_state")


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "linear": lambda o: lr_scheduler.LinearLR(o),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 9),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=12),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 5)], milestones=[3]
    ),
    "chain": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_goes_on_after_a_round_trip(tmp_path: Path, name: str) -> None:
    def build() -> Any:
        return onecopy.initialize(
            nn.Linear(2, 1),
            onecopy.stage(2),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
            scheduler=SCHEDULES[name],
        )

    def steps(engine: Any, count: int) -> list[list[float]]:
        rates = []
        for _ in range(count):
            engine(torch.ones(1, 2)).sum().backward()
            engine.step()
            rates.append([engine.lr(), [group["momentum"] for group in engine.optimizer.param_groups]])
        return rates

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        straight, first, second = build(), build(), build()
        expected = steps(straight, 9)
        steps(first, 5)
        first.save(tmp_path)
        groups, scheduler = [id(group) for group in second.optimizer.param_groups], second.scheduler
        second.load(tmp_path)
        assert [id(group) for group in second.optimizer.param_groups] == groups
        assert second.scheduler is scheduler
        assert steps(second, 4) == expected[5:]


# ------------------------------------------------------------------------------------------------------------ pieces


def state(*bounds: tuple[int, int]) -> State:
    return State(dtype="float32", spans=tuple(Span(file="f", key=str(a), start=a, stop=b) for a, b in bounds))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_ranges_are_put_together_from_the_spans_that_meet_them(sizes: list[int], data: st.DataObject) -> None:
    edges = [sum(sizes[:at]) for at in range(len(sizes) + 1)]
    whole = state(*itertools.pairwise(edges))
    start = data.draw(st.integers(0, edges[-1]))
    stop = data.draw(st.integers(start, edges[-1]))
    found = list(whole.covering(start, stop))
    assert [element for _, low, high in found for element in range(low, high)] == list(range(start, stop))
    assert all(span.start <= low < high <= span.stop for span, low, high in found)


@pytest.mark.parametrize(
    ("bounds", "says"),
    [
        ([(0, 3), (4, 9)], r"\[3, 4\) are there nowhere"),
        ([(0, 5), (4, 9)], r"\[4, 5\) are there twice"),
        ([(0, 5)], r"\[5, 9\) are nowhere"),
        ([], r"\[0, 9\) are nowhere"),
    ],
)
def test_gaps_and_overlaps_are_refused(bounds: list[tuple[int, int]], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        list(state(*bounds).covering(0, 9))


# ------------------------------------------------------------------------------------------------------------- files

SAMPLES = {
    "wide": torch.randn(3, 5, dtype=torch.float64),
    "half": torch.randn(7).bfloat16(),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "flags": torch.tensor([True, False, True]),
    "none": torch.zeros(0, 4),
    "one": torch.tensor(2.5),
    "turned": torch.arange(12.0).view(3, 4).t(),
    "spread": torch.arange(10.0)[::3],
    "counts": torch.tensor([2**40, -1]),
    'odd "name" / é': torch.ones(2),
}


def test_the_package_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    size = write_tensors(path, list(SAMPLES.items())).bytes
    assert size == path.stat().st_size == file_bytes(list(SAMPLES.items()))
    back = load_file(path)
    assert back.keys() == SAMPLES.keys()
    for key, tensor in SAMPLES.items():
        assert back[key].dtype == tensor.dtype
        assert torch.equal(back[key], tensor)
    assert write_tensors(tmp_path / "empty", []).bytes > 0
    assert load_file(tmp_path / "empty") == {}


def test_a_dtype_no_file_can_hold_is_named() -> None:
    with pytest.raises(CheckpointError, match="x has dtype complex128"):
        file_bytes([("x", torch.zeros(2, dtype=torch.complex128))])


# ---------------------------------------------------------------------------------------------------- one rank's saves


def engine(seed: int = 0) -> onecopy.Engine:
    torch.manual_seed(seed)
    return onecopy.initialize(
        nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), onecopy.stage(3), optimizer=lambda p: torch.optim.Adam(p, lr=0.1)
    )


def step(one: onecopy.Engine) -> None:
    one(torch.ones(2, 3)).sum().backward()
    one.step()


def whole(one: onecopy.Engine) -> list[float]:
    return [value for param in one.module.parameters() for value in param.detach().reshape(-1).tolist()]


def test_a_checkpoint_without_process_group(tmp_path: Path) -> None:
    first, second = engine(), engine(1)
    step(first)
    assert first.save(tmp_path, client_state={"pair": (1, 2)}) == str(tmp_path / "step00000001")
    assert (tmp_path / "latest").read_text() == "step00000001\n"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "step00000001"]
    assert sorted(os.listdir(tmp_path / "step00000001")) == [MANIFEST, "rank-00000.safetensors"]
    loaded = second.load(str(tmp_path))
    assert loaded == {"pair": (1, 2)}
    assert loaded.path == str(tmp_path / "step00000001")
    assert not loaded.differences.any()
    assert whole(second) == whole(first)
    assert second.global_steps == second.micro_steps == 1
    assert second.grad_norm == first.grad_norm


def test_the_manifest_accounts_for_every_byte(tmp_path: Path) -> None:
    one = engine()
    step(one)
    folder = Path(one.save(tmp_path))
    manifest = parse((folder / MANIFEST).read_text(), "m")
    elements = 0
    content = load_file(folder / "rank-00000.safetensors")
    for name, record in manifest.parameters.items():
        assert set(record.moments) == {"exp_avg", "exp_avg_sq"}
        assert decode(record.scalars["step"]) == 1
        for held in (record.weight, *record.moments.values()):
            for span, low, high in held.covering(0, record.numel):
                assert content[span.key].shape == (high - low,), name
                assert dtype_name(content[span.key].dtype) == held.dtype
                elements += high - low
    assert elements == 3 * sum(param.numel() for param in one.module.parameters())
    own = {key for key in content if key.startswith("rank/")}
    assert len(own) == 3, "torch's, Python's and numpy's random states"
    assert sum(tensor.numel() for key, tensor in content.items() if key not in own) == elements
    record, file = manifest.files["rank-00000.safetensors"], (folder / "rank-00000.safetensors").read_bytes()
    assert record.bytes == len(file) and record.crc32 == f"{zlib.crc32(file):08x}"


def test_a_tag_is_replaced_and_nothing_else_is(tmp_path: Path) -> None:
    one = engine()
    step(one)
    one.save(tmp_path, "same")
    step(one)
    one.save(tmp_path, "same")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["latest", "same"]
    other = engine()
    other.load(tmp_path, "same")
    assert other.global_steps == 2
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    with pytest.raises(CheckpointError, match="mine is no checkpoint, so it is not replaced"):
        one.save(tmp_path, "mine")
    assert (tmp_path / "mine" / "notes").exists()
    for bad in ("", "..", "a/b", ".hidden", "latest", "a b"):
        with pytest.raises(CheckpointError, match="cannot name a checkpoint"):
            one.save(tmp_path, bad)
    one.save(tmp_path, "aside", latest=False)
    assert (tmp_path / "latest").read_text() == "same\n"


def test_the_way_to_a_checkpoint_is_checked(tmp_path: Path) -> None:
    one = engine()
    step(one)
    for tag in ("first", "second"):
        one.save(tmp_path / "runs", tag)
    runs = tmp_path / "runs"

    def refused(directory: Path, tag: str | None = None) -> str:
        before = whole(one)
        with pytest.raises(CheckpointError) as caught:
            one.load(directory, tag)
        assert whole(one) == before
        return str(caught.value)

    assert "nowhere is no directory" in refused(tmp_path / "nowhere")
    assert f"{tmp_path} has no complete checkpoint" in refused(tmp_path)
    assert f"load('{runs}', tag='first')" in refused(runs / "first")
    said = refused(runs, "third")
    assert f"{runs / 'third'} does not exist" in said
    assert "first, second" in said
    (runs / "latest").write_text("gone\n")
    assert "latest names 'gone', but" in refused(runs)
    (runs / "latest").write_text("../first")
    assert "cannot name a checkpoint" in refused(runs)
    (runs / "latest").write_text("")
    said = refused(runs)
    assert f"{runs / 'latest'} says '', which cannot name a checkpoint" in said and "first, second" in said
    said = refused(runs, "../first")
    assert "'../first' cannot name a checkpoint" in said and "first, second" in said
    (runs / "latest").unlink()
    said = refused(runs)
    assert "latest cannot be read" in said
    assert "oldest first: first, second; choose one with tag=" in said
    (runs / "second" / MANIFEST).unlink()
    said = refused(runs, "second")
    assert "oldest first: first;" in said
    assert store.complete_tags(runs) == ["first"]
    os.truncate(runs / "first" / "rank-00000.safetensors", 9)
    assert store.complete_tags(runs) == []
    assert "rank-00000.safetensors is damaged: it has 9 bytes" in refused(runs, "first")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.update(format=99, library={"onecopy": "7.0"}), "format 99, written by onecopy 7.0"),
        (lambda m: m.pop("format"), "no format number"),
        (lambda m: m["parameters"]["0.weight"]["weight"]["spans"].pop(), r"'weight' of '0.weight' .* nowhere"),
        (lambda m: m["parameters"]["0.weight"].pop("shape"), r"damaged at parameters\.0\.weight\.shape"),
        (lambda m: m["parameters"]["0.weight"].update(shape=[5, 4]), r"'0.weight' has shape \(5, 3\), in the checkpoint"),
        (lambda m: m["parameters"]["0.weight"]["weight"].update(dtype="bfloat16"), "rank-00000.safetensors is damaged"),
    ],
)
def test_a_manifest_that_is_wrong_is_an_error(tmp_path: Path, change: Callable[[Any], Any], says: str) -> None:
    one = engine()
    step(one)
    path = Path(one.save(tmp_path)) / MANIFEST
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(seal(manifest))
    before = whole(one)
    with pytest.raises(CheckpointError, match=says):
        one.load(tmp_path)
    assert whole(one) == before
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="is damaged: its checksum is"):
        one.load(tmp_path)
    path.write_text(path.read_text()[:100])
    with pytest.raises(CheckpointError, match="is damaged: it is not JSON"):
        one.load(tmp_path)


def test_fields_of_later_versions_are_let_pass(tmp_path: Path) -> None:
    one = engine()
    step(one)
    path = Path(one.save(tmp_path)) / MANIFEST
    manifest = json.loads(path.read_text()) | {"anything": {"new": 1}}
    manifest["files"]["rank-00000.safetensors"]["blake3"] = 77
    path.write_text(seal(manifest))
    one.load(tmp_path)


def test_too_little_space_is_said_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine()
    step(one)
    one.save(tmp_path, "good")
    usage = store.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: usage._replace(free=100))
    with pytest.raises(CheckpointError, match=r"no space to save in .*needs 1\d\.\d\d KiB, 100 bytes are free"):
        one.save(tmp_path, "more")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["good", "latest"]


# --------------------------------------------------------------------------------------------------------------- kills


def killed_at(call: int, save: Callable[[], Any]) -> bool:
    """Run ``save`` in a copy of this process that is killed before its ``call``-th change of the disk. True if it was."""
    child = os.fork()
    if child == 0:
        left = call

        def count(function: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*args: Any, **kwargs: Any) -> Any:
                nonlocal left
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return function(*args, **kwargs)

            return counted

        try:
            for module, name in (
                (os, "rename"), (os, "replace"), (os, "mkdir"), (os, "unlink"), (os, "fsync"), (os, "rmdir"),
                (os, "open"), (os, "pwritev"), (os, "pwrite"), (os, "ftruncate"),
            ):  # fmt: skip
                setattr(module, name, count(getattr(module, name)))
            tensors.open = count(open)  # type: ignore[attr-defined]
            save()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def saving(one: onecopy.Engine, folder: Path, tag: str, **options: Any) -> Callable[[], Any]:
    """A save under ``tag``, to its end also where that is in a thread."""
    return lambda: (one.save(folder, tag, **options), one._saves.settle())


@pytest.mark.filterwarnings("ignore:.*(did not come to its end|is newer and complete)")
@pytest.mark.parametrize(
    ("tag", "options"),
    [
        ("new", {}),
        ("old", {}),
        ("new", {"asynchronous": True, "keep_last": 1}),
    ],
)
def test_whenever_a_save_is_killed_a_complete_one_is_found(tmp_path: Path, tag: str, options: dict[str, Any]) -> None:
    """``old`` replaces the only checkpoint there is; its name leads to the former or the new one, never to none."""
    one = engine()
    step(one)
    seen, call, killed = set(), 0, True
    while killed:
        folder = tmp_path / str(call)
        one.save(folder, "old")
        former = whole(one)
        step(one)
        killed = killed_at(call, saving(one, folder, tag, **options))
        other = engine(1)
        other.load(folder)
        assert whole(other) in (former, whole(one)), f"killed before change {call}"
        assert other.global_steps == one.global_steps - (whole(other) == former)
        seen.add(whole(other) == former)
        # The same save again, by the run that resumed: everything left behind is cleared away.
        saving(one, folder, tag, **options)()
        stays = {"latest", tag} if "keep_last" in options else {"latest", "old", tag}
        assert sorted(entry.name for entry in folder.iterdir()) == sorted(stays)
        other.load(folder)
        assert whole(other) == whole(one)
        call += 1
    assert seen == {True, False}
    assert call > 8


def test_options_keep_the_kind_they_have_here(tmp_path: Path) -> None:
    """A learning rate that is a tensor is written into, so that whoever captured it sees the new one."""

    def build(lr: Any) -> Any:
        return onecopy.initialize(
            nn.Linear(2, 1),
            onecopy.stage(2),
            optimizer=lambda params: torch.optim.Adam(params, lr=lr, foreach=False, betas=(0.5, 0.6)),
        )

    for saved, here in ((0.5, torch.tensor(0.25)), (torch.tensor(0.5), 0.25), (torch.tensor(0.5), torch.tensor(0.25))):
        first, second = build(saved), build(here)
        first.save(tmp_path)
        group = second.optimizer.param_groups[0]
        group["betas"], group["foreach"] = (0.1, 0.2), True
        second.load(tmp_path)
        assert group["betas"] == (0.5, 0.6)
        assert group["foreach"] is True
        assert float(group["lr"]) == 0.5
        assert group["lr"] is here if isinstance(here, torch.Tensor) else type(group["lr"]) is float


def test_errors_are_of_the_library() -> None:
    assert issubclass(CheckpointError, OneCopyError)
