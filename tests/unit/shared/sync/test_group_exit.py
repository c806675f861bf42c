"""A process that leaves its groups and ends at once ends well."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.addresses import free_port

ROOT = Path(__file__).parents[4]
PROGRAM = """
import sys
from shared.sync import group
ports = [int(port) for port in sys.argv[1:]]
joins = [
    group.start_join("tcp", "127.0.0.1", port, rank, 2, 20.0, secret=b"a") for port in ports for rank in (0, 1)
]
for joined in [join.result() for join in joins]:
    joined.close()
"""


@pytest.mark.slow
def test_leaving_groups_and_the_process_at_once_does_not_abort() -> None:
    """Threads that were still inside a group when the interpreter went ended good runs by SIGABRT."""
    command = [sys.executable, "-c", PROGRAM, *(str(free_port()) for _ in range(8))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
