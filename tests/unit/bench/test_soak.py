"""Tests of what a soak notes of its processes, and of what it takes for growth."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import soak
from bench.soak import figures_of, grown, held, read_samples, sampling
from tests.waits import wait_until


def samples(
    memory: Callable[[int], float], *, descriptors: Callable[[int], int] = lambda i: 20
) -> list[dict[str, Any]]:
    """Return samples of one process that lives for 100 of them, and of one that is started again every ten."""
    found = []
    for i in range(100):
        values = {"resident_mib": memory(i), "descriptors": descriptors(i), "threads": 5}
        long = {"name": "server 0: python", "began": 1, **values}
        short = {"name": "server 1: python", "began": 100 + i // 10, **values}
        found.append({"at_s": 10.0 * i, "processes": {"7": long, "8": short}, "files": {"run": 9}, "left": []})
    return found


def test_what_grows_is_named() -> None:
    assert grown(figures_of(samples(lambda i: 100.0 + i % 3))) == []
    leaking = grown(figures_of(samples(lambda i: 100.0 + 0.1 * i)))
    assert len(leaking) == 1
    assert "resident_mib of server 0: python (7)" in leaking[0]
    [descriptors] = grown(figures_of(samples(lambda i: 100.0, descriptors=lambda i: 20 + i // 40)))
    assert "descriptors" in descriptors


def test_growth_in_the_first_fifth_does_not_count() -> None:
    assert grown(figures_of(samples(lambda i: min(100.0, 50.0 + 3 * i)))) == []


def test_only_long_lives_are_judged() -> None:
    found = figures_of(samples(lambda i: 100.0 + (0 if i < 50 else 50)))
    assert [row["pid"] for row in found["processes"]] == [7]
    assert found["processes_seen"] == {"server 0": 1, "server 1": 10}
    short = [{**one, "processes": {"8": one["processes"]["8"]}} for one in samples(lambda i: 100.0)]
    assert "no process" in grown(figures_of(short))[0]


def test_files_that_stay_are_found() -> None:
    found = samples(lambda i: 100.0)
    for i, one in enumerate(found):
        one["files"] = {"run": 9, "temporary": i}
    [said] = grown(figures_of(found))
    assert "files in temporary" in said


def test_a_process_is_looked_at_until_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that outlives its program counts as left."""
    monkeypatch.setattr(soak, "_LEFT_AFTER_S", 0.2)
    program = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        programs = {"server": parent.pid}
        out = tmp_path / "out.jsonl"
        with sampling(lambda: programs, {"here": tmp_path}, 0.05, out):
            wait_until(lambda: out.read_text().count("\n") >= 3)
            parent.stdin.close()
            parent.wait(10)
            programs.clear()
            time.sleep(0.5)
        os.kill(child, 9)
    looks = read_samples(out)
    assert {one["name"] for one in looks[0]["processes"].values()} == {"server: python", "server: sleep"}
    assert looks[0]["files"] == {"here": 1}
    assert any(f"{child} sleep" in one for one in looks[-1]["left"])
    assert any("outlived" in one for one in grown(figures_of(looks)))


def test_this_process() -> None:
    found = held(os.getpid())
    assert found is not None
    assert 1 < found.resident_mib < 100_000
    assert found.threads >= 1
    before = found.descriptors
    with Path(os.devnull).open():
        after = held(os.getpid())
        assert after is not None
        assert after.descriptors == before + 1
    assert held(2**22 + 1) is None
