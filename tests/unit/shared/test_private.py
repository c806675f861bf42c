"""Files and folders that no other user of the machine can have prepared."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from learner.run.files import AppendedLines, write_atomically
from shared.errors import OutputError
from shared.private import cache_folder, is_private

NOBODY = 65534
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


def test_a_cache_is_the_users_own(tmp_path: Path) -> None:
    folder = cache_folder({"XDG_CACHE_HOME": str(tmp_path / "caches")}, "rollout-learner")
    assert folder == tmp_path / "caches/rollout-learner/torch"
    assert (folder.stat().st_mode & 0o777, is_private(folder)) == (0o700, True)
    folder.chmod(0o775)  # as an earlier version made it
    assert cache_folder({"XDG_CACHE_HOME": str(tmp_path / "caches")}, "rollout-learner") == folder
    assert is_private(folder)


@root_only
@pytest.mark.parametrize("prepared", ["torch", "program", "root", "link"])
def test_what_another_user_made_first_is_not_used(prepared: str, tmp_path: Path) -> None:
    """What is compiled is code, and the next start loads it."""
    tmp_path.chmod(0o1777)
    root = tmp_path / "caches"
    made = {"torch": root / "rl/torch", "program": root / "rl", "root": root, "link": root / "rl/torch"}[prepared]
    if prepared == "link":
        (tmp_path / "theirs").mkdir()
        os.chown(tmp_path / "theirs", NOBODY, NOBODY)
        made.parent.mkdir(parents=True)
        made.symlink_to(tmp_path / "theirs")
    else:
        made.mkdir(parents=True)
        made.chmod(0o777)
        os.chown(made, NOBODY, NOBODY)
    folder = cache_folder({"XDG_CACHE_HOME": str(root)}, "rl")
    assert not folder.is_relative_to(tmp_path)
    assert is_private(folder)


def test_a_folder_that_others_can_write_is_not_private(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    for mode, private in ((0o700, True), (0o755, True), (0o775, False), (0o777, False), (0o1777, False)):
        (tmp_path / "own").chmod(mode)
        assert is_private(tmp_path / "own") == private, oct(mode)


def test_a_folder_for_one_process_ends_with_it(tmp_path: Path) -> None:
    code = """
import os
from shared.private import cache_folder
print(cache_folder({"XDG_CACHE_HOME": "/proc/nothing"}, "rl"), flush=True)
if os.fork() == 0:
    raise SystemExit
os.wait()
assert os.path.isdir(cache_folder.__globals__["tempfile"].gettempdir())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.strip()).exists()


def test_no_file_is_written_through_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / f".new.json.{os.getpid()}").symlink_to(precious)
    write_atomically(tmp_path / "new.json", "{}")
    (tmp_path / "lines.jsonl").symlink_to(precious)
    with pytest.raises(OutputError):
        AppendedLines(tmp_path / "lines.jsonl")
    assert precious.read_text() == "precious"
