"""The folder of a server's temporary files: a killed server's is removed by the next one, anybody else's stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shared import private
from shared.private import locked_folder, remove_semaphores

START = """
import os, subprocess, tempfile, time
from rollout_server.__main__ import _temporary_folder
folder = _temporary_folder()
inductor = os.environ["TORCHINDUCTOR_CACHE_DIR"]
child = subprocess.run(["mktemp"], capture_output=True, text=True).stdout.strip()
print(folder, tempfile.mkstemp()[1], child, inductor, flush=True)
time.sleep(60)
"""


@contextmanager
def started(temporary: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Start a process that has such a folder, as a server has."""
    environment = {name: text for name, text in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    environment |= {"TMPDIR": str(temporary), "XDG_CACHE_HOME": str(temporary / "caches")}
    with subprocess.Popen([sys.executable, "-c", START], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            folder, *files, compiled = process.stdout.readline().split()
            assert {Path(file).parent for file in files} == {Path(folder)}, "of its processes too"
            assert compiled == str(temporary / "caches/rollout-server/torch"), "it outlives the server"
            yield process, Path(folder)
        finally:
            process.kill()


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("t")


def test_a_killed_servers_files_are_removed_by_the_next_one(temporary: Path) -> None:
    with started(temporary) as (killed, left), started(temporary) as (_, running):
        killed.send_signal(signal.SIGKILL)
        killed.wait(10)
        assert left.is_dir()
        with started(temporary) as (_, newest):
            assert not left.exists()
            assert running.is_dir(), "its server runs"
            assert newest.is_dir()


def test_what_is_not_such_a_folder_stays(temporary: Path) -> None:
    of_others = [temporary / "rs-mine", temporary / "rs-agent", temporary / "other"]
    for folder in of_others:
        folder.mkdir()
        (folder / "notes.txt").touch()
    link = temporary / "rs-link"
    link.symlink_to(of_others[2])
    with started(temporary) as (_, folder):
        assert folder.parent == temporary
        assert all(path.exists() for path in (*[one / "notes.txt" for one in of_others], link))


def test_semaphores_of_a_killed_server_are_removed_by_the_next_one(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each killed engine left some in shared memory. Those of a process that runs are not touched."""
    monkeypatch.setattr(private, "SHARED_MEMORY", temporary)
    engine = subprocess.Popen(["sleep", "60"])
    (temporary / private.PIDS).write_text(f"{os.getpid()}\n{engine.pid}")
    files = [temporary / f"sem.loky-{pid}-abc" for pid in (engine.pid, os.getpid(), 4_000_000)]
    for file in files:
        file.touch()
    try:
        assert not remove_semaphores(temporary), "both run"
        assert all(file.exists() for file in files)
    finally:
        engine.kill()
        engine.wait()
    assert not remove_semaphores(temporary)
    assert [file.exists() for file in files] == [False, True, True], "nobody wrote the last one down"


def test_a_folder_is_left_while_its_processes_run(temporary: Path) -> None:
    code = "import os, sys; from shared.private import *; from pathlib import Path; "
    code += "print(locked_folder('x-', Path(sys.argv[1])), flush=True); os.kill(os.getpid(), 9)"
    killed = subprocess.run([sys.executable, "-c", code, str(temporary)], capture_output=True, text=True)
    left = Path(killed.stdout.strip())
    first = locked_folder("x-", temporary, leave=lambda _: False)
    assert left.is_dir()
    second = locked_folder("x-", temporary)
    assert (left.exists(), Path(first).is_dir(), Path(second).is_dir()) == (False, True, True)
