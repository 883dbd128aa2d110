"""Exports and conversions that are killed at any moment, or that the disk refuses: nothing is left that looks whole."""

from __future__ import annotations

import json
import os
import resource
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from onecopy.checkpoint.convert import convert
from onecopy.checkpoint.dcp_write import to_dcp
from onecopy.checkpoint.export import Options, export_checkpoint
from onecopy.checkpoint.facts import check_everything
from onecopy.checkpoint.sources import open_source
from onecopy.checkpoint.store import complete_tags
from onecopy.errors import CheckpointError
from tests.pure.test_checkpoint import engine, killed_at, step

pytestmark = pytest.mark.pure


def values(folder: Path) -> dict[str, Tensor]:
    """The weights that a reader of the folder takes for whole; none without an index or a single file."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else set()
    files |= {single.name} if single.exists() else set()
    return {key: value for file in files for key, value in load_file(folder / file).items()}


def exported(out: Path, truth: dict[str, Tensor]) -> bool:
    found = values(out) if out.exists() else {}
    assert not found or (found.keys() == truth.keys() and all(torch.equal(found[key], truth[key]) for key in truth))
    return bool(found)


def checkpoint(out: Path, truth: dict[str, Tensor]) -> bool:
    """Is there a checkpoint, ours or DCP's? Then it is whole."""
    there = complete_tags(out) if out.exists() else []
    if (out / "latest").exists():
        assert there
    if not there and not (out / ".metadata").exists():
        return False
    source = open_source(out / there[0] if there else out)
    assert not check_everything(source)
    found = {name: part.view(-1) for name, part, _ in source.values(1 << 20)}
    assert all(torch.equal(found[key], truth[key].view(-1)) for key in truth)
    return True


def calls(top: Path) -> dict[str, tuple[Callable[[Path], Any], Callable[[Path, dict[str, Tensor]], bool]]]:
    return {
        "one file": (lambda out: export_checkpoint(open_source(top / "ours"), out, Options()), exported),
        "files": (lambda out: export_checkpoint(open_source(top / "ours"), out, Options.of("fp32", 40)), exported),
        "dcp": (lambda out: to_dcp(open_source(top / "ours"), out), checkpoint),
        "convert": (lambda out: convert(open_source(top / "dcp"), out, "tag"), checkpoint),
    }


def start(top: Path) -> dict[str, Tensor]:
    one = engine()
    step(one)
    one.save(top / "ours")
    to_dcp(open_source(top / "ours"), top / "dcp")
    return one.full_state_dict()


@pytest.mark.filterwarnings("ignore:.*single process")
@pytest.mark.parametrize("what", ["one file", "files", "dcp", "convert"])
def test_killed_before_any_change_of_the_disk(tmp_path: Path, what: str) -> None:
    truth = start(tmp_path)
    call, whole = calls(tmp_path)[what]
    seen, at, killed = [], 0, True
    while killed:
        out = tmp_path / f"out{at}"
        killed = killed_at(at, lambda out=out: call(out))
        seen.append(whole(out, truth))
        if not seen[-1] and not [path for path in out.glob("*.safetensors") if what == "files"]:
            call(out)  # what was left is in nobody's way
            assert whole(out, truth)
        at += 1
    assert seen[0] is False and seen[-1] is True and len(seen) > 4


@pytest.mark.filterwarnings("ignore:.*single process")
@pytest.mark.parametrize("what", ["one file", "files", "dcp", "convert"])
def test_a_file_that_cannot_grow(tmp_path: Path, what: str) -> None:
    """The system refuses bytes beyond a limit, as a full disk does: one error, and nothing is left."""
    start(tmp_path)
    call, _ = calls(tmp_path)[what]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call(tmp_path / "out")
        except CheckpointError as error:
            code = 0 if "File too large" in str(error) and "out" in str(error) else 2
        except OSError as error:
            code = 3 if error.errno == 27 else 4
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 3), "no error, or another one"  # 3: the command line names the folder
    left = [path for path in (tmp_path / "out").rglob("*")] if (tmp_path / "out").exists() else []
    assert not left, left
