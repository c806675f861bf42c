"""The launcher of ranks: output passes through, the first failure's exit code comes out, no traceback, no orphan."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shared.processes import descendants, without_working_directory
from tests.servers import is_alive, wait_gone
from tests.waits import wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


def start(nproc: int, script: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "deploy.torchrun", "--nproc", str(nproc), "--", str(script)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def script(folder: Path, body: str) -> Path:
    path = folder / "rank.py"
    path.write_text(f"import os, signal, sys, time\nrank = int(os.environ['RANK'])\n{body}\n")
    return path


def test_the_first_failing_rank_decides_and_nothing_is_a_traceback(tmp_path: Path) -> None:
    """Rank 1 fails with 2; rank 0, which would wait for ever, is ended and not blamed."""
    said = str(tmp_path / "said")
    body = "os.write(1, f'hello {rank} of {os.environ[\"WORLD_SIZE\"]}\\n'.encode())\n"  # print() writes a line in two
    body += f"while rank and not os.path.exists({said!r}): time.sleep(0.01)\n"
    body += f"if rank: sys.exit(2)\nopen({said!r}, 'w').close()\ntime.sleep(600)"
    process = start(2, script(tmp_path, body))
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert sorted(out.split("\n")) == ["", "hello 0 of 2", "hello 1 of 2"]
    assert err == "torchrun: rank 1 ended with exit code 2\n"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_ranks_and_ends_all(tmp_path: Path, signum: signal.Signals) -> None:
    ready = tmp_path / "ready"
    process = start(1, script(tmp_path, f"open({str(ready)!r}, 'w').close()\ntime.sleep(600)"))
    wait_until(ready.exists)
    ranks = descendants(process.pid)
    assert ranks
    process.send_signal(signum)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert err.endswith(f"torchrun: stopped by {signum.name}\n")
    assert wait_gone(ranks, 30) == []


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_between_the_starts_of_two_ranks_ends_the_first(tmp_path: Path, signum: signal.Signals) -> None:
    """torchrun keeps no rank's process before all ranks have been started."""
    program = (
        "import os, sys\n"
        "from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler as torchs\n"
        "start = torchs.Popen\n"
        "def started(*args, **named):\n"
        "    rank = start(*args, **named)\n"
        "    print(rank.pid, flush=True)\n"
        f"    os.kill(os.getpid(), {int(signum)})\n"
        "    return rank\n"
        "torchs.Popen = started\n"
        "from learner.run.torchrun import run_ranks\n"
        "sys.exit(run_ranks(2, sys.argv[1:]))\n"
    )
    rank = script(tmp_path, "time.sleep(100)")
    done = subprocess.run([sys.executable, "-c", program, rank], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 128 + signum
    (pid,) = map(int, done.stdout.split())
    assert not is_alive(pid)


def test_a_rank_that_a_signal_ended_is_told_by_its_name(tmp_path: Path) -> None:
    process = start(1, script(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)"))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL
    assert err == "torchrun: rank 0 was ended by SIGKILL\n"


def test_wrong_arguments_are_told_without_starting_anything() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deploy.torchrun", "--nproc", "0", "--", "x.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "wanted 1 or more" in done.stderr


@pytest.mark.parametrize("safe", [True, False])
def test_a_folder_of_our_name_does_not_hide_the_clone(tmp_path: Path, safe: bool) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "__init__.py").write_text("raise RuntimeError('the working directory was imported')\n")
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    if safe:
        environment |= without_working_directory(environment)
    done = subprocess.run(
        [sys.executable, "-m", "learner", "--help"], cwd=tmp_path, env=environment, capture_output=True, timeout=60
    )
    assert (done.returncode == 0) == safe


def test_paths_of_the_user_are_kept() -> None:
    once = without_working_directory({"PYTHONPATH": "/a:/b"})
    assert once["PYTHONPATH"].split(":") == [str(ROOT), "/a", "/b"]
    assert without_working_directory(once) == once
