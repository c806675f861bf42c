"""GPUs and memory are watched: what nvidia-smi prints, and the most that a program held."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import bench.watch
from bench.watch import gpu_use, peak_memory, read_smi
from tests.waits import wait_until


def test_utilisation_is_read_per_gpu_and_a_cut_line_is_left_out() -> None:
    use = read_smi("0, 100, 5000\n1, 0, 10\n0, 50, 6000\n1, 20, 10\n0, 1")
    assert (use[0].busy_mean, use[0].memory_mib) == (0.75, 6000.0)
    assert use[1].busy_median == pytest.approx(0.1)
    assert read_smi("") == {}


SMI = """#!/bin/sh
while true; do echo "3, 50, 700"; echo "3, 100, 900"; touch "$0.ran"; sleep 0.02; done
"""


def test_gpus_are_sampled_while_the_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in nvidia-smi's place prints the same lines."""
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with gpu_use(20, ["3"]) as use:
        wait_until((tmp_path / "nvidia-smi.ran").exists)
        assert use == {}
    assert list(use) == [3]
    assert use[3].memory_mib == 900.0
    assert use[3].busy_mean == pytest.approx(0.75, abs=0.26)


def test_the_most_memory_that_a_program_held_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []

    def resident_bytes(pid: int) -> int:
        found.append(resident(pid))
        return found[-1]

    resident = bench.watch.resident_bytes
    monkeypatch.setattr(bench.watch, "resident_bytes", resident_bytes)
    code = "import sys; held = b'x' * (64 << 20); sys.stdin.readline(); del held; print('left', flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdin is not None
    assert holder.stdout is not None
    with peak_memory({"holder": holder.pid}) as peaks:
        wait_until(lambda: peaks["holder"] > 64 << 20)
        print(file=holder.stdin, flush=True)
        assert holder.stdout.readline() == "left\n"
        wait_until(lambda: found[-1] < 64 << 20)
    assert peaks["holder"] > 64 << 20
    holder.communicate("\n")
