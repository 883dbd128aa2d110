"""Files of a checkpoint that are not what was written: noticed by whoever reads them, and never loaded."""

from __future__ import annotations

import itertools
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import onecopy
from onecopy.checkpoint import store, writer
from onecopy.checkpoint.format import MANIFEST, Span
from onecopy.checkpoint.reader import Reader
from onecopy.checkpoint.sources import open_source
from onecopy.checkpoint.writer import write_tensors
from onecopy.errors import CheckpointError, OneCopyError
from tests.pure.disk_files import largest_file
from tests.pure.test_checkpoint import engine, step, whole

pytestmark = pytest.mark.pure


def test_a_reader_reads_ranges_and_notices_damage(tmp_path: Path) -> None:
    record = write_tensors(tmp_path / "f", [("k", torch.arange(10, 20, dtype=torch.float32))])
    size, span = record.bytes, Span(file="f", key="k", start=10, stop=20)
    reader = Reader(tmp_path, {"f": record})
    reader.check(span, (10,), "float32")
    for out in (torch.empty(3), torch.empty(3, dtype=torch.int64), torch.empty(6)[::2]):
        reader.read(span, 12, 15, out)
        assert out.tolist() == [12, 13, 14]
    with pytest.raises(CheckpointError, match=r"f is damaged: 'k' is F32 of shape \[10\].*BF16 of shape \[9\]"):
        reader.check(span, (9,), "bfloat16")
    with pytest.raises(CheckpointError, match="f is damaged: it has no tensor 'other'"):
        reader.check(Span(file="f", key="other", start=0, stop=1), (1,), "float32")
    with pytest.raises(CheckpointError, match="refers to g, which it does not list"):
        reader.check_file("g")
    reader.close()
    os.truncate(tmp_path / "f", size - 4)
    with pytest.raises(CheckpointError, match=rf"f is damaged: it has {size - 4} bytes, {size} were written"):
        Reader(tmp_path, {"f": record}).check_file("f")
    (tmp_path / "f").write_bytes(b"\xff" * size)
    with pytest.raises(CheckpointError, match=rf"f is damaged: bytes 0 to {size} have checksum [0-9a-f]{{8}}, "):
        Reader(tmp_path, {"f": record}).check(span, (10,), "float32")
    (tmp_path / "f").unlink()
    with pytest.raises(CheckpointError, match=rf"f is missing; it was {size} bytes"):
        Reader(tmp_path, {"f": record}).check_file("f")


def test_ranges_across_chunks_are_right_and_each_chunk_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 64 bytes: any range of a tensor over many of them, and a flipped bit is noticed by exactly those that read
    its chunk."""
    monkeypatch.setattr(writer, "CHUNK", 64)
    values = {"wide": torch.arange(50, dtype=torch.float64), "half": torch.arange(99).bfloat16(), "byte": torch.arange(9)}
    record = write_tensors(tmp_path / "f", list(values.items()))
    assert record.chunk == 64 and len(record.crc32) == 8 * -(-record.bytes // 64)
    assert all(torch.equal(load_file(tmp_path / "f")[key], value) for key, value in values.items())
    reader = Reader(tmp_path, {"f": record})
    span = Span(file="f", key="wide", start=0, stop=50)
    for start, stop in itertools.product(range(51), repeat=2):
        if start <= stop:
            out = torch.empty(stop - start, dtype=torch.float64)
            reader.read(span, start, stop, out)
            assert torch.equal(out, values["wide"][start:stop])
    reader.close()
    content = bytearray((tmp_path / "f").read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    at = header + 8 * 20  # element 20 of "wide"
    content[at] ^= 4
    (tmp_path / "f").write_bytes(content)
    low = at // 64 * 64
    noticed = set()
    for element in range(50):
        try:
            Reader(tmp_path, {"f": record}).read(span, element, element + 1, torch.empty(1, dtype=torch.float64))
        except CheckpointError as error:
            assert f"bytes {low} to {low + 64} have checksum" in str(error)
            noticed.add(element)
    assert noticed == {e for e in range(50) if low <= header + 8 * e < low + 64}
    with pytest.raises(CheckpointError, match="have checksum"):
        Reader(tmp_path, {"f": record}).verify("f")


def test_damage_in_two_hundred_places_is_reported_and_never_loaded(tmp_path: Path) -> None:
    """A bit flipped or the rest cut off at random places of every file there is: the error names the file, the engine is as
    it was or refuses to step, and the good checkpoint still loads."""
    one, draw = engine(), random.Random(7)
    step(one)
    folder = Path(one.save(tmp_path, client_state={"pair": (1, 2)}))
    truth = whole(one)
    files = [folder / MANIFEST, folder / "rank-00000.safetensors", tmp_path / "latest"]
    for count in range(200):
        path = files[0 if count < 90 else 1 if count < 180 else 2]
        good = path.read_bytes()
        at = draw.randrange(len(good))
        flipped = good[:at] + bytes([good[at] ^ (1 << draw.randrange(8))]) + good[at + 1 :]
        path.write_bytes(flipped if count % 3 else good[:at])
        before = whole(one)
        with pytest.raises(CheckpointError) as caught:
            one.load(tmp_path)
        assert path.name in str(caught.value), f"{path.name} at {at}: {caught.value}"
        if "holds a part" in str(caught.value):
            with pytest.raises(OneCopyError, match="load\\(\\) a checkpoint"):
                one.save(tmp_path / "more")
        else:
            assert whole(one) == before
        path.write_bytes(good)
        if count % 20 == 0:
            assert one.load(tmp_path) == {"pair": (1, 2)}
            assert whole(one) == truth


def test_a_load_that_fails_on_its_way_leaves_an_engine_that_trains_no_mixture(tmp_path: Path, monkeypatch: Any) -> None:
    """Damage far behind the beginning is found when weights before it are loaded: no step and no save until one is whole."""
    monkeypatch.setattr(writer, "CHUNK", 64)
    one = engine()
    good, bad = (saved(one, tmp_path, tag)[0] for tag in ("good", "bad"))
    shard = tmp_path / "bad" / "rank-00000.safetensors"
    content = bytearray(shard.read_bytes())
    at = 8 + int.from_bytes(content[:8], "little") + 4 * 4 * 15  # in moments of the second layer
    content[at] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"have checksum .* The engine holds a part of .*bad now; load again"):
        one.load(tmp_path, "bad", random_states=False)
    for call in (lambda: step(one), lambda: one.save(tmp_path, "more")):
        with pytest.raises(OneCopyError, match=r"load\(\) failed: .*load\(\) a?"):
            call()
    one.discard_gradients()
    one.load(tmp_path, "good")
    assert whole(one) == good != bad
    step(one)


def saved(one: onecopy.Engine, folder: Path, *tags: str, **options: int) -> list[list[float]]:
    """The weights in the checkpoints ``tags``, a step apart, which it makes."""
    found = []
    for tag in tags:
        step(one)
        one.save(folder, tag, **options)  # type: ignore[arg-type]
        found.append(whole(one))
    return found


def test_the_newest_complete_one_is_loaded_and_what_was_skipped_is_said(tmp_path: Path) -> None:
    """The checkpoint that ``latest`` names has lost something: the newest complete one is loaded, with a warning that says
    what was passed over and why. Where there is none, that is the error; never a start from scratch."""
    one, other = engine(), engine(1)
    _, second, third = saved(one, tmp_path, "a", "b", "c")
    shard, manifest = tmp_path / "c" / "rank-00000.safetensors", tmp_path / "c" / MANIFEST
    content, text = shard.read_bytes(), manifest.read_bytes()
    for change, says in (
        (shard.unlink, r"c.rank-00000.safetensors is missing; it was \d+ bytes"),
        (lambda: shard.write_bytes(content[:99]), rf"is damaged: it has 99 bytes, {len(content)} were written"),
        (lambda: manifest.write_bytes(text[:200]), r"c.manifest.json is damaged: it is not JSON"),
        (lambda: manifest.write_bytes(text.replace(b"torch", b"torsh", 1)), "its checksum is .*, .* was written"),
        (manifest.unlink, r"c.manifest.json cannot be read"),
    ):
        change()
        with pytest.warns(UserWarning, match=rf"loaded {tmp_path / 'b'}; {tmp_path / 'c'} was skipped: .*{says}"):
            assert other.load(tmp_path).path == str(tmp_path / "b")
        assert whole(other) == second and other.global_steps == 2
        with pytest.raises(CheckpointError, match=says):
            other.load(tmp_path, "c")  # the one that was asked for, or none
        shard.write_bytes(content), manifest.write_bytes(text)
    assert other.load(tmp_path).path == str(tmp_path / "c") and whole(other) == third
    (tmp_path / "latest").write_text("b\n")
    with pytest.warns(UserWarning, match=rf"loaded {tmp_path / 'b'}; {tmp_path / 'c'} is newer and complete"):
        other.load(tmp_path)
    (tmp_path / "latest").write_text("b")
    with pytest.raises(CheckpointError, match=r"latest is cut off: it says 'b'.* oldest first: a, b, c"):
        other.load(tmp_path)
    for tag in "abc":
        (tmp_path / tag / "rank-00000.safetensors").unlink()
    (tmp_path / "latest").write_text("c\n")
    with pytest.raises(CheckpointError, match=r"names 'c', but .* is missing.* has no complete checkpoint"):
        other.load(tmp_path)


def test_old_checkpoints_go_and_the_newest_complete_ones_stay(tmp_path: Path) -> None:
    one = engine()
    saved(one, tmp_path, *"abcd")
    one.save(tmp_path, "aside", latest=False)
    (tmp_path / "b" / "rank-00000.safetensors").unlink()
    (tmp_path / ".old.0123abcd.partial").mkdir()
    (tmp_path / "mine").mkdir()
    saved(one, tmp_path, "e", keep_last=4)
    # Of the six, b is not complete and does not count; it is older than the four that are kept.
    assert sorted(os.listdir(tmp_path)) == ["aside", "c", "d", "e", "latest", "mine"]
    os.truncate(tmp_path / "d" / "rank-00000.safetensors", 9)
    saved(one, tmp_path, "f", keep_last=3)
    assert sorted(os.listdir(tmp_path)) == ["aside", "e", "f", "latest", "mine"]
    saved(one, tmp_path, "g", keep_last=9)
    assert store.complete_tags(tmp_path) == ["aside", "e", "f", "g"], "never one too many"
    # What latest names stays, however old it is.
    (tmp_path / "latest").write_text("aside\n")
    assert store.prune(tmp_path, 1) == ["e", "f"]
    assert store.complete_tags(tmp_path) == ["aside", "g"]


@pytest.mark.parametrize("room", [0, 2000])
def test_a_save_that_finds_no_room_leaves_no_folder(tmp_path: Path, room: int) -> None:
    """Neither when the first file cannot be written nor when a later one cannot; what was there before stays."""
    one = engine()
    step(one)
    with largest_file(room), pytest.raises(CheckpointError, match="File too large"):
        one.save(tmp_path / "some" / "where")
    assert not list(tmp_path.iterdir())
    (tmp_path / "some").mkdir()
    with largest_file(room), pytest.raises(CheckpointError, match="File too large"):
        one.save(tmp_path / "some" / "where")
    assert [path.name for path in tmp_path.rglob("*")] == ["some"]
    one.save(tmp_path / "some" / "where")
    one.close()


def test_a_checkpoint_from_before_there_were_checksums_is_read_with_a_warning(tmp_path: Path) -> None:
    one = engine()
    step(one)
    path = Path(one.save(tmp_path)) / MANIFEST
    truth, manifest = whole(one), json.loads(path.read_text())
    for key in ("checksum", "ranks", "save"):
        del manifest[key]
    manifest["files"] = {name: {"bytes": record["bytes"]} for name, record in manifest["files"].items()}
    path.write_text(json.dumps(manifest, indent=1))
    other = engine(1)
    with pytest.warns(UserWarning, match="wrote it without checksums") as said:
        other.load(tmp_path)
    assert len(said) == 1 and whole(other) == truth
    with pytest.warns(UserWarning, match="wrote it without checksums"):
        assert not open_source(tmp_path).checksums
    step(one)
    step(other)
    assert whole(other) == whole(one)
    os.truncate(path.parent / "rank-00000.safetensors", 900)
    with pytest.raises(CheckpointError, match="it has 900 bytes"):
        other.load(tmp_path)
