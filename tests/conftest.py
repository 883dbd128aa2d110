"""Settings of the whole suite."""

from __future__ import annotations

import os

# Before torch is imported anywhere: ranks share the cores of one machine, one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Jobs that are healthy may be slow on a busy machine; tests of hangs set their own.
os.environ.setdefault("ONECOPY_PATIENCE", "200")

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("long", deadline=None, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
