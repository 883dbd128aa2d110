"""Settings of the whole suite."""

from __future__ import annotations

import os

# Before torch is imported anywhere: ranks share the cores of one machine, one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Jobs that are healthy may be slow on a busy machine; tests of hangs set their own.
os.environ.setdefault("ONECOPY_PATIENCE", "200")

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests marked long, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what repeats a test that is run at a larger size: what is marked so, and a test over numbers of ranks at
    four of them, which on two cores takes longer than at two and three together."""
    if config.getoption("--long"):
        return
    skip = pytest.mark.skip(reason="long; run with --long")
    for item in items:
        params = getattr(item, "callspec", None)
        four = params is not None and params.params.get("world") == 4 and item.get_closest_marker("ranks")
        if four or item.get_closest_marker("long"):
            item.add_marker(skip)
