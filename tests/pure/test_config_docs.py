"""``docs/configuration.md`` names every key."""

from __future__ import annotations

from pathlib import Path

import pytest

from onecopy.plan.recipe import OPTIMIZERS, SCHEDULES, TORCH_SCHEDULES
from tests.pure.test_config import KEYS
from tests.pure.test_config_keys import info_of

pytestmark = pytest.mark.pure


def test_every_key_and_every_name_is_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    keys = [key for key in KEYS if info_of(key)[1] is None]
    missing = [name for name in (*keys, *OPTIMIZERS, *SCHEDULES, *TORCH_SCHEDULES) if f"`{name}`" not in text]
    assert not missing
