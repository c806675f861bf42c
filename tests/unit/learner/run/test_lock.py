"""One run at a time in `training.output_dir`, and no request of an earlier run is obeyed by the next."""

from __future__ import annotations

import json
import multiprocessing
import os
from contextlib import ExitStack
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from learner.rollout.control import FOLDER, REQUESTS, STATE, ServerControl, ServerRequest, ask
from learner.run.lock import LOCK, is_running, locked
from shared.errors import ConfigError

FORK = multiprocessing.get_context("fork")
ADD = ServerRequest(action="add", base_url="http://127.0.0.1:9", group_port=5)


def _hold(run_dir: Path, held: Event, end: Event) -> None:
    with locked(run_dir):
        held.set()
        end.wait(60)


@pytest.fixture
def other(tmp_path: Path) -> Event:
    """Another process holds the lock of `tmp_path` until this is set."""
    held, end = FORK.Event(), FORK.Event()
    process = FORK.Process(target=_hold, args=(tmp_path, held, end), daemon=True)
    process.start()
    assert held.wait(30)
    return end


def test_a_second_run_is_refused_until_the_first_has_ended(tmp_path: Path, other: Event) -> None:
    with pytest.raises(ConfigError, match="output_dir") as raised, locked(tmp_path):
        pass
    assert "process " in raised.value.found
    assert is_running(tmp_path)
    other.set()
    for process in multiprocessing.active_children():
        process.join(30)
    assert not is_running(tmp_path)
    with locked(tmp_path):
        pass


def test_a_killed_run_holds_nothing(tmp_path: Path, other: Event) -> None:
    for process in multiprocessing.active_children():
        process.kill()
        process.join(30)
    with ExitStack() as stack:
        stack.enter_context(locked(tmp_path))


def test_the_process_that_holds_it_may_open_the_file(tmp_path: Path) -> None:
    """A POSIX lock is lost when its own process closes the file, however it opened it."""
    with locked(tmp_path):
        (tmp_path / LOCK).read_text()
        assert is_running(tmp_path), "this process asks"
        with FORK.Pool(1) as asked:
            assert asked.apply(is_running, (tmp_path,))


def _open_files() -> list[str]:
    return [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]


def test_a_fork_does_not_keep_it(tmp_path: Path) -> None:
    """A data worker or an engine may end later than its learner."""
    with locked(tmp_path):
        assert str(tmp_path / LOCK) in _open_files()
        with FORK.Pool(1) as forked:
            assert str(tmp_path / LOCK) not in forked.apply(_open_files)


@pytest.mark.parametrize("kind", ["link", "hanging link", "second name", "pipe", "folder"])
def test_what_others_put_in_its_place_is_not_written(kind: str, tmp_path: Path) -> None:
    run_dir, file = tmp_path / "run", tmp_path / "precious"
    run_dir.mkdir()
    file.write_text("precious")
    lock = run_dir / LOCK
    {
        "link": lambda: lock.symlink_to(file),
        "hanging link": lambda: lock.symlink_to(tmp_path / "new"),
        "second name": lambda: lock.hardlink_to(file),
        "pipe": lambda: os.mkfifo(lock),
        "folder": lambda: lock.mkdir(),
    }[kind]()
    with pytest.raises((ConfigError, IsADirectoryError), match="lock"), locked(run_dir):
        pass
    assert file.read_text() == "precious"
    assert not (tmp_path / "new").exists()
    assert is_running(run_dir), "nobody knows"


def _state(run_dir: Path) -> None:
    (run_dir / FOLDER).mkdir(exist_ok=True)
    (run_dir / FOLDER / STATE).write_text(json.dumps({"servers": []}))


def test_a_request_to_a_run_that_has_ended_is_refused(tmp_path: Path) -> None:
    _state(tmp_path)
    with locked(tmp_path):
        pass
    with pytest.raises(ConfigError, match="ended"):
        ask(tmp_path, ADD)


def test_the_next_run_does_not_obey_what_was_asked_before(tmp_path: Path, other: Event) -> None:
    """The address would get its token and its weights."""
    _state(tmp_path)
    path = ask(tmp_path, ADD)
    control = ServerControl(tmp_path)
    assert not path.exists()
    assert control.take() == []
    ask(tmp_path, ADD)
    assert control.take() == [ADD]
    other.set()


def test_a_pipe_among_the_requests_is_not_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / FOLDER / REQUESTS
    folder.mkdir(parents=True)
    control = ServerControl(tmp_path)
    os.mkfifo(folder / "1.json")
    assert control.take() == []
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "[]", '"\\ud800"', "\xff"])
def test_a_damaged_request_is_removed(tmp_path: Path, text: str) -> None:
    control = ServerControl(tmp_path)
    folder = tmp_path / FOLDER / REQUESTS
    folder.mkdir(parents=True)
    (folder / "1.json").write_text(text, encoding="latin-1")
    (folder / "2.json").mkdir()
    assert control.take() == []
    assert [path.name for path in folder.iterdir()] == ["2.json"]


def test_a_folder_without_a_lock_can_be_asked(tmp_path: Path) -> None:
    _state(tmp_path)
    assert not (tmp_path / LOCK).exists()
    assert ask(tmp_path, ADD).exists()
