"""What page-locked memory takes of the host (R09). `tests/gpu/test_host_memory_cuda.py` compares it with torch."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from pathlib import Path
from threading import Timer
from types import SimpleNamespace

import pytest
import torch

from shared.sync import host_memory


@pytest.mark.parametrize(
    ("asked", "taken"), [(0, 0), (1, 1), (2, 2), (3, 4), (2**29, 2**29), (2**29 + 16, 2**30), (777912336, 2**30)]
)
def test_page_locked_memory_takes_the_next_power_of_two(asked: int, taken: int) -> None:
    assert host_memory.page_locked_bytes(asked) == taken


def test_available_memory_is_some_and_at_most_all() -> None:
    total = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    assert 0 < host_memory.available_bytes() <= int(total.split()[1]) << 10


HOLD = "from shared.sync.host_memory import taking\nwith taking():\n    print(flush=True)\n    input()"


def test_processes_take_memory_in_turn(caplog: pytest.LogCaptureFixture) -> None:
    """One that takes too long does not stop the others, and neither does one that was killed."""
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline()
        with host_memory.taking(others_s=0.1):
            assert "another process" in caplog.text
        caplog.clear()
        Timer(0.2, holder.kill).start()
        began = time.monotonic()
        with host_memory.taking(others_s=20.0):
            assert 0.1 < time.monotonic() - began < 15.0
        assert not caplog.records


def test_a_system_without_such_locks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(host_memory.fcntl, "flock", refuse)
    with host_memory.taking():
        assert "No locks available" in caplog.text


@pytest.mark.parametrize(("public", "private"), [(True, True), (False, True), (False, False)])
def test_unused_memory_is_given_back_by_the_function_that_torch_has(
    public: bool, private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The public one, else that of torch 2.11; without either nothing can be done."""
    called: list[str] = []
    fake = SimpleNamespace(
        cuda=SimpleNamespace(is_available=lambda: True), accelerator=SimpleNamespace(), _C=SimpleNamespace()
    )
    if public:
        fake.accelerator.empty_host_cache = lambda: called.append("public")
    if private:
        fake._C._host_emptyCache = lambda: called.append("private")
    monkeypatch.setattr(host_memory, "torch", fake)
    host_memory.release_page_locked()
    assert called == (["public"] if public else ["private"] if private else [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is memory to give back with CUDA")
def test_nothing_is_given_back_without_cuda() -> None:
    """torch refuses the call there."""
    host_memory.release_page_locked()
