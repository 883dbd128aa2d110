"""A rank is killed at random moments of saving; the run resumes from a complete step and stays the run it was."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.ranks.kills import lives

pytestmark = pytest.mark.ranks

# The long version: ONECOPY_KILLS=40 (some minutes).
KILLS = int(os.environ.get("ONECOPY_KILLS", "2"))


def test_killed_at_random_moments_of_saving(tmp_path: Path) -> None:
    """SIGKILL of a random rank at random moments of saves, every other one asynchronous, under training: each time all ranks
    resume one complete step, and every step after it has the bits of a run that nobody killed."""
    found = lives(tmp_path / "saves", KILLS, seed=int(os.environ.get("ONECOPY_KILLS_SEED", "6")), longest=0.08)
    assert found["kills"] == KILLS and found["sync"] and found["async"]
    print(json.dumps(found))
