"""What decides how the engine's process is made."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("openmp", [1, 3])
def test_all_threads_are_counted(openmp: int) -> None:
    """OpenMP's stay after the first operation that used them, and would be missing from a forked process."""
    work = f"""
import threading, torch
from rollout_server.engine import _num_threads
torch.set_num_threads({openmp})
torch.randn(1 << 20).exp_()
before = _num_threads()
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(before, _num_threads() - before)
"""
    found = subprocess.run([sys.executable, "-c", work], capture_output=True, text=True, check=True, timeout=120.0)
    before, more = map(int, found.stdout.split())
    assert (before == 1, more) == (openmp == 1, 1), found.stdout
