"""What decides how the engine's process is made."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from rollout_server.engine import _num_threads


def test_threads_are_counted() -> None:
    before, go_on = _num_threads(), threading.Event()
    thread = threading.Thread(target=go_on.wait)
    thread.start()
    assert _num_threads() == before + 1
    go_on.set()
    thread.join()


@pytest.mark.parametrize("openmp", [1, 3])
def test_openmp_s_threads_count_too(openmp: int) -> None:
    """They stay after the first operation that used them, and would be missing from a forked process."""
    work = (
        f"import torch; torch.set_num_threads({openmp}); torch.randn(1 << 20).exp_()\n"
        "from rollout_server.engine import _num_threads; print(_num_threads())"
    )
    found = subprocess.run([sys.executable, "-c", work], capture_output=True, text=True, check=True, timeout=120.0)
    assert (int(found.stdout) == 1) == (openmp == 1), found.stdout
