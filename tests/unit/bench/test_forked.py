"""Programs that name one folder fork from one process, which ends with the last of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.servers import wait_gone

ASKS = """
import os, sys
from pathlib import Path
from bench.forked import share, start
share(Path(sys.argv[1]))
out = Path(sys.argv[1], sys.argv[2]).open("wb")
waits = ["-n1", "-r1", "import time; time.sleep(60)"]
program = start(("colorsys",), "timeit", waits, env={}, stdout=out, stderr=out)
print(program.pid, flush=True)
sys.stdin.read()
program.kill()
print(program.wait(30), flush=True)
"""


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_two_programs_fork_from_one_process_that_ends_with_the_last(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", ASKS, str(tmp_path)]
    pipe = subprocess.PIPE
    asking = [subprocess.Popen([*argv, name], stdin=pipe, stdout=pipe, text=True) for name in ("one", "two")]
    pids = [int(one.stdout.readline()) for one in asking if one.stdout]
    (origin,) = {parent(pid) for pid in pids}
    assert origin not in {one.pid for one in asking}
    assert asking[0].communicate("", timeout=60) == ("-9\n", None)
    assert parent(pids[1]) == origin, "the other one goes on"
    assert asking[1].communicate("", timeout=60) == ("-9\n", None)
    assert not wait_gone([origin], 30.0)
