"""Tests of what `bench.colocated` says of a first sync, and of how its process ended."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from bench import colocated


def test_samples_name_where_the_time_went(tmp_path: Path) -> None:
    def waits() -> None:
        time.sleep(0.6)

    with colocated.sampled(tmp_path / "first.txt"):
        waits()
    found = (tmp_path / "first.txt").read_text()
    (line,) = [line for line in found.splitlines() if "waits" in line]
    assert float(line.split("%")[0]) > 50


@pytest.mark.parametrize(
    ("said", "errors"),
    [("fine", 0), ("CUDA Error: invalid argument at /src/csrc/cumem_allocator.cpp:235", 1), ("cumem is used", 0)],
)
def test_the_end_of_the_process_is_kept(
    said: str, errors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A line on standard error is found, and everything is passed on and kept."""
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\necho one\necho '{said}' >&2\ntest -n \"$BENCH_COLOCATED_INSIDE\" && exit 3\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    out = tmp_path / "result.json"
    out.write_text(json.dumps({"sync": []}))
    assert colocated.outside(out) == 3
    found = json.loads(out.read_text())
    assert found["sync"] == []
    assert found["exit"]["code"] == 3
    assert found["exit"]["allocator"] == [said] * errors
    assert said in capfd.readouterr().out
    assert said in (tmp_path / "result-logs" / "run.log").read_text()
