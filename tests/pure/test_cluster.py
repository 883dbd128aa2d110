"""Clusters: the table, sizes in words, and errors that name the nearest."""

from __future__ import annotations

from typing import Any

import psutil
import pytest

from onecopy.cluster import GPUS, Cluster, gpu, here, quantity
from onecopy.errors import ConfigError

pytestmark = pytest.mark.pure


def test_the_table_has_what_people_have() -> None:
    wanted = "a100-40g a100-80g h100-80g h200 l40s a10g v100-32g 4090 3090 t4".split()
    assert list(GPUS) == wanted
    for name in wanted:
        row = gpu(name.upper())
        assert 16e9 <= row.memory <= 141e9
        assert row.single < row.low and row.pcie <= row.link
        assert row.flops("float16") == row.low and row.flops(None) == row.single
    assert gpu("h100").name == "h100-80g"
    assert gpu("t4").flops("bfloat16") < gpu("t4").flops("float16"), "a T4 has no units for bfloat16"
    assert gpu("cpu").shared


@pytest.mark.parametrize(("text", "memory"), [("24GB", 24e9), ("24gib", 24 * 2**30), ("24G", 24 * 2**30), ("0.5 TB", 5e11)])
def test_a_size_is_a_gpu(text: str, memory: float) -> None:
    assert gpu(text).memory == memory


@pytest.mark.parametrize(
    ("name", "says"), [("a100", "a100-40g or a100-80g"), ("h10O", "h100"), ("409O", "4090"), ("x", "24GB")]
)
def test_an_unknown_gpu(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as error:
        gpu(name)
    assert "\n" not in str(error.value) and name in str(error.value)


@pytest.mark.parametrize(
    ("text", "size", "value"),
    [
        ("7.5e9", False, 7_500_000_000),
        ("7B", False, 7_000_000_000),
        ("125M", False, 125_000_000),
        ("1_000", False, 1000),
        ("128GB", True, 128_000_000_000),
        ("128GiB", True, 128 * 2**30),
        ("512M", True, 512 * 2**20),
        ("512B", True, 512),
        (".5TB", True, 500_000_000_000),
    ],
)
def test_quantities(text: str, size: bool, value: int) -> None:
    assert quantity(text, "--x", size=size) == value


@pytest.mark.parametrize("text", ["", "lots", "-5", "0", "0.2", "7X", "1e999", "nan", "7 7", "GB"])
def test_what_is_no_quantity(text: str) -> None:
    with pytest.raises(ConfigError, match="--x"):
        quantity(text, "--x")


@pytest.mark.parametrize("wrong", [{"gpus": 0}, {"nodes": -1}, {"host_memory": -1}, {"network": 0.0}, {"nvme": float("nan")}])
def test_a_cluster_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Cluster(**wrong)


def test_here_is_this_machine(tmp_path: Any) -> None:
    found = here(tmp_path)
    assert found.nodes == 1 and found.ranks >= 1
    assert found.host_memory == psutil.virtual_memory().total
    assert found.nvme is not None and found.nvme > 0
    if found.gpu.shared:
        assert found.gpu.memory * found.gpus <= found.host_memory
