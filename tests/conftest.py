"""Settings of all tests: hypothesis draws the same examples in every run, machines may be slow, and two processes test.

One thread of OpenMP each, which sleeps while it waits: this must stand before torch is imported.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

from tests.examples import examples

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

settings.register_profile(
    "repeatable",
    max_examples=examples(100),
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
settings.load_profile("repeatable")
